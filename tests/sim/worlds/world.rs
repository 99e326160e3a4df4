//! The cluster, what is written to it, and what is in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_producer::{Document, Producer, ProducerOptions, Rule, WriteOptions, parse_rules};
use dcp_proto::Op;
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{CollectionId, Datatype, Seqno, Vbid};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::Instant;

use crate::plan::Plan;
use crate::rows::{Documents, Row};
use crate::truth::Truth;
use crate::vault::Vault;

/// Keys per collection.
const KEYS: u32 = 24;
/// The collection every bucket has.
pub(crate) const DEFAULT: u32 = CollectionId::DEFAULT.0;
/// Collections that come and go, by scope.
pub(crate) const NAMES: [(&str, &str); 3] =
    [("shop", "orders"), ("shop", "carts"), ("_default", "notes")];

/// Every key in these collections, records of transactions or not.
fn keys(ids: &BTreeSet<u32>, transactions: bool) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    for &id in ids {
        all.extend((0..KEYS).map(|key| (id, format!("key-{key}").into_bytes())));
        if transactions && id == DEFAULT {
            all.extend((0..4).map(|key| (id, format!("_txn:{key}").into_bytes())));
        }
    }
    all
}

/// A collection there is or was.
#[derive(Clone, Debug)]
pub(crate) struct Collection {
    pub(crate) scope: String,
    pub(crate) name: String,
    pub(crate) is_there: bool,
    /// It was flushed: the server may leave its documents out, or not yet.
    pub(crate) was_emptied: bool,
}

/// A cluster and its true history.
pub(crate) struct World {
    pub(crate) producer: Arc<Producer>,
    pub(crate) truth: Truth,
    pub(crate) vault: Arc<Vault>,
    passwords: u64,
    /// Every collection there was, by id.
    pub(crate) collections: BTreeMap<u32, Collection>,
    /// Nodes that are down or out.
    pub(crate) broken: Vec<usize>,
    /// How often the bucket was made.
    pub(crate) lives: u32,
    /// How often history may have been lost.
    pub(crate) losses: u32,
    pub(crate) is_calm: bool,
    pub(crate) is_ephemeral: bool,
    written: u64,
    /// What nodes answer wrongly, and until when.
    rules: Vec<(Instant, Vec<Rule>)>,
}

impl World {
    pub(crate) async fn new(plan: &Plan) -> Self {
        let mut options = ProducerOptions::default();
        options.in_memory = true;
        options.seed = Some(plan.seed);
        options.nodes = plan.nodes;
        options.vbuckets = plan.vbuckets;
        options.replicas = plan.replicas;
        options.ephemeral = plan.ephemeral;
        options.keeps_history = plan.history;
        let vault = Arc::new(Vault::new(&options.password));
        let producer = Producer::start(options).await.expect("a cluster");
        let mut world = Self {
            producer: Arc::new(producer),
            truth: Truth::default(),
            vault,
            passwords: 0,
            collections: BTreeMap::new(),
            broken: Vec::new(),
            lives: 1,
            losses: 0,
            is_calm: plan.calm,
            is_ephemeral: plan.ephemeral,
            written: 0,
            rules: Vec::new(),
        };
        world.begin(plan.system_scope, plan.collections);
        world
    }

    /// What every bucket has at first.
    pub(crate) fn begin(&mut self, system_scope: bool, collections: bool) {
        let default = ("_default".to_owned(), "_default".to_owned());
        self.add(DEFAULT, default);
        self.producer.create_scope("shop").expect("a new scope");
        if system_scope {
            self.create_system_scope();
        }
        for (scope, name) in NAMES.into_iter().filter(|_| collections) {
            let id = self.producer.create_collection(scope, name, None).expect("a new one");
            self.add(id.0, (scope.to_owned(), name.to_owned()));
        }
        self.observe(true);
    }

    fn add(&mut self, id: u32, (scope, name): (String, String)) {
        self.collections.insert(id, Collection { scope, name, is_there: true, was_emptied: false });
    }

    /// Notes what a step has made of the cluster.
    pub(crate) fn observe(&mut self, keeps_promises: bool) {
        self.truth.observe(&self.producer, keeps_promises);
    }

