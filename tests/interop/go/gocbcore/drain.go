package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"

	"dcp_rs/tests/interop/go/session"
)

// patience is how long anything may take; a job may set it.
var patience = time.Minute

const noEnd = gocbcore.SeqNo(0xffff_ffff_ffff_ffff)

// drain reads the streams of all vBuckets.
type drain struct {
	job     session.Job
	agent   *gocbcore.DCPAgent
	report  *session.Report
	input   *session.Input
	streams []*stream

	// Has something in it when a stream may have come to its end.
	changed chan struct{}
}

func connect(job session.Job) (*gocbcore.DCPAgent, error) {
	config := gocbcore.DCPAgentConfig{
		UserAgent:        "dcp-rs-interop",
		BucketName:       job.Bucket,
		SeedConfig:       gocbcore.SeedConfig{MemdAddrs: job.Nodes},
		EnableCCCPPoller: true,
		IoConfig: gocbcore.IoConfig{
			UseCollections:             job.Collections,
			UseClusterMapNotifications: true,
		},
		CompressionConfig:  gocbcore.CompressionConfig{Enabled: job.Compression != "off"},
		ConfigPollerConfig: gocbcore.ConfigPollerConfig{CccpPollPeriod: 200 * time.Millisecond},
		SecurityConfig: gocbcore.SecurityConfig{
			Auth: gocbcore.PasswordAuthProvider{Username: job.Username, Password: job.Password},
		},
		KVConfig: gocbcore.KVConfig{MaxQueueSize: 8192},
		DCPConfig: gocbcore.DCPConfig{
			AgentPriority:                gocbcore.DcpAgentPriorityHigh,
			BackfillOrder:                gocbcore.DCPBackfillOrderRoundRobin,
			BufferSize:                   job.Buffer,
			DisableBufferAcknowledgement: job.Buffer == 0,
			UseExpiryOpcode:              job.Expirations,
			UseStreamID:                  len(job.StreamIDs) > 0,
			UseOSOBackfill:               job.OutOfOrder,
		},
	}
	if job.PurgeMarkers {
		config.DCPConfig.MaxSnapshotMarkerVersion = gocbcore.MaxSnapshotMarkerVersionV2_2
	}
	if job.CA != "" {
		authority, err := os.ReadFile(job.CA)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(authority)
		config.SecurityConfig.UseTLS = true
		config.SecurityConfig.TLSRootCAProvider = func() *x509.CertPool { return pool }
	}
	flags := memd.DcpOpenFlagProducer | memd.DcpOpenFlagIncludeXattrs
	if job.Expirations {
		flags |= memd.DcpOpenFlagIncludeDeleteTimes
	}
	if job.NoValue {
		flags |= memd.DcpOpenFlagNoValue
	}
	agent, err := gocbcore.CreateDcpAgent(&config, fmt.Sprintf("interop-%d", os.Getpid()), flags)
	if err != nil {
		return nil, err
	}
	return agent, wait(func(done func(error)) (gocbcore.PendingOp, error) {
		return agent.WaitUntilReady(time.Now().Add(patience), gocbcore.WaitUntilReadyOptions{},
			func(_ *gocbcore.WaitUntilReadyResult, err error) { done(err) })
	})
}

// wait makes a call of an operation that calls back.
func wait(begin func(done func(error)) (gocbcore.PendingOp, error)) error {
	result := make(chan error, 1)
	if _, err := begin(func(err error) { result <- err }); err != nil {
		return err
	}
	select {
	case err := <-result:
		return err
	case <-time.After(patience):
		return session.ErrPatience
	}
}

// run does the job and leaves the agent open.
func (d *drain) run() error {
	config, err := d.agent.ConfigSnapshot()
	if err != nil {
		return err
	}
	vbuckets, err := config.NumVbuckets()
	if err != nil {
		return err
	}
	high, err := d.highSeqnos(config)
	if err != nil {
		return err
	}
	if len(high) != vbuckets {
		return fmt.Errorf("nodes tell the high seqnos of %d vBuckets, the map has %d", len(high), vbuckets)
	}
	positions, err := readPositions(d.job.Resume)
	if err != nil {
		return err
	}
	ids := d.job.StreamIDs
	if len(ids) == 0 {
		ids = []uint16{0}
	}
	for vbucket := range uint16(vbuckets) {
		for _, id := range ids {
			stream := &stream{
				report: d.report, vbucket: vbucket, streamID: id, at: positions[vbucket],
				end: high[vbucket], ended: d.ended, advanced: d.notify, wantsOnly: map[uint32]bool{},
			}
			for _, collection := range d.job.Filter {
				stream.wantsOnly[collection] = true
			}
			d.streams = append(d.streams, stream)
		}
	}
	for _, stream := range d.streams {
		if err := d.open(stream); err != nil {
			return err
		}
	}
	if d.job.Follow {
		d.report.Streaming(len(d.streams))
		if err := d.readEnds(); err != nil {
			return err
		}
	}
	return d.await()
}

