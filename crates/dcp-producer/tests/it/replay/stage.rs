//! The embedded cluster a recording is replayed to, and how its history is made on it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use dcp_producer::{Producer, ProducerOptions, VBucketState};
use dcp_test::traces::Scenario;
use dcp_wire::{Feature, Frame, Opaque, Opcode, Seqno, Status, Vbid};

use super::facts::Facts;
use super::history::{Deed, Step, histories};
use super::twins::Twins;
use crate::raw_client::RawClient;

/// User and password of the recordings.
const USER: (&str, &str) = ("@admin", "password");

/// Longer than the documents live that expire in a recording.
const UNTIL_EXPIRED: Duration = Duration::from_secs(2);

/// The cluster of a replay.
pub(super) struct Stage {
    pub(super) producer: Producer,
    pub(super) facts: Facts,
    histories: BTreeMap<u16, Vec<Step>>,
    /// Seqno of each vBucket up to which a branch emptied memory.
    emptied: BTreeMap<u16, u64>,
    /// Steps done of each history.
    done: BTreeMap<u16, usize>,
    /// Node that is written to, and the other one: it has the replica if there is one, else what
    /// the recorded node did not have.
    nodes: [usize; 2],
    dead: BTreeSet<u16>,
    writer: Option<RawClient>,
    /// Writes that are still to be sent: streams find together what is sent together.
    waiting: Vec<(u16, Step)>,
    /// Operations that did not succeed as they did when it was recorded.
    pub(super) refused: Vec<String>,
}

impl Stage {
    /// A cluster as it was before anything was done to it.
    pub(super) async fn set(scenario: &Scenario) -> Self {
        let facts = Facts::of(scenario);
        let mut options = ProducerOptions::default();
        options.username = USER.0.to_owned();
        options.password = USER.1.to_owned();
        options.vbuckets = facts.count();
        options.nodes = 2;
        options.replicas = u8::from(facts.fails_over);
        options.ephemeral = facts.ephemeral;
        // Persisted when the history says so.
        options.persist_delay = Duration::from_secs(24 * 3600);
        options.keeps_compressed = facts.passive_compression;
        options.in_memory = true;
        options.seed = Some(1);
        let producer = Producer::start(options).await.unwrap();
        producer.set_dcp_config(facts.dcp_config());
        let vbid = facts.streamed.first().copied().filter(|&vbid| vbid < facts.count());
        let active = producer.copies_of(Vbid(vbid.unwrap_or_default())).unwrap()[0];
        let mut stage = Self {
            producer,
            histories: histories(scenario),
            emptied: BTreeMap::new(),
            done: BTreeMap::new(),
            nodes: [active, 1 - active],
            dead: BTreeSet::new(),
            writer: None,
            waiting: Vec::new(),
            refused: Vec::new(),
            facts,
        };
        stage.arrange();
        stage
    }

    /// Lets the recorded node have the vBuckets it had.
    fn arrange(&mut self) {
        if !self.facts.fails_over {
            for vbid in 0..self.facts.count() {
                let all = self.facts.vbuckets.as_ref();
                let is_present = all.is_none_or(|all| all.contains(&vbid));
                let node = self.nodes[usize::from(!is_present)];
                self.producer.move_vbucket(Vbid(vbid), node).unwrap();
            }
        }
        for vbid in self.facts.replicas.clone() {
            self.set_state(vbid, VBucketState::Replica);
        }
    }

    pub(super) fn set_state(&mut self, vbid: u16, state: VBucketState) {
        if state == VBucketState::Dead {
            self.dead.insert(vbid);
        }
        // Clients ask for vBuckets there are not.
        drop(self.producer.set_vbucket_state(Vbid(vbid), state));
    }

    pub(super) fn is_alive(&self, vbid: u16) -> bool {
        self.producer.high_seqnos().contains_key(&Vbid(vbid))
    }

    /// Makes a dead vBucket active again, as it was.
    pub(super) fn revive(&mut self, vbid: u16) {
        if self.dead.remove(&vbid) {
            self.set_state(vbid, VBucketState::Active);
        }
    }

