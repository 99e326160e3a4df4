//! Prints the changes of a bucket up to now, one line each, and goes on where it stopped.
//!
//! ```sh
//! dcp-rs serve --port 12210                 # or a Couchbase Server
//! DCP_PASSWORD=password cargo run -p dcp-consumer --example changes -- \
//!     couchbase://127.0.0.1:12210/default Administrator positions.json
//! ```
//!
//! The second run prints only what was written since.

use std::error::Error;
use std::io::Write;

use dcp_consumer::{
    BatchSink, Change, ChangeSink, CheckpointStore, Client, ConnectOptions, Credentials, End,
    FileStore, Rollback, SinkError, Start, StreamOptions,
};

/// Collects changes as lines of text. A sink copies what it keeps: a change is borrowed from the
/// connection's read buffer.
#[derive(Default)]
struct Lines {
    lines: Vec<String>,
    bytes: usize,
}

impl Lines {
    fn push(&mut self, line: String) {
        self.bytes += line.len();
        self.lines.push(line);
    }
}

impl ChangeSink for Lines {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        let key = String::from_utf8_lossy(change.key);
        let (op, vbid, seqno) = (change.op.name(), change.vbid, change.seqno);
        self.push(format!("{vbid} seqno {seqno}: {op} of {key}, {} B", change.value.len()));
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        let Rollback { vbid, seqno, from_seqno, .. } = rollback;
        self.push(format!("{vbid}: rolled back from seqno {from_seqno} to {seqno}"));
        Ok(())
    }
}

impl BatchSink for Lines {
    type Batch = Vec<String>;

    fn rows(&self) -> usize {
        self.lines.len()
    }

    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn take_batch(&mut self) -> Result<Self::Batch, SinkError> {
        self.bytes = 0;
        Ok(std::mem::take(&mut self.lines))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [connection_string, username, file] = arguments.as_slice() else {
        return Err("usage: changes CONNECTION_STRING USERNAME CHECKPOINT_FILE".into());
    };
    let password = std::env::var("DCP_PASSWORD").map_err(|_| "DCP_PASSWORD is not set")?;

    let options = ConnectOptions::new(connection_string.as_str())
        .with_credentials(Credentials::new(username.as_str(), password));
    let client = Client::connect(options).await?;

    let store = FileStore::new(file);
    let mut options = StreamOptions::default();
    options.start = store.load()?.map_or(Start::Earliest, Start::Checkpoint);
    options.end = End::Now;
    let mut stream = client.stream(options, Lines::default).await?;
    let mut out = std::io::stdout().lock();
    while let Some(delivered) = stream.next().await {
        let delivered = delivered?;
        for line in &delivered.batch {
            writeln!(out, "{line}")?;
        }
        // What was done with the batch comes first, then its checkpoint: a crash in between repeats
        // the batch, in the other order it would be lost.
        out.flush()?;
        store.save(&delivered.checkpoint)?;
    }
    Ok(())
}