func (d *drain) highSeqnos(config *gocbcore.ConfigSnapshot) (map[uint16]uint64, error) {
	servers, err := config.NumServers()
	if err != nil {
		return nil, err
	}
	high := map[uint16]uint64{}
	for server := 1; server <= servers; server++ {
		err := wait(func(done func(error)) (gocbcore.PendingOp, error) {
			return d.agent.GetVbucketSeqnos(server, memd.VbucketStateActive,
				gocbcore.GetVbucketSeqnoOptions{}, func(entries []gocbcore.VbSeqNoEntry, err error) {
					for _, entry := range entries {
						high[entry.VbID] = uint64(entry.SeqNo)
					}
					done(err)
				})
		})
		if err != nil {
			return nil, err
		}
	}
	return high, nil
}

// open opens a stream where it is, going back as far as the producer says.
func (d *drain) open(stream *stream) error {
	for range 4 {
		var log []gocbcore.FailoverEntry
		err := wait(func(done func(error)) (gocbcore.PendingOp, error) {
			return d.request(stream, func(entries []gocbcore.FailoverEntry, err error) {
				log = entries
				if err == nil && len(log) > 0 {
					// Before any item of it can come: the callback runs where packets are read.
					stream.mutex.Lock()
					stream.at.Vbuuid = uint64(log[0].VbUUID)
					stream.mutex.Unlock()
				}
				done(err)
			})
		})
		var rollback gocbcore.DCPRollbackError
		switch {
		case err == nil && len(log) == 0:
			return fmt.Errorf("vBucket %d has an empty failover log", stream.vbucket)
		case err == nil:
			d.report.Print("opened", map[string]any{"vb": stream.vbucket, "log": logFields(log)})
			stream.mutex.Lock()
			stream.opened++
			stream.mutex.Unlock()
			d.notify()
			return nil
		case !errors.As(err, &rollback):
			return fmt.Errorf("vBucket %d cannot be streamed: %w", stream.vbucket, err)
		}
		at := stream.position()
		d.report.Print("rollback", map[string]any{
			"vb": stream.vbucket, "from": at.Seqno, "to": uint64(rollback.SeqNo)})
		if uint64(rollback.SeqNo) >= at.Seqno {
			return fmt.Errorf("vBucket %d at %d is to roll back to %d", stream.vbucket, at.Seqno, rollback.SeqNo)
		}
		if err := d.rollBack(stream, uint64(rollback.SeqNo)); err != nil {
			return err
		}
	}
	return fmt.Errorf("vBucket %d was rolled back again and again", stream.vbucket)
}

func (d *drain) request(
	stream *stream, callback gocbcore.OpenStreamCallback,
) (gocbcore.PendingOp, error) {
	end := gocbcore.SeqNo(stream.end)
	if d.job.Follow {
		end = noEnd
	}
	var options gocbcore.OpenStreamOptions
	at := stream.position()
	if stream.streamID != 0 || d.job.PurgeMarkers {
		options.StreamOptions = &gocbcore.OpenStreamStreamOptions{
			StreamID: stream.streamID, PurgeSeqNo: at.PurgeSeqno}
	}
	if len(d.job.Filter) > 0 {
		options.FilterOptions = &gocbcore.OpenStreamFilterOptions{CollectionIDs: d.job.Filter}
	}
	if d.job.Collections {
		options.ManifestOptions = &gocbcore.OpenStreamManifestOptions{}
	}
	return d.agent.OpenStream(stream.vbucket, memd.DcpStreamAddFlagActiveOnly,
		gocbcore.VbUUID(at.Vbuuid), gocbcore.SeqNo(at.Seqno), end,
		gocbcore.SeqNo(at.SnapshotStart), gocbcore.SeqNo(at.SnapshotEnd), stream, options, callback)
}

// rollBack takes a stream back to seqno, on the branch that the history had there.
func (d *drain) rollBack(stream *stream, seqno uint64) error {
	at := Position{Seqno: seqno, SnapshotStart: seqno, SnapshotEnd: seqno}
	if seqno > 0 {
		err := wait(func(done func(error)) (gocbcore.PendingOp, error) {
			return d.agent.GetFailoverLog(stream.vbucket,
				func(log []gocbcore.FailoverEntry, err error) {
					for _, entry := range log {
						if uint64(entry.SeqNo) <= seqno {
							at.Vbuuid = uint64(entry.VbUUID)
							break
						}
					}
					done(err)
				})
		})
		if err != nil {
			return err
		}
	}
	stream.moveTo(at)
	return nil
}

