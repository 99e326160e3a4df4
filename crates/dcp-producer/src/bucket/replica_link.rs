//! Feeds a replica over a DCP connection to the active copy.
//!
//! ```text
//! active copy ─► producer ── packets ──► inbox ──► consumer's end ─► replica
//!                   ▲                                    │
//!                   └──────── requests, acks ────────────┘
//! ```
//!
//! Both ends are the machines that serve sockets. Packets are exchanged in memory, under the lock of
//! the vBucket.

use core::cell::{Cell, Ref, RefCell};
use std::sync::LazyLock;
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use dcp_producer_proto::replica::{self, Completion, NotApplied, ReplicaPosition, ReplicaStore};
use dcp_producer_proto::{
    BucketSource, Connection, ConnectionConfig, Disconnect, FailoverTable, Features, Item,
    MemoryPressure, Privilege, VBucketState,
};
use dcp_wire::message::{DurabilityLevel, Open, OpenFlags, SnapshotMarker, StreamRequestFlags};
use dcp_wire::{
    CollectionId, Datatype, EncodeError, Frame, MAX_BODY_LEN, ManifestUid, Opaque, Opcode, ScopeId,
    Seqno, Status, Vbid,
};

use super::link_faults::LinkState;
use super::source::VBucketView;
use super::vbucket::VBucket;

/// Maximum bytes waiting for a replica. A larger lag is cut short.
pub(super) const INBOX_BYTES: usize = 16 << 20;

/// Flow-control window of a link, large enough that a full inbox never closes it.
const WINDOW: u32 = 32 << 20;

/// Bytes the producer writes at a time.
const BUDGET: usize = 1 << 20;

/// How many streams are requested in a row before the replica is left as it is.
const MAX_STREAMS: u32 = 16;

/// Name of the connection.
const NAME: &[u8] = b"replication";

/// Name under which replicas acknowledge durable writes.
const CONSUMER_NAME: &str = "replica";

/// What both ends agreed on before the connection was opened.
const FEATURES: Features = Features {
    collections: true,
    xerror: true,
    snappy: true,
    json: true,
    unordered_execution: false,
};

/// The constant time of a link: packets are never lost, so noops are not needed.
static LINK_TIME: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A connection between a replica and the active copy of its vBucket.
#[derive(Debug)]
pub(super) struct ReplicaLink {
    producer: Connection,
    consumer: replica::Connection,
    /// On its way to the replica.
    inbox: BytesMut,
    /// Changes in the inbox.
    waiting: u64,
    /// The last change that the producer wrote.
    last_sent: Seqno,
    /// Whether the inbox holds the end of the stream.
    is_ending: bool,
    /// On its way to the active copy; empty between calls unless a fault holds it up. The window
    /// bounds it: it has only acknowledgements of what was received.
    outbox: BytesMut,
    /// Seqno up to which the replica has acknowledged prepares.
    acknowledged: Seqno,
    /// Flow-control window in bytes.
    window: u32,
    pub(super) max_waiting_bytes: usize,
}

impl ReplicaLink {
    /// A connection that is not opened yet.
    pub(super) fn new(faults: &LinkState) -> Self {
        let window = faults.window().unwrap_or(WINDOW);
        let config = replica::Config {
            consumer_name: Some(CONSUMER_NAME.to_owned()),
            buffer_size: window,
            ..replica::Config::default()
        };
        Self {
            producer: Connection::new(ConnectionConfig::default()),
            consumer: replica::Connection::new(&config, FEATURES),
            inbox: BytesMut::new(),
            waiting: 0,
            last_sent: Seqno::ZERO,
            is_ending: false,
            outbox: BytesMut::new(),
            acknowledged: Seqno::ZERO,
            window,
            max_waiting_bytes: INBOX_BYTES,
        }
    }

    /// Seqno up to which the replica has acknowledged prepares.
    pub(super) const fn acknowledged(&self) -> Seqno {
        self.acknowledged
    }

