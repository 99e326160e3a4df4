//! The Rust client, which counts changes.

use std::io::{BufRead, Read, Write};

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, PendingBatch, TableOptions, TableSchema};
use dcp_benches::Error;
use dcp_benches::measure::WallClock;
use dcp_consumer::{Client, ConnectOptions, Credentials, End, StreamOptions};
use dcp_proto::{BatchSink, Change, ChangeSink, Rollback, SinkError};
use serde_json::{Value, json};
use tokio::runtime::Builder;

/// Counts changes and the bytes of their keys and values.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    changes: usize,
    bytes: usize,
}

impl ChangeSink for Counter {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.changes += 1;
        self.bytes += change.key.len() + change.value.len();
        Ok(())
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl BatchSink for Counter {
    type Batch = Self;

    fn rows(&self) -> usize {
        self.changes
    }

    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn take_batch(&mut self) -> Result<Self, SinkError> {
        Ok(std::mem::take(self))
    }
}

/// Runs the job given on standard input, prints counts and time as a JSON line, and waits for the
/// end of its input, so that the process can still be inspected. With `into_batches` it makes
/// record batches and counts their rows.
pub(crate) fn count(into_batches: bool) -> Result<(), Error> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let job: Value = serde_json::from_str(&line)?;
    let counted = if into_batches {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let schema = TableSchema::new(&TableOptions::default())?;
        let sink = move || {
            ArrowSink::new(schema.clone(), CollectionNames::default(), BatchLimits::default())
        };
        runtime.block_on(Box::pin(read(&job, sink, |batch: PendingBatch| {
            let batch = batch.finish()?;
            Ok(Counter { changes: batch.num_rows(), bytes: batch.get_array_memory_size() })
        })))?
    } else {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(Box::pin(read(&job, Counter::default, Ok)))?
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{counted}")?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

async fn read<S: BatchSink>(
    job: &Value,
    sink: impl Fn() -> S + Send + Sync + 'static,
    mut finish: impl FnMut(S::Batch) -> Result<Counter, Error>,
) -> Result<Value, Error> {
    let text = |name: &str| job[name].as_str().ok_or(format!("the job has no {name}"));
    let options = ConnectOptions::new(text("connection_string")?)
        .with_bucket(text("bucket")?)
        .with_credentials(Credentials::new(text("username")?, text("password")?));
    let client = Client::connect(options).await?;
    let clock = WallClock::start();
    let buffer_size = u32::try_from(job["buffer"].as_u64().ok_or("the job has no buffer")?)?;
    let mut options = StreamOptions::default();
    (options.end, options.buffer_size) = (End::Now, buffer_size);
    let mut stream = client.stream(options, sink).await?;
    let (mut total, mut batches) = (Counter::default(), 0);
    while let Some(delivered) = stream.next().await {
        let batch = finish(delivered?.batch)?;
        batches += 1;
        total.changes += batch.changes;
        total.bytes += batch.bytes;
    }
    let seconds = clock.elapsed().as_secs_f64();
    client.close().await;
    Ok(json!({
        "line": "counted", "changes": total.changes, "bytes": total.bytes, "batches": batches,
        "seconds": seconds,
    }))
}
