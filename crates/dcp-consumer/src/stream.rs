//! The application's end of a stream of changes.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::Seqno;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::first_load::FirstLoad;
use crate::queue::{Credit, Entry, Queue};
use crate::stats::total_lag;
use crate::stream_task::{KnownVbucket, SharedStats};
use crate::{
    AckToken, Acknowledger, CollectionLag, Error, StreamEvent, StreamStats, VbucketState,
    VbucketStats,
};

/// One batch of changes, and what to store in order to resume after it.
#[derive(Debug)]
pub struct Delivered<B> {
    /// The changes.
    pub batch: B,
    /// Rows in it.
    pub rows: usize,
    /// The position of the stream once this batch and all before it have been processed: store it
    /// with the batch, or after it, never before. If batches are acknowledged out of order, store
    /// [`ChangeStream::checkpoint`] instead.
    pub checkpoint: Checkpoint,
    /// Token to acknowledge the batch.
    pub token: AckToken,
}

/// Changes of a bucket, batch by batch.
///
/// Within a vBucket, changes are in seqno order, and a rollback is a record among them. A batch may
/// hold changes of many vBuckets, all of one node.
///
/// Dropping it ends its connections.
#[derive(Debug)]
pub struct ChangeStream<B> {
    queue: Arc<Queue<B>>,
    /// After the batch returned last.
    checkpoint: Checkpoint,
    acks: Acknowledger,
    /// Bytes of the batch returned last, unless the application acknowledges it.
    credit: Option<Credit>,
    stats: Arc<SharedStats>,
    batches: u64,
    rows: u64,
    opened: Instant,
    /// Set for a first load without a priority.
    first_load: Option<FirstLoad>,
    /// Whether the stream has ended.
    has_ended: bool,
    cancel: CancellationToken,
    /// Ends the tasks when the stream is dropped.
    _guard: DropGuard,
}

