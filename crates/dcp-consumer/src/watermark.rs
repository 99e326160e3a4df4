//! Progress of an application that acknowledges batches in any order.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::consumer::PositionUpdate;
use dcp_wire::Vbid;

use crate::Error;
use crate::queue::Credit;
use crate::sync::{Arc, Mutex, MutexGuard};

/// Identifies one delivered batch of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AckToken {
    stream: u64,
    batch: u64,
}

/// Acknowledges batches of a stream opened with
/// [`Acknowledge::Manual`](crate::Acknowledge::Manual), from any task or thread. Cheap to clone;
/// outlives the stream.
#[derive(Clone, Debug)]
pub struct Acknowledger {
    stream: u64,
    /// `None` without manual acknowledgement.
    watermark: Option<Arc<Mutex<Watermark>>>,
}

impl Acknowledger {
    /// For a new stream that starts at `checkpoint`.
    pub(crate) fn new(is_manual: bool, checkpoint: &Checkpoint) -> Self {
        static STREAMS: AtomicU64 = AtomicU64::new(0);
        let watermark = is_manual.then(|| Arc::new(Mutex::new(Watermark::new(checkpoint.clone()))));
        Self { stream: STREAMS.fetch_add(1, Ordering::Relaxed), watermark }
    }

    /// Acknowledges a processed batch: its bytes are released, and the checkpoint includes it as
    /// soon as it includes everything before it. Repeated calls have no effect.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) if the batch belongs to another stream, or the stream does not use
    /// manual acknowledgement.
    pub fn ack(&self, token: AckToken) -> Result<(), Error> {
        let Some(mut watermark) = self.lock() else {
            let problem = "the stream acknowledges each batch when the next one is taken: open it \
                           with manual acknowledgement";
            return Err(Error::option(&["acknowledge"], problem));
        };
        if token.stream != self.stream {
            let problem = "the batch belongs to another stream: acknowledge it there";
            return Err(Error::option(&["batch_token"], problem));
        }
        watermark.ack(token.batch);
        Ok(())
    }

