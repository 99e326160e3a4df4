//! The consumer's end: what it asks for, takes, refuses and acknowledges.

mod acknowledgements;
mod opening;

use std::cell::RefCell;
use std::rc::Rc;

use bytes::BytesMut;
use dcp_producer_proto::replica::{
    Completion, Config, Connection, NoReplicas, NotApplied, ReplicaPosition, ReplicaStore,
};
use dcp_producer_proto::{
    ConnectionConfig, Disconnect, FailoverTable, Features, Item, ItemKind, ServerVersion, Transmit,
    VBucketState,
};
use dcp_proto::Snapshot;
use dcp_test::bucket::{Bucket, Copies, VBucket};
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    Abort, Commit, Control, DurabilityLevel, FailoverEntry, Mutation, Open, OpenFlags, Prepare,
    SeqnoAdvanced, SetVbucketState, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd,
    StreamEndReason, StreamRequest, StreamRequestFlags, VbucketState, encode_failover_log,
};
use dcp_wire::{
    Cas, CollectionId, Datatype, DocKey, Frame, Opaque, Opcode, RevSeqno, Seqno, Status, Vbid,
    Vbuuid,
};

use crate::client::{COLLECTIONS, Client, LEGACY, frame, packets};

const VB: Vbid = Vbid(3);

/// What a node has of one vBucket, and what was done to it.
struct Copy {
    state: Option<VBucketState>,
    log: FailoverTable,
    high_seqno: u64,
    snapshot: (u64, u64),
    persisted: u64,
    items: Vec<Item>,
    outstanding: Vec<(Seqno, DurabilityLevel)>,
    rolled_back: Vec<u64>,
}

struct Store(RefCell<Copy>);

impl Store {
    fn new() -> Self {
        Self(RefCell::new(Copy {
            state: Some(VBucketState::Replica),
            log: FailoverTable::new(Vbuuid(0xa)),
            high_seqno: 0,
            snapshot: (0, 0),
            persisted: 0,
            items: Vec::new(),
            outstanding: Vec::new(),
            rolled_back: Vec::new(),
        }))
    }

    /// A copy at `high_seqno` in a snapshot, with these branches.
    fn at(high_seqno: u64, snapshot: (u64, u64), log: &[(u64, u64)]) -> Self {
        let store = Self::new();
        {
            let mut copy = store.0.borrow_mut();
            (copy.high_seqno, copy.snapshot) = (high_seqno, snapshot);
            copy.log = table(log);
        }
        store
    }

    fn seqnos(&self) -> Vec<u64> {
        self.0.borrow().items.iter().map(|item| item.seqno.0).collect()
    }
}

fn entries(log: &[(u64, u64)]) -> impl Iterator<Item = FailoverEntry> {
    log.iter().map(|&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) })
}

fn table(log: &[(u64, u64)]) -> FailoverTable {
    FailoverTable::load(entries(log), Vbuuid(0xf), Seqno::ZERO).0
}

impl ReplicaStore for Store {
    fn state(&self, _: Vbid) -> Option<VBucketState> {
        self.0.borrow().state
    }

    fn position(&self, _: Vbid) -> Option<ReplicaPosition> {
        let copy = self.0.borrow();
        Some(ReplicaPosition {
            high_seqno: Seqno(copy.high_seqno),
            snapshot: Snapshot { start: Seqno(copy.snapshot.0), end: Seqno(copy.snapshot.1) },
            persisted_seqno: Seqno(copy.persisted),
        })
    }

    fn failover_table(&self, _: Vbid) -> Option<FailoverTable> {
        Some(self.0.borrow().log.clone())
    }

    fn set_failover_table(&self, _: Vbid, table: FailoverTable) {
        self.0.borrow_mut().log = table;
    }

    fn drop_newest_branch(&self, _: Vbid) {
        let mut copy = self.0.borrow_mut();
        let older: Vec<_> = copy.log.entries().iter().skip(1).copied().collect();
        copy.log = FailoverTable::load(older, Vbuuid(0xf), Seqno::ZERO).0;
    }

    fn roll_back(&self, _: Vbid, to: Seqno) {
        let mut copy = self.0.borrow_mut();
        copy.rolled_back.push(to.0);
        copy.high_seqno = to.0;
        copy.snapshot = (to.0, to.0);
        copy.items.retain(|item| item.seqno <= to);
    }