    /// Address of the node a connection goes to.
    pub(super) fn address(&self, conn: u32) -> SocketAddr {
        let takes_over = self.facts.fails_over && conn != 0;
        self.address_of(if takes_over { self.nodes[1] } else { self.nodes[0] })
    }

    fn address_of(&self, node: usize) -> SocketAddr {
        let addresses = self.producer.connection_string();
        let all: Vec<_> = addresses.strip_prefix("couchbase://").unwrap().split(',').collect();
        // After a failover only one is left.
        all.get(node).or(all.last()).unwrap().parse().unwrap()
    }

    fn next(&self, vbid: u16) -> Option<&Step> {
        self.histories.get(&vbid)?.get(self.done(vbid))
    }

    pub(super) fn high_seqno(&self, vbid: u16) -> u64 {
        self.producer.high_seqnos().get(&Vbid(vbid)).map_or(0, |seqno| seqno.0)
    }

    /// The branch a vBucket is on.
    fn vbuuid(&self, vbid: u16) -> u64 {
        self.producer.failover_logs()[&Vbid(vbid)][0].vbuuid.0
    }

    /// Whether a stream from `start` begins with what a branch has left on disk only.
    pub(super) fn is_emptied(&self, vbid: u16, start: u64) -> bool {
        self.emptied.get(&vbid).is_some_and(|last| start < *last)
    }

    /// How much of a vBucket's history is done.
    pub(super) fn done(&self, vbid: u16) -> usize {
        self.done.get(&vbid).copied().unwrap_or_default()
    }

    /// How much of a history is done, and the highest seqno, once the burst is that holds `seqno`,
    /// from where it stands and before a node fails.
    pub(super) fn burst_end(&self, vbid: u16, seqno: u64) -> (usize, u64) {
        let (mut done, mut high) = (self.done(vbid), self.high_seqno(vbid));
        for step in self.histories.get(&vbid).into_iter().flatten().skip(done) {
            let is_next = step.begins_burst && high >= seqno;
            if is_next || matches!(step.deed, Deed::Fail) {
                break;
            }
            (done, high) = (done + 1, step.seqno);
        }
        (done, high)
    }

    /// Whether a burst ends with `seqno`, which may be done already.
    pub(super) fn ends_burst(&self, vbid: u16, seqno: u64) -> bool {
        let steps = self.histories.get(&vbid).map_or(&[][..], Vec::as_slice);
        let last = steps.iter().rposition(|step| step.seqno == seqno);
        last.is_some_and(|last| {
            let next = steps.get(last + 1);
            next.is_none_or(|step| step.begins_burst || matches!(step.deed, Deed::Fail))
        })
    }

    /// Whether more is to be done before a stream can have `seqno`.
    pub(super) fn lacks(&self, vbid: u16, seqno: u64) -> bool {
        self.next(vbid).is_some_and(|step| {
            step.seqno <= seqno && !matches!(step.deed, Deed::Fail) && self.high_seqno(vbid) < seqno
        })
    }

    /// Does everything until so many steps are done.
    pub(super) async fn advance_to(&mut self, vbid: u16, done: usize, twins: &mut Twins) {
        while self.done(vbid) < done {
            self.step(vbid, twins).await;
        }
        self.write_waiting(twins).await;
    }

    /// Does what is left of the burst at hand, up to `seqno`; whether there was something to do.
    pub(super) async fn advance_burst(&mut self, vbid: u16, seqno: u64, twins: &mut Twins) -> bool {
        let before = self.done(vbid);
        while let Some(step) = self.next(vbid) {
            let begins_next = matches!(step.deed, Deed::Promote) && step.seqno == seqno;
            let is_next_burst = step.begins_burst && self.done(vbid) > before;
            let is_over = step.seqno > seqno || begins_next || is_next_burst;
            if is_over || matches!(step.deed, Deed::Fail) {
                break;
            }
            self.step(vbid, twins).await;
        }
        self.write_waiting(twins).await;
        self.done(vbid) > before
    }

    /// Does everything until a branch begins.
    pub(super) async fn advance_to_branch(&mut self, vbid: u16, vbuuid: u64, twins: &mut Twins) {
        let Some(history) = self.histories.get(&vbid) else { return };
        let begins = |step: &Step| matches!(step.deed, Deed::Promote) && step.vbuuid == vbuuid;
        let Some(at) = history.iter().position(begins) else { return };
        while self.done(vbid) <= at {
            self.step(vbid, twins).await;
        }
    }

