//! How a stream finds, announces and sends its snapshots.

use std::sync::Arc;

use dcp_wire::message::{SeqnoAdvanced, SnapshotFlags, SnapshotMarker, StreamEndReason};
use dcp_wire::{EncodeError, Seqno};
use tracing::warn;

use super::filter::Passage;
use super::oso;
use super::output::Output;
use super::read_ahead::Next;
use super::read_ahead::{CheckpointRest, DiskItems};
use super::rollback::purge_may_hide_deletions;
use super::snapshot::{Items, Sending, Step, Unreadable};
use super::stream::{Pause, Phase, Stream};
use super::{Backfill, CheckpointItems, Cursor, DurableSeqnos, MemoryRead, VBucketSource};
use dcp_proto::Snapshot;

/// What a stream has read of a checkpoint in memory.
struct CheckpointRead {
    /// The items to send.
    items: CheckpointRest,
    /// Whether it begins here.
    is_new: bool,
    is_historical: bool,
    /// Highest seqno up to the end of anything but a prepare or an abort.
    max_visible: Seqno,
    /// The first item to send.
    first: Option<Seqno>,
    /// Last seqno that belongs to the stream, sent or not.
    end: Option<Seqno>,
    /// Last seqno.
    read_up_to: Seqno,
}

impl Stream {
    /// Looks for the next snapshot; `Some` if there is nothing yet, or it has to be read from disk
    /// and that must wait.
    pub(super) fn begin_snapshot(
        &mut self,
        vbucket: &impl VBucketSource,
        may_backfill: bool,
    ) -> Option<Pause> {
        let begun = |has_begun: bool| (!has_begun).then_some(Pause::Idle);
        if self.disk_only && !may_backfill {
            return Some(Pause::BeforeBackfill);
        }
        if self.disk_only {
            return begun(self.begin_disk_snapshot(vbucket));
        }
        if self.cursor.is_none() {
            self.take_place(self.last_read, vbucket);
        }
        match vbucket.read_memory(self.last_read) {
            read @ MemoryRead::Items { .. } => begun(self.begin_memory_snapshot(read, vbucket)),
            MemoryRead::NeedsBackfill if !may_backfill => Some(Pause::BeforeBackfill),
            MemoryRead::NeedsBackfill => begun(self.begin_disk_snapshot(vbucket)),
            // An exhausted filter is detected even without new items.
            MemoryRead::UpToDate if self.filter.is_exhausted() => {
                self.end(StreamEndReason::FILTER_EMPTY);
                None
            }
            MemoryRead::UpToDate => Some(Pause::Idle),
        }
    }

    fn begin_disk_snapshot(&mut self, vbucket: &impl VBucketSource) -> bool {
        let image = vbucket.open_backfill(self.last_read);
        if self.purge_overtook(image.purge_seqno, vbucket) {
            self.end(StreamEndReason::ROLLBACK);
            return true;
        }
        if image.end_seqno <= self.last_read {
            // Memory has items as well, so a write is in progress between the two.
            if self.disk_only {
                self.end(StreamEndReason::OK);
            }
            return self.disk_only;
        }
        let is_first = self.last_read == Seqno::ZERO && self.last_marker_end.is_none();
        if is_first && let Some(sending) = self.oso.open(&self.filter, vbucket) {
            // In this order servers send them all.
            self.filter.stop_skipping();
            self.phase = Phase::SendingByKey(sending);
            return true;
        }
        if !self.disk_only {
            // Items after the image are read from memory, if it can hold them.
            self.take_place(image.end_seqno, vbucket);
        }
        let natural_start = Seqno(self.last_read.0.saturating_add(1));
        // If the disk has only the beginning of a snapshot, the rest comes from memory.
        let open_end = vbucket.open_snapshot_end().filter(|_| !self.disk_only);
        let history = vbucket.history_start().filter(|_| self.fields.history);
        self.phase = Phase::Sending(match history {
            None => self.disk_snapshot(image, natural_start, false).ending_at(open_end),
            Some(start) if start <= natural_start => {
                let image = vbucket.open_history(self.last_read);
                self.disk_snapshot(image, natural_start, true)
            }
            Some(start) => self.disk_snapshot_before(start, image, vbucket),
        });
        true
    }

    /// Registers a cursor in the vBucket's memory after `position`.
    fn take_place(&mut self, position: Seqno, vbucket: &impl VBucketSource) {
        let cursor = Arc::new(Cursor::new(position, self.is_droppable));
        vbucket.register_cursor(&cursor);
        self.cursor = Some(cursor);
    }

