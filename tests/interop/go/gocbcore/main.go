// Drains a bucket with gocbcore's DCP agent and prints what it is sent as JSON lines.
//
// Standard input tells a session.Job. Exits with 1 after a surprise: something that a producer which
// keeps to the protocol does not do.
package main

import (
	"os"

	"github.com/couchbase/gocbcore/v10"

	"dcp_rs/tests/interop/go/session"
)

func main() {
	if os.Getenv("INTEROP_VERBOSE") != "" {
		gocbcore.SetLogger(gocbcore.VerboseStdioLogger())
	}
	session.Run(run)
}

func run(job session.Job, input *session.Input, report *session.Report) error {
	patience = job.Patient()
	agent, err := connect(job)
	if err != nil {
		return err
	}
	drain := drain{
		job: job, agent: agent, report: report, input: input, changed: make(chan struct{}, 1),
	}
	if job.Count {
		return drain.count()
	}
	if err := drain.run(); err != nil {
		return err
	}
	return writePositions(job.Save, drain.streams)
}
