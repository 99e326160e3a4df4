package main

import (
	"encoding/json"
	"os"
)

// Position is where a stream is: what a client must keep to go on from there.
type Position struct {
	Vbuuid        uint64 `json:"vbuuid,string"`
	Seqno         uint64 `json:"seqno"`
	SnapshotStart uint64 `json:"snapshot_start"`
	SnapshotEnd   uint64 `json:"snapshot_end"`
	PurgeSeqno    uint64 `json:"purge_seqno,omitempty"`
}

// readPositions gives the positions by vBucket; an empty path has none.
func readPositions(path string) (map[uint16]Position, error) {
	positions := map[uint16]Position{}
	if path == "" {
		return positions, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return positions, json.Unmarshal(text, &positions)
}

func writePositions(path string, streams []*stream) error {
	if path == "" {
		return nil
	}
	positions := map[uint16]Position{}
	for _, stream := range streams {
		positions[stream.vbucket] = stream.position()
	}
	text, err := json.Marshal(positions)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}