    fn disk_snapshot(&self, image: Backfill, natural_start: Seqno, is_history: bool) -> Sending {
        let end = if self.filter.is_collection_aware() {
            image.end_seqno
        } else if self.filter.view().sync_writes {
            image.default_high_seqno
        } else {
            image.default_end_seqno
        };
        let rest = DiskItems::new(image.items);
        let (purge_seqno, superseded) = (image.purge_seqno, image.superseded);
        let items = Items::Disk { rest, purge_seqno, superseded };
        let sending = Sending::new(items, natural_start, Some(end), image.end_seqno);
        Sending { durable: image.durable, is_history, ..sending }
    }

    /// A snapshot in two parts with the same end: changes from before `start`, where the disk began
    /// to keep every version, and those versions.
    fn disk_snapshot_before(
        &self,
        start: Seqno,
        mut image: Backfill,
        vbucket: &impl VBucketSource,
    ) -> Sending {
        let before = Seqno(start.0.saturating_sub(1));
        let history = self.disk_snapshot(vbucket.open_history(before), start, true);
        image.items = Box::new(image.items.take_while(move |item| match item {
            Ok(item) => item.seqno < start,
            Err(_) => true,
        }));
        let natural_start = Seqno(self.last_read.0.saturating_add(1));
        let first = self.disk_snapshot(image, natural_start, false);
        Sending { read_up_to: before, then: Some(Box::new(history)), ..first }
    }

    /// Whether deletions the client has not seen were purged since its request was accepted.
    fn purge_overtook(&self, purge_seqno: Seqno, vbucket: &impl VBucketSource) -> bool {
        let collection_high = self.filter.high_seqno(vbucket).unwrap_or_default();
        let (start, client_purge) = (self.last_read, self.client_purge_seqno);
        !self.ignore_purged
            && purge_may_hide_deletions(start, purge_seqno, client_purge, collection_high)
    }

    fn begin_memory_snapshot(&mut self, read: MemoryRead, vbucket: &impl VBucketSource) -> bool {
        // This is the rest of a snapshot that began with what the replica had on disk.
        let open_end = self.last_marker_end.filter(|&end| self.last_read < end);
        let Some(mut checkpoint) = self.read_checkpoint(read, open_end) else {
            return false;
        };
        // Servers read all of memory at once, so a checkpoint of which nothing is sent gets no
        // marker if another one follows.
        while checkpoint.first.is_none()
            && open_end.is_none()
            && checkpoint.read_up_to < self.end_seqno
            && let next @ MemoryRead::Items { is_historical, .. } =
                vbucket.read_memory(checkpoint.read_up_to)
            && is_historical == checkpoint.is_historical
            && let Some(next) = self.read_checkpoint(next, None)
        {
            checkpoint = CheckpointRead { end: next.end.or(checkpoint.end), ..next };
        }
        let CheckpointRead { items, is_historical, max_visible, first, read_up_to, .. } =
            checkpoint;
        let end = open_end.filter(|&open_end| open_end == read_up_to).or(checkpoint.end);
        if self.is_by_key && checkpoint.is_new {
            // Servers send the start of the checkpoint, but at most the seqno below the first item.
            let below = Seqno(first.or(end).unwrap_or(read_up_to).0.saturating_sub(1));
            self.snapshot.start = self.snapshot.start.max(self.checkpoint_start.min(below));
        }
        let natural_start = match (first, self.last_marker_end) {
            (None, _) => end.unwrap_or(read_up_to),
            // The checkpoint may have begun with changes that this client is not sent.
            (Some(_), Some(last_end)) if self.starts_with_checkpoint(last_end) => {
                self.checkpoint_start
            }
            (Some(first), _) => first,
        };
        self.phase = Phase::Sending(Sending {
            durable: DurableSeqnos { max_visible, ..DurableSeqnos::default() },
            is_history: is_historical && self.fields.history,
            marker_sent: open_end.is_some(),
            ..Sending::new(Items::Memory(items), natural_start, end, read_up_to)
        });
        true
    }

    /// Reads a checkpoint in memory, up to `open_end` at most; `None` if nothing in it is new.
    fn read_checkpoint(
        &mut self,
        read: MemoryRead,
        open_end: Option<Seqno>,
    ) -> Option<CheckpointRead> {
        let MemoryRead::Items {
            checkpoint_start,
            begins_checkpoint,
            is_historical,
            max_visible_seqno: max_visible,
            items,
        } = read
        else {
            return None;
        };
        let items = match open_end {
            Some(end) => items.iter().filter(|item| item.seqno <= end).cloned().collect(),
            None => items,
        };
        let read_up_to = items.last().map_or(Seqno::ZERO, |item| item.seqno);
        if read_up_to <= self.last_read {
            return None;
        }
        if let Some(cursor) = &self.cursor {
            cursor.advance(read_up_to);
        }
        self.filter.stop_skipping();
        if begins_checkpoint {
            self.at_checkpoint = true;
            self.checkpoint_start = checkpoint_start;
        }
        let (items, first, end) = self.filter_checkpoint(items, read_up_to);
        let is_new = begins_checkpoint;
        Some(CheckpointRead { items, is_new, is_historical, max_visible, first, end, read_up_to })
    }

