// Makes each call of the Couchbase Go SDK on the embedded cluster and prints what came of it as JSON
// lines: "works", how it differs from a server's answer, or that it is not available.
//
// Standard input tells a session.Job; its Calls are the only ones to make, if there are any.
package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/couchbase/gocb/v2"

	"dcp_rs/tests/interop/go/session"
)

// patience is as long as the machine may be slow.
const patience = 20 * time.Second

// call is a call of the SDK by the name that the guide has for it.
type call struct {
	name string
	make func(*trial) string
}

func main() {
	if os.Getenv("INTEROP_VERBOSE") != "" {
		gocb.SetLogger(gocb.VerboseStdioLogger())
	}
	session.Run(run)
}

func connect(job session.Job) (*gocb.Cluster, error) {
	options := gocb.ClusterOptions{
		Authenticator: gocb.PasswordAuthenticator{Username: job.Username, Password: job.Password},
		TimeoutsConfig: gocb.TimeoutsConfig{
			ConnectTimeout: patience, KVTimeout: patience, KVDurableTimeout: patience,
		},
	}
	scheme := "couchbase://"
	if job.CA != "" {
		authority, err := os.ReadFile(job.CA)
		if err != nil {
			return nil, err
		}
		scheme, options.SecurityConfig.TLSRootCAs = "couchbases://", x509.NewCertPool()
		options.SecurityConfig.TLSRootCAs.AppendCertsFromPEM(authority)
	}
	return gocb.Connect(scheme+strings.Join(job.Nodes, ","), options)
}

func run(job session.Job, _ *session.Input, report *session.Report) error {
	sdk, err := connect(job)
	if err != nil {
		return err
	}
	bucket := sdk.Bucket(job.Bucket)
	if err := bucket.WaitUntilReady(patience, nil); err != nil {
		return err
	}
	calls := slices.Concat(documents, management, absent, buckets)
	if len(job.Calls) > 0 {
		calls = slices.DeleteFunc(append(calls, impossible), func(each call) bool {
			return !slices.Contains(job.Calls, each.name)
		})
	}
	for number, call := range calls {
		trial := trial{job: job, sdk: sdk, bucket: bucket, key: fmt.Sprintf("key-%d", number)}
		started := time.Now()
		answer, failure := trial.run(call)
		report.Print("call", map[string]any{
			"name": call.name, "answer": answer, "failure": failure,
			"seconds": time.Since(started).Seconds(),
		})
	}
	return sdk.Close(nil)
}

// trial is a call that is being tried, with a key that nobody has used.
type trial struct {
	job    session.Job
	sdk    *gocb.Cluster
	bucket *gocb.Bucket
	key    string
}

// unexpected is what ends a trial.
type unexpected struct{ what string }

// run makes a call; it gives the answer, or what was not as expected.
func (t *trial) run(call call) (answer, failure string) {
	defer func() {
		switch raised := recover().(type) {
		case nil:
		case unexpected:
			failure = raised.what
		default:
			panic(raised)
		}
	}()
	if answer = call.make(t); answer == "" {
		answer = "works"
	}
	return answer, ""
}

func (t *trial) collection() *gocb.Collection { return t.bucket.DefaultCollection() }

// ok ends the trial after an error.
func (t *trial) ok(err error) {
	if err != nil {
		panic(unexpected{err.Error()})
	}
}

// is ends the trial unless the error is one of those.
func (t *trial) is(err error, wanted ...error) {
	for _, each := range wanted {
		if errors.Is(err, each) {
			return
		}
	}
	panic(unexpected{fmt.Sprintf("%v in place of %v", err, wanted)})
}

// same ends the trial unless both print the same.
func (t *trial) same(found, wanted any) {
	if fmt.Sprint(found) != fmt.Sprint(wanted) {
		panic(unexpected{fmt.Sprintf("%v in place of %v", found, wanted)})
	}
}

// number is what the trial's documents are.
type number struct {
	N int `json:"n"`
}

// stored is the number under a key.
func (t *trial) stored(key string) int {
	found, err := t.collection().Get(key, nil)
	t.ok(err)
	var value number
	t.ok(found.Content(&value))
	return value.N
}

// exists tells whether there is a document under a key.
func (t *trial) exists(key string) bool {
	found, err := t.collection().Exists(key, nil)
	t.ok(err)
	return found.Exists()
}