// ended notes the end of a stream; it runs where packets are read, so it must not wait.
func (d *drain) ended(stream *stream, err error) {
	reason := "ok"
	if err != nil {
		reason = err.Error()
	}
	d.report.Print("end", map[string]any{"vb": stream.vbucket, "sid": stream.streamID, "reason": reason})
	stream.mutex.Lock()
	expected := err == nil && !d.job.Follow ||
		errors.Is(err, gocbcore.ErrDCPStreamClosed) && stream.closing
	stream.finished = stream.finished || expected
	stream.mutex.Unlock()
	switch {
	case expected:
		d.notify()
	case isReopened(err) && d.job.Follow:
		go d.reopen(stream)
	default:
		stream.surprise("the stream ended: %s", reason)
	}
}

// reopen opens a stream that was cut off as soon as there is a node that has it.
func (d *drain) reopen(stream *stream) {
	at := stream.whole()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		stream.moveTo(at)
		if err = d.open(stream); err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	stream.surprise("the stream cannot be opened again: %v", err)
}

func (d *drain) notify() {
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// readEnds waits to be told where to end.
func (d *drain) readEnds() error {
	ends, err := d.input.Ends()
	if err != nil {
		return err
	}
	for _, stream := range d.streams {
		stream.mutex.Lock()
		stream.end = ends[stream.vbucket]
		stream.mutex.Unlock()
	}
	return nil
}

// await waits until every stream is where it is to end, and closes those that have no end.
func (d *drain) await() error {
	reached := func(s *stream) bool { return s.finished || d.job.Follow && s.at.Seqno >= s.end }
	if err := d.until(reached); err != nil {
		return err
	}
	if d.job.Follow {
		for _, stream := range d.streams {
			if err := d.close(stream); err != nil {
				return fmt.Errorf("vBucket %d cannot be closed: %w", stream.vbucket, err)
			}
		}
		if err := d.until(func(s *stream) bool { return s.finished }); err != nil {
			return err
		}
	}
	for _, stream := range d.streams {
		d.report.Print("vbucket", map[string]any{
			"vb": stream.vbucket, "sid": stream.streamID, "items": stream.items,
			"seqno": stream.position().Seqno,
		})
	}
	return nil
}

// until waits until the condition holds for every stream.
func (d *drain) until(condition func(*stream) bool) error {
	deadline := time.After(patience)
	for {
		missing := d.firstNot(condition)
		if missing == nil {
			return nil
		}
		select {
		case <-d.changed:
		case <-time.After(100 * time.Millisecond):
		case <-deadline:
			return fmt.Errorf("vBucket %d stays at %d of %d",
				missing.vbucket, missing.position().Seqno, missing.end)
		}
	}
}

func (d *drain) firstNot(condition func(*stream) bool) *stream {
	for _, stream := range d.streams {
		stream.mutex.Lock()
		holds := condition(stream)
		stream.mutex.Unlock()
		if !holds {
			return stream
		}
	}
	return nil
}

// close closes a stream, which the producer acknowledges with an answer and the stream's end.
func (d *drain) close(closed *stream) error {
	deadline := time.Now().Add(patience)
	for {
		closed.mutex.Lock()
		closed.closing = true
		opened := closed.opened
		closed.mutex.Unlock()
		err := d.requestClose(closed)
		if err == nil || !isNotOpen(err) || time.Now().After(deadline) {
			return err
		}
		// The node that had it is gone: the stream is being opened again, or will be as soon as
		// gocbcore notices, and then there is something to close.
		isOpenAgain := func(s *stream) bool { return s != closed || s.opened > opened }
		if err := d.until(isOpenAgain); err != nil {
			return err
		}
	}
}

func (d *drain) requestClose(stream *stream) error {
	var options gocbcore.CloseStreamOptions
	if stream.streamID != 0 {
		options.StreamOptions = &gocbcore.CloseStreamStreamOptions{StreamID: stream.streamID}
	}
	var err error
	for range 100 {
		err = wait(func(done func(error)) (gocbcore.PendingOp, error) {
			return d.agent.CloseStream(stream.vbucket, options, done)
		})
		// A stream that was cut off is none until it is opened again, of which its end tells.
		if !errors.Is(err, gocbcore.ErrDocumentNotFound) && !errors.Is(err, gocbcore.ErrSocketClosed) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

func logFields(log []gocbcore.FailoverEntry) [][2]uint64 {
	fields := make([][2]uint64, 0, len(log))
	for _, entry := range log {
		fields = append(fields, [2]uint64{uint64(entry.VbUUID), uint64(entry.SeqNo)})
	}
	return fields
}