    /// Whether the connection has the window that `faults` ask for.
    pub(super) fn suits(&self, faults: &LinkState) -> bool {
        self.window == faults.window().unwrap_or(WINDOW)
    }

    /// Bytes on their way to the replica.
    #[cfg(test)]
    pub(super) fn waiting_bytes(&self) -> usize {
        self.inbox.len()
    }

    /// Carries packets back and forth until neither side has anything to send, holding back the last
    /// `lag` changes, or more if `faults` say so. Requests a stream with `flags` if there is none.
    ///
    /// # Errors
    /// [`Disconnect`]: one of the two ends closes the connection.
    pub(super) fn carry(
        &mut self,
        active: &mut VBucket,
        replica: &mut VBucket,
        lag: u64,
        faults: &LinkState,
        flags: StreamRequestFlags,
    ) -> Result<(), Disconnect> {
        let lag = lag.max(faults.lag());
        let vbid = active.vbid();
        let active = Feed { copy: RefCell::new(active), acknowledged: Cell::default() };
        let replica = Fed(RefCell::new(replica));
        if self.producer.name().is_none() {
            self.open(&active)?;
        }
        self.producer.notify(vbid);
        let mut streams = 0;
        loop {
            if !self.consumer.has_stream(vbid) {
                if replica.is_active() || streams == MAX_STREAMS {
                    break;
                }
                streams += 1;
                self.add_stream(vbid, flags, &replica)?;
            }
            self.consumer.poll_transmit(&replica, &mut self.outbox)?;
            let asked = !faults.stalls_answers() && self.hand_to_producer(&active)?;
            let made = !faults.stalls_changes() && self.produce(&active);
            let unsent = self.unsent(&active, &replica, faults);
            let delivered =
                !faults.stalls_changes() && self.deliver(&replica, lag.saturating_sub(unsent))?;
            if !(asked || made || delivered) {
                break;
            }
        }
        self.acknowledged = self.acknowledged.max(active.acknowledged.take());
        free(&mut self.inbox);
        free(&mut self.outbox);
        Ok(())
    }

    /// Opens the connection with the flags that nodes use.
    fn open(&mut self, active: &Feed<'_>) -> Result<(), Disconnect> {
        let flags = OpenFlags::PRODUCER
            | OpenFlags::INCLUDE_XATTRS
            | OpenFlags::INCLUDE_DELETE_TIMES
            | OpenFlags::INCLUDE_DELETED_USER_XATTRS;
        let open = Open { flags, name: NAME, value: &[], datatype: Datatype::RAW };
        open.encode(Opaque(0), &mut self.outbox).map_err(too_long)?;
        self.hand_to_producer(active)?;
        // The answer contains nothing that either end needs.
        self.inbox.clear();
        Ok(())
    }

    /// Adds the stream, as the cluster manager does.
    fn add_stream(
        &mut self,
        vbid: Vbid,
        flags: StreamRequestFlags,
        replica: &Fed<'_>,
    ) -> Result<(), Disconnect> {
        let extras = flags.bits().to_be_bytes();
        let request = Frame::request(Opcode::DCP_ADD_STREAM).with_vbid(vbid).with_extras(&extras);
        self.is_ending = false;
        self.consumer.handle_frame(&request, replica, &mut self.outbox)
    }

