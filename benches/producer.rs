//! Reads the embedded producer's documents with one plain reader of the socket, compared with a
//! sender of ready-made frames: the cost of encoding documents, and how efficiently they are sent.
//!
//! Every document has its own memory, as loaded ones do. The frames are either one pass of 1 MiB
//! that stays in the caches and is sent repeatedly, or as many as there are documents, which have
//! to come from memory like these. A thousand documents streamed repeatedly stay in the caches like
//! the pass. Times are elapsed times from opening the streams to the last stream's end.

use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use dcp_benches::Error;
use dcp_benches::drain::{Target, drain};
use dcp_benches::footprint::footprint;
use dcp_benches::frames::{KEY_LEN, Shape, frame_len, json_value};
use dcp_benches::listening::may_choose;
use dcp_benches::machine::default_congestion_control;
use dcp_benches::measure::{Case, Options, compare};
use dcp_benches::report::{Group, run};
use dcp_benches::sender::{self, Sender};
use dcp_benches::writes::Writes;
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_wire::{Seqno, Vbid};
use tokio::runtime::{Builder, Runtime};

/// Flow-control buffer in bytes: the client's default.
const WINDOW: u32 = 8 * 1024 * 1024;

const VBUCKETS: u16 = 16;

/// Few documents, which stay in the caches, in few vBuckets: streams are reopened when they end.
const FEW: u64 = 1_000;
const FEW_VBUCKETS: u16 = 4;

/// Where the producer reads the documents from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Memory,
    Disk,
}

fn main() -> ExitCode {
    run("producer", |options, report| {
        footprint(options)?;
        let default = default_congestion_control();
        for congestion_control in ["reno", "bbr", "cubic"] {
            // Short runs only use the producer's default and the system's.
            let wanted =
                !options.short || congestion_control == "reno" || congestion_control == default;
            if !wanted || !may_choose(congestion_control) {
                continue;
            }
            for &value_len in options.pick([1024].as_slice(), &[64, 256, 1024, 4096]) {
                for group in measure(options, congestion_control, value_len)? {
                    report.add(group);
                }
            }
        }
        Ok(())
    })
}

fn measure(
    options: &Options,
    congestion_control: &str,
    value_len: usize,
) -> Result<Vec<Group>, Error> {
    let passes = options.pick(256, 512);
    let shape = Shape { value_len, vbuckets: VBUCKETS, pass_bytes: 1024 * 1024 };
    let sender = Sender::start(shape, passes, Writes::Large, Some(congestion_control))?;
    // The same number of changes, all in memory at once like the producer's.
    let pass_bytes = usize::try_from(sender.rows())? * frame_len(value_len);
    let large =
        Sender::start(Shape { pass_bytes, ..shape }, 1, Writes::Large, Some(congestion_control))?;
    if large.rows() != sender.rows() {
        return Err("the senders' frames are not as many".into());
    }
    let server = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let producer = load(&server, congestion_control, VBUCKETS, value_len, sender.rows())?;
    let mut groups = Vec::new();
    for from in [From::Memory, From::Disk] {
        let place = match from {
            From::Memory => "memory",
            From::Disk => {
                producer.persist();
                "disk image"
            }
        };
        let name = format!("producer from {place}, {congestion_control}, {value_len} B values");
        let cases = vec![
            Case::reference("frames in cache", || run_drain(&of_sender(&sender), sender.rows())),
            Case::reference("frames in memory", || run_drain(&of_sender(&large), large.rows())),
            Case::new("embedded producer", || {
                run_drain(&of_producer(&producer, 1)?, sender.rows())
            }),
        ];
        groups.push(Group {
            series: compare(options, &name, cases)?,
            name,
            shape: format!(
                "1 node, {VBUCKETS} vBuckets, {KEY_LEN} B keys, window 8 MiB, one plain reader"
            ),
            rows: sender.rows(),
            bytes: sender.bytes(),
        });
    }
    server.block_on(producer.shutdown());
    groups.push(measure_few(options, congestion_control, &server, &sender, value_len)?);
    Ok(groups)
}

/// Documents in cache, compared with frames in cache.
fn measure_few(
    options: &Options,
    congestion_control: &str,
    server: &Runtime,
    sender: &Sender,
    value_len: usize,
) -> Result<Group, Error> {
    let producer = load(server, congestion_control, FEW_VBUCKETS, value_len, FEW)?;
    let passes = usize::try_from(sender.rows().div_ceil(FEW))?;
    let rows = FEW * passes as u64;
    let name = format!("producer from cache, {congestion_control}, {value_len} B values");
    let per_row = |elapsed: Duration| elapsed.mul_f64(rows as f64 / sender.rows() as f64);
    let cases = vec![
        Case::reference("frames in cache", || {
            Ok(per_row(run_drain(&of_sender(sender), sender.rows())?))
        }),
        Case::new("embedded producer", || run_drain(&of_producer(&producer, passes)?, rows)),
    ];
    let group = Group {
        series: compare(options, &name, cases)?,
        name,
        shape: format!(
            "1 node, {FEW} documents in {FEW_VBUCKETS} vBuckets, each streamed {passes} times, \
             {KEY_LEN} B keys, window 8 MiB, one plain reader"
        ),
        rows,
        bytes: sender.bytes() * rows / sender.rows(),
    };
    server.block_on(producer.shutdown());
    Ok(group)
}

/// A producer with all documents in memory.
fn load(
    server: &Runtime,
    congestion_control: &str,
    vbuckets: u16,
    value_len: usize,
    documents: u64,
) -> Result<Producer, Error> {
    let mut options = ProducerOptions::default();
    options.vbuckets = vbuckets;
    options.congestion_control = Some(congestion_control.to_owned());
    options.persist_delay = Duration::from_secs(24 * 3600);
    let producer = server.block_on(Producer::start(options))?;
    let value = json_value(value_len);
    for number in 0..documents {
        let key = format!("key-{number:015}");
        producer.upsert(key.as_bytes(), Bytes::from(value.clone()), WriteOptions::default())?;
    }
    Ok(producer)
}

fn of_sender(sender: &Sender) -> Target {
    Target {
        address: sender.address(),
        bucket: sender::BUCKET.to_owned(),
        username: sender::USERNAME.to_owned(),
        password: sender::PASSWORD.to_owned(),
        ends: (0..sender.vbuckets()).map(|vbid| (Vbid(vbid), Seqno::MAX)).collect(),
        buffer_size: WINDOW,
        passes: 1,
        nap: Duration::ZERO,
    }
}

fn of_producer(producer: &Producer, passes: usize) -> Result<Target, Error> {
    let options = ProducerOptions::default();
    Ok(Target {
        address: producer.connection_string().trim_start_matches("couchbase://").parse()?,
        bucket: producer.bucket_name().to_owned(),
        username: options.username,
        password: options.password,
        ends: producer.high_seqnos().into_iter().collect(),
        buffer_size: WINDOW,
        passes,
        nap: Duration::ZERO,
    })
}

fn run_drain(target: &Target, rows: u64) -> Result<Duration, Error> {
    let drained = drain(target)?;
    if drained.changes != rows {
        return Err(format!("{} changes went by instead of {rows}", drained.changes).into());
    }
    Ok(drained.elapsed)
}
