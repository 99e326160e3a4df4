package main

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/Trendyol/go-dcp"
	"github.com/Trendyol/go-dcp/models"

	"dcp_rs/tests/interop/go/session"
)

// counter is a listener that does nothing but count.
type counter struct {
	changes atomic.Uint64
	bytes   atomic.Uint64
	// How many changes there are, and when the last of them came; go-dcp takes its time to close.
	expected uint64
	reached  atomic.Pointer[time.Time]
}

// count reads everything up to now into a counter; the job's measure of the library alone.
func count(job session.Job, input *session.Input, report *session.Report) error {
	counter := &counter{expected: job.Documents}
	connector, err := dcp.NewExtendedDcp(configure(job), counter)
	if err != nil {
		return err
	}
	started := time.Now()
	stopped := make(chan struct{})
	go func() {
		connector.Start()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(10 * patience):
		return fmt.Errorf("only %d changes came", counter.changes.Load())
	}
	elapsed := time.Since(started)
	if reached := counter.reached.Load(); reached != nil {
		elapsed = reached.Sub(started)
	}
	report.Counted(counter.changes.Load(), counter.bytes.Load(), elapsed.Seconds())
	input.AwaitEnd()
	return nil
}

// ConsumeEvent counts a change.
func (c *counter) ConsumeEvent(context *models.ListenerContext) {
	switch event := context.Event.(type) {
	case models.DcpMutation:
		c.add(event.Key, event.Value)
	case models.DcpDeletion:
		c.add(event.Key, event.Value)
	case models.DcpExpiration:
		c.add(event.Key, nil)
	}
	context.Ack()
}

// TrackOffset is not counted.
func (c *counter) TrackOffset(uint16, *models.Offset) {}

func (c *counter) add(key, value []byte) {
	c.bytes.Add(uint64(len(key) + len(value)))
	if c.changes.Add(1) == c.expected {
		now := time.Now()
		c.reached.Store(&now)
	}
}
