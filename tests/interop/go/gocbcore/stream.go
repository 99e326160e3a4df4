package main

import (
	"errors"
	"hash/crc32"
	"sync"

	"github.com/couchbase/gocbcore/v10"

	"dcp_rs/tests/interop/go/session"
)

// stream is one stream of a vBucket: it observes it, and checks what each packet says against the
// packets before.
type stream struct {
	report    *session.Report
	vbucket   uint16
	streamID  uint16
	wantsOnly map[uint32]bool
	ended     func(*stream, error)
	advanced  func()

	mutex sync.Mutex
	at    Position
	// The snapshot of the last marker. It becomes the position's with its first item.
	pending    *gocbcore.DcpSnapshotMarker
	snapshot   gocbcore.DcpSnapshotMarker
	inside     bool
	outOfOrder bool
	// Where it was before the backfill that is not in order, which counts only as a whole.
	before Position
	end    uint64
	items  int
	// How often it was opened.
	opened   int
	closing  bool
	finished bool
}

func (s *stream) position() Position {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.at
}

// whole is the position of the last item behind which nothing is missing.
func (s *stream) whole() Position {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.outOfOrder {
		return s.before
	}
	return s.at
}

// moveTo sets where the stream goes on, before it is opened.
func (s *stream) moveTo(at Position) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.at, s.pending, s.inside, s.outOfOrder = at, nil, false, false
}

func (s *stream) surprise(format string, arguments ...any) {
	s.report.Surprise(s.vbucket, format, arguments...)
}

func (s *stream) checkOrigin(vbucket, streamID uint16) {
	if vbucket != s.vbucket || streamID != s.streamID {
		s.surprise("packet of vBucket %d stream %d came to stream %d", vbucket, streamID, s.streamID)
	}
}

// reach checks that an item may be here and takes its place in the stream.
func (s *stream) reach(seqno uint64) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if !s.outOfOrder {
		s.checkOrder(seqno)
	}
	s.items++
	if seqno > s.at.Seqno {
		s.at.Seqno = seqno
	}
	if !s.outOfOrder {
		s.at.SnapshotStart, s.at.SnapshotEnd = s.snapshot.StartSeqNo, s.snapshot.EndSeqNo
	}
	s.advanced()
}

func (s *stream) checkOrder(seqno uint64) {
	if s.pending != nil {
		s.snapshot, s.pending, s.inside = *s.pending, nil, true
	}
	if !s.inside {
		s.surprise("item %d before any snapshot marker", seqno)
		return
	}
	if seqno < s.snapshot.StartSeqNo || seqno > s.snapshot.EndSeqNo {
		s.surprise("item %d outside of snapshot %d-%d", seqno, s.snapshot.StartSeqNo, s.snapshot.EndSeqNo)
	}
	if seqno <= s.at.Seqno {
		s.surprise("item %d after item %d", seqno, s.at.Seqno)
	}
}

func (s *stream) change(
	operation string, vbucket, streamID uint16, seqno, cas, revision uint64, collection uint32,
	key, value []byte, rest map[string]any,
) {
	s.checkOrigin(vbucket, streamID)
	s.reach(seqno)
	if len(s.wantsOnly) > 0 && !s.wantsOnly[collection] {
		s.surprise("item %d is of collection %d, which was not asked for", seqno, collection)
	}
	fields := map[string]any{
		"vb": vbucket, "sid": streamID, "op": operation, "seqno": seqno, "cas": cas, "rev": revision,
		"collection": collection, "key": string(key), "size": len(value),
		"crc": crc32.ChecksumIEEE(value),
	}
	for name, field := range rest {
		fields[name] = field
	}
	s.report.Print("change", fields)
}

// SnapshotMarker begins a snapshot.
func (s *stream) SnapshotMarker(marker gocbcore.DcpSnapshotMarker) {
	s.checkOrigin(marker.VbID, marker.StreamID)
	s.mutex.Lock()
	if marker.StartSeqNo > marker.EndSeqNo {
		s.surprise("snapshot %d-%d ends before it starts", marker.StartSeqNo, marker.EndSeqNo)
	}
	if marker.EndSeqNo < s.at.Seqno {
		s.surprise("snapshot %d-%d after item %d", marker.StartSeqNo, marker.EndSeqNo, s.at.Seqno)
	}
	if s.pending != nil {
		s.surprise("a snapshot marker without items before another")
	}
	s.pending = &marker
	s.at.PurgeSeqno = max(s.at.PurgeSeqno, marker.PurgeSeqNo)
	s.mutex.Unlock()
	s.report.Print("marker", map[string]any{
		"vb": s.vbucket, "sid": s.streamID, "start": marker.StartSeqNo, "end": marker.EndSeqNo,
		"memory": marker.SnapshotType.HasInMemory(), "disk": marker.SnapshotType.HasOnDisk(),
		"purge_seqno": marker.PurgeSeqNo, "max_visible_seqno": marker.MaxVisibleSeqNo,
	})
}

