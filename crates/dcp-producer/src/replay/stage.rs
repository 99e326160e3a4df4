//! The embedded cluster a recording is replayed to, and how its history is made on it.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use dcp_proto::producer::VBucketState;
use dcp_test::traces::Scenario;
use dcp_wire::{Cas, Feature, Frame, MAX_BODY_LEN, Opcode, Seqno, Status, Vbid, Vbuuid, sasl};

use super::facts::Facts;
use super::history::{Deed, Step, histories};
use super::twins::Twins;
use crate::bucket::Now;
use crate::chance::Chance;
use crate::kv::{Credentials, Session};
use crate::{Producer, ProducerOptions};

/// User and password of the recordings.
const USER: (&str, &str) = ("@admin", "password");

/// What the cluster knows them by, which takes a while to make.
static CREDENTIALS: LazyLock<Arc<Credentials>> = LazyLock::new(|| {
    Arc::new(Credentials::new(USER.0, USER.1, Credentials::ROUNDS, Arc::default()).unwrap())
});

/// The cluster of a replay.
pub(super) struct Stage {
    pub(super) producer: Producer,
    pub(super) facts: Facts,
    histories: BTreeMap<u16, Vec<Step>>,
    /// Steps done of each history.
    done: BTreeMap<u16, usize>,
    /// Node that is written to, and that has the replica if there is one.
    nodes: [usize; 2],
    failed_over: bool,
    writer: Option<Session>,
    opaque: u32,
    /// Operations that did not succeed as they did when it was recorded.
    pub(super) refused: Vec<String>,
}

impl Stage {
    /// A cluster as it was before anything was done to it.
    pub(super) async fn set(scenario: &Scenario) -> Self {
        let facts = Facts::of(scenario);
        let copies = usize::from(facts.fails_over);
        let options = ProducerOptions {
            username: USER.0.to_owned(),
            password: USER.1.to_owned(),
            vbuckets: facts.count(),
            nodes: 1 + copies,
            replicas: u8::from(facts.fails_over),
            ephemeral: facts.ephemeral,
            // Persisted when the history says so.
            persist_delay: Duration::from_secs(3600),
            keeps_compressed: facts.passive_compression,
            ..ProducerOptions::default()
        };
        let producer = Producer::start(options).await.unwrap();
        producer.set_dcp_config(facts.dcp_config());
        let vbid = facts.streamed.first().copied().filter(|&vbid| vbid < facts.count());
        let nodes = producer.copies_of(Vbid(vbid.unwrap_or_default())).unwrap();
        let stage = Self {
            producer,
            histories: histories(scenario),
            done: BTreeMap::new(),
            nodes: [nodes[0], nodes.last().copied().unwrap()],
            failed_over: false,
            writer: None,
            opaque: 0,
            refused: Vec::new(),
            facts,
        };
        stage.arrange();
        stage
    }

    /// Takes away the vBuckets the recorded node did not have.
    fn arrange(&self) {
        let bucket = &self.producer.cluster.bucket;
        if let Some(present) = &self.facts.vbuckets {
            for vbid in bucket.vbids().filter(|vbid| !present.contains(&vbid.0)) {
                bucket.rearrange(vbid, |copies| copies.clear());
            }
        }
        for &vbid in &self.facts.replicas {
            self.set_state(vbid, VBucketState::Replica);
        }
        if !self.facts.has_map {
            self.producer.cluster.forget_map();
        }
    }

    /// The cluster manager tells the nodes the cluster map.
    pub(super) fn learn_map(&mut self) {
        self.facts.has_map = true;
        self.producer.cluster.learn_map();
    }

    pub(super) fn set_state(&self, vbid: u16, state: VBucketState) {
        self.producer.cluster.bucket.rearrange(Vbid(vbid), |copies| {
            if let Some(copy) = copies.get_mut(0) {
                copy.vbucket.state = state;
            }
        });
    }

    pub(super) fn is_alive(&self, vbid: u16) -> bool {
        let state = self.producer.cluster.bucket.lock(Vbid(vbid)).map(|vbucket| vbucket.state);
        state == Some(VBucketState::Active)
    }

    pub(super) fn drop_vbucket(&self, vbid: u16) {
        self.producer.cluster.bucket.rearrange(Vbid(vbid), |copies| copies.clear());
    }

    /// Makes a vBucket that is not active active again, as it was.
    pub(super) fn revive(&self, vbid: u16) {
        if !self.facts.replicas.contains(&vbid) {
            self.set_state(vbid, VBucketState::Active);
        }
    }

    /// Address of the node a connection went to.
    pub(super) fn address(&self, conn: u32) -> String {
        let node = if self.facts.fails_over && conn != 0 { self.nodes[1] } else { self.nodes[0] };
        let addresses = self.producer.connection_string();
        let all: Vec<_> = addresses.strip_prefix("couchbase://").unwrap().split(',').collect();
        // After a failover only one is left.
        all.get(node).or(all.last()).unwrap().to_string()
    }

    fn next(&self, vbid: u16) -> Option<&Step> {
        self.histories.get(&vbid)?.get(self.done.get(&vbid).copied().unwrap_or_default())
    }