    pub(crate) fn any_vbid(&self, rng: &mut StdRng) -> Vbid {
        Vbid(rng.random_range(0..self.producer.num_vbuckets()))
    }

    pub(crate) fn any_node(&self, rng: &mut StdRng) -> usize {
        rng.random_range(0..self.producer.num_nodes() + self.broken.len())
    }

    /// The id of a collection there is.
    pub(crate) fn id_of(&self, scope: &str, name: &str) -> Option<u32> {
        let mut found = self.collections.iter();
        let is_it = |of: &Collection| of.is_there && of.scope == scope && of.name == name;
        found.find(|(_, of)| is_it(of)).map(|(id, _)| *id)
    }

    /// Ids of the collections there are, as far as wanted.
    pub(crate) fn live(&self, wanted: impl Fn(&Collection) -> bool) -> BTreeSet<u32> {
        let there = self.collections.iter().filter(|(_, of)| of.is_there && wanted(of));
        there.map(|(id, _)| *id).collect()
    }

    // ----- writes -----

    /// Writes, removes and expires a few documents, of so many keys.
    pub(crate) fn write(&mut self, count: u32, keys: u32, rng: &mut StdRng) {
        let ids: Vec<u32> = self.live(|of| of.scope != "_system").into_iter().collect();
        for _ in 0..count {
            let Some(&collection) = ids.choose(rng) else { return };
            let key = format!("key-{}", rng.random_range(0..keys));
            self.write_one(collection, key.as_bytes(), rng);
        }
    }

    /// Documents of the `_system` scope and records of transactions.
    pub(crate) fn write_system(&mut self, count: u32, rng: &mut StdRng) {
        let system: Vec<u32> = self.live(|of| of.scope == "_system").into_iter().collect();
        for _ in 0..count {
            let number = rng.random_range(0..4);
            match system.choose(rng) {
                Some(&collection) if rng.random_bool(0.6) => {
                    self.write_one(collection, format!("key-{number}").as_bytes(), rng);
                }
                _ => self.write_one(DEFAULT, format!("_txn:{number}").as_bytes(), rng),
            }
        }
    }

    /// Writes to one vBucket, so many times.
    pub(crate) fn write_to(&mut self, vbid: Vbid, count: u64, rng: &mut StdRng) {
        let keys = self.keys_of(vbid);
        for _ in 0..count {
            let Some(key) = keys.choose(rng) else { return };
            self.upsert(DEFAULT, key, rng);
        }
    }

    /// The keys that lie in a vBucket.
    pub(crate) fn keys_of(&self, vbid: Vbid) -> Vec<Vec<u8>> {
        let keys = (0..KEYS).map(|key| format!("key-{key}").into_bytes());
        keys.filter(|key| self.producer.vbid_of(key) == vbid).collect()
    }

    /// Writes each of these documents once, in their order.
    pub(crate) fn write_each(&mut self, collection: u32, keys: &[Vec<u8>], rng: &mut StdRng) {
        for key in keys {
            self.upsert(collection, key, rng);
        }
    }

    fn write_one(&mut self, collection: u32, key: &[u8], rng: &mut StdRng) {
        let mut options = WriteOptions::default();
        options.collection_id = CollectionId(collection);
        let (op, written) = match rng.random_range(0..10) {
            0..7 => return self.upsert(collection, key, rng),
            7..9 => (Op::Deletion, self.producer.remove(key, options)),
            _ => (Op::Expiration, self.producer.expire(key, options)),
        };
        // Refused where there is no such document, or no node that has the vBucket.
        if let Ok(token) = written {
            self.truth.written(token, op, collection, key, &[]);
        }
    }

