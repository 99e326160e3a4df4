package session

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"
)

// Report prints JSON lines; streams of several nodes share it.
type Report struct {
	mutex     sync.Mutex
	out       *bufio.Writer
	surprises int
}

// NewReport prints to standard output.
func NewReport() *Report {
	r := &Report{out: bufio.NewWriterSize(os.Stdout, 1<<16)}
	// What was printed is to be seen even if a library ends the process.
	go func() {
		for range time.Tick(50 * time.Millisecond) {
			r.Flush()
		}
	}()
	return r
}

// Print writes one line of the kind given.
func (r *Report) Print(kind string, fields map[string]any) {
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

// Surprise is what a producer that keeps to the protocol does not do.
func (r *Report) Surprise(vbucket uint16, format string, arguments ...any) {
	r.Print("surprise", map[string]any{"vb": vbucket, "what": fmt.Sprintf(format, arguments...)})
	r.mutex.Lock()
	r.surprises++
	r.mutex.Unlock()
}

// Surprises tells how many there were.
func (r *Report) Surprises() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.surprises
}

// Streaming tells that all streams are open.
func (r *Report) Streaming(streams int) {
	r.Print("streaming", map[string]any{"streams": streams})
	r.Flush()
}

// Counted tells what was counted, and how long that took.
func (r *Report) Counted(changes, bytes uint64, seconds float64) {
	r.Print("counted", map[string]any{"changes": changes, "bytes": bytes, "seconds": seconds})
	r.Flush()
}

// Done prints how the job ended; it is the last line.
func (r *Report) Done(err error) {
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	r.Print("done", map[string]any{"error": reason})
	r.Flush()
}

// Flush hands over what was printed.
func (r *Report) Flush() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	_ = r.out.Flush()
}
