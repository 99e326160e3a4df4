//! The streams of one connection, which take turns.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dcp_wire::message::StreamEndReason;
use dcp_wire::{Opaque, Opcode, Seqno, StreamId, Vbid};
use rustc_hash::FxHashMap;
use slab::Slab;

use super::BucketSource;
use super::output::Output;
use super::stream::{Pause, Stream};

#[derive(Debug)]
struct Slot {
    stream: Stream,
    /// Whether it waits in the queue.
    queued: bool,
}

/// The streams of one connection.
///
/// Streams that have something to send wait in a queue and take turns; the others cost nothing
/// until their vBucket changes.
#[derive(Debug, Default)]
pub(super) struct Streams {
    slots: Slab<Slot>,
    /// The streams of each vBucket: one, unless they have stream ids.
    by_vbid: FxHashMap<Vbid, Vec<usize>>,
    queue: VecDeque<usize>,
    /// The stream whose backfill is the only one, if they are sent one after the other.
    backfilling: Option<usize>,
    /// The streams whose backfills follow it.
    behind: VecDeque<usize>,
}

impl Streams {
    /// Number of live streams, and of ended ones whose end is still to be sent.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Whether any stream waits for its turn.
    pub(super) fn has_ready(&self) -> bool {
        !self.queue.is_empty() || self.backfilling.is_none() && !self.behind.is_empty()
    }

    fn of(&self, vbid: Vbid) -> &[usize] {
        self.by_vbid.get(&vbid).map(Vec::as_slice).unwrap_or_default()
    }

    fn live_key(&self, vbid: Vbid, stream_id: Option<StreamId>) -> Option<usize> {
        self.of(vbid).iter().copied().find(|&key| {
            self.slots.get(key).is_some_and(|slot| {
                slot.stream.is_live() && slot.stream.address().stream_id == stream_id
            })
        })
    }

    /// Whether the vBucket has a live stream with that stream id.
    pub(super) fn is_live(&self, vbid: Vbid, stream_id: Option<StreamId>) -> bool {
        self.live_key(vbid, stream_id).is_some()
    }

    /// Whether the vBucket has any live stream.
    pub(super) fn has_live(&self, vbid: Vbid) -> bool {
        self.of(vbid)
            .iter()
            .any(|&key| self.slots.get(key).is_some_and(|slot| slot.stream.is_live()))
    }

    /// Highest seqno that the live streams of the vBucket have sent; `None` without any.
    pub(super) fn last_sent(&self, vbid: Vbid) -> Option<Seqno> {
        let slots = self.of(vbid).iter().filter_map(|&key| self.slots.get(key));
        let live = slots.map(|slot| &slot.stream).filter(|stream| stream.is_live());
        live.map(Stream::last_sent).max()
    }

    /// Adds a stream to the queue.
    pub(super) fn insert(&mut self, stream: Stream) {
        let vbid = stream.vbid();
        let key = self.slots.insert(Slot { stream, queued: true });
        self.by_vbid.entry(vbid).or_default().push(key);
        self.queue.push_back(key);
    }

    /// Ends the live stream with that stream id, with a message or without one; `false` if there
    /// is none.
    pub(super) fn close(
        &mut self,
        vbid: Vbid,
        stream_id: Option<StreamId>,
        with_message: bool,
    ) -> bool {
        let Some(key) = self.live_key(vbid, stream_id) else {
            return false;
        };
        if with_message {
            self.end(key, StreamEndReason::CLOSED);
        } else {
            self.remove(key);
        }
        true
    }

    /// Ends every live stream of the vBucket with a message.
    pub(super) fn end_all(&mut self, vbid: Vbid, reason: StreamEndReason) {
        for key in self.of(vbid).to_vec() {
            self.end(key, reason);
        }
    }

