package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/couchbase/gocb/v2"
)

// management has the calls for transactions, collections and the cluster.
var management = []call{
	{"`Transactions().Run`, committed", func(t *trial) string {
		giver, taker, old := t.key+"-giver", t.key+"-taker", t.key+"-old"
		for _, key := range []string{giver, old} {
			_, err := t.collection().Upsert(key, number{100}, nil)
			t.ok(err)
		}
		_, err := t.sdk.Transactions().Run(func(attempt *gocb.TransactionAttemptContext) error {
			document, err := attempt.Get(t.collection(), giver)
			if err != nil {
				return err
			}
			if _, err := attempt.Replace(document, number{60}); err != nil {
				return err
			}
			if _, err := attempt.Insert(t.collection(), taker, number{40}); err != nil {
				return err
			}
			if document, err = attempt.Get(t.collection(), old); err != nil {
				return err
			}
			if err := attempt.Remove(document); err != nil {
				return err
			}
			// Others do not see it yet.
			if n := t.stored(giver); n != 100 {
				return errors.New("what is not committed is seen")
			}
			return nil
		}, nil)
		t.ok(err)
		t.same([]any{t.stored(giver), t.stored(taker), t.exists(old)}, []any{60, 40, false})
		return ""
	}},
	{"`Transactions().Run`, rolled back", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		refusal := errors.New("no")
		_, err = t.sdk.Transactions().Run(func(attempt *gocb.TransactionAttemptContext) error {
			document, err := attempt.Get(t.collection(), t.key)
			if err != nil {
				return err
			}
			if _, err := attempt.Replace(document, number{2}); err != nil {
				return err
			}
			if _, err := attempt.Insert(t.collection(), t.key+"-never", number{}); err != nil {
				return err
			}
			return refusal
		}, nil)
		t.is(err, refusal)
		t.same([]any{t.stored(t.key), t.exists(t.key + "-never")}, []any{1, false})
		return ""
	}},
	{"`Transactions().Run` with a query", func(t *trial) string {
		var refused error
		_, err := t.sdk.Transactions().Run(func(attempt *gocb.TransactionAttemptContext) error {
			_, refused = attempt.Query("SELECT 1", nil)
			return refused
		}, nil)
		t.is(err, refused)
		return "not available: " + unavailable(t, err)
	}},
	{"`CollectionsV2()`", func(t *trial) string {
		manager := t.bucket.CollectionsV2()
		t.ok(manager.CreateScope("shop", nil))
		t.is(manager.CreateScope("shop", nil), gocb.ErrScopeExists)
		settings := &gocb.CreateCollectionSettings{MaxExpiry: time.Hour}
		t.ok(manager.CreateCollection("shop", "orders", settings, nil))
		t.is(manager.CreateCollection("shop", "orders", nil, nil), gocb.ErrCollectionExists)
		t.is(manager.CreateCollection("none", "orders", nil, nil), gocb.ErrScopeNotFound)
		longer := gocb.UpdateCollectionSettings{MaxExpiry: 2 * time.Hour}
		t.ok(manager.UpdateCollection("shop", "orders", longer, nil))
		scopes, err := manager.GetAllScopes(nil)
		t.ok(err)
		shop := slices.IndexFunc(scopes, func(each gocb.ScopeSpec) bool { return each.Name == "shop" })
		t.same(scopes[shop].Collections[0].MaxExpiry, 2*time.Hour)
		orders := t.bucket.Scope("shop").Collection("orders")
		_, err = orders.Upsert(t.key, number{1}, nil)
		t.ok(err)
		t.same(t.exists(t.key), false)
		t.ok(manager.DropCollection("shop", "orders", nil))
		t.is(manager.DropCollection("shop", "orders", nil), gocb.ErrCollectionNotFound)
		t.ok(manager.DropScope("shop", nil))
		t.is(manager.DropScope("shop", nil), gocb.ErrScopeNotFound)
		return ""
	}},
	{"`Ping`, `Diagnostics`, `WaitUntilReady`", func(t *trial) string {
		options := &gocb.PingOptions{ServiceTypes: []gocb.ServiceType{gocb.ServiceTypeKeyValue}}
		pinged, err := t.bucket.Ping(options)
		t.ok(err)
		var nodes []string
		for _, each := range pinged.Services[gocb.ServiceTypeKeyValue] {
			t.same(each.State, gocb.PingStateOk)
			nodes = append(nodes, each.Remote)
		}
		slices.Sort(nodes)
		// A connection that was made anew may be listed beside the one that it replaces.
		t.same(len(slices.Compact(nodes)), len(t.job.Nodes))
		seen, err := t.sdk.Diagnostics(nil)
		t.ok(err)
		t.same(seen.State, gocb.ClusterStateOnline)
		t.ok(t.sdk.WaitUntilReady(patience, nil))
		return ""
	}},
	{"`Internal().GetNodesMetadata`", func(t *trial) string {
		nodes, err := t.sdk.Internal().GetNodesMetadata(nil)
		t.ok(err)
		t.same(len(nodes), len(t.job.Nodes))
		return ""
	}},
}