    pub(super) fn high_seqno(&self, vbid: u16) -> u64 {
        self.producer.cluster.bucket.lock(Vbid(vbid)).map_or(0, |vbucket| vbucket.high_seqno.0)
    }

    /// Whether more is to be done before a vBucket can announce `seqno`.
    pub(super) fn lacks(&self, vbid: u16, seqno: u64) -> bool {
        self.next(vbid).is_some_and(|step| {
            step.seqno <= seqno && !matches!(step.deed, Deed::Fail) && self.high_seqno(vbid) < seqno
        })
    }

    /// Does everything up to `seqno`.
    pub(super) fn advance(&mut self, vbid: u16, seqno: u64, twins: &mut Twins) {
        while let Some(step) = self.next(vbid) {
            let begins_next = matches!(step.deed, Deed::Promote) && step.seqno == seqno;
            if step.seqno > seqno || begins_next || matches!(step.deed, Deed::Fail) {
                return;
            }
            self.step(vbid, twins);
        }
    }

    /// Does everything until a branch begins.
    pub(super) fn advance_to_branch(&mut self, vbid: u16, vbuuid: u64, twins: &mut Twins) {
        let Some(history) = self.histories.get(&vbid) else { return };
        let begins = |step: &Step| matches!(step.deed, Deed::Promote) && step.vbuuid == vbuuid;
        let Some(at) = history.iter().position(begins) else { return };
        while self.done.get(&vbid).copied().unwrap_or_default() <= at {
            self.step(vbid, twins);
        }
    }

    /// Does everything of vBuckets that no stream shows.
    pub(super) fn advance_unseen(&mut self, twins: &mut Twins) {
        let unseen = |vbid: &&u16| !self.facts.streamed.contains(*vbid);
        let vbids: Vec<u16> = self.histories.keys().filter(unseen).copied().collect();
        for vbid in vbids {
            while self.next(vbid).is_some() {
                self.step(vbid, twins);
            }
        }
    }

    fn step(&mut self, vbid: u16, twins: &mut Twins) {
        let Some(step) = self.next(vbid).cloned() else { return };
        *self.done.entry(vbid).or_default() += 1;
        if !step.spreads && self.facts.fails_over {
            self.producer.set_replica_lag(Vbid(vbid), 1, None).unwrap();
        }
        let bucket = &self.producer.cluster.bucket;
        match &step.deed {
            Deed::Event(event) => {
                bucket.with(Vbid(vbid), |vbucket| {
                    vbucket.stage_event(Chance::default().now(), event);
                });
            }
            Deed::Manifest(model) => {
                let manifest = model.manifest();
                let now = Chance::default().now();
                let replaced = self.producer.cluster.update_manifest(now, |old| {
                    *old = manifest;
                    Ok(())
                });
                replaced.unwrap();
                if !self.facts.has_map {
                    self.producer.cluster.forget_map();
                }
            }
            Deed::Promote => self.promote(vbid, step.vbuuid, twins),
            Deed::Fail => {}
            _ => self.write(vbid, &step, twins),
        }
        self.after(vbid, &step);
    }

    fn promote(&self, vbid: u16, vbuuid: u64, twins: &mut Twins) {
        let ours = Vbuuid(rand::random_range(1..1u64 << 48));
        twins.vbuuids.bind(vbuuid, ours.0);
        let keeps_checkpoint = self.facts.version.is_legacy();
        self.producer.cluster.bucket.rearrange(Vbid(vbid), |copies| {
            copies.get_mut(0).unwrap().vbucket.stage_promotion(ours, keeps_checkpoint);
        });
    }

    /// Persists, purges and lets leave memory what did after a step.
    fn after(&self, vbid: u16, step: &Step) {
        let bucket = &self.producer.cluster.bucket;
        if step.spreads {
            bucket.each_copy(Vbid(vbid), |vbucket| vbucket.persist());
        }
        if self.facts.purges.get(&vbid) == Some(&step.seqno) {
            let to = Seqno(self.facts.purge_seqno);
            bucket.each_copy(Vbid(vbid), |vbucket| {
                vbucket.stage_purge(to);
                true
            });
        }
        if self.facts.evictions.get(&vbid) == Some(&step.seqno) {
            self.evict(vbid);
        }
    }

    /// Lets everything of a vBucket leave memory.
    pub(super) fn evict(&self, vbid: u16) {
        let bucket = &self.producer.cluster.bucket;
        bucket.each_copy(Vbid(vbid), |vbucket| {
            vbucket.persist_and_evict();
            true
        });
        bucket.changes().announce(Vbid(vbid));
    }

