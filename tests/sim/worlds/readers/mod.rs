//! Applications that read: their processes may be killed between any two of their steps, and what
//! they have stored is all the next one knows.

mod batches;
mod endless;
mod finite;
mod ledger;
mod tasks;
mod verdict;
mod watched;

pub(crate) use self::batches::Log;
use self::verdict::{compare, compare_up_to, is_asked_for, wanted_ids};
use self::watched::Streams;
use dcp_test::with;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use dcp_consumer::{
    Acknowledge, Client, ConnectOptions, Content, CredentialsSource, Error, Filter,
    InitialDeletions, OnRollback, StreamOptions,
};
use dcp_proto::RowFilter;
use dcp_wire::Vbid;
use dcp_wire::sasl::Mechanism;
use rand::Rng;
use rand::rngs::StdRng;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::network::{Dialer, Network};
use crate::plan::{FilterPlan, Kind, Plan, ReaderKind, ReaderPlan, Step};
use crate::report::Report;
use crate::rows::Item;
use crate::storage::{Pair, Storage};
use crate::trace::Trace;
use crate::world::{NAMES, World};

/// Longer than any world: no outage may end a stream.
const RETRY_TIMEOUT: Duration = Duration::from_secs(3600);

/// Longest time a client may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A new process, and what else takes a moment.
const SETTLE: Duration = Duration::from_secs(5);

/// Longest wait between two attempts at the same thing.
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Longest time a node may take to say what is on disk.
const LONGEST_QUESTION: Duration = Duration::from_secs(10);

/// What all of one world share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) seed: u64,
    pub(crate) world: Rc<RefCell<World>>,
    pub(crate) network: Arc<Network>,
    pub(crate) trace: Trace,
    pub(crate) report: Rc<RefCell<Report>>,
    /// Some step lets nodes send what no client can take.
    damages_packets: bool,
    clients: Rc<RefCell<BTreeMap<u64, (Client, u32)>>>,
    connected: Rc<Cell<u64>>,
    pub(crate) streams: Rc<RefCell<Streams>>,
    /// All faults are over.
    pub(crate) healed: Rc<Cell<Option<Instant>>>,
}

impl Shared {
    pub(crate) fn new(
        plan: &Plan,
        world: Rc<RefCell<World>>,
        network: Arc<Network>,
        trace: Trace,
    ) -> Self {
        let damages = |step: &Step| matches!(step.kind, Kind::Truncated | Kind::Repeat);
        Self {
            seed: plan.seed,
            damages_packets: plan.steps.iter().any(damages),
            world,
            network,
            trace,
            report: Rc::default(),
            clients: Rc::default(),
            connected: Rc::default(),
            streams: Rc::default(),
            healed: Rc::default(),
        }
    }

    /// Whether nothing was broken for as long as a client may take to connect.
    fn is_well(&self) -> bool {
        self.healed.get().is_some_and(|since| since.elapsed() > 2 * CONNECT_TIMEOUT)
    }

    pub(crate) fn count(&self, what: impl Into<String>) {
        self.report.borrow_mut().count(what);
    }
}

/// Why a reader stops.
enum Stop {
    /// While a stream was being opened.
    Opening(Error),
    /// While it ran.
    Running(Error),
    Violation(String),
    /// A call was cancelled, or there is nothing to read.
    Again,
}

/// One reader and its process.
pub(crate) struct Reader {
    pub(crate) plan: ReaderPlan,
    shared: Shared,
    pub(crate) storage: Rc<RefCell<Storage>>,
    paused_until: Rc<Cell<Option<Instant>>>,
    /// A finite reader begins nothing more.
    stops: Rc<Cell<bool>>,
    lives: u64,
    /// How many members it had last.
    members: Option<u16>,
    alive: Vec<JoinHandle<()>>,
}

impl Reader {
    pub(crate) fn new(plan: ReaderPlan, shared: Shared) -> Self {
        Self {
            plan,
            shared,
            storage: Rc::default(),
            paused_until: Rc::default(),
            stops: Rc::default(),
            lives: 0,
            members: None,
            alive: Vec::new(),
        }
    }