    fn begin_snapshot(&self, _: Vbid, marker: &SnapshotMarker) {
        self.0.borrow_mut().snapshot = (marker.start_seqno.0, marker.end_seqno.0);
    }

    fn apply(&self, _: Vbid, item: Item) {
        let mut copy = self.0.borrow_mut();
        copy.high_seqno = item.seqno.0;
        copy.items.push(item);
    }

    fn complete(&self, vbid: Vbid, completion: &Completion<'_>) -> Result<(), NotApplied> {
        let Completion { key, prepared_seqno: prepared, seqno, is_commit } = *completion;
        let is_it =
            |item: &&Item| item.seqno == prepared && matches!(item.kind, ItemKind::Prepare { .. });
        let prepare = self.0.borrow().items.iter().find(is_it).cloned();
        let item = match prepare {
            Some(item) => item,
            None if is_commit => return Err(NotApplied),
            None => Item {
                collection_id: key.collection_id,
                key: key.key.to_vec().into(),
                ..dcp_test::bucket::doc(seqno.0, 0)
            },
        };
        let kind = if is_commit {
            ItemKind::Commit { prepared, is_deletion: false }
        } else {
            ItemKind::Abort { prepared }
        };
        self.apply(vbid, Item { kind, seqno, ..item });
        Ok(())
    }

    fn advance(&self, _: Vbid, seqno: Seqno) {
        self.0.borrow_mut().high_seqno = seqno.0;
    }

    fn prepared(&self, _: Vbid) -> Vec<(Seqno, DurabilityLevel)> {
        self.0.borrow().outstanding.clone()
    }

    fn set_state(&self, _: Vbid, state: VBucketState) {
        self.0.borrow_mut().state = Some(state);
    }
}

/// A node's consumer whose manager and producer the test is.
struct Peer {
    connection: Connection,
    store: Store,
    out: BytesMut,
}

const V6: ServerVersion = ServerVersion { major: 6, minor: 0, patch: 5 };

impl Peer {
    fn new(store: Store, config: &Config, features: Features) -> Self {
        Self { connection: Connection::new(config, features), store, out: BytesMut::new() }
    }

    /// One whose stream is open, with all that was asked for before it taken.
    fn streaming(store: Store) -> Self {
        Self::streaming_with(store, COLLECTIONS)
    }

    fn streaming_with(store: Store, features: Features) -> Self {
        let config = Config { consumer_name: Some("n1".into()), ..Config::default() };
        let mut peer = Self::new(store, &config, features);
        let request = peer.begin();
        peer.accept(request.opaque, &[(0xb, 7), (0xa, 0)]);
        assert_eq!(peer.take().len(), 1, "the stream was added");
        peer
    }

    /// Has a stream added; returns its request.
    fn begin(&mut self) -> StreamRequest<'static> {
        self.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
        self.negotiate()
    }

    /// Grants everything, until the stream is requested.
    fn negotiate(&mut self) -> StreamRequest<'static> {
        self.negotiate_with(|_| Status::SUCCESS)
    }

    /// Answers each request by its key, until the stream is requested.
    fn negotiate_with(
        &mut self,
        mut status: impl FnMut(&[u8]) -> Status,
    ) -> StreamRequest<'static> {
        for _ in 0..40 {
            for packet in self.take() {
                let frame = frame(&packet);
                let opaque = frame.header.opaque;
                match frame.header.opcode {
                    Opcode::DCP_STREAM_REQ => {
                        return StreamRequest {
                            value: &[],
                            ..StreamRequest::decode(&frame).unwrap()
                        };
                    }
                    opcode if !frame.header.magic.is_response() => {
                        let answer = Frame::response(opcode, status(frame.key));
                        self.handle(&encoded(answer.with_opaque(opaque))).unwrap();
                    }
                    _ => {}
                }
            }
        }
        panic!("no stream request");
    }

    fn accept(&mut self, opaque: Opaque, log: &[(u64, u64)]) {
        let mut value = Vec::new();
        encode_failover_log(entries(log), &mut value);
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
        self.handle(&encoded(answer.with_opaque(opaque).with_value(&value))).unwrap();
    }

    fn handle(&mut self, packet: &[u8]) -> Result<(), Disconnect> {
        self.connection.handle_frame(&frame(packet), &self.store, &mut self.out)
    }

    /// The packets it has written.
    fn take(&mut self) -> Vec<Vec<u8>> {
        self.connection.poll_transmit(&self.store, &mut self.out).unwrap();
        let bytes = self.out.split();
        packets(&bytes)
    }

    /// The status it answers a packet with; `None` without an answer.
    fn answer(&mut self, packet: &[u8]) -> Option<Status> {
        self.handle(packet).unwrap();
        self.take().first().map(|packet| status(packet))
    }

    /// What it answers a packet with before it closes the connection.
    fn last_words(&mut self, packet: &[u8]) -> (Option<Status>, Disconnect) {
        let reason = self.handle(packet).unwrap_err();
        (self.take().first().map(|packet| status(packet)), reason)
    }
}

