//! One stream of one vBucket.
//!
//! ```text
//!                 ┌──────────────────────────────────────────┐
//!                 │ snapshot done                            │
//!                 ▼                                          │
//! (accepted) ► Between ─ not in memory ► Disk snapshot ──────┤
//!                 │ └──── in memory ───► Memory snapshot ────┘
//!                 │
//!                 │ end reached, nothing can pass, vBucket changed, closed
//!                 ▼
//!              Ending ─ STREAM_END sent ► Ended
//! ```
//!
//! A snapshot is announced by its marker when the first message of it is about to be sent, so a
//! snapshot in which nothing is the stream's costs no message at all.

use std::sync::Arc;

use dcp_wire::message::{
    SeqnoAdvanced, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd, StreamEndReason,
};
use dcp_wire::{EncodeError, Seqno, Vbid, Vbuuid};
use tracing::{debug, warn};

use super::filter::{Filter, Passage};
use super::oso;
use super::outlet::Outlet;
use super::rollback::purge_may_hide_deletions;
use super::settings::{Settings, SyncWrites};
use super::shape::Shape;
use super::snapshot::{Items, Next, Sending, Step, Unreadable};
use super::stream_request::Accepted;
use super::{Item, MemoryRead, VBucketSource, VBucketState};
use crate::Snapshot;

/// Why a stream stopped writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// It has more to say, or may have.
    Ready,
    /// It has said everything: wait until its vBucket changes.
    Idle,
    /// Its end was sent.
    Ended,
}

/// Which of the optional fields markers carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MarkerFields {
    purge_seqno: bool,
    replication: bool,
}

#[derive(Debug)]
enum Phase {
    Between,
    Sending(Sending),
    /// Sending a snapshot in the order of the keys.
    SendingByKey(oso::Sending),
    Ending(StreamEndReason),
    Ended,
}

/// One stream of one vBucket: from the answer to its request to its end.
#[derive(Debug)]
pub(super) struct Stream {
    to: StreamAddress,
    shape: Shape,
    filter: Filter,
    fields: MarkerFields,
    /// State and history branch of the vBucket, which the stream does not outlive.
    state: VBucketState,
    vbuuid: Vbuuid,
    /// Which life of the vBucket the stream belongs to.
    incarnation: u64,
    start_seqno: Seqno,
    end_seqno: Seqno,
    /// Snapshot the client is in until the first marker.
    snapshot: Snapshot,
    disk_only: bool,
    ignore_purged: bool,
    client_purge_seqno: Seqno,
    oso: oso::Terms,
    /// Last seqno looked at, sent or not.
    last_read: Seqno,
    /// End of the last marker sent; `None` before the first.
    last_marker_end: Option<Seqno>,
    /// Whether the next marker from memory begins a checkpoint for the client.
    at_checkpoint: bool,
    phase: Phase,
}

impl Stream {
    pub(super) fn new(
        to: StreamAddress,
        accepted: Accepted,
        shape: Shape,
        settings: &Settings,
        oso: oso::Terms,
    ) -> Self {
        let ended = accepted.start_seqno >= accepted.end_seqno;
        Self {
            to,
            shape,
            filter: accepted.filter,
            fields: MarkerFields {
                purge_seqno: settings.purge_seqno_markers,
                replication: settings.sync_writes == SyncWrites::Replication,
            },
            state: accepted.state,
            vbuuid: accepted.failover_log.first().map(|entry| entry.vbuuid).unwrap_or_default(),
            incarnation: accepted.incarnation,
            start_seqno: accepted.start_seqno,
            end_seqno: accepted.end_seqno,
            snapshot: accepted.snapshot,
            disk_only: accepted.disk_only,
            ignore_purged: accepted.ignore_purged,
            client_purge_seqno: accepted.client_purge_seqno,
            oso,
            last_read: accepted.start_seqno,
            last_marker_end: None,
            at_checkpoint: true,
            phase: if ended { Phase::Ending(StreamEndReason::OK) } else { Phase::Between },
        }
    }

    pub(super) const fn address(&self) -> StreamAddress {
        self.to
    }

    pub(super) const fn vbid(&self) -> Vbid {
        self.to.vbid
    }

