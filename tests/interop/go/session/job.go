// Package session is what the programs have in common: the jobs they are given and what they print.
package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Job is what a run is to do; the Java program reads the same document.
type Job struct {
	// Nodes are the KV addresses to begin at, host:port; over TLS the ports of that.
	Nodes []string `json:"nodes"`
	// Management are the addresses of the management ports, as URLs.
	Management []string `json:"management"`
	// CA is the file of the authority to trust; it switches TLS on.
	CA       string `json:"ca"`
	Bucket   string `json:"bucket"`
	Username string `json:"username"`
	Password string `json:"password"`
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
	// Scope and CollectionNames ask by name, for clients that look the numbers up.
	Scope           string   `json:"scope"`
	CollectionNames []string `json:"collection_names"`
	// Expirations asks for them under an opcode of their own.
	Expirations bool `json:"expirations"`
	// NoValue asks for keys alone.
	NoValue bool `json:"no_value"`
	// Compression is "off", "on" or "forced"; gocbcore cannot ask for that and takes it for on.
	Compression string `json:"compression"`
	// StreamIDs opens a stream of each vBucket for each of them; none opens one without.
	StreamIDs []uint16 `json:"stream_ids"`
	// OutOfOrder allows backfills in the order of keys.
	OutOfOrder bool `json:"out_of_order"`
	// PurgeMarkers asks for snapshot markers that tell the purge seqno (V2.2).
	PurgeMarkers bool `json:"purge_markers"`
	// MitigateRollbacks is the time between looks at what is persisted, in ms; 0 for none.
	MitigateRollbacks int `json:"mitigate_rollbacks"`
	// Count does nothing with the changes but count them, for measuring.
	Count bool `json:"count"`
	// Documents is how many changes there are to count; 0 if that is not known.
	Documents uint64 `json:"documents"`
	// Patience is how many seconds anything may take; 0 for 60.
	Patience int `json:"patience"`
	// Unacknowledged is the key of a change that is never acknowledged. At its ends the program then
	// saves what it may and dies.
	Unacknowledged string `json:"unacknowledged"`
	// Calls are those to make of an SDK; none is all.
	Calls []string `json:"calls"`
}

// Patient is how long anything may take.
func (j Job) Patient() time.Duration {
	if j.Patience > 0 {
		return time.Duration(j.Patience) * time.Second
	}
	return time.Minute
}

// Input is standard input: a job, and where to end if the job follows.
type Input struct {
	decoder *json.Decoder
}

// NewInput reads from where the jobs come from.
func NewInput(in io.Reader) *Input {
	return &Input{json.NewDecoder(in)}
}

// Job waits for the job.
func (i *Input) Job() (Job, error) {
	var job Job
	if err := i.decoder.Decode(&job); err != nil {
		return job, fmt.Errorf("standard input tells no job: %w", err)
	}
	return job, nil
}

// Ends waits to be told where to end, by vBucket.
func (i *Input) Ends() (map[uint16]uint64, error) {
	var ends map[uint16]uint64
	if err := i.decoder.Decode(&ends); err != nil {
		return nil, fmt.Errorf("standard input does not tell where to end: %w", err)
	}
	return ends, nil
}

// AwaitEnd waits until nothing more is to come: whoever measures looks at the process before.
func (i *Input) AwaitEnd() {
	var rest any
	for i.decoder.Decode(&rest) == nil {
	}
}

// Run is the whole of a program: it does the job that standard input tells.
func Run(work func(Job, *Input, *Report) error) {
	input, report := NewInput(os.Stdin), NewReport()
	job, err := input.Job()
	if err == nil {
		err = work(job, input, report)
	}
	if surprises := report.Surprises(); err == nil && surprises > 0 {
		err = fmt.Errorf("%d surprises, see the lines of that kind", surprises)
	}
	report.Done(err)
	if err != nil {
		os.Exit(1)
	}
}

// ErrPatience tells that something took too long.
var ErrPatience = errors.New("no answer in time")
