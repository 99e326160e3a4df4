//! The queue between the connections' tasks and the application.

use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use dcp_proto::consumer::{ConnectionStats, PositionUpdate, Unpersisted};

use crate::Error;
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Notify};

/// State shared by one connection's task and the application, besides batches.
#[derive(Debug, Default)]
pub(crate) struct SharedState {
    /// Bytes that the application has processed and the task has not acknowledged to the server yet.
    returned: AtomicU64,
    /// Batches of this connection the application has not taken, and their bytes.
    queued: AtomicUsize,
    queued_bytes: AtomicU64,
    /// Whether the connection has ended.
    has_ended: AtomicBool,
    /// Whether to wake the task once they are all taken.
    is_taking_awaited: AtomicBool,
    /// Bytes received and not acknowledged, as last reported by the task.
    unacknowledged: AtomicU64,
    /// The connection's counters and unpersisted changes, as last reported by the task.
    stats: Mutex<(ConnectionStats, Unpersisted)>,
    /// The newest cluster map from the connection that was not taken yet.
    map: Mutex<Option<Bytes>>,
    /// Wakes the task when there are bytes to return, or all batches were taken.
    pub(crate) wake: Notify,
}

impl SharedState {
    /// Bytes to return to the server, once.
    pub(crate) fn take_returned(&self) -> u64 {
        self.returned.swap(0, Ordering::AcqRel)
    }

    /// Batches of this connection that the application has not taken.
    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// Whether the application has a batch of this connection to take.
    pub(crate) fn has_queued(&self) -> bool {
        self.queued() > 0
    }

    /// Bytes of the batches of this connection that the application has not taken.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    /// Whether the application has a batch of this connection to take; if so, the task is woken
    /// once it has taken all of them. Otherwise the task is not woken, since a wake-up costs the
    /// application more than the batch.
    pub(crate) fn awaits_taking(&self) -> bool {
        self.has_queued() && {
            // Batches taken before the flag was set do not wake the task. A swap, not a store: it
            // reads the swap of `take`, so that the number of batches read next is not older.
            self.is_taking_awaited.swap(true, Ordering::SeqCst);
            self.has_queued()
        }
    }

    fn put(&self, bytes: u64) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.queued.fetch_add(1, Ordering::SeqCst);
    }

    /// The application takes a batch.
    fn take(&self, bytes: u64) {
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        let is_last = self.queued.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && self.is_taking_awaited.swap(false, Ordering::SeqCst) {
            self.wake.notify_one();
        }
    }

    /// Replaces the cluster map; `true` if the previous one was taken, so that a new report is
    /// needed.
    pub(crate) fn offer_map(&self, json: Bytes) -> bool {
        self.map.lock().unwrap_or_else(PoisonError::into_inner).replace(json).is_none()
    }

    /// The newest cluster map, once.
    pub(crate) fn take_map(&self) -> Option<Bytes> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn publish(
        &self,
        stats: ConnectionStats,
        unacknowledged: u64,
        waiting: Unpersisted,
    ) {
        self.unacknowledged.store(unacknowledged, Ordering::Relaxed);
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = (stats, waiting);
    }

    /// The connection's counters and unpersisted changes.
    pub(crate) fn stats(&self) -> (ConnectionStats, Unpersisted) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the connection as ended. Its batches stay in the queue until they are taken.
    pub(crate) fn close(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Takes the connection's counters, to add them elsewhere.
    pub(crate) fn take_stats(&self) -> ConnectionStats {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *stats).0
    }

    /// Bytes of the connection in memory, and whether a server waits for them.
    pub(crate) fn buffered(&self) -> (u64, bool) {
        if self.has_ended.load(Ordering::Relaxed) {
            return (self.queued_bytes.load(Ordering::Relaxed), false);
        }
        (self.unacknowledged.load(Ordering::Relaxed), true)
    }
}

/// Bytes of a batch, to be released on their connection.
#[derive(Debug)]
pub(crate) struct Credit {
    shared: Arc<SharedState>,
    bytes: u64,
}

impl Credit {
    pub(crate) const fn new(shared: Arc<SharedState>, bytes: u64) -> Self {
        Self { shared, bytes }
    }

    #[cfg(test)]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The application has processed the batch.
    pub(crate) fn give_back(self) {
        self.shared.returned.fetch_add(self.bytes, Ordering::AcqRel);
        self.shared.wake.notify_one();
    }
}

/// One batch for the application.
#[derive(Debug)]
pub(crate) struct Queued<B> {
    pub(crate) batch: B,
    pub(crate) rows: usize,
    /// Positions of its vBuckets after it.
    pub(crate) positions: Vec<PositionUpdate>,
    pub(crate) credit: Credit,
}

/// What the application takes next.
#[derive(Debug)]
pub(crate) enum Entry<B> {
    Batch(Queued<B>),
    /// Position updates of vBuckets without changes for the application.
    Positions(Vec<PositionUpdate>),
    /// The stream failed; the last entry.
    Error(Error),
    /// Everything was delivered; the last entry.
    Finished,
}

/// Batches in the order they are delivered, from all connections of a stream.
///
/// It has no separate bound: its contents count as unacknowledged on their connections, and a
/// connection whose server sends more than the flow-control window and one packet is closed.
/// Positions do not count, and are one entry regardless of how often they move without a batch. So
/// the queue holds at most that much per connection, and little of ended ones (`stream_task::backlog`).
/// No task ever waits to add a batch, so noops are answered while the application is slow.
#[derive(Debug)]
pub(crate) struct Queue<B> {
    state: Mutex<State<B>>,
}

#[derive(Debug)]
struct State<B> {
    entries: VecDeque<Entry<B>>,
    /// Waker of the only reader, if it found nothing.
    reader: Option<Waker>,
}

