//! The consumer under test: its process may be killed between any two of its steps, and what it
//! has stored is all the next one knows.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp_consumer::{
    AckToken, Acknowledge, BatchPolicy, Client, ConnectOptions, Credentials, Delivered, End, Error,
    ErrorKind, OnRollback, Start, StreamOptions,
};
use dcp_proto::Rollback;
use dcp_proto::checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::{sleep, timeout};

use crate::network::{Dialer, Network};
use crate::run::Trace;
use crate::table::{Item, Rows, Table};

/// How consumers of one run are set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) batch: BatchPolicy,
    pub(crate) noop_interval: Duration,
    pub(crate) on_rollback: OnRollback,
    pub(crate) is_manual: bool,
    pub(crate) persisted_only: bool,
    /// Milliseconds between batches, at most.
    pub(crate) slowness: u64,
    /// How often what was read is stored.
    pub(crate) commits: f64,
}

impl Setup {
    pub(crate) fn new(rng: &mut StdRng) -> Self {
        Self {
            batch: BatchPolicy {
                max_rows: *[1, 3, 20, 10_000].get(rng.random_range(0..4)).unwrap_or(&1),
                linger: Duration::from_millis(rng.random_range(0..50)),
                ..BatchPolicy::default()
            },
            noop_interval: Duration::from_secs(rng.random_range(1..10)),
            on_rollback: if rng.random_bool(0.8) { OnRollback::Emit } else { OnRollback::Resync },
            is_manual: rng.random_bool(0.4),
            persisted_only: rng.random_bool(0.2),
            slowness: *[0, 0, 30, 400].get(rng.random_range(0..4)).unwrap_or(&0),
            commits: rng.random_range(0.1..1.0),
        }
    }

    fn options(&self, start: Start, end: End) -> StreamOptions {
        let acknowledge = if self.is_manual { Acknowledge::Manual } else { Acknowledge::OnNext };
        StreamOptions {
            start,
            end,
            batch: self.batch,
            noop_interval: self.noop_interval,
            on_rollback: self.on_rollback,
            acknowledge,
            persisted_only: self.persisted_only,
            buffer_size: StreamOptions::MIN_BUFFER_SIZE,
            retry_timeout: Duration::from_secs(3600),
            ..StreamOptions::default()
        }
    }
}

/// What survives the consumer: rows and checkpoint, stored together, and the pair before them.
#[derive(Debug, Default)]
pub(crate) struct Storage {
    pairs: Vec<(Checkpoint, Table)>,
    /// What the newest checkpoint was made by a crash while it was written.
    torn: Option<Vec<u8>>,
    /// What the consumer did that it must not.
    pub(crate) violation: Option<String>,
}

impl Storage {
    fn store(&mut self, checkpoint: &Checkpoint, table: &Table) {
        if let Err(wrong) = table.check(checkpoint) {
            self.violation.get_or_insert(format!("stored a checkpoint that is off: {wrong}"));
        }
        if self.pairs.len() > 1 {
            self.pairs.remove(0);
        }
        self.pairs.push((checkpoint.clone(), table.clone()));
    }

    /// The newest pair.
    pub(crate) fn newest(&self) -> Option<&(Checkpoint, Table)> {
        self.pairs.last()
    }

    /// The newest pair whose checkpoint is whole, as a new process reads it.
    pub(crate) fn load(&mut self) -> (Option<Checkpoint>, Table) {
        if let Some(json) = self.torn.take()
            && Checkpoint::from_json(&json).is_err()
        {
            self.pairs.pop();
        }
        let Some((checkpoint, table)) = self.newest() else { return (None, Table::default()) };
        let json = checkpoint.to_json();
        let read = Checkpoint::from_json(json.as_bytes()).expect("what was written");
        (Some(read), table.clone())
    }

    /// Damages the newest checkpoint, as a crash while it is written does where a store is not
    /// atomic.
    pub(crate) fn tear(&mut self, rng: &mut StdRng) {
        let Some((checkpoint, _)) = self.newest() else { return };
        let mut json = checkpoint.to_json().into_bytes();
        if rng.random_bool(0.5) {
            json.truncate(rng.random_range(0..json.len()));
        } else {
            // Another digit in some number is still well-formed JSON.
            let is_digit = |&at: &usize| json[at].is_ascii_digit() && json[at] != b'0';
            let digits: Vec<usize> = (0..json.len()).filter(is_digit).collect();
            let at = digits[rng.random_range(0..digits.len())];
            json[at] = if json[at] == b'9' { b'8' } else { json[at] + 1 };
        }
        self.torn = Some(json);
    }
}

pub(crate) fn connect_options(network: &Arc<Network>, connection_string: &str) -> ConnectOptions {
    ConnectOptions::new(connection_string)
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"))
        .with_connect_timeout(Duration::from_secs(5))
        .with_dialer(Arc::new(Dialer(Arc::clone(network))))
}

/// One consumer process.
pub(crate) struct Consumer {
    pub(crate) setup: Setup,
    pub(crate) network: Arc<Network>,
    pub(crate) connection_string: String,
    pub(crate) storage: Arc<Mutex<Storage>>,
    pub(crate) trace: Trace,
    pub(crate) seed: u64,
}