fn status(packet: &[u8]) -> Status {
    frame(packet).header.status()
}

fn encoded(frame: Frame<'_>) -> Vec<u8> {
    let mut packet = Vec::new();
    frame.encode(&mut packet).unwrap();
    packet
}

fn add_stream(vbid: Vbid, flags: StreamRequestFlags) -> Vec<u8> {
    let extras = flags.bits().to_be_bytes();
    let request = Frame::request(Opcode::DCP_ADD_STREAM).with_opaque(Opaque(0xadd));
    encoded(request.with_vbid(vbid).with_extras(&extras))
}

/// Where the messages of the first stream go.
const TO: StreamAddress =
    StreamAddress { vbid: VB, opaque: Opaque(1_u32.swap_bytes()), stream_id: None };

fn message(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut packet = Vec::new();
    write(&mut packet);
    packet
}

fn marker(start: u64, end: u64, flags: SnapshotFlags) -> Vec<u8> {
    let is_disk = flags.contains(SnapshotFlags::DISK);
    let marker = SnapshotMarker {
        max_visible_seqno: Some(Seqno(end)),
        high_completed_seqno: is_disk.then_some(Seqno::ZERO),
        ..SnapshotMarker::new(Seqno(start), Seqno(end), flags)
    };
    message(|out| marker.encode(TO, out).unwrap())
}

fn mutation_to(seqno: u64, to: StreamAddress) -> Vec<u8> {
    let mutation = Mutation {
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(1),
        cas: Cas(seqno),
        datatype: Datatype::RAW,
        key: b"\0key",
        value: b"value",
        ..Mutation::default()
    };
    message(|out| mutation.encode(to, out).unwrap())
}

fn mutation(seqno: u64) -> Vec<u8> {
    mutation_to(seqno, TO)
}

fn prepare(seqno: u64, level: DurabilityLevel) -> Vec<u8> {
    let prepare = Prepare {
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(1),
        cas: Cas(seqno),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        lock_time: 0,
        nru: 0,
        deleted: false,
        level,
        key: b"\0key",
        value: b"value",
    };
    message(|out| prepare.encode(TO, out).unwrap())
}

fn commit(prepared: u64, seqno: u64) -> Vec<u8> {
    let (prepared_seqno, commit_seqno) = (Seqno(prepared), Seqno(seqno));
    let commit = Commit { prepared_seqno, commit_seqno, key: b"\0key" };
    message(|out| commit.encode(TO, out).unwrap())
}

#[test]
fn packet_of_no_stream_is_answered_and_counted() {
    let unknown = StreamAddress { vbid: Vbid(9), ..TO };
    let other = StreamAddress { opaque: Opaque(99), ..TO };
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.answer(&mutation_to(1, unknown)), Some(Status::DCP_STREAM_NOT_FOUND));
    assert_eq!(peer.answer(&mutation_to(1, other)), Some(Status::OPAQUE_NO_MATCH));
    let config = Config { server_version: V6, ..Config::default() };
    let mut older = Peer::new(Store::new(), &config, COLLECTIONS);
    let request = older.begin();
    older.accept(request.opaque, &[(0xb, 0)]);
    older.take();
    assert_eq!(older.answer(&mutation_to(1, unknown)), Some(Status::KEY_ENOENT));
    assert_eq!(older.answer(&mutation_to(1, other)), Some(Status::KEY_EEXISTS));
    assert!(peer.store.seqnos().is_empty() && older.store.seqnos().is_empty());
}