    pub(crate) fn start(&mut self) {
        let processes = match self.plan.kind {
            ReaderKind::Rivals => 2,
            ReaderKind::Members => self.draw_members(),
            _ => 1,
        };
        for number in 0..processes {
            self.lives += 1;
            let seed = self.shared.seed ^ (self.plan.number << 40) ^ (self.lives << 48);
            let is_member = self.plan.kind == ReaderKind::Members;
            let process = Process {
                plan: self.plan.clone(),
                share: is_member.then(|| self.share(number, processes)),
                shared: self.shared.clone(),
                storage: Rc::clone(&self.storage),
                paused_until: Rc::clone(&self.paused_until),
                stops: Rc::clone(&self.stops),
                life: Cell::default(),
                is_foreign: Cell::default(),
                end_existed: Cell::default(),
                ids: RefCell::default(),
                seed,
            };
            self.shared.count(format!("reader {:?}", self.plan.kind));
            self.alive.push(tokio::task::spawn_local(Rc::new(process).live()));
        }
    }

    /// How many members there are from now on.
    fn draw_members(&mut self) -> u16 {
        let seed = !self.shared.seed ^ (self.plan.number << 40) ^ (self.lives << 48);
        let members = <StdRng as rand::SeedableRng>::seed_from_u64(seed).random_range(1..=4);
        if self.members.replace(members).is_some_and(|before| before != members) {
            self.shared.count("share of another number of members");
        }
        members
    }

    /// The vBuckets of one of `members`.
    fn share(&self, number: u16, members: u16) -> Vec<Vbid> {
        let vbuckets = self.shared.world.borrow().producer.num_vbuckets();
        (0..vbuckets).filter(|vbid| vbid % members == number).map(Vbid).collect()
    }

    /// Ends its process without a word; what it had not stored is gone.
    pub(crate) async fn kill(&mut self) {
        self.shared.network.note_end(self.plan.client);
        for alive in self.alive.drain(..) {
            alive.abort();
            // Ends with being cancelled.
            let _ = alive.await;
        }
        if !self.shares_client() {
            self.shared.clients.borrow_mut().remove(&self.plan.client);
        }
    }

    fn shares_client(&self) -> bool {
        self.plan.client != self.plan.number
    }

    /// It takes nothing for a while.
    pub(crate) fn pause(&self, lasts: Duration) {
        self.paused_until.set(Some(Instant::now() + lasts));
    }

    pub(crate) fn take_violation(&self) -> Option<String> {
        self.storage.borrow_mut().violation.take()
    }

    /// Waits until a finite reader has come to the end of what it reads.
    pub(crate) async fn finish(&mut self, patience: Duration) -> Result<(), String> {
        if self.plan.kind != ReaderKind::Finite {
            return Ok(());
        }
        self.stops.set(true);
        for alive in &mut self.alive {
            if timeout(patience, alive).await.is_err() {
                return Err(format!("{self}: a finite stream does not end"));
            }
        }
        self.alive.clear();
        Ok(())
    }

    /// How long after the last fault it may take until it has everything.
    pub(crate) fn patience(&self) -> Duration {
        let plan = &self.plan;
        // Whatever is outstanding may be outstanding on a connection that is dead without a word,
        // which is known after two noop intervals. An attempt to connect may be on its way to such
        // a one then, and the next one waits.
        let connected = plan.noop_interval * 2 + CONNECT_TIMEOUT + LONGEST_BACKOFF;
        // What is on disk is asked for apart, on connections of its own.
        let told = if plan.persisted_only { LONGEST_QUESTION + LONGEST_BACKOFF } else { SETTLE };
        // A reader takes at most a window's half at a time, and rests after it.
        let rows = self.shared.world.borrow().truth.writes();
        let batches = rows / u64::try_from(plan.batch.max_rows).map_or(8, |rows| rows.min(8)) + 8;
        let pace = Duration::from_millis(plan.slowness * batches);
        // Micro-batches of a few seqnos, whose driver may die.
        let rounds = match plan.kind {
            ReaderKind::Batches => Duration::from_secs(30),
            _ => Duration::ZERO,
        };
        connected + told + pace + rounds
    }

    /// Whether what it has stored is what the cluster has.
    pub(crate) fn compare(&self) -> Result<(), String> {
        if self.plan.kind == ReaderKind::Finite {
            return Ok(());
        }
        let storage = self.storage.borrow();
        let batches = (self.plan.kind == ReaderKind::Batches).then(|| storage.batches.as_pair());
        let pair = batches.as_ref().map_or_else(|| storage.newest(), Option::as_ref);
        let world = self.shared.world.borrow();
        let compared = compare(&self.plan, &world, pair);
        compared.map_err(|wrong| format!("{self}: {wrong}"))?;
        let (Some(pair), FilterPlan::All, None) = (pair, self.plan.filter, &batches) else {
            return Ok(());
        };
        for (vbid, high) in world.producer.high_seqnos() {
            let position = pair.checkpoint.position(vbid);
            let seqno = position.map_or_else(Default::default, |position| position.seqno);
            if seqno != high {
                return Err(format!("{self}: {vbid} stands at {seqno} of {high}"));
            }
        }
        Ok(())
    }

