//! The cluster, what was written to it, and what befalls it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dcp_producer::{MutationToken, Producer, ProducerOptions, WriteOptions, parse_rules};
use dcp_proto::Op;
use dcp_wire::{CollectionId, Seqno, Vbid};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::table::{DEFAULT, Documents, Row, Table};

/// Keys per collection.
const KEYS: u32 = 24;
/// What may befall a cluster that is calm: persistence, graceful failovers, moves, rebalances and
/// new nodes, replicas that lag, changes of collections.
const CALM: [u32; 12] = [0, 8, 8, 14, 15, 16, 17, 18, 19, 21, 24, 25];
/// The collection that is dropped and made anew.
const COLLECTION: &str = "orders";

/// Operation, collection, key, value and history branch.
type Written = (Op, u32, Vec<u8>, Vec<u8>, u64);

/// A cluster and everything that was ever written to it.
pub(crate) struct World {
    pub(crate) producer: Arc<Producer>,
    /// By vBucket, seqno and CAS.
    writes: HashMap<(Vbid, Seqno, u64), Written>,
    /// Collections there have been, and those there are.
    collections: BTreeMap<u32, bool>,
    /// Nodes that are down or out.
    broken: Vec<usize>,
    written: u64,
    /// Nothing befalls it that a vBucket has to be rolled back for.
    pub(crate) is_calm: bool,
}

impl World {
    pub(crate) async fn new(rng: &mut StdRng) -> Self {
        let mut options = ProducerOptions::default();
        options.in_memory = true;
        options.nodes = rng.random_range(1..=4);
        options.vbuckets = rng.random_range(1..=6);
        options.replicas = rng.random_range(0..=2);
        options.ephemeral = rng.random_bool(0.1);
        // A node without a disk loses what it has with every restart.
        let is_calm = rng.random_bool(0.2) && !options.ephemeral;
        let producer = Producer::start(options).await.expect("a cluster");
        Self {
            producer: Arc::new(producer),
            writes: HashMap::new(),
            collections: BTreeMap::from([(DEFAULT, true)]),
            broken: Vec::new(),
            written: 0,
            is_calm,
        }
    }

    fn any_vbid(&self, rng: &mut StdRng) -> Vbid {
        Vbid(rng.random_range(0..self.producer.num_vbuckets()))
    }

    fn any_node(&self, rng: &mut StdRng) -> usize {
        rng.random_range(0..self.producer.num_nodes() + self.broken.len())
    }

    fn any_document(&self, rng: &mut StdRng) -> (u32, Vec<u8>) {
        let live: Vec<u32> =
            self.collections.iter().filter(|(_, live)| **live).map(|(id, _)| *id).collect();
        let collection = live[rng.random_range(0..live.len())];
        (collection, format!("key-{}", rng.random_range(0..KEYS)).into_bytes())
    }

    /// Writes, removes and expires a few documents.
    pub(crate) fn write(&mut self, count: u32, rng: &mut StdRng) {
        for _ in 0..count {
            let (collection, key) = self.any_document(rng);
            let mut options = WriteOptions::default();
            options.collection_id = CollectionId(collection);
            let (op, value, written) = match rng.random_range(0..10) {
                0..7 => {
                    self.written += 1;
                    let size = *[4, 40, 40, 4000].get(rng.random_range(0..4)).unwrap_or(&4);
                    let value = format!("{:0size$}", self.written).into_bytes();
                    let written = self.producer.upsert(&key, value.clone().into(), options);
                    (Op::Mutation, value, written)
                }
                7..9 => (Op::Deletion, Vec::new(), self.producer.remove(&key, options)),
                _ => (Op::Expiration, Vec::new(), self.producer.expire(&key, options)),
            };
            // Refused where there is no such document, or no node that has the vBucket.
            if let Ok(MutationToken { vbid, vbuuid, seqno, cas }) = written {
                let written = (op, collection, key, value, vbuuid.0);
                self.writes.insert((vbid, seqno, cas.0), written);
            }
        }
    }