#[test]
fn change_has_to_follow_on_what_came_before_it() {
    use SnapshotFlags as F;
    let begun = [marker(5, 8, F::MEMORY), mutation(6)];
    for (packet, seqno) in [
        (mutation(6), 6),
        (mutation(5), 5),
        (mutation(4), 4),
        (mutation(9), 9),
        (marker(5, 6, F::MEMORY), 6),
    ] {
        let mut peer = Peer::streaming(Store::at(4, (4, 4), &[(0xa, 0)]));
        begun.iter().for_each(|packet| assert_eq!(peer.answer(packet), None));
        let (status, reason) = peer.last_words(&packet);
        let expected = Disconnect::OutOfRange { vbid: VB, seqno: Seqno(seqno) };
        assert_eq!((status, reason), (Some(Status::ERANGE), expected), "{seqno}");
    }
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.answer(&marker(0, u64::MAX, F::MEMORY)), None);
    assert_eq!(peer.answer(&mutation((1 << 63) - 1)), None, "the highest seqno there is");
    assert_eq!(peer.last_words(&mutation(1 << 63)).0, Some(Status::ERANGE), "no seqno is so high");
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.last_words(&mutation(1)).0, Some(Status::ERANGE), "no marker before it");
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.answer(&marker(9, 8, F::MEMORY)), Some(Status::EINVAL), "sm_33");
    // What begins in the middle of what is known and goes on is a snapshot like any other, and so is
    // one that begins where the copy stands.
    for packet in [marker(1, 3, F::MEMORY), mutation(3), marker(2, 5, F::MEMORY), mutation(5)] {
        assert_eq!(peer.answer(&packet), None);
    }
    assert_eq!(peer.answer(&marker(5, 5, F::MEMORY)), None);
    let advanced = message(|out| SeqnoAdvanced { seqno: Seqno(9) }.encode(TO, out).unwrap());
    for packet in [marker(6, 9, F::MEMORY), mutation(7), advanced] {
        assert_eq!(peer.answer(&packet), None);
    }
    assert_eq!((peer.store.seqnos(), peer.store.0.borrow().high_seqno), (vec![3, 5, 7], 9));
}

#[test]
fn cm_19_a_marker_that_is_of_no_use_ends_the_connection() {
    let disk = SnapshotMarker::new(Seqno(1), Seqno(5), SnapshotFlags::DISK);
    let v2 = SnapshotMarker { high_completed_seqno: Some(Seqno(0)), ..disk };
    let above = Some(Seqno(6));
    for marker in [
        disk,
        SnapshotMarker { max_visible_seqno: above, ..v2 },
        SnapshotMarker { purge_seqno: above, ..v2 },
        SnapshotMarker { high_prepared_seqno: above, ..v2 },
    ] {
        let mut peer = Peer::streaming(Store::new());
        let packet = message(|out| marker.encode(TO, out).unwrap());
        assert_eq!(peer.last_words(&packet).1, Disconnect::BadMarker(VB), "{marker:?}");
    }
    let mut peer = Peer::streaming(Store::new());
    let packet = message(|out| v2.encode(TO, out).unwrap());
    assert_eq!(peer.answer(&packet), None);
    // A node that takes no part in durable writes needs nothing of them.
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    let request = peer.begin();
    peer.accept(request.opaque, &[(0xb, 0)]);
    peer.take();
    assert_eq!(peer.answer(&message(|out| disk.encode(TO, out).unwrap())), None);
}