    /// Passes what the consumer's end wrote to the producer; `false` if it wrote nothing.
    fn hand_to_producer(&mut self, active: &Feed<'_>) -> Result<bool, Disconnect> {
        let packets = core::mem::take(&mut self.outbox);
        let mut rest = &packets[..];
        while let Some((frame, len)) = parse(rest) {
            rest = rest.get(len..).unwrap_or_default();
            let (opcode, is_response) = (frame.header.opcode, frame.header.magic.is_response());
            let end = self.inbox.len();
            match opcode {
                // The answer to the manager.
                Opcode::DCP_ADD_STREAM => {
                    let status = frame.header.status();
                    if !status.is_success() {
                        tracing::debug!(%status, "a replica's stream request was refused");
                    }
                }
                // Consumers ask for version 0, which no server has.
                Opcode::GET_ERROR_MAP if !is_response => {
                    let answer = Frame::response(opcode, Status::KEY_ENOENT);
                    let answer = answer.with_opaque(frame.header.opaque);
                    answer.encode(&mut self.inbox).map_err(too_long)?;
                }
                _ => self.producer.handle_frame(
                    *LINK_TIME,
                    &frame,
                    Some(active),
                    FEATURES,
                    &mut self.inbox,
                )?,
            }
            self.count_from(end);
        }
        let any = !packets.is_empty();
        self.outbox = packets;
        self.outbox.clear();
        Ok(any)
    }

    /// Changes that a narrow window keeps in the active copy: the replica is behind by these, too.
    fn unsent(&self, active: &Feed<'_>, replica: &Fed<'_>, faults: &LinkState) -> u64 {
        if faults.window().is_none() {
            return 0;
        }
        let sent = self.last_sent.max(replica.0.borrow().high_seqno);
        active.copy.borrow().high_seqno.0.saturating_sub(sent.0)
    }

    /// Lets the producer write data for the replica; `false` if it has none.
    fn produce(&mut self, active: &Feed<'_>) -> bool {
        let end = self.inbox.len();
        let sent = self.producer.poll_transmit(*LINK_TIME, active, &mut self.inbox, BUDGET);
        self.count_from(end);
        sent.written > 0 || sent.more
    }

    /// Counts the packets after the first `end` bytes of the inbox.
    fn count_from(&mut self, end: usize) {
        let mut rest = self.inbox.get(end..).unwrap_or_default();
        while let Some((frame, len)) = parse(rest) {
            rest = rest.get(len..).unwrap_or_default();
            if let Some(seqno) = seqno_of_change(&frame) {
                self.waiting += 1;
                self.last_sent = seqno;
            }
            self.is_ending |= frame.header.opcode == Opcode::DCP_STREAM_END;
        }
    }

    /// Delivers the part of the inbox that is due; `false` if nothing is.
    fn deliver(&mut self, replica: &Fed<'_>, lag: u64) -> Result<bool, Disconnect> {
        let mut any = false;
        while let Some((frame, len)) = parse(&self.inbox) {
            let is_behind =
                self.waiting > lag || self.is_ending || self.inbox.len() > self.max_waiting_bytes;
            let is_due = match frame.header.opcode {
                Opcode::DCP_SNAPSHOT_MARKER => is_behind || self.waiting == 0,
                _ => is_behind || seqno_of_change(&frame).is_none(),
            };
            if !is_due {
                return Ok(any);
            }
            self.waiting -= u64::from(seqno_of_change(&frame).is_some());
            self.consumer.handle_frame(&frame, replica, &mut self.outbox)?;
            self.inbox.advance(len);
            any = true;
        }
        Ok(any)
    }
}

/// The first packet in `bytes`. Both ends write whole packets.
fn parse(bytes: &[u8]) -> Option<(Frame<'_>, usize)> {
    Frame::parse(bytes, MAX_BODY_LEN).ok().flatten()
}

/// Seqno of a change; `None` for another packet.
fn seqno_of_change(frame: &Frame<'_>) -> Option<Seqno> {
    let at = match frame.header.opcode {
        _ if frame.header.magic.is_response() => return None,
        Opcode::DCP_MUTATION
        | Opcode::DCP_DELETION
        | Opcode::DCP_EXPIRATION
        | Opcode::DCP_SYSTEM_EVENT
        | Opcode::DCP_PREPARE => 0,
        // Behind the seqno of the prepare.
        Opcode::DCP_COMMIT | Opcode::DCP_ABORT => 8,
        _ => return None,
    };
    let seqno = frame.extras.get(at..)?.first_chunk()?;
    Some(Seqno(u64::from_be_bytes(*seqno)))
}

