package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/Trendyol/go-dcp/logger"

	"dcp_rs/tests/interop/go/session"
)

// ears is go-dcp's logger: what becomes of streams it tells nobody else.
type ears struct {
	report  *session.Report
	verbose bool
}

// Log prints what is worth knowing, and as a line of its own what a test is to see.
func (e *ears) Log(level string, message string, arguments ...any) {
	switch {
	case strings.HasPrefix(message, "open stream with rollback, vbID: %d, failedSeqNo: %d"):
		e.report.Print("rollback", map[string]any{
			"vb": arguments[0], "from": arguments[1], "to": arguments[2]})
	case strings.HasPrefix(message, "end stream vbID: %v"):
		e.report.Print("end", map[string]any{
			"vb": arguments[0], "reason": fmt.Sprint(arguments[1:]...)})
	case message == "re-open stream, vbID: %d":
		e.report.Print("opened", map[string]any{"vb": arguments[0]})
	}
	if e.verbose || level == logger.ERROR || level == logger.WARN {
		fmt.Fprintln(os.Stderr, level+": "+fmt.Sprintf(message, arguments...))
	}
}

// Trace logs.
func (e *ears) Trace(message string, arguments ...any) { e.Log(logger.TRACE, message, arguments...) }

// Debug logs.
func (e *ears) Debug(message string, arguments ...any) { e.Log(logger.DEBUG, message, arguments...) }

// Info logs.
func (e *ears) Info(message string, arguments ...any) { e.Log(logger.INFO, message, arguments...) }

// Warn logs.
func (e *ears) Warn(message string, arguments ...any) { e.Log(logger.WARN, message, arguments...) }

// Error logs.
func (e *ears) Error(message string, arguments ...any) { e.Log(logger.ERROR, message, arguments...) }