#[test]
fn replica_and_pending_copies_take_changes_and_no_others_do() {
    use VBucketState::{Active, Dead, Pending, Replica};
    for (state, answer) in [
        (Some(Replica), None),
        (Some(Pending), None),
        (Some(Active), Some(Status::NOT_MY_VBUCKET)),
        (Some(Dead), Some(Status::NOT_MY_VBUCKET)),
        (None, Some(Status::NOT_MY_VBUCKET)),
    ] {
        let mut peer = Peer::streaming(Store::new());
        assert_eq!(peer.answer(&marker(0, 1, SnapshotFlags::MEMORY)), None);
        peer.store.0.borrow_mut().state = state;
        assert_eq!(peer.answer(&mutation(1)), answer, "{state:?}");
        assert_eq!(peer.answer(&marker(0, 2, SnapshotFlags::MEMORY)), answer, "{state:?}");
    }
    for (state, answer) in [(Some(Active), true), (None, true), (Some(Replica), false)] {
        let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
        peer.store.0.borrow_mut().state = state;
        peer.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
        let refused = peer.take().first().map(|packet| status(packet));
        assert_eq!(refused == Some(Status::NOT_MY_VBUCKET), answer, "{state:?}");
    }
}

#[test]
fn packets_that_are_malformed_are_answered_as_such() {
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.answer(&marker(0, 9, SnapshotFlags::MEMORY)), None);
    for opcode in
        [0x51, 0x52, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5b, 0x5c, 0x5f, 0x60, 0x62, 0x63, 0x64]
    {
        let request = Frame::request(Opcode(opcode)).with_vbid(VB).with_opaque(TO.opaque);
        let packet = encoded(request.with_extras(&[1, 2, 3]));
        assert_eq!(peer.answer(&packet), Some(Status::EINVAL), "{opcode:#x}");
    }
    let nowhere = Mutation { seqno: Seqno(1), key: b"\x01key", ..Mutation::default() };
    let packet = message(|out| nowhere.encode(TO, out).unwrap());
    assert_eq!(peer.answer(&packet), Some(Status::EINVAL), "a reserved collection");
    for (opcode, status) in [
        (Opcode::DCP_CONTROL, Status::EINVAL),
        (Opcode::DCP_FLUSH, Status::NOT_SUPPORTED),
        (Opcode::DCP_CACHE_TRANSFER, Status::UNKNOWN_COMMAND),
        (Opcode::DCP_CACHE_TRANSFER_END, Status::UNKNOWN_COMMAND),
    ] {
        assert_eq!(peer.answer(&encoded(Frame::request(opcode))), Some(status), "{opcode}");
    }
    for opcode in [Opcode::DCP_STREAM_REQ, Opcode::DCP_GET_FAILOVER_LOG, Opcode::DCP_BUFFER_ACK] {
        let mut peer = Peer::streaming(Store::new());
        let reason = peer.handle(&encoded(Frame::request(opcode))).unwrap_err();
        assert_eq!(reason, Disconnect::UnexpectedRequest(opcode));
    }
}

#[test]
fn key_without_its_collection_has_1_to_250_bytes() {
    for (len, is_taken) in [(0, false), (1, true), (250, true), (251, false)] {
        let mut peer = Peer::streaming_with(Store::new(), LEGACY);
        assert_eq!(peer.answer(&marker(0, 9, SnapshotFlags::MEMORY)), None);
        let key = vec![b'k'; len];
        let write = Mutation { seqno: Seqno(1), key: &key, ..Mutation::default() };
        let packet = message(|out| write.encode(TO, out).unwrap());
        let refused = (!is_taken).then_some(Status::EINVAL);
        assert_eq!(peer.answer(&packet), refused, "{len} bytes");
        assert_eq!(peer.store.0.borrow().items.len(), usize::from(is_taken), "{len} bytes");
    }
}

#[test]
fn takeover_changes_the_state_step_by_step() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    peer.handle(&add_stream(VB, StreamRequestFlags::TAKE_OVER)).unwrap();
    let request = peer.negotiate();
    assert_eq!(request.flags, StreamRequestFlags::TAKE_OVER);
    peer.accept(request.opaque, &[(0xb, 0)]);
    peer.take();
    for (state, is) in [
        (VbucketState::PENDING, VBucketState::Pending),
        (VbucketState::ACTIVE, VBucketState::Active),
        (VbucketState::REPLICA, VBucketState::Replica),
        (VbucketState::DEAD, VBucketState::Dead),
    ] {
        let packet = message(|out| SetVbucketState { state }.encode(TO, out).unwrap());
        assert_eq!(peer.answer(&packet), Some(Status::SUCCESS));
        assert_eq!(peer.store.0.borrow().state, Some(is));
    }
    let end = StreamEnd { reason: StreamEndReason::OK };
    assert_eq!(peer.answer(&message(|out| end.encode(TO, out).unwrap())), None);
    assert!(!peer.connection.has_stream(VB));
}

