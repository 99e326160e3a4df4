// Drains a bucket with gocbcore's DCP agent and prints what it is sent as JSON lines.
//
// Usage: drain JOB, with JOB a file that holds a Job. Exits with 1 after a surprise: something that
// a producer which keeps to the protocol does not do.
package main

import (
	"fmt"
	"os"

	"github.com/couchbase/gocbcore/v10"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: drain JOB")
		os.Exit(2)
	}
	if os.Getenv("INTEROP_VERBOSE") != "" {
		gocbcore.SetLogger(gocbcore.VerboseStdioLogger())
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "drain:", err)
		os.Exit(1)
	}
}

func run(path string) error {
	job, err := readJob(path)
	if err != nil {
		return err
	}
	agent, err := connect(job)
	if err != nil {
		return err
	}
	drain := drain{job: job, agent: agent, report: newReport(), changed: make(chan struct{}, 1)}
	err = drain.run()
	surprises := drain.report.flush()
	if err != nil {
		return err
	}
	if surprises > 0 {
		return fmt.Errorf("%d surprises, see the lines of that kind", surprises)
	}
	return writePositions(job.Save, drain.streams)
}
