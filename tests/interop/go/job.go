package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// Job is what a run is to do; the Java program reads the same document.
type Job struct {
	// Nodes are the KV addresses to begin at, host:port.
	Nodes    []string `json:"nodes"`
	Bucket   string   `json:"bucket"`
	Username string   `json:"username"`
	Password string   `json:"password"`
	// Resume is the file of positions to begin at; empty for the beginning.
	Resume string `json:"resume"`
	// Save is the file the positions are written to at the end; empty for none.
	Save string `json:"save"`
	// Follow goes on past what is there at the start, until told on standard input where to end.
	Follow bool `json:"follow"`
	// Buffer is the size of the flow control buffer in bytes; 0 switches flow control off.
	Buffer int `json:"buffer"`
	// Collections negotiates collections; Filter then asks for those alone.
	Collections bool     `json:"collections"`
	Filter      []uint32 `json:"filter"`
	// Expirations asks for them under an opcode of their own.
	Expirations bool `json:"expirations"`
	// NoValue asks for keys alone.
	NoValue bool `json:"no_value"`
	// Compression is "off", "on" or "forced", which this client cannot ask for: it takes it for on.
	Compression string `json:"compression"`
	// StreamIDs opens a stream of each vBucket for each of them; none opens one without.
	StreamIDs []uint16 `json:"stream_ids"`
	// OutOfOrder allows backfills in the order of keys.
	OutOfOrder bool `json:"out_of_order"`
	// PurgeMarkers asks for snapshot markers that tell the purge seqno (V2.2).
	PurgeMarkers bool `json:"purge_markers"`
}

// Position is where a stream is: what a client must keep to go on from there.
type Position struct {
	Vbuuid        uint64 `json:"vbuuid,string"`
	Seqno         uint64 `json:"seqno"`
	SnapshotStart uint64 `json:"snapshot_start"`
	SnapshotEnd   uint64 `json:"snapshot_end"`
	PurgeSeqno    uint64 `json:"purge_seqno,omitempty"`
}

func readJob(path string) (Job, error) {
	var job Job
	text, err := os.ReadFile(path)
	if err != nil {
		return job, err
	}
	if err := json.Unmarshal(text, &job); err != nil {
		return job, fmt.Errorf("the job %s is not readable: %w", path, err)
	}
	return job, nil
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