impl<B: Send + 'static> ChangeStream<B> {
    pub(crate) fn new(
        queue: Arc<Queue<B>>,
        checkpoint: Checkpoint,
        acks: Acknowledger,
        stats: Arc<SharedStats>,
        first_load: Option<FirstLoad>,
        cancel: CancellationToken,
    ) -> Self {
        let guard = cancel.clone().drop_guard();
        Self {
            queue,
            checkpoint,
            acks,
            credit: None,
            stats,
            batches: 0,
            rows: 0,
            opened: Instant::now(),
            first_load,
            has_ended: false,
            cancel,
            _guard: guard,
        }
    }

    /// The next batch; `None` once a finite stream is complete, the stream was closed, or an
    /// error was returned.
    ///
    /// Taking the next batch acknowledges the previous one to the server, unless the application
    /// does that ([`Acknowledge::Manual`](crate::Acknowledge::Manual)). Cancellation-safe: a batch
    /// is either returned or stays for the next call.
    ///
    /// # Errors
    /// [`Error`] once, if the stream cannot continue. Changes delivered before remain valid, and so
    /// does their checkpoint.
    pub async fn next(&mut self) -> Option<Result<Delivered<B>, Error>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`next`](Self::next), for callers that cannot keep the stream borrowed while they wait:
    /// the waker of the last call is woken when the next call may succeed.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivered<B>, Error>>> {
        if let Some(credit) = self.credit.take() {
            credit.give_back();
        }
        while !self.has_ended {
            let next = self.queue.poll_pop(context);
            if let Some(load) = &mut self.first_load {
                load.asked(Instant::now(), next.is_ready());
            }
            match ready!(next) {
                Entry::Batch(queued) => {
                    self.batches += 1;
                    let (positions, credit) = (queued.positions, queued.credit);
                    self.credit = self.acks.delivered(self.batches, &positions, credit);
                    for update in positions {
                        self.checkpoint.advance(update);
                    }
                    self.rows += queued.rows as u64;
                    return Poll::Ready(Some(Ok(Delivered {
                        batch: queued.batch,
                        rows: queued.rows,
                        checkpoint: self.checkpoint.clone(),
                        token: self.acks.token(self.batches),
                    })));
                }
                Entry::Positions(positions) => {
                    self.acks.passed(&positions);
                    for update in positions {
                        self.checkpoint.advance(update);
                    }
                }
                Entry::Error(error) => {
                    self.close();
                    return Poll::Ready(Some(Err(error)));
                }
                Entry::Finished => {
                    if let Some(load) = self.first_load.take() {
                        load.finished(Instant::now(), self.rows);
                    }
                    self.close();
                }
            }
        }
        Poll::Ready(None)
    }

    /// The position of the stream after the last returned batch: everything up to here was
    /// returned.
    ///
    /// With [`Acknowledge::Manual`](crate::Acknowledge::Manual): everything up to here was
    /// acknowledged, in each vBucket without a gap.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.acks.checkpoint().unwrap_or_else(|| self.checkpoint.clone())
    }

    /// Acknowledges a processed batch: see [`Acknowledger::ack`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) if the batch belongs to another stream, or
    /// the stream does not use manual acknowledgement.
    pub fn ack(&self, token: AckToken) -> Result<(), Error> {
        self.acks.ack(token)
    }

    /// A handle that acknowledges batches from other tasks, while this one waits for the next
    /// batch.
    #[must_use]
    pub fn acknowledger(&self) -> Acknowledger {
        self.acks.clone()
    }

    /// Ends the stream and its connections. Batches not taken yet are dropped, and the checkpoint
    /// does not include them.
    pub fn close(&mut self) {
        self.has_ended = true;
        self.cancel.cancel();
        self.queue.clear();
    }

    /// Statistics of the stream.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        let (now, vbuckets) = (Instant::now().into_std(), self.stats.vbuckets());
        self.stats.refresh(now);
        let lags: Vec<_> = vbuckets.iter().map(|&known| self.vbucket(known)).collect();
        let oldest = vbuckets.iter().filter_map(|vbucket| vbucket.unpersisted_since).min();
        StreamStats {
            batches: self.batches,
            rows: self.rows,
            elapsed: self.opened.elapsed(),
            unpersisted_for: oldest
                .map_or(Duration::ZERO, |since| now.saturating_duration_since(since)),
            diverged: vbuckets.iter().filter(|vbucket| vbucket.is_diverged).count(),
            disconnected: lags.iter().filter(|vbucket| vbucket.is_disconnected).count(),
            ..self.stats.snapshot()
        }
        .with_lag(&lags)
    }

    /// Statistics of every vBucket, ascending.
    #[must_use]
    pub fn vbucket_stats(&self) -> Vec<VbucketStats> {
        self.stats.refresh(Instant::now().into_std());
        let vbuckets = self.stats.vbuckets().into_iter();
        vbuckets.map(|known| self.vbucket(known)).collect()
    }

    /// Lag behind the server in each collection that the stream's filter passes, by name. Without a
    /// filter, it is requested only from the first call on, so that the first call returns nothing.
    #[must_use]
    pub fn collection_lag(&self) -> Vec<CollectionLag> {
        self.stats.refresh(Instant::now().into_std());
        let open: Vec<VbucketStats> = self
            .stats
            .vbuckets()
            .into_iter()
            .filter(|known| known.state != VbucketState::Complete)
            .map(|known| self.vbucket(known))
            .collect();
        self.stats.collections(|collections| {
            let mut lags: Vec<_> = collections
                .iter()
                .map(|(&id, known)| {
                    let behind = |of: &VbucketStats| {
                        let seqno = known.seqnos.get(&of.vbid).filter(|_| !of.is_disconnected)?;
                        Some(seqno.0.saturating_sub(of.seqno.0))
                    };
                    let lag = total_lag(open.iter().map(behind));
                    CollectionLag { id, name: known.name.clone(), lag }
                })
                .collect();
            lags.sort_by(|one, other| one.name.cmp(&other.name));
            lags
        })
    }

    fn vbucket(&self, known: KnownVbucket) -> VbucketStats {
        let KnownVbucket { vbid, state, high_seqno: heard, persisted_seqno, .. } = known;
        let position = self.checkpoint.position(vbid);
        let seqno = position.map_or(Seqno::ZERO, |position| position.seqno);
        let high_seqno = heard.max(position.map(|position| position.snapshot.end));
        let now = Instant::now().into_std();
        VbucketStats {
            vbid,
            state,
            seqno,
            high_seqno,
            persisted_seqno,
            unpersisted_for: known
                .unpersisted_since
                .map(|since| now.saturating_duration_since(since)),
            is_diverged: known.is_diverged,
            is_disconnected: known.idle_since.is_some_and(|since| {
                now.saturating_duration_since(since) >= VbucketStats::DISCONNECTED
            }),
        }
    }

    /// Events since the last call, oldest first. An event may arrive shortly after the changes it
    /// concerns. If events are not taken, the oldest are dropped, which is reported as an event as
    /// well.
    #[must_use]
    pub fn take_events(&self) -> Vec<StreamEvent> {
        self.stats.events.take()
    }
}
