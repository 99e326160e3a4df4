//! A client that reads into record batches, and its rows.

use dcp_test::with;
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type};
use arrow_array::{Array, RecordBatch};
use bytes::Bytes;
use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, PendingBatch, TableOptions, TableSchema};
use dcp_consumer::{
    BatchPolicy, ChangeStream, Client, ConnectOptions, Credentials, End, Error, Start,
    StreamOptions,
};
use dcp_producer::Producer;
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::{Seqno, Vbid};
use tokio::time::timeout;

/// A user with the rights of the role *Data DCP Reader*, and their password: what is read, they read.
pub(crate) const READER: (&str, &str) = ("reader", "reads");

/// Longest time a test waits for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// One row of the change table.
#[derive(Clone, PartialEq, Eq)]
pub struct Row {
    /// Column `op`.
    pub op: String,
    /// Column `key`.
    pub key: Option<String>,
    /// Column `value`.
    pub value: Option<Bytes>,
    /// Column `vbucket`.
    pub vbid: Vbid,
    /// Column `seqno`.
    pub seqno: Seqno,
    /// Column `epoch`.
    pub epoch: i32,
    /// Column `cas`.
    pub cas: Option<u64>,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, key, vbid, seqno, epoch, .. } = self;
        let len = self.value.as_ref().map(Bytes::len);
        write!(f, "{op} {key:?} {vbid} seqno {seqno} epoch {epoch} value of {len:?} bytes")
    }
}

impl Row {
    /// The rows of a batch with the basic columns.
    ///
    /// # Panics
    /// If a column is missing or of another type.
    #[must_use]
    pub fn of(batch: &RecordBatch) -> Vec<Self> {
        let column = |name: &str| batch.column_by_name(name).expect(name);
        let (ops, keys) = (column("op").as_string::<i32>(), column("key").as_string::<i32>());
        let values = column("value").as_binary::<i32>();
        let vbuckets = column("vbucket").as_primitive::<Int32Type>();
        let epochs = column("epoch").as_primitive::<Int32Type>();
        let seqnos = column("seqno").as_primitive::<Int64Type>();
        let cas = column("cas").as_primitive::<Int64Type>();
        (0..batch.num_rows())
            .map(|row| Self {
                op: ops.value(row).to_owned(),
                key: keys.is_valid(row).then(|| keys.value(row).to_owned()),
                value: values.is_valid(row).then(|| Bytes::copy_from_slice(values.value(row))),
                vbid: Vbid(u16::try_from(vbuckets.value(row)).expect("a vBucket")),
                seqno: Seqno(seqnos.value(row).cast_unsigned()),
                epoch: epochs.value(row),
                cas: cas.is_valid(row).then(|| cas.value(row).cast_unsigned()),
            })
            .collect()
    }
}

/// Stream options for tests: batches are handed over soon.
#[must_use]
pub fn options(start: Start, end: End) -> StreamOptions {
    let mut options = StreamOptions::default();
    (options.start, options.end) = (start, end);
    options.batch = with(BatchPolicy::default(), |o| o.linger = Duration::from_millis(5));
    options
}

/// How a reader connects.
#[must_use]
pub fn connect_options(producer: &Producer) -> ConnectOptions {
    ConnectOptions::new(producer.connection_string())
        .with_bucket(producer.bucket_name())
        .with_credentials(Credentials::new(READER.0, READER.1))
}

/// One stream of changes into record batches.
#[derive(Debug)]
pub struct Reader {
    /// The client it was opened with.
    pub client: Client,
    /// The stream.
    pub stream: ChangeStream<PendingBatch>,
    /// Checkpoint after each batch taken.
    pub checkpoints: Vec<Checkpoint>,
}

impl Reader {
    /// Connects a client of its own and opens a stream.
    ///
    /// # Panics
    /// If that fails.
    pub async fn open(producer: &Producer, options: StreamOptions) -> Self {
        Self::try_open(producer, options).await.expect("the stream opens")
    }

    /// The same, for streams that may be refused.
    ///
    /// # Errors
    /// Whatever the client says.
    pub async fn try_open(producer: &Producer, options: StreamOptions) -> Result<Self, Error> {
        Self::on(Client::connect(connect_options(producer)).await?, options).await
    }

    /// Opens a stream of this client.
    ///
    /// # Errors
    /// Whatever the client says.
    pub async fn on(client: Client, options: StreamOptions) -> Result<Self, Error> {
        let schema = TableSchema::new(&TableOptions::default()).expect("the basic columns");
        let sink = move || {
            ArrowSink::new(schema.clone(), CollectionNames::default(), BatchLimits::default())
        };
        let stream = client.stream(options, sink).await?;
        Ok(Self { client, stream, checkpoints: Vec::new() })
    }

    /// Everything from the earliest change until now.
    pub async fn read_now(producer: &Producer) -> Vec<Row> {
        Self::open(producer, options(Start::Earliest, End::Now)).await.rest().await
    }

    /// The next batch's rows; `None` at the end.
    ///
    /// # Panics
    /// If the stream stalls or fails.
    pub async fn next(&mut self) -> Option<Vec<Row>> {
        let next = timeout(PATIENCE, self.stream.next()).await;
        let Ok(next) = next else { panic!("the stream stalls: {:?}", self.stream.stats()) };
        let delivered = next?.expect("the stream goes on");
        let batch = delivered.batch.finish().expect("the batch is well-formed");
        assert_eq!(batch.num_rows(), delivered.rows);
        self.checkpoints.push(delivered.checkpoint);
        Some(Row::of(&batch))
    }

    /// Rows until there are at least `count`.
    ///
    /// # Panics
    /// If the stream ends before.
    pub async fn take(&mut self, count: usize) -> Vec<Row> {
        let mut rows = Vec::new();
        while rows.len() < count {
            rows.extend(self.next().await.expect("more rows"));
        }
        rows
    }

    /// Rows until one satisfies `last`, the rest of its batch included.
    ///
    /// # Panics
    /// If the stream ends before.
    pub async fn until(&mut self, mut last: impl FnMut(&Row) -> bool) -> Vec<Row> {
        let mut rows = Vec::new();
        loop {
            let batch = self.next().await.expect("more rows");
            let found = batch.iter().any(&mut last);
            rows.extend(batch);
            if found {
                return rows;
            }
        }
    }

    /// Everything up to the end of a finite stream.
    pub async fn rest(&mut self) -> Vec<Row> {
        let mut rows = Vec::new();
        while let Some(batch) = self.next().await {
            rows.extend(batch);
        }
        rows
    }
}