impl<B> Queue<B> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State { entries: VecDeque::new(), reader: None }) }
    }

    pub(crate) fn push(&self, entry: Entry<B>) {
        if let Entry::Batch(batch) = &entry {
            batch.credit.shared.put(batch.credit.bytes);
        }
        let reader = {
            let mut state = self.lock();
            match (state.entries.back_mut(), entry) {
                (Some(Entry::Positions(last)), Entry::Positions(newer)) => supersede(last, newer),
                (_, entry) => state.entries.push_back(entry),
            }
            state.reader.take()
        };
        // A waker may run any code, so it is called without the lock.
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The next entry, or registers the caller's waker. Nothing else is kept for a caller that does
    /// not return.
    pub(crate) fn poll_pop(&self, context: &mut Context<'_>) -> Poll<Entry<B>> {
        let replaced;
        let entry = {
            let mut state = self.lock();
            let entry = state.entries.pop_front();
            let waker = entry.is_none().then(|| context.waker().clone());
            replaced = std::mem::replace(&mut state.reader, waker);
            entry
        };
        drop(replaced);
        let Some(entry) = entry else { return Poll::Pending };
        if let Entry::Batch(batch) = &entry {
            batch.credit.shared.take(batch.credit.bytes);
        }
        Poll::Ready(entry)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().entries.is_empty()
    }

    pub(crate) fn clear(&self) {
        let entries = std::mem::take(&mut self.lock().entries);
        drop(entries);
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Nothing panics while the lock is held, so the entries are consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Replaces older positions of the same vBuckets with newer ones.
fn supersede(positions: &mut Vec<PositionUpdate>, newer: Vec<PositionUpdate>) {
    let mut at: HashMap<_, _> =
        positions.iter().enumerate().map(|(at, moved)| (moved.vbid, at)).collect();
    for moved in newer {
        match at.get(&moved.vbid).and_then(|&at| positions.get_mut(at)) {
            Some(older) => *older = moved,
            None => {
                at.insert(moved.vbid, positions.len());
                positions.push(moved);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use dcp_proto::{History, Position};
    use dcp_wire::{Seqno, Vbid};

    use super::*;

    fn pushed(queue: &Queue<u32>, shared: &Arc<SharedState>, batch: u32) {
        let credit = Credit::new(Arc::clone(shared), 0);
        queue.push(Entry::Batch(Queued { batch, rows: 1, positions: Vec::new(), credit }));
    }

    fn popped(queue: &Queue<u32>) -> Option<u32> {
        match queue.poll_pop(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Entry::Batch(batch)) => Some(batch.batch),
            _ => None,
        }
    }

    fn is_woken(shared: &SharedState) -> bool {
        pin!(shared.wake.notified()).enable()
    }

    #[test]
    fn task_is_woken_by_the_last_batch_that_is_taken_if_it_waits_for_that() {
        let (queue, shared) = (Queue::new(), Arc::new(SharedState::default()));
        assert!(!shared.awaits_taking(), "there is none");
        pushed(&queue, &shared, 1);
        assert!(popped(&queue).is_some());
        assert!(!is_woken(&shared), "nobody waits");
        (2..4).for_each(|batch| pushed(&queue, &shared, batch));
        assert!(shared.awaits_taking());
        assert!(popped(&queue).is_some());
        assert!(!is_woken(&shared), "one is left");
        assert!(popped(&queue).is_some());
        assert!(is_woken(&shared));
        pushed(&queue, &shared, 4);
        assert!(popped(&queue).is_some());
        assert!(!is_woken(&shared), "said once");
    }

    fn moved(vbid: u16, seqno: u64) -> PositionUpdate {
        let position = Position { seqno: Seqno(seqno), ..Position::EARLIEST };
        PositionUpdate { vbid: Vbid(vbid), position, history: History::default() }
    }

    #[test]
    fn positions_that_nobody_takes_are_one_entry_with_the_newest_of_each() {
        let (queue, shared) = (Queue::new(), Arc::new(SharedState::default()));
        for seqno in 1..=100 {
            queue.push(Entry::Positions(vec![moved(0, seqno), moved(1, seqno * 2)]));
            queue.push(Entry::Positions(vec![moved(2, seqno), moved(0, seqno + 1)]));
        }
        pushed(&queue, &shared, 1);
        // Positions after a batch do not overtake it.
        queue.push(Entry::Positions(vec![moved(0, 200)]));
        let mut seen = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(entry) = queue.poll_pop(&mut context) {
            seen.push(match entry {
                Entry::Positions(positions) => {
                    positions.iter().map(|moved| (moved.vbid.0, moved.position.seqno.0)).collect()
                }
                _ => Vec::new(),
            });
        }
        assert_eq!(seen, [vec![(0, 101), (1, 200), (2, 100)], vec![], vec![(0, 200)]]);
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn reader_is_woken_once_and_finds_every_entry_whoever_gave_up_waiting() {
        let (queue, shared) = (Queue::new(), Arc::new(SharedState::default()));
        let (gone, waits) = (Arc::new(Count::default()), Arc::new(Count::default()));
        for reader in [&gone, &waits, &waits] {
            let waker = Waker::from(Arc::clone(reader));
            assert!(queue.poll_pop(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(Arc::strong_count(&gone), 1, "nothing is kept for a reader that was replaced");
        (1..3).for_each(|batch| pushed(&queue, &shared, batch));
        assert_eq!((gone.0.load(Ordering::SeqCst), waits.0.load(Ordering::SeqCst)), (0, 1));
        assert_eq!((popped(&queue), popped(&queue), popped(&queue)), (Some(1), Some(2), None));
    }
}
