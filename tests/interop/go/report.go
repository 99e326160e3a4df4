package main

import (
	"bufio"
	"encoding/json"
	"os"
	"sync"
)

// report prints JSON lines; streams of several nodes share it.
type report struct {
	mutex     sync.Mutex
	out       *bufio.Writer
	surprises int
}

func newReport() *report {
	return &report{out: bufio.NewWriterSize(os.Stdout, 1<<16)}
}

// print writes one line of the kind given.
func (r *report) print(kind string, fields map[string]any) {
	fields["line"] = kind
	text, err := json.Marshal(fields)
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if err != nil {
		r.surprises++
		return
	}
	_, _ = r.out.Write(append(text, '\n'))
}

// surprise is what a producer that keeps to the protocol does not do.
func (r *report) surprise(vbucket uint16, what string) {
	r.print("surprise", map[string]any{"vb": vbucket, "what": what})
	r.mutex.Lock()
	r.surprises++
	r.mutex.Unlock()
}

// flush hands over what was printed, and tells how many surprises there were.
func (r *report) flush() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	_ = r.out.Flush()
	return r.surprises
}