    /// Whether it still stands in the way of another stream with its stream id.
    pub(super) const fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ending(_) | Phase::Ended)
    }

    /// Stops; only the end itself is still to be sent.
    pub(super) fn end(&mut self, reason: StreamEndReason) {
        if !self.is_live() {
            return;
        }
        debug!(vbid = %self.to.vbid, %reason, last_read = %self.last_read, "stream ends");
        let told = match reason {
            // Internal names for what the client sees as a change of the vBucket.
            StreamEndReason::ROLLBACK => StreamEndReason::STATE_CHANGED,
            // Clients without collections know neither filters nor privileges of collections.
            StreamEndReason::FILTER_EMPTY | StreamEndReason::LOST_PRIVILEGES
                if !self.filter.is_collection_aware() =>
            {
                StreamEndReason::OK
            }
            other => other,
        };
        self.phase = Phase::Ending(told);
    }

    /// Writes messages until there are no more or the outlet takes none. The outlet must take one
    /// when this is called.
    pub(super) fn write(
        &mut self,
        vbucket: Option<&impl VBucketSource>,
        outlet: &mut Outlet<'_>,
    ) -> Pause {
        match vbucket {
            Some(vbucket) if self.is_same(vbucket) => self.write_from(vbucket, outlet),
            _ => {
                self.end(StreamEndReason::STATE_CHANGED);
                self.write_end(outlet)
            }
        }
    }

    fn write_from(&mut self, vbucket: &impl VBucketSource, outlet: &mut Outlet<'_>) -> Pause {
        loop {
            match core::mem::replace(&mut self.phase, Phase::Between) {
                Phase::Between => {
                    if !self.begin_snapshot(vbucket) {
                        return Pause::Idle;
                    }
                }
                Phase::Sending(sending) => {
                    if let Some(pause) = self.write_snapshot(sending, outlet) {
                        return pause;
                    }
                }
                Phase::SendingByKey(sending) => {
                    if let Some(pause) = self.write_by_key(sending, outlet) {
                        return pause;
                    }
                }
                end @ (Phase::Ending(_) | Phase::Ended) => {
                    self.phase = end;
                    return self.write_end(outlet);
                }
            }
        }
    }

    /// Whether the vBucket is still the one the stream was opened on: a change of its state, a
    /// move or a new history branch (after a rollback, say) ends the stream, even if it was undone
    /// since.
    pub(super) fn is_same(&self, vbucket: &impl VBucketSource) -> bool {
        vbucket.incarnation() == self.incarnation
            && vbucket.state() == self.state
            && vbucket.failover_table().newest().vbuuid == self.vbuuid
    }

    fn write_end(&mut self, outlet: &mut Outlet<'_>) -> Pause {
        let Phase::Ending(reason) = self.phase else {
            return Pause::Ended;
        };
        if !outlet.may_send() {
            return Pause::Ready;
        }
        let to = self.to;
        let sent: Result<(), EncodeError> =
            outlet.send(|out, _| StreamEnd { reason }.encode(to, out));
        debug_assert!(sent.is_ok(), "a stream end has a fixed size");
        self.phase = Phase::Ended;
        Pause::Ended
    }

    /// Looks for the next snapshot; `false` if there is nothing yet.
    fn begin_snapshot(&mut self, vbucket: &impl VBucketSource) -> bool {
        if self.disk_only {
            return self.begin_disk_snapshot(vbucket);
        }
        match vbucket.read_memory(self.last_read) {
            MemoryRead::Items { checkpoint_start, begins_checkpoint, items } => {
                self.begin_memory_snapshot(checkpoint_start, begins_checkpoint, items)
            }
            MemoryRead::NeedsBackfill => self.begin_disk_snapshot(vbucket),
            // A filter that names nothing is noticed even when there is nothing to pass it.
            MemoryRead::UpToDate if self.filter.is_exhausted() => {
                self.end(StreamEndReason::FILTER_EMPTY);
                true
            }
            MemoryRead::UpToDate => false,
        }
    }

    fn begin_disk_snapshot(&mut self, vbucket: &impl VBucketSource) -> bool {
        let image = vbucket.open_backfill(self.last_read);
        if self.purge_overtook(image.purge_seqno, vbucket) {
            self.end(StreamEndReason::ROLLBACK);
            return true;
        }
        if image.end_seqno <= self.last_read {
            // With memory to come as well, a write is on its way between the two.
            if self.disk_only {
                self.end(StreamEndReason::OK);
            }
            return self.disk_only;
        }
        let is_first = self.last_read == Seqno::ZERO && self.last_marker_end.is_none();
        if is_first && let Some(sending) = self.oso.open(&self.filter, vbucket) {
            self.phase = Phase::SendingByKey(sending);
            return true;
        }
        let end = if self.filter.is_collection_aware() {
            image.end_seqno
        } else {
            image.default_end_seqno
        };
        let natural_start = Seqno(self.last_read.0.saturating_add(1));
        let items = Items::Disk { rest: image.items, purge_seqno: image.purge_seqno };
        self.begin(items, natural_start, Some(end), image.end_seqno);
        true
    }

    /// Whether deletions the client has not seen were purged since its request was accepted.
    fn purge_overtook(&self, purge_seqno: Seqno, vbucket: &impl VBucketSource) -> bool {
        let collection_high = self.filter.high_seqno(vbucket).unwrap_or_default();
        let (start, client_purge) = (self.last_read, self.client_purge_seqno);
        !self.ignore_purged
            && purge_may_hide_deletions(start, purge_seqno, client_purge, collection_high)
    }

    fn begin_memory_snapshot(
        &mut self,
        checkpoint_start: Seqno,
        begins_checkpoint: bool,
        mut items: Vec<Arc<Item>>,
    ) -> bool {
        let read_up_to = items.last().map_or(Seqno::ZERO, |item| item.seqno);
        if read_up_to <= self.last_read {
            return false;
        }
        self.at_checkpoint |= begins_checkpoint;
        // The last thing that is the stream's decides where its snapshot ends, sent or not.
        let mut end = None;
        items.retain(|item| {
            let passage = self.filter.check(item);
            if passage != Passage::Foreign {
                end = Some(item.seqno);
            }
            passage == Passage::Passes
        });
        let first = items.first().map(|item| item.seqno).or(end).unwrap_or(read_up_to);
        let natural_start = match self.last_marker_end {
            Some(last_end) if begins_checkpoint && checkpoint_start > last_end => {
                checkpoint_start.min(first)
            }
            _ => first,
        };
        self.begin(Items::Memory(items.into_iter()), natural_start, end, read_up_to);
        true
    }

    fn begin(&mut self, items: Items, natural_start: Seqno, end: Option<Seqno>, read_up_to: Seqno) {
        self.phase = Phase::Sending(Sending {
            items,
            natural_start,
            end,
            read_up_to,
            marker_sent: false,
            told: self.last_read,
            next: None,
        });
    }

    /// Writes what the outlet takes of the snapshot; `None` once it is done.
    fn write_snapshot(&mut self, mut sending: Sending, outlet: &mut Outlet<'_>) -> Option<Pause> {
        while outlet.may_send() {
            match self.write_message(&mut sending, outlet) {
                Ok(Step::Sent) => {}
                Ok(Step::Scanned) => break,
                Ok(Step::Done) => {
                    let from_disk = matches!(sending.items, Items::Disk { .. });
                    self.finish_snapshot(sending.read_up_to, from_disk);
                    return None;
                }
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            }
        }
        self.phase = Phase::Sending(sending);
        Some(Pause::Ready)
    }

    /// Writes what the outlet takes of a snapshot in the order of the keys; `None` once it is
    /// done.
    fn write_by_key(
        &mut self,
        mut sending: oso::Sending,
        outlet: &mut Outlet<'_>,
    ) -> Option<Pause> {
        while outlet.may_send() {
            match sending.write_message(&mut self.filter, &self.shape, self.to, outlet) {
                Ok(Step::Sent) => {}
                Ok(Step::Scanned) => break,
                Ok(Step::Done) => {
                    // The client stands at the end of it now, with a whole snapshot.
                    let end = sending.end_seqno;
                    self.start_seqno = end;
                    self.snapshot = Snapshot { start: end, end };
                    self.finish_snapshot(end, true);
                    return None;
                }
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            }
        }
        self.phase = Phase::SendingByKey(sending);
        Some(Pause::Ready)
    }

    fn fail(&mut self, error: Unreadable) {
        warn!(vbid = %self.to.vbid, %error, "stream cannot be read any further");
        self.end(StreamEndReason::BACKFILL_FAIL);
    }

    /// Writes the next message of the snapshot.
    fn write_message(
        &mut self,
        sending: &mut Sending,
        outlet: &mut Outlet<'_>,
    ) -> Result<Step, Unreadable> {
        let next = match sending.next.take() {
            Some(item) => Next::Item(item),
            None => sending.items.next(&mut self.filter)?,
        };
        let to = self.to;
        match next {
            Next::Scanned => return Ok(Step::Scanned),
            Next::Item(item) if !sending.marker_sent => {
                sending.next = Some(item);
                self.write_marker(sending, sending.end.unwrap_or(sending.read_up_to), outlet)?;
            }
            Next::Item(item) => {
                sending.told = item.seqno;
                let shape = &self.shape;
                outlet.send(|out, scratch| shape.write(&item, to, scratch, out))?;
            }
            Next::None => {
                let Some(seqno) = self.closing_seqno(sending) else {
                    return Ok(Step::Done);
                };
                if !sending.marker_sent {
                    self.write_marker(sending, seqno, outlet)?;
                } else {
                    sending.told = seqno;
                    outlet.send(|out, _| SeqnoAdvanced { seqno }.encode(to, out))?;
                }
            }
        }
        Ok(Step::Sent)
    }

    /// The seqno that the client still has to be told at the end of the snapshot, although its
    /// item is none the client gets; `None` if it was told everything, or cannot be told.
    fn closing_seqno(&self, sending: &Sending) -> Option<Seqno> {
        if !self.filter.is_collection_aware() {
            return None;
        }
        if sending.marker_sent {
            return sending.end.filter(|&end| sending.told < end);
        }
        // A client that resumed inside a snapshot waits for its end.
        let is_waiting = self.last_marker_end.is_none() && self.start_seqno < self.snapshot.end;
        if is_waiting && sending.read_up_to >= self.snapshot.end {
            return Some(sending.read_up_to);
        }
        match sending.items {
            Items::Memory(_) => sending.end,
            // The snapshot for a filter that names nothing is announced all the same.
            Items::Disk { .. } => sending.end.filter(|_| self.filter.is_exhausted()),
        }
    }

    fn write_marker(
        &mut self,
        sending: &mut Sending,
        end: Seqno,
        outlet: &mut Outlet<'_>,
    ) -> Result<(), EncodeError> {
        let start = match self.last_marker_end {
            // The first one goes on with the snapshot the client is in.
            None => sending.natural_start.min(self.snapshot.start),
            Some(_) => sending.natural_start,
        };
        let mut marker = SnapshotMarker::new(start, end, SnapshotFlags::empty());
        // Without prepares everything is visible and nothing was ever completed.
        marker.max_visible_seqno = self.fields.replication.then_some(end);
        match sending.items {
            Items::Memory(_) => {
                marker.flags = SnapshotFlags::MEMORY;
                marker.flags.set(SnapshotFlags::CHECKPOINT, self.at_checkpoint);
                self.at_checkpoint = false;
            }
            Items::Disk { purge_seqno, .. } => {
                marker.flags = SnapshotFlags::DISK | SnapshotFlags::CHECKPOINT;
                let zero = self.fields.replication.then_some(Seqno::ZERO);
                marker.high_completed_seqno = zero;
                if self.fields.purge_seqno {
                    marker.purge_seqno = Some(purge_seqno);
                    marker.high_prepared_seqno = zero;
                }
            }
        }
        sending.marker_sent = true;
        sending.end = Some(end);
        self.last_marker_end = Some(end);
        let to = self.to;
        outlet.send(|out, _| marker.encode(to, out))
    }

    fn finish_snapshot(&mut self, read_up_to: Seqno, from_disk: bool) {
        self.last_read = self.last_read.max(read_up_to);
        self.at_checkpoint |= from_disk;
        if self.filter.is_exhausted() {
            self.end(StreamEndReason::FILTER_EMPTY);
        } else if self.last_read >= self.end_seqno || (self.disk_only && from_disk) {
            self.end(StreamEndReason::OK);
        }
    }
}