/// Frees an empty buffer.
fn free(buffer: &mut BytesMut) {
    if buffer.is_empty() && buffer.capacity() > 0 {
        *buffer = BytesMut::new();
    }
}

fn too_long(EncodeError { len, .. }: EncodeError) -> Disconnect {
    Disconnect::ResponseTooLong(len)
}

/// The active copy as the producer sees it.
struct Feed<'a> {
    copy: RefCell<&'a mut VBucket>,
    /// What the replica acknowledged.
    acknowledged: Cell<Seqno>,
}

impl BucketSource for Feed<'_> {
    type VBucket<'a>
        = VBucketView<Ref<'a, VBucket>>
    where
        Self: 'a;

    fn vbucket(&self, vbid: Vbid) -> Option<VBucketView<Ref<'_, VBucket>>> {
        let copy = Ref::map(self.copy.borrow(), |copy| &**copy);
        (copy.vbid() == vbid).then_some(VBucketView(copy))
    }

    fn cluster_map(&self) -> Option<Bytes> {
        None
    }

    fn manifest_uid(&self) -> ManifestUid {
        ManifestUid(0)
    }

    fn has_collection(&self, collection: CollectionId) -> bool {
        self.copy.borrow().collections.contains(collection)
    }

    fn scope_collections(&self, _: ScopeId) -> Option<Vec<CollectionId>> {
        None
    }

    fn has_privilege(&self, _: Privilege) -> bool {
        true
    }

    fn is_warming_up(&self) -> bool {
        false
    }

    fn memory_pressure(&self) -> MemoryPressure {
        MemoryPressure::None
    }

    fn disk_usage_percent(&self) -> u8 {
        0
    }

    fn keeps_history(&self) -> bool {
        self.copy.borrow().settings.keeps_history
    }

    fn retire(&self, _: Vbid) {
        self.copy.borrow_mut().set_state(VBucketState::Dead);
    }

    fn prepares_acknowledged(&self, _: Vbid, seqno: Seqno) {
        self.acknowledged.set(seqno);
    }
}

/// The replica as the consumer's end sees it.
struct Fed<'a>(RefCell<&'a mut VBucket>);

impl Fed<'_> {
    fn is_active(&self) -> bool {
        self.0.borrow().state == VBucketState::Active
    }
}

impl ReplicaStore for Fed<'_> {
    fn state(&self, _: Vbid) -> Option<VBucketState> {
        Some(self.0.borrow().state)
    }

    fn position(&self, _: Vbid) -> Option<ReplicaPosition> {
        Some(self.0.borrow().replica_position())
    }

    fn failover_table(&self, _: Vbid) -> Option<FailoverTable> {
        Some(self.0.borrow().failover.clone())
    }

    fn set_failover_table(&self, _: Vbid, table: FailoverTable) {
        self.0.borrow_mut().failover = table;
    }

    fn drop_newest_branch(&self, _: Vbid) {
        self.0.borrow_mut().drop_newest_branch();
    }

    fn roll_back(&self, _: Vbid, to: Seqno) {
        self.0.borrow_mut().roll_back_replica(to);
    }

    fn begin_snapshot(&self, _: Vbid, marker: &SnapshotMarker) {
        self.0.borrow_mut().begin_snapshot(marker);
    }

    fn apply(&self, _: Vbid, item: Item) {
        self.0.borrow_mut().receive(item);
    }

    fn complete(&self, _: Vbid, completion: &Completion<'_>) -> Result<(), NotApplied> {
        self.0.borrow_mut().receive_completion(completion)
    }

    fn advance(&self, _: Vbid, seqno: Seqno) {
        self.0.borrow_mut().receive_nothing_up_to(seqno);
    }

    fn prepared(&self, _: Vbid) -> Vec<(Seqno, DurabilityLevel)> {
        self.0.borrow().prepared()
    }

    fn set_state(&self, _: Vbid, state: VBucketState) {
        self.0.borrow_mut().take_over(state);
    }
}