    /// Does everything of vBuckets that no stream shows.
    pub(super) async fn advance_unseen(&mut self, twins: &mut Twins) {
        let unseen = |vbid: &&u16| !self.facts.streamed.contains(*vbid);
        let vbids: Vec<u16> = self.histories.keys().filter(unseen).copied().collect();
        for vbid in vbids {
            while self.next(vbid).is_some() {
                self.step(vbid, twins).await;
            }
        }
        self.write_waiting(twins).await;
    }

    async fn step(&mut self, vbid: u16, twins: &mut Twins) {
        let Some(step) = self.next(vbid).cloned() else { return };
        *self.done.entry(vbid).or_default() += 1;
        let goes_on = self.waiting.last().is_none_or(|(_, last)| last.spreads == step.spreads);
        let is_write = !matches!(step.deed, Deed::Manifest(_) | Deed::Promote | Deed::Fail);
        if !goes_on || !is_write || matches!(step.deed, Deed::Expire { .. }) {
            self.write_waiting(twins).await;
        }
        if !step.spreads && self.facts.fails_over {
            self.producer.set_replica_lag(Vbid(vbid), 1, None).unwrap();
        }
        match &step.deed {
            // One manifest is all vBuckets'.
            Deed::Manifest(_) if self.high_seqno(vbid) >= step.seqno => {}
            Deed::Manifest(model) => {
                self.producer.set_manifest(&model.to_json()).unwrap();
                self.persist(vbid, &step);
            }
            Deed::Promote => self.promote(vbid, step.vbuuid, twins),
            Deed::Fail => {}
            Deed::Expire { .. } => {
                tokio::time::advance(UNTIL_EXPIRED).await;
                self.waiting.push((vbid, step.clone()));
            }
            _ => self.waiting.push((vbid, step.clone())),
        }
        if self.facts.purges.get(&vbid) == Some(&step.seqno) {
            self.write_waiting(twins).await;
            self.producer.compact(Vbid(vbid), Seqno(self.facts.purge_seqno)).unwrap();
        }
        if self.facts.on_disk == Some(step.seqno) {
            self.write_waiting(twins).await;
            self.producer.persist();
        }
        if self.facts.flushed == Some(step.seqno) {
            self.write_waiting(twins).await;
            self.producer.hold_persistence(Vbid(vbid), 0, true).unwrap();
        }
    }

    fn promote(&mut self, vbid: u16, vbuuid: u64, twins: &mut Twins) {
        // A branch closes the checkpoint. A closed one that is persisted stays in the memory of
        // servers before 7.2 only.
        let steps = self.histories.get(&vbid).into_iter().flatten().take(self.done(vbid));
        let (mut is_persisted, mut last) = (true, 0);
        for step in steps {
            (is_persisted, last) = (is_persisted && step.spreads, step.seqno);
        }
        if is_persisted && self.facts.version.is_at_least(7, 2) {
            self.producer.persist();
            self.emptied.insert(vbid, last);
        }
        self.producer.hold_persistence(Vbid(vbid), 0, true).unwrap();
        self.set_state(vbid, VBucketState::Replica);
        self.set_state(vbid, VBucketState::Active);
        twins.vbuuids.bind(vbuuid, self.vbuuid(vbid));
    }

    /// Persists what does after a step.
    fn persist(&self, vbid: u16, step: &Step) {
        let is_flushed = self.facts.flushed.is_none_or(|flushed| step.seqno <= flushed);
        if step.spreads && is_flushed {
            for copy in 0..self.producer.copies_of(Vbid(vbid)).unwrap().len() {
                self.producer.hold_persistence(Vbid(vbid), copy, false).unwrap();
            }
        }
    }