    /// Whether it has every version of what it asks for, in collections that were never emptied.
    pub(crate) fn check_history(&self) -> Result<(), String> {
        let (storage, world) = (self.storage.borrow(), self.shared.world.borrow());
        let Some(pair) = storage.newest() else { return Ok(()) };
        let ids = wanted_ids(&self.plan, &world, Some(pair));
        let is_whole = |id: u32| ids.contains(&id) && !world.collections[&id].was_emptied;
        let is_shown = |key: &[u8]| self.plan.system_documents || !key.starts_with(b"_txn:");
        for (vbid, seqno, write) in world.truth.held() {
            let key = &write.key;
            let is_wanted =
                is_whole(write.collection) && is_shown(key) && is_asked_for(&self.plan, key);
            if is_wanted && !pair.table.has(vbid, seqno) {
                return Err(format!(
                    "{self}: {vbid} {seqno} is left out of the history: {write:?}"
                ));
            }
        }
        Ok(())
    }

    /// Reads everything that is there, from the beginning and from what is stored; each must bring
    /// what the cluster has.
    pub(crate) async fn read_all(&mut self, patience: Duration) -> Result<(), String> {
        let process = Process {
            plan: self.plan.clone(),
            share: None,
            shared: self.shared.clone(),
            storage: Rc::clone(&self.storage),
            paused_until: Rc::default(),
            stops: Rc::default(),
            life: Cell::default(),
            is_foreign: Cell::default(),
            end_existed: Cell::default(),
            ids: RefCell::default(),
            seed: self.shared.seed ^ (self.plan.number << 40),
        };
        let read = timeout(patience, Box::pin(process.read_all())).await;
        let read = read.unwrap_or_else(|_| Err("the last finite stream does not end".to_owned()));
        read.map_err(|wrong| format!("{self}: {wrong}"))
    }
}

impl std::fmt::Display for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "reader {} ({:?}, {:?})", self.plan.number, self.plan.kind, self.plan.filter)
    }
}

/// One process of a reader.
struct Process {
    plan: ReaderPlan,
    /// The vBuckets of a member.
    share: Option<Vec<Vbid>>,
    shared: Shared,
    storage: Rc<RefCell<Storage>>,
    paused_until: Rc<Cell<Option<Instant>>>,
    stops: Rc<Cell<bool>>,
    /// Of the bucket, when the client was connected.
    life: Cell<u32>,
    /// What it went on from is of a bucket that is gone.
    is_foreign: Cell<bool>,
    /// How often history may have been lost when an end was seen that the stream relies on.
    end_existed: Cell<Option<u32>>,
    /// Collections it asked for last, where its filter names any.
    ids: RefCell<Option<BTreeSet<u32>>>,
    seed: u64,
}

/// What a stream is opened with.
struct Wanted {
    client: Client,
    options: StreamOptions,
    pair: Option<Pair>,
    ids: Option<BTreeSet<u32>>,
    /// How often history may have been lost before.
    losses: u32,
}