    /// The positions of all vBuckets, up to which everything was acknowledged without a gap; `None`
    /// without manual acknowledgement.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        Some(self.lock()?.checkpoint.clone())
    }

    /// Whether the application acknowledges batches.
    #[must_use]
    pub const fn is_manual(&self) -> bool {
        self.watermark.is_some()
    }

    /// Batches delivered and not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.lock().map_or(0, |watermark| watermark.pending.len())
    }

    pub(crate) const fn token(&self, batch: u64) -> AckToken {
        AckToken { stream: self.stream, batch }
    }

    /// A batch is delivered to the application; returns the credit if it need not be acknowledged.
    pub(crate) fn delivered(
        &self,
        batch: u64,
        updates: &[PositionUpdate],
        credit: Credit,
    ) -> Option<Credit> {
        let Some(mut watermark) = self.lock() else { return Some(credit) };
        watermark.delivered(batch, updates, credit);
        None
    }

    /// Position updates of vBuckets without changes for the application.
    pub(crate) fn passed(&self, updates: &[PositionUpdate]) {
        if let Some(mut watermark) = self.lock() {
            for update in updates {
                watermark.push(Step { batch: None, update: update.clone() });
            }
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Watermark>> {
        // Nothing panics while the lock is held, so its contents are consistent.
        Some(self.watermark.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Batches that were delivered but not acknowledged, and the checkpoint before them.
#[derive(Debug)]
struct Watermark {
    checkpoint: Checkpoint,
    /// By the number of the batch.
    pending: BTreeMap<u64, Pending>,
    /// By vBucket, the steps that the checkpoint does not include yet, in the order of delivery.
    /// The first step is not acknowledged and no two consecutive ones are, so there are at most
    /// twice as many as unacknowledged batches.
    waiting: HashMap<Vbid, VecDeque<Step>>,
}

#[derive(Debug)]
struct Pending {
    vbids: Vec<Vbid>,
    credit: Credit,
}

/// One position update of a vBucket.
#[derive(Debug)]
struct Step {
    /// The batch that must be acknowledged for it to count; `None` if none must be any longer.
    batch: Option<u64>,
    update: PositionUpdate,
}

impl Watermark {
    fn new(checkpoint: Checkpoint) -> Self {
        Self { checkpoint, pending: BTreeMap::new(), waiting: HashMap::new() }
    }

    fn delivered(&mut self, batch: u64, updates: &[PositionUpdate], credit: Credit) {
        for update in updates {
            self.push(Step { batch: Some(batch), update: update.clone() });
        }
        let vbids = updates.iter().map(|update| update.vbid).collect();
        self.pending.insert(batch, Pending { vbids, credit });
    }

    fn push(&mut self, step: Step) {
        let steps = self.waiting.entry(step.update.vbid).or_default();
        match steps.back_mut() {
            // Of two updates by one batch, or by none, the second is sufficient.
            Some(last) if last.batch == step.batch => *last = step,
            None if step.batch.is_none() => self.checkpoint.advance(step.update),
            _ => steps.push_back(step),
        }
    }

    fn ack(&mut self, batch: u64) {
        let Some(Pending { vbids, credit }) = self.pending.remove(&batch) else { return };
        credit.give_back();
        for vbid in vbids {
            let Some(steps) = self.waiting.get_mut(&vbid) else { continue };
            let Some(at) = steps.iter().position(|step| step.batch == Some(batch)) else {
                continue;
            };
            if let Some(step) = steps.get_mut(at) {
                step.batch = None;
            }
            let is_acked = |steps: &VecDeque<Step>, at: usize| {
                steps.get(at).is_some_and(|step| step.batch.is_none())
            };
            if is_acked(steps, at + 1) {
                steps.remove(at);
            }
            if at > 0 && is_acked(steps, at - 1) && is_acked(steps, at) {
                steps.remove(at - 1);
            }
            while is_acked(steps, 0) {
                if let Some(step) = steps.pop_front() {
                    self.checkpoint.advance(step.update);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_proto::checkpoint::StoredFilter;
    use dcp_proto::{History, Position, Snapshot};
    use dcp_wire::Seqno;
    use proptest::prelude::*;

    use super::*;
    use crate::queue::SharedState;

    fn update(vbid: u16, seqno: u64) -> PositionUpdate {
        let snapshot = Snapshot { start: Seqno(0), end: Seqno(1000) };
        let position = Position { seqno: Seqno(seqno), snapshot, ..Position::EARLIEST };
        PositionUpdate { vbid: Vbid(vbid), position, history: History::default() }
    }

    fn manual() -> (Acknowledger, Arc<SharedState>) {
        (Acknowledger::new(true, &Checkpoint::new("b", StoredFilter::default())), Arc::default())
    }

    fn seqno(acks: &Acknowledger, vbid: u16) -> u64 {
        acks.checkpoint().unwrap().position(Vbid(vbid)).map_or(0, |position| position.seqno.0)
    }

    fn deliver(
        acks: &Acknowledger,
        shared: &Arc<SharedState>,
        batch: u64,
        updates: &[PositionUpdate],
    ) {
        assert!(acks.delivered(batch, updates, Credit::new(Arc::clone(shared), 10)).is_none());
    }

    #[test]
    fn checkpoint_never_passes_a_batch_that_is_not_acknowledged() {
        let (acks, shared) = manual();
        deliver(&acks, &shared, 1, &[update(0, 10), update(1, 5)]);
        deliver(&acks, &shared, 2, &[update(0, 20)]);
        deliver(&acks, &shared, 3, &[update(0, 30), update(2, 7)]);
        acks.ack(acks.token(3)).unwrap();
        acks.ack(acks.token(2)).unwrap();
        assert_eq!((seqno(&acks, 0), seqno(&acks, 1), seqno(&acks, 2)), (0, 0, 7));
        acks.ack(acks.token(1)).unwrap();
        assert_eq!((seqno(&acks, 0), seqno(&acks, 1)), (30, 5));
        assert_eq!(acks.unacknowledged(), 0);
    }

    #[test]
    fn checkpoint_never_passes_a_batch_through_changes_that_are_not_delivered() {
        let (acks, shared) = manual();
        acks.passed(&[update(0, 3)]);
        assert_eq!(seqno(&acks, 0), 3, "nothing is before it");
        deliver(&acks, &shared, 1, &[update(0, 10)]);
        acks.passed(&[update(0, 15)]);
        acks.passed(&[update(0, 16)]);
        assert_eq!(seqno(&acks, 0), 3);
        acks.ack(acks.token(1)).unwrap();
        assert_eq!(seqno(&acks, 0), 16);
    }

    #[test]
    fn bytes_are_released_with_each_acknowledgement_once() {
        let (acks, shared) = manual();
        for batch in 1..=3 {
            deliver(&acks, &shared, batch, &[update(0, batch)]);
        }
        assert_eq!(shared.take_returned(), 0);
        acks.ack(acks.token(3)).unwrap();
        acks.ack(acks.token(3)).unwrap();
        assert_eq!(shared.take_returned(), 10);
        acks.ack(acks.token(1)).unwrap();
        assert_eq!(shared.take_returned(), 10);
    }

    #[test]
    fn tokens_of_other_streams_and_of_other_modes_are_refused() {
        let (one, other) = (manual().0, manual().0);
        assert_eq!(one.ack(other.token(1)).unwrap_err().options(), ["batch_token"]);
        let by_itself = Acknowledger::new(false, &Checkpoint::new("b", StoredFilter::default()));
        assert_eq!(by_itself.ack(by_itself.token(1)).unwrap_err().options(), ["acknowledge"]);
        assert_eq!(by_itself.checkpoint(), None);
    }

    proptest! {
        #[test]
        fn acknowledgements_in_any_order_give_the_longest_run_without_a_gap(
            steps in proptest::collection::vec((0_u16..3, any::<bool>(), any::<u16>()), 1..40),
        ) {
            let (acks, shared) = manual();
            // For each step: vBucket, seqno, and the batch that must be acknowledged.
            let mut model: Vec<(u16, u64, Option<u64>)> = Vec::new();
            let mut open: Vec<u64> = Vec::new();
            for (i, (vbid, has_rows, which)) in steps.into_iter().enumerate() {
                let number = i as u64 + 1;
                if has_rows {
                    deliver(&acks, &shared, number, &[update(vbid, number)]);
                    open.push(number);
                } else {
                    acks.passed(&[update(vbid, number)]);
                }
                model.push((vbid, number, has_rows.then_some(number)));
                if which % 3 != 0 && !open.is_empty() {
                    let batch = open.remove(usize::from(which) % open.len());
                    acks.ack(acks.token(batch)).unwrap();
                    for step in model.iter_mut().filter(|step| step.2 == Some(batch)) {
                        step.2 = None;
                    }
                }
                for vbid in 0..3 {
                    let of_it = model.iter().filter(|step| step.0 == vbid);
                    let run = of_it.take_while(|step| step.2.is_none());
                    prop_assert_eq!(seqno(&acks, vbid), run.last().map_or(0, |step| step.1));
                }
                let watermark = acks.lock().unwrap();
                let most = 2 * open.len();
                prop_assert!(watermark.waiting.values().all(|steps| steps.len() <= most));
            }
        }
    }
}