    /// The node went down: it crashed, or was failed over.
    pub(super) async fn fail(&mut self, twins: &mut Twins) {
        let vbids: Vec<u16> = self.histories.keys().copied().collect();
        if self.facts.fails_over {
            self.producer.kill(self.nodes[0]).unwrap();
            self.producer.failover(self.nodes[0], false).unwrap();
            self.nodes[0] = self.nodes[1];
        } else {
            self.producer.restart(self.nodes[0], false).await.unwrap();
            self.arrange();
        }
        self.writer = None;
        // Versions made before are not given again.
        tokio::time::advance(Duration::from_secs(1)).await;
        for vbid in vbids {
            if let Some(step) = self.next(vbid).filter(|step| matches!(step.deed, Deed::Fail)) {
                twins.vbuuids.bind(step.vbuuid, self.vbuuid(vbid));
                *self.done.entry(vbid).or_default() += 1;
            }
        }
    }

    /// Writes what waits for it.
    async fn write_waiting(&mut self, twins: &mut Twins) {
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.is_empty() {
            return;
        }
        let mut out = BytesMut::new();
        let is_legacy = self.producer.dcp_config().server_version.is_legacy();
        for (vbid, step) in &waiting {
            encode(*vbid, step, is_legacy, &mut out);
        }
        if self.writer.is_none() {
            let socket = self.producer.dial(self.address_of(self.nodes[0])).unwrap();
            self.writer = Some(open_writer(socket).await);
        }
        let writer = self.writer.as_mut().unwrap();
        writer.send(&out).await;
        for (vbid, step) in &waiting {
            let answer = writer.receive().await;
            let answer = answer.frame();
            let status = answer.header.status();
            let done = matches!(status, Status::SUCCESS | Status::SUBDOC_SUCCESS_DELETED);
            let expires = matches!(step.deed, Deed::Expire { .. });
            if !done && !expires {
                let (opcode, seqno) = (answer.header.opcode, step.seqno);
                self.refused.push(format!("{opcode} of seqno {seqno} is refused: {status}"));
            }
            if step.cas != 0 && !expires {
                twins.cas.entry(*vbid).or_default().bind(step.cas, answer.header.cas.0);
            }
            if let (true, Some(token)) = (step.vbuuid != 0, answer.extras.first_chunk()) {
                twins.vbuuids.bind(step.vbuuid, u64::from_be_bytes(*token));
            }
        }
        for (vbid, step) in &waiting {
            self.persist(*vbid, step);
        }
    }
}

/// The request that does a step. Servers without collections know keys only as they are.
fn encode(vbid: u16, step: &Step, is_legacy: bool, out: &mut BytesMut) {
    let named = |key: &Vec<u8>| key[usize::from(is_legacy)..].to_vec();
    let request = |opcode| Frame::request(opcode).with_vbid(Vbid(vbid)).with_opaque(Opaque(1));
    let encoded = match &step.deed {
        Deed::Set { key, value, datatype, flags, expiry } => {
            let mut extras = flags.to_be_bytes().to_vec();
            extras.put_u32(*expiry);
            let request = request(Opcode::SET).with_extras(&extras);
            request.with_key(&named(key)).with_value(value).with_datatype(*datatype).encode(out)
        }
        Deed::SetXattr { key, path, value, of_tombstone } => {
            let spec = xattr_spec(path, value);
            // Create; of a tombstone also access deleted and create as deleted.
            let doc_flags: &[u8] = if *of_tombstone { &[0x0d] } else { &[0x01] };
            let request = request(Opcode::SUBDOC_MULTI_MUTATION).with_extras(doc_flags);
            request.with_key(&named(key)).with_value(&spec).encode(out)
        }
        Deed::Delete { key } => request(Opcode::DELETE).with_key(&named(key)).encode(out),
        Deed::Expire { key } => request(Opcode::GET).with_key(&named(key)).encode(out),
        other => panic!("{other:?} is no document's"),
    };
    encoded.unwrap();
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

/// A client of its own that writes documents.
async fn open_writer(socket: dcp_producer::MemoryStream) -> RawClient {
    let mut writer = RawClient::over(socket);
    let features = [
        Feature::MUTATION_SEQNO,
        Feature::XATTR,
        Feature::XERROR,
        Feature::SNAPPY,
        Feature::JSON,
        Feature::COLLECTIONS,
    ];
    writer.hello(&features).await;
    writer.log_in(USER.0, USER.1).await;
    writer.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    writer
}
