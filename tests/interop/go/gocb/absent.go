package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/couchbase/gocb/v2"
	cbsearch "github.com/couchbase/gocb/v2/search"
	"github.com/couchbase/gocb/v2/vector"
)

// absent has the calls to services and features that a cluster with a data service only lacks.
var absent = []call{
	refused("`Scan`",
		func(t *trial) error { return drain(t.collection().Scan(gocb.RangeScan{}, nil)) },
		func(t *trial) error { return drain(t.collection().Scan(gocb.NewRangeScanForPrefix("key"), nil)) },
	),
	{"`Scan` of a sample", func(t *trial) string {
		t.ok(drain(t.collection().Scan(gocb.SamplingScan{Limit: 3}, nil)))
		return "differs: finds nothing, because the SDK ignores the refusal"
	}},
	refused("`Query`, of the cluster and of a scope",
		func(t *trial) error { _, err := t.sdk.Query("SELECT 1", nil); return err },
		func(t *trial) error { _, err := t.bucket.DefaultScope().Query("SELECT 1", nil); return err },
	),
	refused("`QueryIndexes()`",
		func(t *trial) error { _, err := t.sdk.QueryIndexes().GetAllIndexes(t.job.Bucket, nil); return err },
		func(t *trial) error { return t.sdk.QueryIndexes().CreatePrimaryIndex(t.job.Bucket, nil) },
		func(t *trial) error { _, err := t.collection().QueryIndexes().GetAllIndexes(nil); return err },
	),
	refused("`SearchQuery`",
		func(t *trial) error {
			_, err := t.sdk.SearchQuery("index", cbsearch.NewMatchAllQuery(), nil)
			return err
		},
	),
	refused("`Search`, of the cluster and of a scope, for vectors too",
		func(t *trial) error {
			request := gocb.SearchRequest{SearchQuery: cbsearch.NewMatchAllQuery()}
			_, err := t.bucket.DefaultScope().Search("index", request, nil)
			return err
		},
		func(t *trial) error {
			query := vector.NewQuery("v", []float32{1})
			request := gocb.SearchRequest{VectorSearch: vector.NewSearch([]*vector.Query{query}, nil)}
			_, err := t.sdk.Search("index", request, nil)
			return err
		},
	),
	refused("`SearchIndexes()`",
		func(t *trial) error { _, err := t.sdk.SearchIndexes().GetAllIndexes(nil); return err },
		func(t *trial) error {
			_, err := t.bucket.DefaultScope().SearchIndexes().GetAllIndexes(nil)
			return err
		},
	),
	refused("`AnalyticsQuery`, of the cluster and of a scope",
		func(t *trial) error { _, err := t.sdk.AnalyticsQuery("SELECT 1", nil); return err },
		func(t *trial) error {
			_, err := t.bucket.DefaultScope().AnalyticsQuery("SELECT 1", nil)
			return err
		},
	),
	refused("`AnalyticsIndexes()`",
		func(t *trial) error { _, err := t.sdk.AnalyticsIndexes().GetAllDatasets(nil); return err },
		func(t *trial) error { return t.sdk.AnalyticsIndexes().CreateDataverse("verse", nil) },
	),
	refused("`ViewQuery`",
		func(t *trial) error { _, err := t.bucket.ViewQuery("design", "view", nil); return err },
	),
	refused("`ViewIndexes()`",
		func(t *trial) error {
			space := gocb.DesignDocumentNamespaceProduction
			_, err := t.bucket.ViewIndexes().GetDesignDocument("design", space, nil)
			return err
		},
	),
	refused("`EventingFunctions()`, of the cluster and of a scope",
		func(t *trial) error { _, err := t.sdk.EventingFunctions().GetAllFunctions(nil); return err },
		func(t *trial) error {
			_, err := t.bucket.DefaultScope().EventingFunctions().GetAllFunctions(nil)
			return err
		},
	),
	{"`Users()`", func(t *trial) string {
		_, listed := t.sdk.Users().GetAllUsers(nil)
		joe := gocb.User{Username: "joe", Password: "word", Roles: []gocb.Role{{Name: "admin"}}}
		added := t.sdk.Users().UpsertUser(joe, nil)
		_, roles := t.sdk.Users().GetRoles(nil)
		statuses := []uint32{t.status(listed), t.status(added), t.status(roles)}
		t.same(statuses, []int{404, 405, 404})
		return "not available: HTTP status 404 or 405"
	}},
}

// status is that of the HTTP answer that an error is.
func (t *trial) status(err error) uint32 {
	var answer *gocb.HTTPError
	if !errors.As(err, &answer) {
		panic(unexpected{fmt.Sprintf("%v in place of an HTTP status", err)})
	}
	return answer.StatusCode
}

// drain reads a scan to its end.
func drain(found *gocb.ScanResult, err error) error {
	if err != nil {
		return err
	}
	for found.Next() != nil {
	}
	return found.Err()
}

// refused is a call that is not available in any of its forms.
func refused(name string, attempts ...func(*trial) error) call {
	return call{name, func(t *trial) string {
		var names []string
		for _, attempt := range attempts {
			names = append(names, unavailable(t, attempt(t)))
		}
		slices.Sort(names)
		return "not available: " + strings.Join(slices.Compact(names), " or ")
	}}
}
