//! Changes from ended connections that the application has not taken yet.

use std::sync::Arc;

use crate::queue::SharedState;

/// Bytes up to which streams are still reopened, so that a reader that is merely slower than the
/// server does not wait whenever a connection is lost; half a flow-control buffer if that is less.
const ROOM: u64 = 4 * 1024 * 1024;

/// Fixed size of a batch regardless of its changes: small ones are delivered when streams end.
const BATCH: u64 = 4 * 1024;

/// Every connection has its own flow-control buffer: without this limit, each one lost while the
/// application pauses would leave another buffer full of changes in memory.
#[derive(Debug, Default)]
pub(super) struct Backlog(Vec<Arc<SharedState>>);

impl Backlog {
    /// Adds an ended connection.
    pub(super) fn add(&mut self, shared: Arc<SharedState>) {
        self.0.push(shared);
    }

    /// Whether streams must not be reopened; `open` are the connections that have not ended.
    pub(super) fn is_full<'a>(
        &mut self,
        open: impl Iterator<Item = &'a Arc<SharedState>>,
        buffer_size: u32,
    ) -> bool {
        let room = ROOM.min(u64::from(buffer_size) / 2);
        self.0.retain(|shared| shared.has_queued());
        let bytes: u64 = self.0.iter().map(|shared| shared.queued_bytes()).sum();
        let batches = self.0.iter().map(|shared| shared.queued()).sum::<usize>()
            + open.map(|shared| shared.queued()).sum::<usize>();
        bytes.saturating_add(batches as u64 * BATCH) > room
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::queue::{Credit, Entry, Queue, Queued};

    const BUFFER: u32 = 1 << 20;

    fn put(queue: &Queue<()>, shared: &Arc<SharedState>, bytes: u64) {
        let credit = Credit::new(Arc::clone(shared), bytes);
        queue.push(Entry::Batch(Queued { batch: (), rows: 1, positions: Vec::new(), credit }));
    }

    #[test]
    fn stats_of_ended_connections_count_until_they_are_taken() {
        let (queue, shared) = (Queue::new(), Arc::<SharedState>::default());
        let mut backlog = Backlog::default();
        put(&queue, &shared, u64::from(BUFFER / 2));
        assert!(!backlog.is_full([&shared].into_iter(), BUFFER), "its server waits for it");
        backlog.add(Arc::clone(&shared));
        assert!(backlog.is_full([].into_iter(), BUFFER));
        assert!(!backlog.is_full([].into_iter(), 2 * BUFFER), "a larger buffer has more room");
        let _ = queue.poll_pop(&mut Context::from_waker(Waker::noop()));
        assert!(!backlog.is_full([].into_iter(), BUFFER));
        assert!(backlog.0.is_empty(), "nothing is kept");
    }

    #[test]
    fn backlog_room_does_not_grow_with_the_buffer_forever() {
        let (queue, shared) = (Queue::new(), Arc::<SharedState>::default());
        let mut backlog = Backlog::default();
        put(&queue, &shared, ROOM);
        backlog.add(shared);
        assert!(backlog.is_full([].into_iter(), u32::MAX));
    }

    #[test]
    fn backlog_counts_small_batches_on_open_connections_by_their_number() {
        let (queue, shared) = (Queue::new(), Arc::<SharedState>::default());
        let mut backlog = Backlog::default();
        let most = u64::from(BUFFER / 2) / BATCH;
        (0..most).for_each(|_| put(&queue, &shared, 1));
        assert!(!backlog.is_full([&shared].into_iter(), BUFFER));
        put(&queue, &shared, 1);
        assert!(backlog.is_full([&shared].into_iter(), BUFFER));
    }
}