    /// Ends the streams that belong to an earlier incarnation of the vBucket, even if they have not
    /// had a turn since it changed.
    pub(super) fn end_outlived<S: BucketSource>(&mut self, vbid: Vbid, source: &S) {
        if self.of(vbid).is_empty() {
            return;
        }
        let vbucket = source.vbucket(vbid);
        for key in self.of(vbid).to_vec() {
            let is_same = |vbucket: &S::VBucket<'_>| {
                self.slots.get(key).is_some_and(|slot| slot.stream.is_same(vbucket))
            };
            if !vbucket.as_ref().is_some_and(is_same) {
                self.end(key, StreamEndReason::STATE_CHANGED);
            }
        }
    }

    /// Ends every stream whose backfill has sent nothing for `limit`.
    pub(super) fn end_stuck(&mut self, now: Instant, limit: Duration) {
        let stuck = |(key, slot): (usize, &Slot)| slot.stream.is_stuck(now, limit).then_some(key);
        for key in self.slots.iter().filter_map(stuck).collect::<Vec<_>>() {
            self.end(key, StreamEndReason::SLOW);
        }
    }

    /// Handles the answer to a message of a takeover stream.
    pub(super) fn acknowledged<S: BucketSource>(
        &mut self,
        opcode: Opcode,
        opaque: Opaque,
        source: &S,
    ) {
        if !matches!(opcode, Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_SET_VBUCKET_STATE) {
            return;
        }
        let mut streams = self.slots.iter_mut();
        let Some((key, slot)) = streams.find(|(_, slot)| slot.stream.hands_over_as(opaque)) else {
            return;
        };
        if slot.stream.acknowledged(opcode) {
            let vbid = slot.stream.vbid();
            source.retire(vbid);
            if let Some(vbucket) = source.vbucket(vbid) {
                slot.stream.follow(&vbucket);
            }
        }
        enqueue(key, slot, &mut self.queue);
    }

    fn end(&mut self, key: usize, reason: StreamEndReason) {
        self.stop_waiting(key);
        if let Some(slot) = self.slots.get_mut(key) {
            slot.stream.end(reason);
            enqueue(key, slot, &mut self.queue);
        }
        self.finish_backfill(key);
    }

    /// Takes a stream out of those that wait for the backfill of another.
    fn stop_waiting(&mut self, key: usize) {
        if let Some(at) = self.behind.iter().position(|&waiting| waiting == key) {
            self.behind.remove(at);
            if let Some(slot) = self.slots.get_mut(key) {
                slot.queued = false;
            }
        }
    }

    /// The stream reads the disk no more: the next backfill may begin.
    fn finish_backfill(&mut self, key: usize) {
        self.backfilling.take_if(|backfilling| *backfilling == key);
    }

    /// The stream whose turn it is. A backfill follows the one before at once.
    fn next(&mut self) -> Option<usize> {
        let next = if self.backfilling.is_none() { self.behind.pop_front() } else { None };
        next.or_else(|| self.queue.pop_front())
    }

    /// Queues the vBucket's streams, the newest first as servers do.
    pub(super) fn wake(&mut self, vbid: Vbid) {
        let Some(keys) = self.by_vbid.get(&vbid) else {
            return;
        };
        for &key in keys.iter().rev() {
            if let Some(slot) = self.slots.get_mut(key) {
                enqueue(key, slot, &mut self.queue);
            }
        }
    }

    fn remove(&mut self, key: usize) {
        self.stop_waiting(key);
        let Some(slot) = self.slots.try_remove(key) else {
            return;
        };
        self.finish_backfill(key);
        if slot.queued {
            self.queue.retain(|&queued| queued != key);
        }
        let vbid = slot.stream.vbid();
        if let Some(keys) = self.by_vbid.get_mut(&vbid) {
            keys.retain(|&other| other != key);
            if keys.is_empty() {
                self.by_vbid.remove(&vbid);
            }
        }
    }

    /// Lets the next stream of the queue write; `false` if none waits. The output must accept a
    /// message. Backfills that are `sequential` are sent one after the other, and streams that
    /// read memory take turns with the current one.
    pub(super) fn take_turn<S: BucketSource>(
        &mut self,
        source: &S,
        sequential: bool,
        output: &mut Output<'_>,
    ) -> bool {
        let Some(key) = self.next() else {
            return false;
        };
        let Some(slot) = self.slots.get_mut(key) else {
            return true;
        };
        slot.queued = false;
        let vbucket = source.vbucket(slot.stream.vbid());
        let may_backfill = self.backfilling.is_none_or(|other| other == key);
        let pause = slot.stream.write(source, vbucket.as_ref(), may_backfill, output);
        let is_backfilling = sequential && slot.stream.is_backfilling();
        match pause {
            Pause::Ready => enqueue(key, slot, &mut self.queue),
            Pause::BeforeBackfill => {
                slot.queued = true;
                self.behind.push_back(key);
            }
            Pause::Idle => {}
            Pause::Ended => self.remove(key),
        }
        if is_backfilling {
            self.backfilling = Some(key);
        } else {
            self.finish_backfill(key);
        }
        true
    }
}

fn enqueue(key: usize, slot: &mut Slot, queue: &mut VecDeque<usize>) {
    if !slot.queued {
        slot.queued = true;
        queue.push_back(key);
    }
}
