//! What the consumer makes of the changes: each vBucket's changes in order, cut back by rollbacks.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::{
    BatchSink, Change, ChangeSink, Op, Rollback, SinkError, Snapshot, SystemEventRecord,
};
use dcp_wire::message::{SystemEvent, SystemEventId};
use dcp_wire::{CollectionId, Seqno, Vbid};

/// Documents by collection and key.
pub(crate) type Documents = BTreeMap<(u32, Vec<u8>), Vec<u8>>;

/// One thing the sink was given.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Change(Arc<Row>),
    Dropped { vbid: Vbid, seqno: Seqno, epoch: u32, collection: u32 },
    Rollback(Rollback),
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) vbid: Vbid,
    pub(crate) seqno: Seqno,
    pub(crate) epoch: u32,
    pub(crate) op: Op,
    pub(crate) collection: u32,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) cas: u64,
    pub(crate) vbuuid: u64,
}

impl Item {
    /// Whether it lies at or below its vBucket's position.
    pub(crate) fn is_covered(&self, checkpoint: &Checkpoint) -> bool {
        let at = |vbid| checkpoint.position(vbid).map(|at| (at.epoch, at.seqno));
        match self {
            Self::Change(row) => at(row.vbid) >= Some((row.epoch, row.seqno)),
            Self::Dropped { vbid, seqno, epoch, .. } => at(*vbid) >= Some((*epoch, *seqno)),
            Self::Rollback(rollback) => {
                at(rollback.vbid).is_some_and(|(epoch, _)| epoch >= rollback.epoch)
            }
        }
    }
}

/// Keeps what it is given.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    items: Vec<Item>,
    bytes: usize,
    misplaced: Option<(Seqno, Snapshot)>,
}

impl ChangeSink for Rows {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        let Snapshot { start, end } = change.snapshot;
        if change.seqno < start || change.seqno > end {
            self.misplaced = Some((change.seqno, change.snapshot));
        }
        self.bytes += change.key.len() + change.value.len();
        self.items.push(Item::Change(Arc::new(Row {
            vbid: change.vbid,
            seqno: change.seqno,
            epoch: change.epoch,
            op: change.op,
            collection: change.collection_id.0,
            key: change.key.to_vec(),
            value: change.value.to_vec(),
            cas: change.cas.0,
            vbuuid: change.vbuuid.0,
        })));
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        self.items.push(Item::Rollback(*rollback));
        Ok(())
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        let &SystemEventRecord { vbid, seqno, epoch, id, version, key, value } = event;
        let payload = SystemEvent { seqno, id, version, key, value }.payload();
        let payload = payload.expect("a payload that is whole").expect("a known event");
        if id == SystemEventId::END_COLLECTION {
            let collection = payload.collection_id.expect("the collection").0;
            self.items.push(Item::Dropped { vbid, seqno, epoch, collection });
        }
        Ok(())
    }
}

impl BatchSink for Rows {
    type Batch = Vec<Item>;

    fn rows(&self) -> usize {
        self.items.len()
    }

    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn take_batch(&mut self) -> Result<Vec<Item>, SinkError> {
        self.bytes = 0;
        assert!(self.misplaced.is_none(), "outside of its snapshot: {:?}", self.misplaced);
        Ok(std::mem::take(&mut self.items))
    }
}

/// One vBucket.
#[derive(Clone, Debug, Default)]
struct Log {
    epoch: u32,
    items: Vec<(Seqno, Item)>,
}

/// All vBuckets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    logs: BTreeMap<Vbid, Log>,
}

impl Table {
    /// Takes the next item; tells what is wrong with it.
    pub(crate) fn apply(&mut self, item: &Item) -> Result<(), String> {
        let (vbid, seqno, epoch) = match item {
            Item::Change(row) => (row.vbid, row.seqno, row.epoch),
            Item::Dropped { vbid, seqno, epoch, .. } => (*vbid, *seqno, *epoch),
            Item::Rollback(rollback) => return self.roll_back(rollback),
        };
        let log = self.logs.entry(vbid).or_default();
        let last = log.items.last().map_or(Seqno::ZERO, |(seqno, _)| *seqno);
        if epoch != log.epoch {
            return Err(format!("{vbid} {seqno} has epoch {epoch}, not {}", log.epoch));
        }
        if seqno <= last {
            return Err(format!("{vbid} {seqno} comes after {last}"));
        }
        log.items.push((seqno, item.clone()));
        Ok(())
    }

    fn roll_back(&mut self, rollback: &Rollback) -> Result<(), String> {
        let log = self.logs.entry(rollback.vbid).or_default();
        if rollback.epoch != log.epoch + 1 {
            return Err(format!("{rollback:?} after epoch {}", log.epoch));
        }
        log.epoch = rollback.epoch;
        log.items.retain(|(seqno, _)| *seqno <= rollback.seqno);
        Ok(())
    }

    /// The newest seqno of each vBucket must lie at or below its position, in its epoch.
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for (vbid, log) in &self.logs {
            let position = checkpoint.position(*vbid);
            let (seqno, epoch) = position.map_or((Seqno::ZERO, 0), |at| (at.seqno, at.epoch));
            let last = log.items.last().map_or(Seqno::ZERO, |(seqno, _)| *seqno);
            if (log.epoch, last) > (epoch, seqno) || log.epoch != epoch {
                let (at, epoch_at) = (log.epoch, epoch);
                return Err(format!(
                    "{vbid}: {last} in epoch {at}, position {seqno} in {epoch_at}"
                ));
            }
            // What is gone on with must know the branch of what there is.
            if let Some((_, Item::Change(row))) = log.items.last()
                && let Some(branches) = position.and_then(|at| at.failover_log.as_ref())
                && branches.branch_of(row.seqno).vbuuid.0 != row.vbuuid
            {
                return Err(format!("{vbid}: the position names another branch than {row:?}"));
            }
        }
        Ok(())
    }

    /// Every change in it.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.logs.values().flat_map(|log| &log.items).filter_map(|(_, item)| match item {
            Item::Change(row) => Some(row.as_ref()),
            _ => None,
        })
    }

    /// Rollbacks there were.
    pub(crate) fn rollbacks(&self) -> u32 {
        self.logs.values().map(|log| log.epoch).sum()
    }

    /// What it amounts to.
    pub(crate) fn documents(&self) -> Documents {
        let mut documents = Documents::new();
        for log in self.logs.values() {
            let mut of_vbucket = Documents::new();
            for (_, item) in &log.items {
                match item {
                    Item::Change(row) => {
                        let key = (row.collection, row.key.clone());
                        match row.op {
                            Op::Mutation => of_vbucket.insert(key, row.value.clone()),
                            Op::Deletion | Op::Expiration => of_vbucket.remove(&key),
                        };
                    }
                    Item::Dropped { collection, .. } => {
                        of_vbucket.retain(|(of, _), _| of != collection);
                    }
                    Item::Rollback(_) => {}
                }
            }
            documents.extend(of_vbucket);
        }
        documents
    }
}

/// The collections keys are written to at first.
pub(crate) const DEFAULT: u32 = CollectionId::DEFAULT.0;