    fn upsert(&mut self, collection: u32, key: &[u8], rng: &mut StdRng) {
        self.written += 1;
        let size = *[4, 40, 40, 400, 4000].choose(rng).unwrap_or(&4);
        let value = format!("{:0size$}", self.written).into_bytes();
        let (mut stored, mut options) = (value.clone(), WriteOptions::default());
        options.collection_id = CollectionId(collection);
        if rng.random_bool(0.2) {
            stored.clear();
            let sync = Xattr { name: b"_sync", value: br#"{"rev":1}"# };
            xattr::encode([sync], &mut stored).expect("extended attributes");
            stored.extend_from_slice(&value);
            options.datatype = Some(Datatype::XATTR);
        }
        let written = self.producer.upsert(key, stored.into(), options);
        if let Ok(token) = written {
            self.truth.written(token, Op::Mutation, collection, key, &value);
        }
    }

    // ----- collections -----

    pub(crate) fn create_system_scope(&mut self) -> bool {
        let made = self.producer.create_scope("_system").is_ok();
        if let Ok(id) = self.producer.create_collection("_system", "_query", None) {
            self.add(id.0, ("_system".to_owned(), "_query".to_owned()));
        }
        made
    }

    pub(crate) fn create_collection(&mut self, rng: &mut StdRng) -> String {
        let (scope, name) = *NAMES.choose(rng).unwrap_or(&NAMES[0]);
        match self.producer.create_collection(scope, name, None) {
            Ok(id) => {
                self.add(id.0, (scope.to_owned(), name.to_owned()));
                format!("create {scope}.{name}: {id}")
            }
            Err(error) => format!("create {scope}.{name}: {error}"),
        }
    }

    pub(crate) fn drop_collection(&mut self, rng: &mut StdRng) -> String {
        let live = self.live(|of| of.scope != "_system" && of.name != "_default");
        let live: Vec<u32> = live.into_iter().collect();
        let Some(id) = live.choose(rng) else { return "nothing to drop".to_owned() };
        let Some(of) = self.collections.get_mut(id) else { return String::new() };
        let done = self.producer.drop_collection(&of.scope, &of.name).is_ok();
        of.is_there = !done;
        format!("drop {}.{}, {id}: {done}", of.scope, of.name)
    }

    pub(crate) fn flush_collection(&mut self, rng: &mut StdRng) -> String {
        let live: Vec<u32> = self.live(|of| of.scope != "_system").into_iter().collect();
        let Some(of) = live.choose(rng).and_then(|id| self.collections.get_mut(id)) else {
            return "nothing to flush".to_owned();
        };
        let done = self.producer.flush_collection(&of.scope, &of.name).is_ok();
        of.was_emptied |= done;
        format!("flush {}.{}: {done}", of.scope, of.name)
    }

    /// The bucket was dropped, and nothing that was written to it counts any more.
    pub(crate) fn end_bucket(&mut self) {
        self.lives += 1;
        self.collections.clear();
        self.truth = Truth::default();
    }

    /// Another password is asked for from now on, which clients are given after a while.
    pub(crate) fn change_password(&mut self, after: Duration, is_sealed: bool) {
        self.passwords += 1;
        let password = format!("password {}", self.passwords);
        self.producer.set_password(&password).expect("a password");
        self.vault.change(password, after, is_sealed);
    }

    // ----- what nodes answer -----

    /// Lets the nodes answer by rules for a while.
    pub(crate) fn misbehave(&mut self, rules: &str, lasts: Duration) {
        self.add_rules(parse_rules(rules).expect("rules"), lasts);
    }

    /// Adds rules for a while, after those there are.
    pub(crate) fn add_rules(&mut self, rules: Vec<Rule>, lasts: Duration) {
        self.rules.push((Instant::now() + lasts, rules));
        self.set_rules();
    }

    /// Ends the faults of replication.
    pub(crate) fn mend_replication(&mut self) {
        let is_of_clients =
            |rules: &[Rule]| rules.iter().all(|rule| rule.condition.between.is_empty());
        self.rules.retain(|(_, rules)| is_of_clients(rules));
        self.set_rules();
    }

    /// Ends what has lasted long enough.
    pub(crate) fn tick(&mut self) {
        let before = self.rules.len();
        self.rules.retain(|(until, _)| *until > Instant::now());
        if self.rules.len() != before {
            self.set_rules();
        }
    }

    fn set_rules(&self) {
        let rules = self.rules.iter().flat_map(|(_, rules)| rules.clone()).collect();
        self.producer.set_faults(rules).expect("rules");
    }

    // ----- the end of all faults -----

    /// The nodes answer as they should.
    pub(crate) fn end_rules(&mut self) {
        self.rules.clear();
        self.set_rules();
    }

    /// Every copy follows; all nodes run already.
    pub(crate) fn settle(&mut self) {
        self.catch_up();
        self.producer.rebalance().expect("all nodes run");
        // Of the copies that were made by that, those whose node had one before lag as that did.
        self.catch_up();
        self.observe(true);
    }

    /// Every copy receives and persists everything.
    pub(crate) fn catch_up(&self) {
        for index in 0..self.producer.num_vbuckets() {
            for copy in 0..4 {
                // Refused where there is no such copy.
                let _ = self.producer.set_replica_lag(Vbid(index), copy, Some(0));
                let _ = self.producer.hold_persistence(Vbid(index), copy, false);
            }
        }
    }

    // ----- what must be true -----

    /// What is in these collections, records of transactions or not.
    pub(crate) fn documents(
        &self,
        ids: &BTreeSet<u32>,
        transactions: bool,
    ) -> Result<Documents, String> {
        self.documents_up_to(ids, transactions, |_| Some(u64::MAX))
    }

    /// What is in these collections, of the vBuckets that have an end up to there.
    pub(crate) fn documents_up_to(
        &self,
        ids: &BTreeSet<u32>,
        transactions: bool,
        end: impl Fn(Vbid) -> Option<u64>,
    ) -> Result<Documents, String> {
        let keys = keys(ids, transactions);
        let keys = keys.iter().map(|(id, key)| (*id, key.as_slice()));
        self.truth.documents(&self.producer, keys, end)
    }

    /// Every document as the active copies have it.
    pub(crate) fn contents(&self) -> BTreeMap<(u32, Vec<u8>), Document> {
        let of = |key: (u32, Vec<u8>)| {
            let document = self.producer.get_from(CollectionId(key.0), &key.1)?;
            Some((key, document))
        };
        keys(&self.live(|_| true), true).into_iter().filter_map(of).collect()
    }

    /// The branch each vBucket is on.
    pub(crate) fn branches(&self) -> BTreeMap<Vbid, u64> {
        let logs = self.producer.failover_logs().into_iter();
        logs.filter_map(|(vbid, log)| Some((vbid, log.first()?.vbuuid.0))).collect()
    }

    /// The last changes of documents within a range of seqnos, its end included, that every reader
    /// of the range is given: nothing above it has replaced them, and no collection was emptied.
    /// `first_snapshot_end` is 0 unless the range begins inside of a snapshot from the beginning.
    pub(crate) fn wanted_within(
        &self,
        vbid: Vbid,
        (from, to): (Seqno, Seqno),
        first_snapshot_end: Seqno,
        sees_system: bool,
    ) -> impl Iterator<Item = (u32, &[u8], Seqno)> {
        let is_sure = move |collection: u32, key: &[u8]| {
            let of = self.collections.get(&collection);
            let is_system = of.is_some_and(|of| of.scope == "_system") || key.starts_with(b"_txn:");
            of.is_some_and(|of| of.is_there && !of.was_emptied) && (sees_system || !is_system)
        };
        // Who reads from the beginning, or is still inside of the snapshot that began there, has
        // nothing that its deletions could remove, so the server may have purged them.
        let counts = move |op, seqno| {
            op == Op::Mutation || (from != Seqno::ZERO && seqno > first_snapshot_end)
        };
        self.truth.newest(vbid).into_iter().filter_map(
            move |((collection, key), (seqno, write))| {
                let is_within = seqno > from && seqno <= to;
                (is_within && counts(write.op, seqno) && is_sure(collection, key))
                    .then_some((collection, key, seqno))
            },
        )
    }

    /// A row a reader was given is one it asked for, and true.
    pub(crate) fn check_row(&mut self, row: &Row, sees_system: bool) -> Result<(), String> {
        if !self.truth.knows(row.vbid, row.vbuuid) {
            // It began while a step was under way.
            self.observe(true);
        }
        self.truth.check(row).map_err(|wrong| format!("a row {wrong}"))?;
        let of = self.collections.get(&row.collection);
        let is_system = of.is_some_and(|of| of.scope == "_system");
        if !sees_system && (is_system || row.key.starts_with(b"_txn:")) {
            return Err(format!("a hidden document was shown: {row:?}"));
        }
        Ok(())
    }
}