    /// The node went down: it crashed, or was failed over.
    pub(super) async fn fail(&mut self, twins: &mut Twins) {
        let vbids: Vec<u16> = self.histories.keys().copied().collect();
        if self.facts.fails_over {
            self.producer.kill(self.nodes[0]).unwrap();
            self.producer.failover(self.nodes[0], false).unwrap();
            self.nodes[0] = self.nodes[1];
            self.failed_over = true;
        } else {
            self.producer.restart(0, false).await.unwrap();
            self.arrange();
        }
        self.writer = None;
        for vbid in vbids {
            if let Some(step) = self.next(vbid).filter(|step| matches!(step.deed, Deed::Fail)) {
                let vbuuid = self.producer.cluster.bucket.lock(Vbid(vbid)).unwrap().vbuuid();
                twins.vbuuids.bind(step.vbuuid, vbuuid.0);
                *self.done.entry(vbid).or_default() += 1;
            }
        }
    }

    fn write(&mut self, vbid: u16, step: &Step, twins: &mut Twins) {
        let mut now = Chance::default().now();
        let request = Frame::request(match &step.deed {
            Deed::Set { .. } => Opcode::SET,
            Deed::SetXattr { .. } => Opcode::SUBDOC_MULTI_MUTATION,
            Deed::Delete { .. } => Opcode::DELETE,
            _ => Opcode::GET,
        });
        let request = request.with_vbid(Vbid(vbid));
        let answer = match &step.deed {
            Deed::Set { key, value, datatype, flags, expiry } => {
                let mut extras = flags.to_be_bytes().to_vec();
                extras.put_u32(*expiry);
                let request = request.with_extras(&extras).with_key(key).with_value(value);
                self.ask(now, request.with_datatype(*datatype))
            }
            Deed::SetXattr { key, path, value, of_tombstone } => {
                let spec = xattr_spec(path, value);
                // Create; of a tombstone also access deleted and create as deleted.
                let doc_flags: &[u8] = if *of_tombstone { &[0x0d] } else { &[0x01] };
                self.ask(now, request.with_extras(doc_flags).with_key(key).with_value(&spec))
            }
            Deed::Delete { key } => self.ask(now, request.with_key(key)),
            Deed::Expire { key } => {
                now.0 += 2_000_000_000;
                self.ask(now, request.with_key(key))
            }
            other => panic!("{other:?} is no document's"),
        };
        let expires = matches!(step.deed, Deed::Expire { .. });
        let done = matches!(answer.status, Status::SUCCESS | Status::SUBDOC_SUCCESS_DELETED);
        if !done && !expires {
            let (status, opcode) = (answer.status, request.header.opcode);
            self.refused.push(format!("{opcode} of seqno {} is refused: {status}", step.seqno));
        }
        if step.cas != 0 && !expires {
            twins.cas.entry(vbid).or_default().bind(step.cas, answer.cas.0);
        }
        if let (true, Some(token)) = (step.vbuuid != 0, answer.extras.first_chunk()) {
            twins.vbuuids.bind(step.vbuuid, u64::from_be_bytes(*token));
        }
    }

    /// Lets a connection of its own, without a socket, answer a request.
    fn ask(&mut self, now: Now, request: Frame<'_>) -> Answer {
        if self.writer.is_none() {
            self.open_writer();
        }
        let mut out = BytesMut::new();
        let mut packet = Vec::new();
        self.opaque += 1;
        request.with_opaque(dcp_wire::Opaque(self.opaque)).encode(&mut packet).unwrap();
        let (frame, _) = Frame::parse(&packet, MAX_BODY_LEN).unwrap().unwrap();
        self.writer.as_mut().unwrap().handle(now, &frame, false, &mut out);
        let (frame, _) = Frame::parse(&out, MAX_BODY_LEN).unwrap().expect("an answer");
        Answer {
            status: frame.header.status(),
            cas: frame.header.cas,
            extras: frame.extras.to_vec(),
        }
    }

    fn open_writer(&mut self) {
        let credentials = Arc::clone(&CREDENTIALS);
        let cluster = Arc::clone(&self.producer.cluster);
        self.writer = Some(Session::new(cluster, self.nodes[0], credentials));
        let features = [
            Feature::MUTATION_SEQNO,
            Feature::XATTR,
            Feature::XERROR,
            Feature::SNAPPY,
            Feature::JSON,
            Feature::COLLECTIONS,
        ];
        let codes: Vec<u8> = features.iter().flat_map(|code| code.0.to_be_bytes()).collect();
        let now = Chance::default().now();
        let login = sasl::encode_plain(USER.0, USER.1).unwrap();
        for request in [
            Frame::request(Opcode::HELLO).with_value(&codes),
            Frame::request(Opcode::SASL_AUTH).with_key(b"PLAIN").with_value(&login),
            Frame::request(Opcode::SELECT_BUCKET).with_key(b"default"),
        ] {
            assert_eq!(self.ask(now, request).status, Status::SUCCESS);
        }
    }
}

/// What a write was answered.
struct Answer {
    status: Status,
    cas: Cas,
    extras: Vec<u8>,
}

/// Sets an xattr, the way to it included.
fn xattr_spec(path: &str, value: &str) -> Vec<u8> {
    let mut spec = vec![Opcode::SUBDOC_DICT_UPSERT.0, 0x05];
    spec.put_u16(path.len().try_into().unwrap());
    spec.put_u32(value.len().try_into().unwrap());
    spec.put_slice(path.as_bytes());
    spec.put_slice(value.as_bytes());
    spec
}
