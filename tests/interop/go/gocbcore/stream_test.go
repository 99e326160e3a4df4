package main

import (
	"testing"

	"github.com/couchbase/gocbcore/v10"

	"dcp_rs/tests/interop/go/session"
)

func marker(start, end uint64) gocbcore.DcpSnapshotMarker {
	return gocbcore.DcpSnapshotMarker{VbID: 3, StartSeqNo: start, EndSeqNo: end}
}

func item(seqno uint64) gocbcore.DcpMutation {
	return gocbcore.DcpMutation{VbID: 3, SeqNo: seqno}
}

func TestAStreamThatBreaksTheProtocolIsNoticed(t *testing.T) {
	cases := map[string]struct {
		surprises int
		play      func(*stream)
	}{
		"as it should be": {0, func(s *stream) {
			s.SnapshotMarker(marker(0, 4))
			s.Mutation(item(1))
			s.Mutation(item(4))
			s.SnapshotMarker(marker(5, 5))
			s.Deletion(gocbcore.DcpDeletion{VbID: 3, SeqNo: 5})
		}},
		"an item before any marker":     {1, func(s *stream) { s.Mutation(item(1)) }},
		"an item past its snapshot":     {1, func(s *stream) { s.SnapshotMarker(marker(0, 2)); s.Mutation(item(3)) }},
		"an item short of its snapshot": {1, func(s *stream) { s.SnapshotMarker(marker(2, 3)); s.Mutation(item(1)) }},
		"a snapshot that ends first":    {1, func(s *stream) { s.SnapshotMarker(marker(3, 2)) }},
		"a marker that nothing follows": {1, func(s *stream) { s.SnapshotMarker(marker(0, 2)); s.SnapshotMarker(marker(0, 3)) }},
		"an item of another vBucket":    {1, func(s *stream) { s.SnapshotMarker(marker(0, 2)); s.Mutation(gocbcore.DcpMutation{VbID: 4, SeqNo: 1}) }},
		"an item of another stream": {1, func(s *stream) {
			s.SnapshotMarker(marker(0, 2))
			s.Mutation(gocbcore.DcpMutation{VbID: 3, StreamID: 1, SeqNo: 1})
		}},
		"an item of another collection": {1, func(s *stream) {
			s.SnapshotMarker(marker(0, 2))
			s.Mutation(gocbcore.DcpMutation{VbID: 3, CollectionID: 8, SeqNo: 1})
		}},
		"the same item twice":            {1, func(s *stream) { s.SnapshotMarker(marker(0, 2)); s.Mutation(item(1)); s.Mutation(item(1)) }},
		"a snapshot that was there once": {1, func(s *stream) { s.SnapshotMarker(marker(0, 9)); s.Mutation(item(9)); s.SnapshotMarker(marker(0, 8)) }},
		"an order that was agreed on": {0, func(s *stream) {
			s.OSOSnapshot(gocbcore.DcpOSOSnapshot{VbID: 3, SnapshotType: 1})
			s.Mutation(item(7))
			s.Mutation(item(2))
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			report := session.NewReport()
			s := &stream{report: report, vbucket: 3, advanced: func() {}, wantsOnly: map[uint32]bool{0: true}}
			c.play(s)
			if surprises := report.Surprises(); surprises != c.surprises {
				t.Errorf("%d surprises instead of %d", surprises, c.surprises)
			}
		})
	}
}