    /// Whether the next marker begins where its checkpoint does, after one that ended at `last_end`.
    fn starts_with_checkpoint(&self, last_end: Seqno) -> bool {
        self.fields.checkpoint_start && self.at_checkpoint && self.checkpoint_start > last_end
    }

    /// The items to send of a checkpoint that ends at `last`, where they begin, and the last seqno
    /// of the checkpoint that belongs to the stream, sent or not, which is where its snapshot ends.
    fn filter_checkpoint(
        &mut self,
        items: CheckpointItems,
        last: Seqno,
    ) -> (CheckpointRest, Option<Seqno>, Option<Seqno>) {
        let filter = &mut self.filter;
        if filter.is_pass_through() {
            let first = items.iter().find(|item| filter.check(item) == Passage::Passes);
            let first = first.map(|item| item.seqno);
            return (CheckpointRest::new(items, false), first, Some(last));
        }
        let mut end = None;
        let passing: CheckpointItems = items
            .iter()
            .filter(|item| {
                let passage = filter.check(item);
                if passage != Passage::Foreign {
                    end = Some(item.seqno);
                }
                passage == Passage::Passes
            })
            .cloned()
            .collect();
        let first = passing.iter().next().map(|item| item.seqno);
        (CheckpointRest::new(passing, true), first, end)
    }

    /// Writes as much of the snapshot as the output accepts; `None` once it is done.
    pub(super) fn write_snapshot(
        &mut self,
        mut sending: Sending,
        output: &mut Output<'_>,
    ) -> Option<Pause> {
        while output.may_send() {
            match self.write_message(&mut sending, output) {
                Ok(Step::Sent) => {}
                Ok(Step::Scanned) => break,
                Ok(Step::Done) => {
                    self.finish_part(sending);
                    return None;
                }
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            }
            self.progressed = Some(output.now());
        }
        self.phase = Phase::Sending(sending);
        Some(Pause::Ready)
    }

    /// Writes as much of a snapshot in key order as the output accepts; `None` once it is done.
    pub(super) fn write_by_key(
        &mut self,
        mut sending: oso::Sending,
        output: &mut Output<'_>,
    ) -> Option<Pause> {
        while output.may_send() {
            match sending.write_message(&mut self.filter, &self.format, self.to, output) {
                Ok(Step::Sent) => {}
                Ok(Step::Scanned) => break,
                Ok(Step::Done) => {
                    // The client is at the end of it now, with a complete snapshot.
                    let end = sending.end_seqno;
                    self.start_seqno = end;
                    self.snapshot = Snapshot { start: end, end };
                    self.is_by_key = true;
                    self.finish_snapshot(end, true);
                    return None;
                }
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            }
            self.progressed = Some(output.now());
        }
        self.phase = Phase::SendingByKey(sending);
        Some(Pause::Ready)
    }

    fn fail(&mut self, error: Unreadable) {
        warn!(vbid = %self.to.vbid, %error, "stream cannot be read any further");
        self.end(StreamEndReason::BACKFILL_FAIL);
    }

    /// Writes the next message of the snapshot, or as many items as the output accepts.
    fn write_message(
        &mut self,
        sending: &mut Sending,
        output: &mut Output<'_>,
    ) -> Result<Step, Unreadable> {
        let has_item = match &mut sending.items {
            Items::Memory(rest) => rest.peek(&mut self.filter).is_some(),
            Items::Disk { .. } if sending.next.is_some() => true,
            Items::Disk { rest, .. } => match rest.next(&mut self.filter)? {
                Next::Scanned => return Ok(Step::Scanned),
                Next::Item(item) => {
                    sending.next = Some(item);
                    true
                }
                Next::None => false,
            },
        };
        if has_item {
            if sending.marker_sent {
                self.write_items(sending, output)?;
            } else {
                self.write_marker(sending, sending.end.unwrap_or(sending.read_up_to), output)?;
            }
            return Ok(Step::Sent);
        }
        let Some(seqno) = self.closing_seqno(sending) else {
            return Ok(Step::Done);
        };
        if !sending.marker_sent {
            self.write_marker(sending, seqno, output)?;
        } else {
            let to = self.to;
            sending.last_sent = seqno;
            output.send(|out, _| SeqnoAdvanced { seqno }.encode(to, out))?;
        }
        Ok(Step::Sent)
    }

