//! Reads a stream over loopback TCP into record batches, compared with a plain drain of the same
//! stream.
//!
//! First with a sender of ready-made frames that is faster than any server, so that only the client
//! is measured; then end to end with the embedded producer. Times are elapsed times from opening
//! the streams to the last batch.

use std::process::ExitCode;
use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};
use dcp_benches::Error;
use dcp_benches::drain::{Target, drain};
use dcp_benches::frames::{KEY_LEN, Shape, frame_len, json_value};
use dcp_benches::listening::may_choose;
use dcp_benches::machine::default_congestion_control;
use dcp_benches::measure::{Case, Options, WallClock, compare};
use dcp_benches::report::{Group, run};
use dcp_benches::sender::{self, Sender};
use dcp_benches::writes::Writes;
use dcp_consumer::{Client, ConnectOptions, Credentials, End, StreamOptions};
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_wire::{Seqno, Vbid};
use tokio::runtime::{Builder, Runtime};

/// Flow-control buffer in bytes: the client's default.
const WINDOW: u32 = 8 * 1024 * 1024;

/// vBuckets of the sender of ready-made frames.
const SENDER_VBUCKETS: u16 = 16;

fn main() -> ExitCode {
    run("loopback", |options, report| {
        let default = default_congestion_control();
        let mut congestion_controls = vec![default.as_str()];
        // Available everywhere without privileges, and without the pacing of bbr.
        if default != "reno" {
            congestion_controls.push("reno");
        }
        for congestion_control in congestion_controls {
            for &value_len in options.pick([256, 1024].as_slice(), &[64, 256, 1024, 4096]) {
                report.add(ready_frames(options, congestion_control, value_len)?);
            }
        }
        for value_len in [256, 1024] {
            report.add(embedded_producer(options, value_len)?);
        }
        Ok(())
    })
}

fn ready_frames(
    options: &Options,
    congestion_control: &str,
    value_len: usize,
) -> Result<Group, Error> {
    let shape = Shape { value_len, vbuckets: SENDER_VBUCKETS, pass_bytes: 1024 * 1024 };
    let sender =
        Sender::start(shape, options.pick(256, 1024), Writes::Large, Some(congestion_control))?;
    let ends = (0..sender.vbuckets()).map(|vbid| (Vbid(vbid), Seqno::MAX)).collect();
    let source = Source {
        connection_string: sender.connection_string(),
        target: Target {
            address: sender.address(),
            bucket: sender::BUCKET.to_owned(),
            username: sender::USERNAME.to_owned(),
            password: sender::PASSWORD.to_owned(),
            ends,
            buffer_size: WINDOW,
            passes: 1,
            nap: Duration::ZERO,
        },
        rows: sender.rows(),
    };
    let name = format!(
        "ready frames over loopback, {}, {value_len} B values",
        sender.congestion_control()
    );
    Ok(Group {
        series: source.measure(options, &name)?,
        name,
        shape: format!(
            "1 node, {SENDER_VBUCKETS} vBuckets, {KEY_LEN} B keys, writes of 256 KiB, \
             window 8 MiB, batches of 10,000 rows or 4 MiB"
        ),
        rows: sender.rows(),
        bytes: sender.bytes(),
    })
}

fn embedded_producer(options: &Options, value_len: usize) -> Result<Group, Error> {
    let documents: u64 = options.pick(100_000, 1_000_000);
    let server = runtime(1)?;
    let mut producer_options = ProducerOptions::default();
    let congestion_control =
        if may_choose("reno") { "reno".to_owned() } else { default_congestion_control() };
    producer_options.congestion_control = Some(congestion_control.clone());
    let credentials = (producer_options.username.clone(), producer_options.password.clone());
    let vbuckets = producer_options.vbuckets;
    let producer = server.block_on(Producer::start(producer_options))?;
    let value = bytes::Bytes::from(json_value(value_len));
    for number in 0..documents {
        let key = format!("key-{number:015}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default())?;
    }
    producer.persist();
    let connection_string = producer.connection_string();
    let address = connection_string.trim_start_matches("couchbase://").parse()?;
    let source = Source {
        connection_string,
        target: Target {
            address,
            bucket: producer.bucket_name().to_owned(),
            username: credentials.0,
            password: credentials.1,
            ends: producer.high_seqnos().into_iter().collect(),
            buffer_size: WINDOW,
            passes: 1,
            nap: Duration::ZERO,
        },
        rows: documents,
    };
    let name = format!("embedded producer over loopback, {value_len} B values");
    let group = Group {
        series: source.measure(options, &name)?,
        name,
        shape: format!(
            "1 node, {vbuckets} vBuckets, {KEY_LEN} B keys, backfill from disk, \
             TCP {congestion_control}, window 8 MiB, batches of 10,000 rows or 4 MiB"
        ),
        rows: documents,
        bytes: documents * frame_len(value_len) as u64,
    };
    server.block_on(producer.shutdown());
    Ok(group)
}

/// A node to read from, and what it is expected to send.
struct Source {
    connection_string: String,
    target: Target,
    rows: u64,
}

impl Source {
    fn measure(
        &self,
        options: &Options,
        name: &str,
    ) -> Result<Vec<dcp_benches::measure::Series>, Error> {
        let client = runtime(2)?;
        let cases = vec![
            Case::reference("plain drain", || self.drain()),
            Case::new("client to RecordBatch", || client.block_on(Box::pin(self.read()))),
        ];
        compare(options, name, cases)
    }

    fn drain(&self) -> Result<Duration, Error> {
        let drained = drain(&self.target)?;
        self.check(drained.changes)?;
        Ok(drained.elapsed)
    }

    async fn read(&self) -> Result<Duration, Error> {
        let options = ConnectOptions::new(self.connection_string.as_str())
            .with_bucket(self.target.bucket.as_str())
            .with_credentials(Credentials::new(
                self.target.username.as_str(),
                self.target.password.as_str(),
            ));
        let client = Client::connect(options).await?;
        let schema = TableSchema::new(&TableOptions::default())?;
        let mut options = StreamOptions::default();
        (options.end, options.buffer_size) = (End::Now, WINDOW);
        let clock = WallClock::start();
        let mut stream = client
            .stream(options, move || {
                ArrowSink::new(schema.clone(), CollectionNames::default(), BatchLimits::default())
            })
            .await?;
        let mut rows = 0;
        while let Some(delivered) = stream.next().await {
            rows += delivered?.batch.finish()?.num_rows() as u64;
        }
        let elapsed = clock.elapsed();
        client.close().await;
        self.check(rows)?;
        Ok(elapsed)
    }

    fn check(&self, rows: u64) -> Result<(), Error> {
        if rows != self.rows {
            return Err(format!("{rows} rows came out instead of {}", self.rows).into());
        }
        Ok(())
    }
}

fn runtime(threads: usize) -> Result<Runtime, Error> {
    Ok(Builder::new_multi_thread().worker_threads(threads).enable_all().build()?)
}
