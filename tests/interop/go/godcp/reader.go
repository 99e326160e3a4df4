package main

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"sync"

	"github.com/Trendyol/go-dcp/models"

	"dcp_rs/tests/interop/go/session"
)

// reader is the listener: it checks what it is given against what it was given before. That items
// are within their snapshots, go-dcp checks itself, and panics.
type reader struct {
	report *session.Report
	// Key of the change that is not acknowledged.
	unacknowledged string
	mutex          sync.Mutex
	// The seqno of the last change of each vBucket, and where go-dcp says it is.
	last   map[uint16]uint64
	offset map[uint16]uint64
}

// newReader begins where the file of go-dcp's checkpoints says, if there is one.
func newReader(report *session.Report, job session.Job) (*reader, error) {
	r := &reader{
		report: report, unacknowledged: job.Unacknowledged,
		last: map[uint16]uint64{}, offset: map[uint16]uint64{},
	}
	if job.Resume == "" {
		return r, nil
	}
	text, err := os.ReadFile(job.Resume)
	if err != nil {
		return nil, err
	}
	var documents map[uint16]models.CheckpointDocument
	if err := json.Unmarshal(text, &documents); err != nil {
		return nil, err
	}
	for vbucket, document := range documents {
		r.last[vbucket], r.offset[vbucket] = document.Checkpoint.SeqNo, document.Checkpoint.SeqNo
	}
	return r, nil
}

// ConsumeEvent takes a change.
func (r *reader) ConsumeEvent(context *models.ListenerContext) {
	switch event := context.Event.(type) {
	case models.DcpMutation:
		if r.unacknowledged != "" && string(event.Key) == r.unacknowledged {
			r.report.Print("unacknowledged", map[string]any{"vb": event.VbID, "seqno": event.SeqNo})
			r.mutex.Lock()
			r.last[event.VbID] = event.SeqNo
			r.mutex.Unlock()
			return
		}
		r.change("mutation", event.VbID, event.SeqNo, event.Offset, map[string]any{
			"cas": event.Cas, "rev": event.RevNo, "collection": event.CollectionID,
			"name": event.CollectionName, "key": string(event.Key), "size": len(event.Value),
			"crc": crc32.ChecksumIEEE(event.Value),
		})
	case models.DcpDeletion:
		r.change("deletion", event.VbID, event.SeqNo, event.Offset, map[string]any{
			"cas": event.Cas, "rev": event.RevNo, "collection": event.CollectionID,
			"name": event.CollectionName, "key": string(event.Key), "size": len(event.Value),
			"crc": crc32.ChecksumIEEE(event.Value),
		})
	case models.DcpExpiration:
		r.change("expiration", event.VbID, event.SeqNo, event.Offset, map[string]any{
			"cas": event.Cas, "rev": event.RevNo, "collection": event.CollectionID,
			"name": event.CollectionName, "key": string(event.Key), "size": 0, "crc": 0,
			"time": event.DeleteTime,
		})
	}
	context.Ack()
}

func (r *reader) change(
	operation string, vbucket uint16, seqno uint64, offset *models.Offset, fields map[string]any,
) {
	r.mutex.Lock()
	if seqno <= r.last[vbucket] {
		r.report.Surprise(vbucket, "item %d after item %d", seqno, r.last[vbucket])
	}
	if offset.VbUUID == 0 {
		r.report.Surprise(vbucket, "item %d is of no branch", seqno)
	}
	r.last[vbucket] = seqno
	r.mutex.Unlock()
	fields["vb"], fields["op"], fields["seqno"] = vbucket, operation, seqno
	r.report.Print("change", fields)
}

// TrackOffset is told where a vBucket is.
func (r *reader) TrackOffset(vbucket uint16, offset *models.Offset) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.offset[vbucket] = offset.SeqNo
}

// seqno is how far a vBucket has come.
func (r *reader) seqno(vbucket uint16) uint64 {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.unacknowledged != "" {
		return max(r.last[vbucket], r.offset[vbucket])
	}
	return r.offset[vbucket]
}

// offsetOf is how far go-dcp says that a vBucket is acknowledged.
func (r *reader) offsetOf(vbucket uint16) uint64 {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.offset[vbucket]
}

func (r *reader) places() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var places []string
	for vbucket, seqno := range r.offset {
		places = append(places, fmt.Sprintf("%d: %d", vbucket, seqno))
	}
	return places
}