#[test]
fn streams_are_added_once_and_closed_once() {
    let mut peer = Peer::streaming(Store::new());
    assert!(peer.connection.has_stream(VB) && !peer.connection.has_stream(Vbid(4)));
    let add = add_stream(VB, StreamRequestFlags::empty());
    assert_eq!(peer.answer(&add), Some(Status::KEY_EEXISTS));
    let close = encoded(Frame::request(Opcode::DCP_CLOSE_STREAM).with_vbid(VB));
    assert_eq!(peer.answer(&close), Some(Status::SUCCESS));
    assert_eq!(peer.answer(&close), Some(Status::KEY_ENOENT));
    assert_eq!(peer.answer(&mutation(1)), Some(Status::DCP_STREAM_NOT_FOUND));
    peer.handle(&add).unwrap();
    assert_eq!(peer.negotiate().start_seqno, Seqno::ZERO);
}

#[test]
fn stream_closed_before_its_request_leaves_the_others_theirs() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    for vbid in [VB, Vbid(4)] {
        peer.handle(&add_stream(vbid, StreamRequestFlags::empty())).unwrap();
    }
    peer.handle(&encoded(Frame::request(Opcode::DCP_CLOSE_STREAM).with_vbid(VB))).unwrap();
    assert_eq!(peer.negotiate().vbid, Vbid(4));
}

#[test]
fn answer_to_a_closed_stream_is_no_answer_to_another() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    let closed = peer.begin();
    peer.handle(&encoded(Frame::request(Opcode::DCP_CLOSE_STREAM).with_vbid(VB))).unwrap();
    peer.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
    let request = peer.negotiate();
    assert_ne!(request.opaque, closed.opaque);
    let refused = Frame::response(Opcode::DCP_STREAM_REQ, Status::ETMPFAIL);
    assert_eq!(peer.answer(&encoded(refused.with_opaque(closed.opaque))), None);
    peer.accept(request.opaque, &[(0xb, 0)]);
    assert_eq!(peer.take().len(), 1, "the stream was added");
    assert_eq!(peer.answer(&encoded(refused.with_opaque(request.opaque))), None, "open already");
    assert!(peer.connection.has_stream(VB));
}

#[test]
fn stream_request_of_a_replica_sends_its_position() {
    for (store, expected) in [
        (Store::at(0, (0, 0), &[(0xa, 0)]), (0, 0, 0, 0)),
        (Store::at(7, (5, 7), &[(0xa, 3), (0xb, 0)]), (7, 0xa, 7, 7)),
        (Store::at(7, (5, 9), &[(0xa, 3)]), (7, 0xa, 5, 9)),
        (Store::at(7, (8, 9), &[(0xa, 3)]), (7, 0xa, 7, 9)),
    ] {
        let mut peer = Peer::new(store, &Config::default(), COLLECTIONS);
        let request = peer.begin();
        let StreamRequest { start_seqno, end_seqno, vbuuid, .. } = request;
        let (start, end) = (request.snapshot_start.0, request.snapshot_end.0);
        assert_eq!((start_seqno.0, vbuuid.0, start, end), expected);
        assert_eq!(end_seqno, Seqno::MAX);
    }
}

/// The answer to a stream request, and what is asked for next.
fn after_rollback(peer: &mut Peer, request: &StreamRequest<'_>, to: u64) -> StreamRequest<'static> {
    let value = to.to_be_bytes();
    let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::ROLLBACK);
    peer.handle(&encoded(answer.with_opaque(request.opaque).with_value(&value))).unwrap();
    let again = peer.negotiate();
    assert_ne!(again.opaque, request.opaque);
    again
}

