//! A stream shared by its readers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dcp_arrow::{DocumentTally, MalformedKind, MalformedTally, PendingBatch, TableSchema};
use dcp_consumer::{
    Acknowledger, ChangeStream as EngineStream, CollectionLag, Delivered, StreamEvent, StreamStats,
    VbucketStats,
};
use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::Seqno;

use crate::batch::ChangeBatch;
use crate::error::Failure;
use crate::unmatched::{DOCUMENTS, Watch};

/// A stream shared by its readers.
///
/// Its lock is held only briefly: never while a reader waits, while a batch is decoded, or across a
/// call into Python.
#[derive(Debug)]
pub(crate) struct Shared {
    engine: Mutex<Engine>,
    acks: Acknowledger,
    table: TableSchema,
    malformed: Mutex<MalformedTally>,
    watch: Arc<Watch>,
    /// Whether the stream has begun at the beginning of its vBuckets.
    is_whole: bool,
    next_turn: AtomicU64,
}

/// A reader's place in the queue; readers are served in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn(u64);

#[derive(Debug)]
struct Engine {
    stream: EngineStream<PendingBatch>,
    fetched: Fetched,
    /// Waiting readers. The first is woken for a batch, all of them at the end.
    waiting: BTreeMap<Turn, Waker>,
    /// Whether the stream has ended.
    is_over: bool,
    /// Whether it has just come to its end.
    is_complete: bool,
    /// Whether the engine's checkpoint includes a batch that no reader will get.
    is_ahead: bool,
    /// Checkpoint after the last batch taken by a reader.
    checkpoint: Checkpoint,
}

/// The batch that was fetched but not yet taken.
#[derive(Debug)]
enum Fetched {
    Nothing,
    /// A reader is decoding it.
    Decoding,
    Ready(Result<ChangeBatch, Failure>),
}

/// Result of looking for the next batch.
#[derive(Debug)]
pub(crate) enum Next {
    Batch(ChangeBatch),
    Ended,
    NotYet,
}

impl Engine {
    /// Polls for the next batch if it is the reader's turn, which then has to decode it. `None` if
    /// there is nothing to decode: a batch is ready, or the stream has ended.
    fn poll(&mut self, turn: Turn, context: &mut Context<'_>) -> Poll<Option<PendingDelivery>> {
        if self.is_first(turn) {
            match self.fetched {
                Fetched::Ready(_) => return Poll::Ready(None),
                Fetched::Decoding => return Poll::Pending,
                Fetched::Nothing => {}
            }
        }
        if self.is_over {
            return Poll::Ready(None);
        }
        if !self.is_first(turn) {
            return Poll::Pending;
        }
        match self.stream.poll_next(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => {
                self.is_over = true;
                self.is_complete = true;
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                self.is_over = true;
                self.fetched = Fetched::Ready(Err(error.into()));
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(delivered))) => {
                self.fetched = Fetched::Decoding;
                Poll::Ready(Some(delivered))
            }
        }
    }

    fn is_first(&self, turn: Turn) -> bool {
        self.waiting.first_key_value().is_none_or(|(first, _)| *first >= turn)
    }

    /// Readers to wake after one has left.
    fn to_wake(&self) -> Vec<Waker> {
        let count = if self.is_over { self.waiting.len() } else { 1 };
        self.waiting.values().take(count).cloned().collect()
    }

    fn close(&mut self) {
        self.stream.close();
        self.is_over = true;
        if matches!(self.fetched, Fetched::Ready(_)) {
            self.fetched = Fetched::Nothing;
            self.is_ahead = true;
        }
    }
}

type PendingDelivery = Delivered<PendingBatch>;

impl Shared {
    pub(crate) fn new(
        stream: EngineStream<PendingBatch>,
        table: TableSchema,
        watch: Arc<Watch>,
    ) -> Self {
        let (checkpoint, acks) = (stream.checkpoint(), stream.acknowledger());
        let is_whole = checkpoint.positions().all(|(_, position)| position.seqno == Seqno(0));
        let engine = Mutex::new(Engine {
            stream,
            fetched: Fetched::Nothing,
            waiting: BTreeMap::new(),
            is_over: false,
            is_complete: false,
            is_ahead: false,
            checkpoint,
        });
        let (malformed, next_turn) = (Mutex::default(), AtomicU64::new(0));
        Self { engine, acks, table, malformed, watch, is_whole, next_turn }
    }

    pub(crate) const fn table(&self) -> &TableSchema {
        &self.table
    }

    pub(crate) const fn acks(&self) -> &Acknowledger {
        &self.acks
    }