impl Consumer {
    /// Streams until it is killed.
    pub(crate) async fn live(self) {
        loop {
            match self.read().await {
                Ok(()) => return,
                Err(Broken::Violation(what)) => {
                    self.storage.lock().unwrap().violation.get_or_insert(what);
                    return;
                }
                // A node that dies while it is connected to closes without a word, and one that
                // cuts packets short may cut the same one until it is told to stop.
                Err(Broken::Error(error))
                    if error.is_retryable()
                        || error.kind() == ErrorKind::NotCouchbase
                        || error.kind() == ErrorKind::UnusablePacket =>
                {
                    self.trace.add(format!("consumer: {error}"));
                }
                Err(Broken::Error(error)) => {
                    let mut storage = self.storage.lock().unwrap();
                    storage.violation.get_or_insert(format!("an error to end with: {error}"));
                    return;
                }
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    async fn read(&self) -> Result<(), Broken> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let (checkpoint, mut table) = self.storage.lock().unwrap().load();
        let options = connect_options(&self.network, &self.connection_string);
        let client = Box::pin(Client::connect(options)).await?;
        let start = checkpoint.map_or(Start::Earliest, Start::Checkpoint);
        let options = self.setup.options(start, End::Never);
        let mut stream = Box::pin(client.stream(options, Rows::default)).await?;
        let mut received = Received::default();
        loop {
            let next = timeout(Duration::from_millis(300), stream.next()).await;
            let is_idle = next.is_err();
            match next {
                Ok(Some(delivered)) => {
                    let Delivered { batch, token, .. } = delivered?;
                    for item in &batch {
                        if let Item::Rollback(Rollback { vbid, seqno, from_seqno, .. }) = item {
                            self.trace
                                .add(format!("{vbid} is rolled back from {from_seqno} to {seqno}"));
                        }
                    }
                    received.batch(batch, token, self.setup.is_manual);
                }
                Ok(None) => return Err(Broken::Violation("an endless stream ended".into())),
                Err(_) => {}
            }
            while let Some(token) = received.acknowledge(is_idle, &mut rng) {
                stream.ack(token)?;
            }
            if is_idle || rng.random_bool(self.setup.commits) {
                let checkpoint = stream.checkpoint();
                received.settle(&checkpoint, &mut table).map_err(Broken::Violation)?;
                self.storage.lock().unwrap().store(&checkpoint, &table);
            }
            if self.setup.slowness > 0 {
                sleep(Duration::from_millis(rng.random_range(0..=self.setup.slowness))).await;
            }
        }
    }
}

/// Why a consumer stops reading.
enum Broken {
    Error(Error),
    Violation(String),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// What was received and not stored yet.
#[derive(Default)]
struct Received {
    /// In the order it came, with the number of its batch.
    items: VecDeque<(u64, Item)>,
    batches: u64,
    /// Batches that are not acknowledged, by number.
    open: BTreeMap<u64, AckToken>,
}

impl Received {
    fn batch(&mut self, items: Vec<Item>, token: AckToken, is_manual: bool) {
        self.batches += 1;
        let number = self.batches;
        self.items.extend(items.into_iter().map(|item| (number, item)));
        if is_manual {
            self.open.insert(number, token);
        }
    }

    /// Some batch to acknowledge now: any of them, or every one while nothing comes.
    fn acknowledge(&mut self, all: bool, rng: &mut StdRng) -> Option<AckToken> {
        if self.open.is_empty() || !(all || self.open.len() > 8 || rng.random_bool(0.4)) {
            return None;
        }
        let number = *self.open.keys().nth(rng.random_range(0..self.open.len()))?;
        self.open.remove(&number)
    }

    /// Moves what the checkpoint covers into the table.
    fn settle(&mut self, checkpoint: &Checkpoint, table: &mut Table) -> Result<(), String> {
        let mut left = VecDeque::new();
        for (number, item) in self.items.drain(..) {
            if !item.is_covered(checkpoint) {
                left.push_back((number, item));
                continue;
            }
            if self.open.contains_key(&number) {
                return Err(format!("the checkpoint covers what is not acknowledged: {item:?}"));
            }
            table.apply(&item)?;
        }
        self.items = left;
        Ok(())
    }
}

/// Reads the bucket up to its present end, from a checkpoint or the beginning.
pub(crate) async fn read_until_now(
    setup: &Setup,
    network: &Arc<Network>,
    connection_string: &str,
    from: Option<(Checkpoint, Table)>,
) -> Result<Table, String> {
    let failed = |error: Error| format!("a finite stream failed: {error}");
    let options = connect_options(network, connection_string);
    let client = Box::pin(Client::connect(options)).await.map_err(failed)?;
    let (start, mut table) = match from {
        Some((checkpoint, table)) => (Start::Checkpoint(checkpoint), table),
        None => (Start::Earliest, Table::default()),
    };
    let setup = Setup { is_manual: false, ..setup.clone() };
    let options = setup.options(start, End::Now);
    let mut stream = Box::pin(client.stream(options, Rows::default)).await.map_err(failed)?;
    while let Some(delivered) = stream.next().await {
        for item in delivered.map_err(failed)?.batch {
            table.apply(&item)?;
        }
    }
    table.check(&stream.checkpoint())?;
    Ok(table)
}