    /// Writes the next items, as many as the output accepts.
    fn write_items(
        &mut self,
        sending: &mut Sending,
        output: &mut Output<'_>,
    ) -> Result<(), Unreadable> {
        let (to, format, filter) = (self.to, &self.format, &mut self.filter);
        match &mut sending.items {
            Items::Memory(rest) => {
                while output.may_send()
                    && let Some(item) = rest.peek(filter)
                {
                    sending.last_sent = item.seqno;
                    output.send(|out, scratch| format.write(item, to, scratch, out))?;
                    rest.pass();
                }
            }
            Items::Disk { superseded, .. } => {
                if let Some(item) = sending.next.take() {
                    sending.last_sent = item.seqno;
                    let is_cached = !superseded.contains(&item.seqno);
                    output.send(|out, scratch| {
                        format.write_from_disk(&item, is_cached, to, scratch, out)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// The seqno that the client still needs at the end of the snapshot, although it does not get
    /// the item; `None` if it has been sent, or the client cannot receive it.
    fn closing_seqno(&self, sending: &Sending) -> Option<Seqno> {
        if !self.filter.is_collection_aware() || sending.then.is_some() {
            return None;
        }
        if sending.marker_sent {
            let is_sent = |end| end <= sending.last_sent || sending.read_up_to < end;
            return sending.end.filter(|&end| !is_sent(end));
        }
        // A client that resumed inside a snapshot waits for its end.
        let is_waiting = self.last_marker_end.is_none() && self.start_seqno < self.snapshot.end;
        if is_waiting && sending.read_up_to >= self.snapshot.end {
            return Some(sending.read_up_to);
        }
        match sending.items {
            Items::Memory(_) => sending.end,
            // The snapshot for an exhausted filter is announced anyway, and so is one of which the
            // client skips everything.
            Items::Disk { .. } => {
                let is_announced = self.filter.is_exhausted() || self.filter.has_skipped();
                sending.end.filter(|_| is_announced)
            }
        }
    }

    fn write_marker(
        &mut self,
        sending: &mut Sending,
        end: Seqno,
        output: &mut Output<'_>,
    ) -> Result<(), EncodeError> {
        let start = match self.last_marker_end {
            // The first one continues the snapshot that the client is in.
            None => sending.natural_start.min(self.snapshot.start),
            Some(_) => sending.natural_start,
        };
        let mut marker = SnapshotMarker::new(start, end, SnapshotFlags::empty());
        let durable = sending.durable;
        marker.max_visible_seqno = self.fields.replication.then_some(durable.max_visible);
        match sending.items {
            Items::Memory(_) => {
                marker.flags = SnapshotFlags::MEMORY;
                marker.flags.set(SnapshotFlags::CHECKPOINT, self.at_checkpoint);
                self.at_checkpoint = false;
                if let Some(takeover) = &mut self.takeover {
                    marker.flags.insert(SnapshotFlags::ACK);
                    takeover.marker_sent();
                }
            }
            Items::Disk { purge_seqno, .. } => {
                marker.flags = SnapshotFlags::DISK;
                marker.flags.set(SnapshotFlags::CHECKPOINT, self.fields.disk_checkpoint);
                marker.flags.set(SnapshotFlags::MAY_CONTAIN_DUPLICATES, sending.is_history);
                let replicates = self.fields.replication;
                marker.high_completed_seqno = replicates.then_some(durable.high_completed);
                if self.fields.purge_seqno {
                    marker.purge_seqno = Some(purge_seqno);
                    marker.high_prepared_seqno = replicates.then_some(durable.high_prepared);
                }
            }
        }
        marker.flags.set(SnapshotFlags::HISTORY, sending.is_history);
        sending.marker_sent = true;
        sending.end = Some(end);
        self.last_marker_end = Some(end);
        let to = self.to;
        output.send(|out, _| marker.encode(to, out))
    }

    /// Continues with the second part of a snapshot, or with what follows it.
    fn finish_part(&mut self, sending: Sending) {
        match sending.then {
            Some(rest) => {
                self.last_read = self.last_read.max(sending.read_up_to);
                self.phase = Phase::Sending(*rest);
            }
            None => {
                let from_disk = sending.is_from_disk();
                self.finish_snapshot(sending.read_up_to, from_disk);
            }
        }
    }

    fn finish_snapshot(&mut self, read_up_to: Seqno, from_disk: bool) {
        self.last_read = self.last_read.max(read_up_to);
        self.at_checkpoint |= from_disk && self.fields.disk_checkpoint;
        self.filter.stop_skipping();
        if self.filter.is_exhausted() {
            self.end(StreamEndReason::FILTER_EMPTY);
        } else if self.last_read >= self.end_seqno || (self.disk_only && from_disk) {
            self.end(StreamEndReason::OK);
        }
    }
}