    fn lock(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new_turn(&self) -> Turn {
        Turn(self.next_turn.fetch_add(1, Ordering::Relaxed))
    }

    /// Fetches and decodes the next batch; ready if there is one now or the stream has ended.
    /// Otherwise the reader keeps its place until it [leaves](Self::leave).
    pub(crate) fn poll(&self, turn: Turn, context: &mut Context<'_>) -> Poll<()> {
        let (polled, is_complete, _replaced) = {
            let mut engine = self.lock();
            let polled = engine.poll(turn, context);
            let place = polled.is_pending().then(|| context.waker().clone());
            let replaced = place.and_then(|waker| engine.waiting.insert(turn, waker));
            (polled, std::mem::take(&mut engine.is_complete), replaced)
        };
        if is_complete && self.is_whole {
            self.watch.read_all();
        }
        match polled {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => {}
            Poll::Ready(Some(delivered)) => self.decode(delivered),
        }
        Poll::Ready(())
    }

    fn decode(&self, delivered: PendingDelivery) {
        let Delivered { batch, checkpoint, token, .. } = delivered;
        let mut tally = DocumentTally::default();
        let decoded = batch.finish_counting(&mut tally);
        self.watch.add(&tally);
        let DocumentTally { malformed, .. } = tally;
        let decoded = decoded.map(|batch| ChangeBatch { batch, checkpoint, token });
        if malformed.whole + malformed.partial > 0 {
            self.count_malformed(malformed);
        }
        let mut engine = self.lock();
        // A batch that cannot be decoded ends the stream: reading on would skip its rows.
        if decoded.is_err() {
            engine.is_ahead = true;
            engine.close();
        }
        engine.fetched = Fetched::Ready(decoded.map_err(Failure::from));
    }

    /// Counts a batch's documents that do not fit, and logs each kind once.
    #[cold]
    fn count_malformed(&self, batch: MalformedTally) {
        let mut all = self.malformed.lock().unwrap_or_else(PoisonError::into_inner);
        let was_full = all.is_full();
        let new = all.add(batch);
        let is_full = all.is_full();
        drop(all);
        for MalformedKind { field, reason, vbid, seqno, .. } in new {
            match field.as_str() {
                "" => tracing::warn!(
                    name: "document_malformed",
                    target: DOCUMENTS,
                    vbucket = vbid.0, seqno = seqno.0, %reason,
                    "a document is malformed and null; others like it are counted, not logged"
                ),
                field => tracing::warn!(
                    name: "field_malformed",
                    target: DOCUMENTS,
                    vbucket = vbid.0, seqno = seqno.0, field, %reason,
                    "a field does not fit its column and is null; others like it are counted, not \
                     logged"
                ),
            }
        }
        if is_full && !was_full {
            let most = MalformedTally::MAX_KINDS;
            tracing::warn!(
                name: "documents_malformed",
                target: DOCUMENTS,
                "documents do not fit in {most} ways or more: further ones are counted, not logged"
            );
        }
    }

    /// Documents that are malformed, and those of which only some values do not fit.
    pub(crate) fn malformed(&self) -> (u64, u64) {
        let tally = self.malformed.lock().unwrap_or_else(PoisonError::into_inner);
        (tally.whole, tally.partial)
    }

    /// Takes the result of [`poll`](Self::poll) if it is still there and no reader is ahead.
    pub(crate) fn take(&self, turn: Turn) -> Result<Next, Failure> {
        let (taken, to_wake) = {
            let mut engine = self.lock();
            if !engine.is_first(turn) && !engine.is_over {
                return Ok(Next::NotYet);
            }
            let taken = match std::mem::replace(&mut engine.fetched, Fetched::Nothing) {
                Fetched::Ready(batch) => {
                    if let Ok(batch) = &batch {
                        engine.checkpoint = batch.checkpoint.clone();
                    }
                    batch.map(Next::Batch)
                }
                other => {
                    engine.fetched = other;
                    Ok(if engine.is_over { Next::Ended } else { Next::NotYet })
                }
            };
            engine.waiting.remove(&turn);
            (taken, engine.to_wake())
        };
        to_wake.iter().for_each(Waker::wake_by_ref);
        taken
    }

    /// Removes a reader that no longer waits and wakes the next one.
    pub(crate) fn leave(&self, turn: Turn) {
        let (_place, to_wake) = {
            let mut engine = self.lock();
            (engine.waiting.remove(&turn), engine.to_wake())
        };
        to_wake.iter().for_each(Waker::wake_by_ref);
    }

    /// The reader's checkpoint; with manual acknowledgement, after the acknowledged batches.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        self.acks.checkpoint().unwrap_or_else(|| {
            let mut engine = self.lock();
            // Positions also move without a batch, past changes that are filtered out.
            if matches!(engine.fetched, Fetched::Nothing) && !engine.is_ahead {
                engine.checkpoint = engine.stream.checkpoint();
            }
            engine.checkpoint.clone()
        })
    }

    /// Whether the stream has ended and its last batch was taken.
    pub(crate) fn is_over(&self) -> bool {
        let engine = self.lock();
        engine.is_over && matches!(engine.fetched, Fetched::Nothing)
    }

    pub(crate) fn stats(&self) -> StreamStats {
        self.lock().stream.stats()
    }

    pub(crate) fn vbucket_stats(&self) -> Vec<VbucketStats> {
        self.lock().stream.vbucket_stats()
    }

    pub(crate) fn collection_lag(&self) -> Vec<CollectionLag> {
        self.lock().stream.collection_lag()
    }

    pub(crate) fn take_events(&self) -> Vec<StreamEvent> {
        self.lock().stream.take_events()
    }

    /// Closes the stream and wakes all readers.
    pub(crate) fn close(&self) {
        let to_wake = {
            let mut engine = self.lock();
            engine.close();
            engine.to_wake()
        };
        to_wake.iter().for_each(Waker::wake_by_ref);
    }
}