    /// Something befalls the cluster; what it was.
    pub(crate) async fn befall(&mut self, rng: &mut StdRng) -> String {
        let (vbid, node) = (self.any_vbid(rng), self.any_node(rng));
        let copy = rng.random_range(0..3);
        let producer = Arc::clone(&self.producer);
        if !self.broken.is_empty() && rng.random_bool(0.3) {
            return self.repair(rng).await;
        }
        let what =
            if self.is_calm { *CALM.choose(rng).unwrap_or(&0) } else { rng.random_range(0..26) };
        match what {
            0..3 => {
                producer.persist();
                "persist".into()
            }
            3..6 => {
                let high = producer.high_seqnos().get(&vbid).copied().unwrap_or_default();
                let to = Seqno(rng.random_range(0..=high.0));
                format!("roll back {vbid} to {to}: {:?}", producer.roll_back(vbid, to).is_ok())
            }
            // Its only copies would go with it.
            8 if self.is_calm && !self.has_two_of_each() => "calm".into(),
            6..8 => self.fail_over(node, false),
            8 => self.fail_over(node, true),
            9..11 => {
                let done = producer.kill(node).is_ok();
                self.broken.push(node);
                format!("kill node {node}: {done}")
            }
            11..14 => self.restart(node, rng.random_bool(0.5)).await,
            14..17 => {
                format!("move {vbid} to {node}: {}", producer.move_vbucket(vbid, node).is_ok())
            }
            17 => format!("rebalance: {}", producer.rebalance().is_ok()),
            18 if producer.num_nodes() < 5 => {
                format!("add a node: {}", producer.add_node().await.is_ok())
            }
            18..21 => {
                let lag = *[None, Some(0), Some(3), Some(10)].get(copy).unwrap_or(&None);
                let done = producer.set_replica_lag(vbid, copy, lag).is_ok();
                format!("{vbid} replica {copy} lags by {lag:?}: {done}")
            }
            21..23 => {
                let hold = rng.random_bool(0.6);
                let done = producer.hold_persistence(vbid, copy, hold).is_ok();
                format!("{vbid} copy {copy} holds persistence {hold}: {done}")
            }
            23 => {
                let high = producer.high_seqnos().get(&vbid).copied().unwrap_or_default();
                format!("purge {vbid} to {high}: {}", producer.purge(vbid, high).is_ok())
            }
            _ => self.change_collections(),
        }
    }

    /// Removals are forgotten by the nodes, up to the newest change of every vBucket.
    pub(crate) fn purge(&self) {
        for (vbid, high) in self.producer.high_seqnos() {
            // Refused where no node has the vBucket.
            let _ = self.producer.purge(vbid, high);
        }
    }

    /// One vBucket loses the newer half of its changes, or less.
    pub(crate) fn lose_tail(&mut self, rng: &mut StdRng) -> String {
        if self.is_calm {
            return "nothing is lost".into();
        }
        let vbid = self.any_vbid(rng);
        let high = self.producer.high_seqnos().get(&vbid).copied().unwrap_or_default();
        let to = Seqno(rng.random_range(high.0 / 2..=high.0));
        format!("roll back {vbid} of {high} to {to}: {}", self.producer.roll_back(vbid, to).is_ok())
    }