#[test]
fn rollback_is_carried_out_until_the_producer_agrees() {
    let mut peer = Peer::new(Store::at(9, (9, 9), &[(0xa, 0)]), &Config::default(), COLLECTIONS);
    let first = peer.begin();
    let second = after_rollback(&mut peer, &first, 6);
    assert_eq!((second.start_seqno.0, second.snapshot_end.0), (6, 6));
    let third = after_rollback(&mut peer, &second, 0);
    assert_eq!((third.start_seqno.0, third.vbuuid.0), (0, 0));
    assert_eq!(peer.store.0.borrow().rolled_back, [6, 0]);
    peer.accept(third.opaque, &[(0xc, 0)]);
    let added = peer.take();
    assert_eq!(frame(&added[0]).header.opaque, Opaque(0xadd), "the manager is told");
    assert_eq!(frame(&added[0]).extras, third.opaque.0.swap_bytes().to_be_bytes());
    assert_eq!(peer.store.0.borrow().log, table(&[(0xc, 0)]));
}

#[test]
fn cm_15_an_unwritten_branch_is_dropped_before_any_data() {
    let store = Store::at(50, (50, 50), &[(0xa, 50), (0xb, 0)]);
    let mut peer = Peer::new(store, &Config::default(), COLLECTIONS);
    let first = peer.begin();
    assert_eq!(first.vbuuid, Vbuuid(0xa));
    let second = after_rollback(&mut peer, &first, 0);
    assert_eq!((second.vbuuid, second.start_seqno), (Vbuuid(0xb), Seqno(50)));
    assert!(peer.store.0.borrow().rolled_back.is_empty());
}

#[test]
fn cm_15_unwritten_branch_is_dropped_only_above_another_for_rollback_to_0() {
    for (why, log, to) in [
        ("to a seqno", &[(0xa, 50), (0xb, 0)][..], 6),
        ("written", &[(0xa, 40), (0xb, 0)], 0),
        ("the only one", &[(0xa, 50)], 0),
    ] {
        let store = Store::at(50, (50, 50), log);
        let mut peer = Peer::new(store, &Config::default(), COLLECTIONS);
        let first = peer.begin();
        let second = after_rollback(&mut peer, &first, to);
        assert_eq!(second.start_seqno, Seqno(to), "{why}");
        assert_eq!(peer.store.0.borrow().rolled_back, [to], "{why}");
    }
}

#[test]
fn cm_13_and_cm_14_a_malformed_answer_ends_the_connection() {
    for (status, len) in
        [(Status::SUCCESS, 0), (Status::SUCCESS, 20), (Status::ROLLBACK, 7), (Status::ROLLBACK, 16)]
    {
        let store = Store::at(9, (9, 9), &[(0xa, 0)]);
        let mut peer = Peer::new(store, &Config::default(), COLLECTIONS);
        let request = peer.begin();
        let value = vec![1; len];
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, status).with_opaque(request.opaque);
        let reason = peer.handle(&encoded(answer.with_value(&value))).unwrap_err();
        assert_eq!(reason, Disconnect::MalformedResponse(Opcode::DCP_STREAM_REQ));
    }
    // One that rolls nothing back would be asked for ever.
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    let request = peer.begin();
    let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::ROLLBACK);
    let answer = answer.with_opaque(request.opaque).with_value(&[0; 8]);
    assert_eq!(peer.answer(&encoded(answer)), Some(Status::ROLLBACK));
    assert!(!peer.connection.has_stream(VB));
}

#[test]
fn stream_that_is_refused_is_reported_to_the_manager() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    let request = peer.begin();
    let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::ETMPFAIL);
    assert_eq!(peer.answer(&encoded(answer.with_opaque(request.opaque))), Some(Status::ETMPFAIL));
    assert!(!peer.connection.has_stream(VB));
}

#[test]
fn commit_of_nothing_ends_the_connection() {
    let mut peer = Peer::streaming(Store::new());
    assert_eq!(peer.answer(&marker(0, 2, SnapshotFlags::MEMORY)), None);
    let reason = Disconnect::NotPrepared { vbid: VB, seqno: Seqno(2) };
    assert_eq!(peer.last_words(&commit(1, 2)), (Some(Status::KEY_ENOENT), reason));
}

#[test]
fn node_without_copies_takes_nothing() {
    let key = DocKey { collection_id: CollectionId::DEFAULT, key: b"key" };
    let committed = Completion { key, prepared_seqno: Seqno(1), seqno: Seqno(2), is_commit: true };
    assert_eq!(NoReplicas.state(VB), None);
    assert_eq!(NoReplicas.complete(VB, &committed), Err(NotApplied));
}
