package main

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

// counter observes streams and does nothing but count.
type counter struct {
	changes atomic.Uint64
	bytes   atomic.Uint64
	ends    chan error
}

// count reads everything up to now into a counter; the job's measure of the library alone.
func (d *drain) count() error {
	config, err := d.agent.ConfigSnapshot()
	if err != nil {
		return err
	}
	high, err := d.highSeqnos(config)
	if err != nil {
		return err
	}
	counter := &counter{ends: make(chan error, len(high))}
	started := time.Now()
	opened := make(chan error, len(high))
	for vbucket, end := range high {
		_, err := d.agent.OpenStream(vbucket, memd.DcpStreamAddFlagActiveOnly, 0, 0,
			gocbcore.SeqNo(end), 0, 0, counter, gocbcore.OpenStreamOptions{
				ManifestOptions: &gocbcore.OpenStreamManifestOptions{},
			}, func(_ []gocbcore.FailoverEntry, err error) { opened <- err })
		if err != nil {
			return err
		}
	}
	deadline := time.After(10 * patience)
	for _, from := range []chan error{opened, counter.ends} {
		for range high {
			select {
			case err := <-from:
				if err != nil {
					return err
				}
			case <-deadline:
				return fmt.Errorf("only %d changes came", counter.changes.Load())
			}
		}
	}
	elapsed := time.Since(started).Seconds()
	d.report.Counted(counter.changes.Load(), counter.bytes.Load(), elapsed)
	d.input.AwaitEnd()
	return nil
}

func (c *counter) add(key, value []byte) {
	c.changes.Add(1)
	c.bytes.Add(uint64(len(key) + len(value)))
}

// SnapshotMarker is not counted.
func (c *counter) SnapshotMarker(gocbcore.DcpSnapshotMarker) {}

// Mutation counts a document written.
func (c *counter) Mutation(m gocbcore.DcpMutation) { c.add(m.Key, m.Value) }

// Deletion counts a document removed.
func (c *counter) Deletion(d gocbcore.DcpDeletion) { c.add(d.Key, d.Value) }

// Expiration counts a document whose time was over.
func (c *counter) Expiration(e gocbcore.DcpExpiration) { c.add(e.Key, nil) }

// End is the end of a stream.
func (c *counter) End(_ gocbcore.DcpStreamEnd, err error) { c.ends <- err }

// CreateCollection is not counted.
func (c *counter) CreateCollection(gocbcore.DcpCollectionCreation) {}

// DeleteCollection is not counted.
func (c *counter) DeleteCollection(gocbcore.DcpCollectionDeletion) {}

// FlushCollection is not counted.
func (c *counter) FlushCollection(gocbcore.DcpCollectionFlush) {}

// CreateScope is not counted.
func (c *counter) CreateScope(gocbcore.DcpScopeCreation) {}

// DeleteScope is not counted.
func (c *counter) DeleteScope(gocbcore.DcpScopeDeletion) {}

// ModifyCollection is not counted.
func (c *counter) ModifyCollection(gocbcore.DcpCollectionModification) {}

// OSOSnapshot is not counted.
func (c *counter) OSOSnapshot(gocbcore.DcpOSOSnapshot) {}

// SeqNoAdvanced is not counted.
func (c *counter) SeqNoAdvanced(gocbcore.DcpSeqNoAdvanced) {}