// Mutation is a document written.
func (s *stream) Mutation(m gocbcore.DcpMutation) {
	s.change("mutation", m.VbID, m.StreamID, m.SeqNo, m.Cas, m.RevNo, m.CollectionID, m.Key, m.Value,
		map[string]any{"datatype": m.Datatype, "flags": m.Flags, "expiry": m.Expiry})
}

// Deletion is a document removed.
func (s *stream) Deletion(d gocbcore.DcpDeletion) {
	s.change("deletion", d.VbID, d.StreamID, d.SeqNo, d.Cas, d.RevNo, d.CollectionID, d.Key, d.Value,
		map[string]any{"time": d.DeleteTime})
}

// Expiration is a document whose time was over.
func (s *stream) Expiration(e gocbcore.DcpExpiration) {
	s.change("expiration", e.VbID, e.StreamID, e.SeqNo, e.Cas, e.RevNo, e.CollectionID, e.Key, nil,
		map[string]any{"time": e.DeleteTime})
}

// SeqNoAdvanced tells of a seqno that the stream has no item for.
func (s *stream) SeqNoAdvanced(a gocbcore.DcpSeqNoAdvanced) {
	s.checkOrigin(a.VbID, a.StreamID)
	s.reach(a.SeqNo)
	s.report.Print("advanced", map[string]any{"vb": s.vbucket, "sid": s.streamID, "seqno": a.SeqNo})
}

// OSOSnapshot begins or ends a backfill that is not in the order of seqnos.
func (s *stream) OSOSnapshot(o gocbcore.DcpOSOSnapshot) {
	s.checkOrigin(o.VbID, o.StreamID)
	s.mutex.Lock()
	s.outOfOrder = o.SnapshotType == 1
	if s.outOfOrder {
		s.before = s.at
	} else {
		// Complete now: the stream is where its highest item is.
		s.at.SnapshotStart, s.at.SnapshotEnd = s.at.Seqno, s.at.Seqno
	}
	s.mutex.Unlock()
	s.report.Print("out_of_order", map[string]any{"vb": s.vbucket, "type": o.SnapshotType})
}

// End is the end of the stream, told by the producer or because the connection is gone.
func (s *stream) End(end gocbcore.DcpStreamEnd, err error) {
	s.checkOrigin(end.VbID, end.StreamID)
	s.ended(s, err)
}

func (s *stream) system(what string, vbucket, streamID uint16, seqno uint64) {
	s.checkOrigin(vbucket, streamID)
	s.reach(seqno)
	s.report.Print("system", map[string]any{"vb": vbucket, "event": what, "seqno": seqno})
}

// CreateCollection is a system event.
func (s *stream) CreateCollection(e gocbcore.DcpCollectionCreation) {
	s.system("create_collection", e.VbID, e.StreamID, e.SeqNo)
}

// DeleteCollection is a system event.
func (s *stream) DeleteCollection(e gocbcore.DcpCollectionDeletion) {
	s.system("delete_collection", e.VbID, e.StreamID, e.SeqNo)
}

// FlushCollection is a system event.
func (s *stream) FlushCollection(e gocbcore.DcpCollectionFlush) {
	s.system("flush_collection", e.VbID, e.StreamID, e.SeqNo)
}

// CreateScope is a system event.
func (s *stream) CreateScope(e gocbcore.DcpScopeCreation) {
	s.system("create_scope", e.VbID, e.StreamID, e.SeqNo)
}

// DeleteScope is a system event.
func (s *stream) DeleteScope(e gocbcore.DcpScopeDeletion) {
	s.system("delete_scope", e.VbID, e.StreamID, e.SeqNo)
}

// ModifyCollection is a system event.
func (s *stream) ModifyCollection(e gocbcore.DcpCollectionModification) {
	s.system("modify_collection", e.VbID, e.StreamID, e.SeqNo)
}

// isReopened tells whether a stream that ended so is to be opened again.
func isReopened(err error) bool {
	return errors.Is(err, gocbcore.ErrDCPStreamStateChanged) ||
		errors.Is(err, gocbcore.ErrDCPStreamDisconnected) ||
		errors.Is(err, gocbcore.ErrSocketClosed)
}

// isNotOpen tells whether a stream could not be closed because it is not open.
func isNotOpen(err error) bool {
	return errors.Is(err, gocbcore.ErrDocumentNotFound) ||
		errors.Is(err, gocbcore.ErrNotMyVBucket) ||
		errors.Is(err, gocbcore.ErrSocketClosed)
}
