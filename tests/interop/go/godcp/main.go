// Reads a bucket with go-dcp and prints what its listener is given as JSON lines.
//
// Standard input tells a session.Job. Exits with 1 after a surprise: something that a producer which
// keeps to the protocol does not do; with 2 where go-dcp panics.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/Trendyol/go-dcp"
	"github.com/Trendyol/go-dcp/config"
	"github.com/Trendyol/go-dcp/logger"

	"dcp_rs/tests/interop/go/session"
)

// patience is how long anything may take; a job may set it.
var patience = time.Minute

func main() {
	session.Run(run)
}

func configure(job session.Job) *config.Dcp {
	chosen := &config.Dcp{
		BucketName:         job.Bucket,
		Username:           job.Username,
		Password:           job.Password,
		SecureConnection:   job.CA != "",
		RootCAPath:         job.CA,
		ScopeName:          job.Scope,
		CollectionNames:    job.CollectionNames,
		ConnectionTimeout:  patience,
		API:                config.API{Disabled: true},
		HealthCheck:        config.HealthCheck{Disabled: true},
		RollbackMitigation: config.RollbackMitigation{Disabled: job.MitigateRollbacks == 0},
		// It saves when it is closed; the interval is longer than any run.
		Checkpoint: config.Checkpoint{Type: "auto", Interval: time.Hour},
		Metadata:   config.Metadata{Type: config.MetadataTypeNoop, ReadOnly: job.Save == ""},
		Dcp: config.ExternalDcp{
			Mode:              config.DcpModeFinite,
			ConnectionTimeout: patience,
			Group: config.DCPGroup{
				Name:       "interop",
				Membership: config.DCPGroupMembership{Type: "static"},
			},
		},
	}
	for _, address := range job.Management {
		// It knows no other scheme for a management port; SecureConnection alone says how.
		chosen.Hosts = append(chosen.Hosts, strings.Replace(address, "https://", "http://", 1))
	}
	chosen.RollbackMitigation.Interval = time.Duration(job.MitigateRollbacks) * time.Millisecond
	if job.Follow {
		chosen.Dcp.Mode = config.DcpModeInfinite
	}
	if job.Buffer > 0 {
		chosen.Dcp.BufferSize = job.Buffer
	}
	for _, path := range []string{job.Resume, job.Save} {
		if path != "" {
			chosen.Metadata.Type = config.MetadataTypeFile
			chosen.Metadata.Config = map[string]string{config.FileMetadataFileNameConfig: path}
		}
	}
	return chosen
}

func run(job session.Job, input *session.Input, report *session.Report) error {
	patience = job.Patient()
	reader, err := newReader(report, job)
	if err != nil {
		return err
	}
	if job.CA != "" {
		// Its own HTTP client trusts whom the system trusts, whatever RootCAPath says.
		if err := os.Setenv("SSL_CERT_FILE", job.CA); err != nil {
			return err
		}
	}
	logger.Log = &ears{report, os.Getenv("INTEROP_VERBOSE") != ""}
	if job.Count {
		return count(job, input, report)
	}
	connector, err := dcp.NewExtendedDcp(configure(job), reader)
	if err != nil {
		return err
	}
	vbuckets := connector.GetClient().GetNumVBuckets()
	report.Print("version", map[string]any{"server": fmt.Sprint(*connector.GetVersion())})
	stopped := make(chan struct{})
	go func() {
		connector.Start()
		close(stopped)
	}()
	if job.Follow {
		err = follow(connector, reader, vbuckets, input)
		if job.Unacknowledged != "" {
			crash(connector, reader, vbuckets)
		}
		connector.Close()
	}
	select {
	case <-stopped:
	case <-time.After(patience):
		return fmt.Errorf("go-dcp does not stop; streams at %s", strings.Join(reader.places(), ", "))
	}
	for vbucket := range uint16(vbuckets) {
		report.Print("vbucket", map[string]any{"vb": vbucket, "seqno": reader.seqno(vbucket)})
	}
	return err
}

// crash saves what was acknowledged and dies.
func crash(connector dcp.Dcp, reader *reader, vbuckets int) {
	connector.Commit()
	for vbucket := range uint16(vbuckets) {
		reader.report.Print("vbucket", map[string]any{"vb": vbucket, "seqno": reader.offsetOf(vbucket)})
	}
	reader.report.Done(nil)
	os.Exit(9)
}

// follow lets the streams go on until they are where they are to end.
func follow(connector dcp.Dcp, reader *reader, vbuckets int, input *session.Input) error {
	select {
	case <-connector.WaitUntilReady():
	case <-time.After(patience):
		return session.ErrPatience
	}
	reader.report.Streaming(vbuckets)
	ends, err := input.Ends()
	if err != nil {
		return err
	}
	deadline := time.After(patience)
	for vbucket, end := range ends {
		for reader.seqno(vbucket) < end {
			select {
			case <-time.After(20 * time.Millisecond):
			case <-deadline:
				return fmt.Errorf("vBucket %d stays at %d of %d", vbucket, reader.seqno(vbucket), end)
			}
		}
	}
	return nil
}
