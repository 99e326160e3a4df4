//! Plans a read of a bucket, and reads its partitions as other processes would.
//!
//! ```sh
//! dcp-rs serve --port 12210                 # or a Couchbase Server
//! DCP_PASSWORD=password cargo run -p dcp-consumer --example plan -- \
//!     couchbase://127.0.0.1:12210/default Administrator end.json
//! ```
//!
//! The second run reads only what was written since.

use std::error::Error;
use std::fs;
use std::io::{self, Write};

use dcp_consumer::plan::{Limits, Planner, Positions, ReadPlan, Start, open};
use dcp_consumer::{
    BatchSink, Change, ChangeSink, Client, ConnectOptions, Credentials, Rollback, SinkError,
    StreamOptions,
};

/// Counts changes.
#[derive(Default)]
struct Count(usize);

impl ChangeSink for Count {
    fn change(&mut self, _change: &Change<'_>) -> Result<(), SinkError> {
        self.0 += 1;
        Ok(())
    }

    fn rollback(&mut self, _rollback: &Rollback) -> Result<(), SinkError> {
        self.0 += 1;
        Ok(())
    }
}

impl BatchSink for Count {
    type Batch = usize;

    fn rows(&self) -> usize {
        self.0
    }

    fn size_bytes(&self) -> usize {
        0
    }

    fn take_batch(&mut self) -> Result<Self::Batch, SinkError> {
        Ok(std::mem::take(&mut self.0))
    }
}

/// Reads a partition, with nothing but how to connect and its JSON.
async fn read(connect: &ConnectOptions, json: &str) -> Result<usize, Box<dyn Error>> {
    let plan = ReadPlan::from_json(json)?;
    let delivery = StreamOptions::default();
    let (_client, mut stream) = open(connect, None, &plan, &delivery, |_| Count::default).await?;
    let mut rows = 0;
    while let Some(delivered) = stream.next().await {
        rows += delivered?.batch;
    }
    Ok(rows)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [connection_string, username, file] = arguments.as_slice() else {
        return Err("usage: plan CONNECTION_STRING USERNAME END_FILE".into());
    };
    let password = std::env::var("DCP_PASSWORD").map_err(|_| "DCP_PASSWORD is not set")?;
    let connect = ConnectOptions::new(connection_string.as_str())
        .with_credentials(Credentials::new(username.as_str(), password));

    let client = Client::connect(connect.clone()).await?;
    let mut planner = Planner::new(&client, StreamOptions::default()).await?;
    let start = match fs::read_to_string(file) {
        Ok(stored) => planner.start_at(Positions::from_json(&stored)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Start::from(planner.earliest()),
        Err(error) => return Err(error.into()),
    };
    let limits = Limits::default();
    let end = planner.end(&start, &limits).await?;
    let mut out = io::stdout().lock();
    for partition in planner.partitions(&start, &end, Some(4), &limits).await? {
        let rows = read(&connect, &partition.to_json()).await?;
        let (node, most) = (partition.node.as_deref().unwrap_or("?"), partition.size());
        writeln!(out, "{} vBuckets of {node}: {rows} rows of at most {most}", partition.to.len())?;
    }
    // Stored once every partition is read: until then, the next run plans the same changes again.
    fs::write(file, end.to_json())?;
    Ok(())
}