// buckets has the calls for the bucket as a whole; after the last, it is another one.
var buckets = []call{
	{"`Buckets()`: listing", func(t *trial) string {
		all, err := t.sdk.Buckets().GetAllBuckets(nil)
		t.ok(err)
		t.same(len(all), 1)
		one, err := t.sdk.Buckets().GetBucket(t.job.Bucket, nil)
		t.ok(err)
		t.same(one.NumReplicas, 1)
		_, err = t.sdk.Buckets().GetBucket("none", nil)
		t.is(err, gocb.ErrBucketNotFound)
		return ""
	}},
	{"`Buckets().FlushBucket`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		t.ok(t.sdk.Buckets().FlushBucket(t.job.Bucket, nil))
		t.same(t.exists(t.key), false)
		_, err = t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		return ""
	}},
	{"`Buckets().UpdateBucket`", func(t *trial) string {
		manager := t.sdk.Buckets()
		settings := gocb.BucketSettings{Name: t.job.Bucket, RAMQuotaMB: 345, NumReplicas: 1,
			BucketType: gocb.CouchbaseBucketType, ReplicaIndexDisabled: true, FlushEnabled: true}
		t.ok(manager.UpdateBucket(settings, nil))
		settings.NumReplicas = 2
		if manager.UpdateBucket(settings, nil) == nil {
			return ""
		}
		return "differs: the memory quota, and whether the bucket can be flushed; nothing else"
	}},
	{"`Buckets().DropBucket`, `CreateBucket`", func(t *trial) string {
		manager := t.sdk.Buckets()
		settings := gocb.CreateBucketSettings{BucketSettings: gocb.BucketSettings{
			Name: t.job.Bucket, BucketType: gocb.CouchbaseBucketType, RAMQuotaMB: 345, NumReplicas: 1}}
		t.is(manager.CreateBucket(settings, nil), gocb.ErrBucketExists)
		t.ok(manager.DropBucket(t.job.Bucket, nil))
		t.is(manager.DropBucket(t.job.Bucket, nil), gocb.ErrBucketNotFound)
		t.ok(manager.CreateBucket(settings, nil))
		// The SDK finds the new one by itself.
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		settings.Name, settings.BucketType = "another", gocb.EphemeralBucketType
		settings.EvictionPolicy = gocb.EvictionPolicyTypeNoEviction
		t.ok(manager.CreateBucket(settings, nil))
		another := t.sdk.Bucket("another")
		t.ok(another.WaitUntilReady(10*time.Second, nil))
		_, err = another.DefaultCollection().Upsert(t.key, number{2}, nil)
		t.ok(err)
		t.ok(manager.DropBucket("another", nil))
		_, err = t.collection().Get(t.key, nil)
		t.ok(err)
		settings.MaxExpiry = time.Minute
		if manager.CreateBucket(settings, nil) == nil {
			return ""
		}
		return "differs: with its type, replicas, quota and flushing; other settings are fixed"
	}},
}

// unavailable names the error by which a call is said not to be available.
func unavailable(t *trial, err error) string {
	switch {
	case errors.Is(err, gocb.ErrServiceNotAvailable):
		return "`ErrServiceNotAvailable`"
	case errors.Is(err, gocb.ErrFeatureNotAvailable):
		return "`ErrFeatureNotAvailable`"
	}
	panic(unexpected{fmt.Sprintf("%v in place of an error that it is not available", err)})
}