impl Process {
    async fn live(self: Rc<Self>) {
        let mut rng = <StdRng as rand::SeedableRng>::seed_from_u64(self.seed);
        let mut rounds = 0;
        while !self.stops.get() {
            let read = match self.plan.kind {
                ReaderKind::Finite => Box::pin(self.read_finite(&mut rng)).await,
                ReaderKind::Batches => Box::pin(self.read_batches(&mut rng)).await,
                _ => Box::pin(self.read_endless(&mut rng)).await,
            };
            if let Err(violation) = self.judge(read) {
                let violation =
                    format!("reader {} ({:?}): {violation}", self.plan.number, self.plan.kind);
                self.storage.borrow_mut().violation.get_or_insert(violation);
                return;
            }
            // Less and less often, so that a long pause is not all reading; at the end there is only
            // so much time.
            rounds = if self.shared.healed.get().is_some() { 0 } else { rounds + 1 };
            let pause = rng.random_range(1..600 * (1 + rounds / 8));
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// The client, the options, and what to go on from.
    async fn prepare(&self, pair: Option<Pair>, rng: &mut StdRng) -> Result<Wanted, Stop> {
        self.rest().await;
        self.end_existed.set(None);
        let client = self.client(rng).await?;
        let is_foreign = |pair: &Pair| pair.checkpoint.bucket_uuid() != client.bucket_uuid();
        self.is_foreign.set(pair.as_ref().is_some_and(is_foreign));
        let names = self.names(pair.as_ref().and_then(|pair| pair.ids.as_ref()));
        let (filter, ids) = self.filter(&names)?;
        if let Some(had) = pair.as_ref().and_then(|pair| pair.ids.as_ref())
            && ids.as_ref().is_some_and(|ids| ids.len() < had.len())
        {
            self.shared.count("filter narrowed");
        }
        let plan = &self.plan;
        let acknowledge = if plan.manual { Acknowledge::Manual } else { Acknowledge::OnNext };
        let keys = plan.some_keys.then(|| vec!["key-1*".to_owned()]);
        let rows = RowFilter::new(keys, None, None).expect("a pattern");
        if plan.some_keys {
            self.shared.count("filter of keys");
        }
        let options = with(StreamOptions::default(), |o| {
            o.filter = filter;
            o.rows = rows;
            o.history = plan.history;
            o.vbuckets.clone_from(&self.share);
            o.batch = plan.batch;
            o.content = Content { values: true, xattrs: plan.xattrs };
            o.noop_interval = plan.noop_interval;
            o.on_rollback = plan.on_rollback;
            o.acknowledge = acknowledge;
            o.persisted_only = plan.persisted_only;
            if plan.skips_deletions && !plan.history {
                o.initial_deletions = InitialDeletions::Skip;
            }
            o.system_documents = plan.system_documents;
            o.compressed = plan.compressed;
            o.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
            o.retry_timeout = RETRY_TIMEOUT;
        });
        if options.initial_deletions == InitialDeletions::Skip {
            self.shared.count("first loads without deletions");
        }
        self.shared.count(format!("filter {:?}", plan.filter));
        self.shared.count(format!("on_rollback {:?}", plan.on_rollback));
        let losses = self.shared.world.borrow().losses;
        Ok(Wanted { client, options, pair, ids, losses })
    }

    /// The filter to ask for, and the collections it names.
    fn filter(
        &self,
        names: &BTreeMap<String, u32>,
    ) -> Result<(Filter, Option<BTreeSet<u32>>), Stop> {
        let filter = match self.plan.filter {
            FilterPlan::All => Filter::All,
            FilterPlan::Scope => Filter::Scope("shop".to_owned()),
            FilterPlan::Patterns => {
                Filter::Collections(vec!["*.orders".to_owned(), "*.not?s".to_owned()])
            }
            FilterPlan::Collections if names.is_empty() => {
                self.storage.borrow_mut().lose();
                return Err(Stop::Again);
            }
            FilterPlan::Collections => Filter::Collections(names.keys().cloned().collect()),
        };
        let ids = names.values().copied().collect();
        let ids = (self.plan.filter == FilterPlan::Collections).then_some(ids);
        self.ids.borrow_mut().clone_from(&ids);
        Ok((filter, ids))
    }

    /// Whether the filter asks for a collection.
    fn asks_for(&self, world: &World, id: u32) -> bool {
        match (&*self.ids.borrow(), self.plan.filter) {
            (Some(ids), _) => ids.contains(&id),
            (None, FilterPlan::All) => true,
            (None, filter) => {
                world.collections.get(&id).is_some_and(|of| filter.holds(&of.scope, &of.name))
            }
        }
    }

    /// Collections to ask for: those there are of what was asked for before. By name.
    fn names(&self, had: Option<&BTreeSet<u32>>) -> BTreeMap<String, u32> {
        let world = self.shared.world.borrow();
        let of_shop = NAMES.iter().filter(|(scope, _)| *scope == "shop");
        of_shop
            .filter_map(|(scope, name)| {
                Some((format!("{scope}.{name}"), world.id_of(scope, name)?))
            })
            .filter(|(_, id)| had.is_none_or(|had| had.contains(id)))
            .collect()
    }

    /// Whether the filter still means what it was made for.
    fn is_current(&self, wanted: &Wanted) -> bool {
        let Some(ids) = &wanted.ids else { return true };
        let manifest = wanted.client.manifest();
        let Filter::Collections(names) = &wanted.options.filter else { return true };
        let known = names.iter().filter_map(|name| {
            let (scope, collection) = name.split_once('.')?;
            Some(manifest.collection_named(scope, collection)?.id.0)
        });
        known.collect::<BTreeSet<u32>>() == *ids
    }

    async fn client(&self, rng: &mut StdRng) -> Result<Client, Stop> {
        let number = self.plan.client;
        let known = self.shared.clients.borrow().get(&number).cloned();
        if let Some((client, life)) = known {
            self.shared.count("client used again");
            self.life.set(life);
            return Ok(client);
        }
        let life = self.shared.world.borrow().lives;
        self.life.set(life);
        let options = self.connect_options();
        let connecting = Box::pin(Client::connect(options));
        let client = self.unless_cancelled(connecting, rng).await?.map_err(Stop::Opening)?;
        self.shared.clients.borrow_mut().insert(number, (client.clone(), life));
        Ok(client)
    }

    fn connect_options(&self) -> ConnectOptions {
        self.shared.connected.set(self.shared.connected.get() + 1);
        let seed = self.shared.seed ^ (self.shared.connected.get() << 32);
        let (network, client) = (Arc::clone(&self.shared.network), self.plan.client);
        let keep = Duration::from_secs(if self.plan.keeps_connections { 60 } else { 0 });
        let world = self.shared.world.borrow();
        ConnectOptions::new(world.producer.connection_string())
            .with_bucket("default")
            .with_credentials(CredentialsSource::Provider(Arc::clone(&world.vault) as _))
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_connections(keep)
            // The one that costs the least.
            .with_sasl_mechanisms([Mechanism::ScramSha1])
            .with_dialer(Arc::new(Dialer { network, client, seed }))
    }

    /// Now and then gives a call up before it is done.
    async fn unless_cancelled<T>(
        &self,
        call: impl Future<Output = T>,
        rng: &mut StdRng,
    ) -> Result<T, Stop> {
        if !rng.random_bool(0.15) {
            return Ok(call.await);
        }
        let soon = Duration::from_millis(rng.random_range(0..60));
        timeout(soon, call).await.map_err(|_| {
            self.shared.count("call cancelled");
            Stop::Again
        })
    }

    /// Waits until a pause is over.
    async fn rest(&self) {
        while self.is_paused() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn is_paused(&self) -> bool {
        let until = self.paused_until.get();
        until.is_some_and(|until| until > Instant::now()) && self.shared.healed.get().is_none()
    }

    /// Looks at what was received: all of it must be true.
    fn check(&self, items: &[Item], wanted: &Wanted) -> Result<(), Stop> {
        let (uuid, ids) = (wanted.client.bucket_uuid(), wanted.ids.as_ref());
        self.check_items(items, uuid, ids, self.plan.persisted_only)
    }

    fn check_items(
        &self,
        items: &[Item],
        bucket_uuid: &str,
        ids: Option<&BTreeSet<u32>>,
        persisted_only: bool,
    ) -> Result<(), Stop> {
        let mut world = self.shared.world.borrow_mut();
        if bucket_uuid != world.producer.bucket_uuid() {
            // Of a bucket that is gone.
            return Ok(());
        }
        for item in items {
            self.shared.network.event(format!("{} {item:?}", self.plan.number).as_bytes());
            match item {
                Item::Change(row) => {
                    world.check_row(row, self.plan.system_documents).map_err(Stop::Violation)?;
                    let of = world.collections.get(&row.collection);
                    let asked_for = match (ids, self.plan.filter) {
                        (Some(ids), _) => ids.contains(&row.collection),
                        (None, FilterPlan::All) => true,
                        (None, filter) => of.is_some_and(|of| filter.holds(&of.scope, &of.name)),
                    };
                    if !asked_for || !is_asked_for(&self.plan, &row.key) {
                        let wrong = format!("a row that was not asked for: {row:?}");
                        return Err(Stop::Violation(wrong));
                    }
                    if persisted_only && !world.is_ephemeral {
                        world.truth.promise(row, self.plan.number);
                    }
                    self.shared.count(format!("row {:?}", row.op));
                    if row.is_history {
                        self.shared.count("row of history");
                    }
                    if row.has_xattrs {
                        self.shared.count("row with xattrs");
                    }
                }
                Item::Rollback(rollback) => {
                    if self.plan.on_rollback == OnRollback::Resync && rollback.seqno.0 != 0 {
                        let wrong = format!("a resync that begins at {}", rollback.seqno);
                        return Err(Stop::Violation(wrong));
                    }
                    self.shared.count("row Rollback");
                }
                Item::Emptied { .. } => self.shared.count("row CollectionChanged"),
            }
        }
        Ok(())
    }
}