    /// The nodes answer and send what they should not, until told otherwise.
    pub(crate) fn misbehave(&self, rng: &mut StdRng) -> &'static str {
        const FAULTS: [&str; 7] = [
            r#"[]"#,
            r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 2},
                "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#,
            r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 3},
                "reaction": {"rollback": {"seqno": 5}}}]"#,
            r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 3}, "reaction": "rollback"}]"#,
            r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 2},
                "reaction": {"not_my_vbucket": {"map": false}}}]"#,
            r#"[{"condition": {"opcode": "DCP_MUTATION", "every": 20},
                "reaction": {"truncate": {"bytes": 30}}}]"#,
            r#"[{"condition": {"opcode": "DCP_NOOP", "every": 3}, "reaction": "drop"}]"#,
        ];
        let mut faults = FAULTS[rng.random_range(0..FAULTS.len())];
        if self.is_calm && faults.contains("rollback") {
            faults = FAULTS[0];
        }
        self.producer.set_faults(parse_rules(faults).expect("rules")).expect("rules");
        faults
    }

    fn has_two_of_each(&self) -> bool {
        let mut vbids = (0..self.producer.num_vbuckets()).map(Vbid);
        vbids.all(|vbid| self.producer.copies_of(vbid).is_ok_and(|copies| copies.len() > 1))
    }

    fn fail_over(&mut self, node: usize, graceful: bool) -> String {
        let done = self.producer.failover(node, graceful).is_ok();
        if done {
            self.broken.push(node);
        }
        format!("fail over node {node}, graceful {graceful}: {done}")
    }

    async fn restart(&mut self, node: usize, clean: bool) -> String {
        let done = self.producer.restart(node, clean).await.is_ok();
        self.broken.retain(|broken| *broken != node);
        format!("restart node {node}, clean {clean}: {done}")
    }

    /// A node that is down or out comes back, and gets its share again.
    async fn repair(&mut self, rng: &mut StdRng) -> String {
        let node = self.broken[rng.random_range(0..self.broken.len())];
        let restarted = self.restart(node, self.is_calm || rng.random_bool(0.5)).await;
        let rebalanced = self.producer.rebalance().is_ok();
        format!("{restarted}, rebalance: {rebalanced}")
    }

    fn change_collections(&mut self) -> String {
        let id = self.collections.iter().find(|(id, live)| **live && **id != DEFAULT);
        if let Some((&id, _)) = id {
            let done = self.producer.drop_collection("_default", COLLECTION).is_ok();
            self.collections.insert(id, !done);
            return format!("drop collection {id}: {done}");
        }
        match self.producer.create_collection("_default", COLLECTION, None) {
            Ok(id) => {
                self.collections.insert(id.0, true);
                format!("create collection {}", id.0)
            }
            Err(error) => error.to_string(),
        }
    }

    /// vBuckets move a few times.
    pub(crate) async fn stir(&self, rng: &mut StdRng) {
        for _ in 0..rng.random_range(0..6) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..30))).await;
            let (vbid, node) = (self.any_vbid(rng), self.any_node(rng));
            // Refused where it is.
            let _ = self.producer.move_vbucket(vbid, node);
        }
    }

    /// All nodes run, and every copy follows.
    pub(crate) async fn heal(&mut self) {
        self.producer.set_faults(Vec::new()).expect("no rules");
        for node in 0..16 {
            if self.broken.contains(&node) {
                self.restart(node, true).await;
            }
        }
        self.broken.clear();
        self.catch_up();
        self.producer.rebalance().expect("all nodes run");
        // Of the copies that were made by that, those whose node had one before lag as that did.
        self.catch_up();
    }

    /// Every copy receives and persists everything.
    fn catch_up(&self) {
        for index in 0..self.producer.num_vbuckets() {
            for copy in 0..4 {
                // Refused where there is no such copy.
                let _ = self.producer.set_replica_lag(Vbid(index), copy, Some(0));
                let _ = self.producer.hold_persistence(Vbid(index), copy, false);
            }
        }
    }

    /// What is in the bucket.
    pub(crate) fn documents(&self) -> Documents {
        let mut documents = Documents::new();
        for (&collection, _) in self.collections.iter().filter(|(_, live)| **live) {
            for key in (0..KEYS).map(|key| format!("key-{key}").into_bytes()) {
                let id = CollectionId(collection);
                if let Some(document) = self.producer.get_from(id, &key) {
                    documents.insert((collection, key), document.value.to_vec());
                }
            }
        }
        documents
    }

    /// Nothing in a table was made up. A copy that has part of a snapshot when it becomes the active
    /// one keeps that part and begins its branch below it, so that the branch of a change may be
    /// one that did not exist when it was written.
    pub(crate) fn check_written(&self, table: &Table) -> Result<(), String> {
        let logs = self.producer.failover_logs();
        let covers = |row: &Row| {
            let log = logs.get(&row.vbid).into_iter().flatten();
            log.into_iter().any(|entry| entry.vbuuid.0 == row.vbuuid && entry.seqno < row.seqno)
        };
        for row in table.rows() {
            let write = self.writes.get(&(row.vbid, row.seqno, row.cas));
            let is_it = |(op, collection, key, value, vbuuid): &Written| {
                (*op, *collection, key, value) == (row.op, row.collection, &row.key, &row.value)
                    && (*vbuuid == row.vbuuid || covers(row))
            };
            if !write.is_some_and(is_it) {
                return Err(format!("{} {} was never written so: {row:?}", row.vbid, row.seqno));
            }
        }
        Ok(())
    }
}
