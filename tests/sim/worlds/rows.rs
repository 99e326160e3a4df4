//! What a reader is given, and the log it keeps of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::{
    BatchSink, Change, ChangeSink, Op, Rollback, SinkError, Snapshot, SystemEventRecord,
};
use dcp_wire::message::{SystemEvent, SystemEventId};
use dcp_wire::{Datatype, Seqno, Vbid, snappy, xattr};

/// Documents by collection and key.
pub(crate) type Documents = BTreeMap<(u32, Vec<u8>), Vec<u8>>;

/// Most a value inflates to.
const MAX_VALUE: usize = 1 << 20;

/// One thing a sink was given.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Change(Arc<Row>),
    /// A collection begins, begins anew, or ends: it is empty in any case.
    Emptied {
        vbid: Vbid,
        seqno: Seqno,
        epoch: u32,
        collection: u32,
    },
    Rollback(Rollback),
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) vbid: Vbid,
    pub(crate) seqno: Seqno,
    pub(crate) epoch: u32,
    pub(crate) op: Op,
    pub(crate) collection: u32,
    pub(crate) key: Vec<u8>,
    /// Without its extended attributes.
    pub(crate) value: Vec<u8>,
    pub(crate) has_xattrs: bool,
    /// It came where versions are not left out.
    pub(crate) is_history: bool,
    pub(crate) cas: u64,
    pub(crate) vbuuid: u64,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { vbid, seqno, epoch, op, collection, cas, vbuuid, .. } = self;
        let (key, value) = (String::from_utf8_lossy(&self.key), shown(&self.value));
        write!(f, "{vbid} {seqno} on {vbuuid:x}, epoch {epoch}: ")?;
        write!(f, "{op:?} {collection}/{key} = {value}, cas {cas}")
    }
}

/// A value without the zeros that make it long.
pub(crate) fn shown(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_start_matches('0').to_owned()
}

impl Item {
    pub(crate) fn vbid(&self) -> Vbid {
        match self {
            Self::Change(row) => row.vbid,
            Self::Emptied { vbid, .. } => *vbid,
            Self::Rollback(rollback) => rollback.vbid,
        }
    }

    /// Whether it lies at or below its vBucket's position.
    pub(crate) fn is_covered(&self, checkpoint: &Checkpoint) -> bool {
        let at = checkpoint.position(self.vbid()).map(|at| (at.epoch, at.seqno));
        match self {
            Self::Change(row) => at >= Some((row.epoch, row.seqno)),
            Self::Emptied { seqno, epoch, .. } => at >= Some((*epoch, *seqno)),
            Self::Rollback(rollback) => at.is_some_and(|(epoch, _)| epoch >= rollback.epoch),
        }
    }
}

/// Keeps what it is given.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    items: Vec<Item>,
    bytes: usize,
}

impl ChangeSink for Rows {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        let Snapshot { start, end } = change.snapshot;
        assert!(
            change.seqno >= start && change.seqno <= end,
            "{} lies outside of its snapshot {start} to {end}",
            change.seqno
        );
        let mut value = change.value.to_vec();
        if change.datatype.contains(Datatype::SNAPPY) {
            value = snappy::decompress(&value, MAX_VALUE).expect("a compressed value");
        }
        let has_xattrs = change.datatype.contains(Datatype::XATTR);
        if has_xattrs {
            value = xattr::split(&value).expect("extended attributes").1.to_vec();
        }
        self.bytes += change.key.len() + change.value.len();
        self.items.push(Item::Change(Arc::new(Row {
            vbid: change.vbid,
            seqno: change.seqno,
            epoch: change.epoch,
            op: change.op,
            collection: change.collection_id.0,
            key: change.key.to_vec(),
            value,
            has_xattrs,
            is_history: change.history,
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
        if matches!(id, SystemEventId::END_COLLECTION | SystemEventId::BEGIN_COLLECTION) {
            let collection = payload.collection_id.expect("the collection").0;
            self.items.push(Item::Emptied { vbid, seqno, epoch, collection });
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
        Ok(std::mem::take(&mut self.items))
    }
}

/// One vBucket.
#[derive(Clone, Debug, Default)]
struct Log {
    epoch: u32,
    items: Vec<(Seqno, Item)>,
}

/// What a reader has of all vBuckets: each one's changes in order, cut back by rollbacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    logs: BTreeMap<Vbid, Log>,
}

impl Table {
    /// Takes the next item; tells what is wrong with it.
    pub(crate) fn apply(&mut self, item: &Item) -> Result<(), String> {
        let (vbid, seqno, epoch) = match item {
            Item::Change(row) => (row.vbid, row.seqno, row.epoch),
            Item::Emptied { vbid, seqno, epoch, .. } => (*vbid, *seqno, *epoch),
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

    /// What it has of some vBuckets.
    pub(crate) fn of(mut self, vbids: &[Vbid]) -> Self {
        self.logs.retain(|vbid, _| vbids.contains(vbid));
        self
    }

    /// Takes over what another has of these vBuckets.
    pub(crate) fn replace(&mut self, vbids: &[Vbid], other: Self) {
        self.logs.retain(|vbid, _| !vbids.contains(vbid));
        self.logs.extend(other.of(vbids).logs);
    }

    /// The newest seqno of each vBucket must lie at or below its position, in its epoch and on its
    /// branch.
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for (vbid, log) in &self.logs {
            let position = checkpoint.position(*vbid);
            let (seqno, epoch) = position.map_or((Seqno::ZERO, 0), |at| (at.seqno, at.epoch));
            let last = log.items.last().map_or(Seqno::ZERO, |(seqno, _)| *seqno);
            if last > seqno || log.epoch != epoch {
                return Err(format!(
                    "{vbid}: {last} in epoch {}, position {seqno} in {epoch}",
                    log.epoch
                ));
            }
            if let Some((_, Item::Change(row))) = log.items.last()
                && let Some(branches) = position.and_then(|at| at.failover_log.as_ref())
                && branches.branch_of(row.seqno).vbuuid.0 != row.vbuuid
            {
                return Err(format!("{vbid}: the position names another branch than {row:?}"));
            }
        }
        Ok(())
    }

    /// The changes it keeps.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        let items = self.logs.values().flat_map(|log| &log.items);
        items.filter_map(|(_, item)| match item {
            Item::Change(row) => Some(&**row),
            _ => None,
        })
    }

    /// Whether it has a change.
    pub(crate) fn has(&self, vbid: Vbid, seqno: u64) -> bool {
        self.logs.get(&vbid).is_some_and(|log| {
            log.items.binary_search_by_key(&Seqno(seqno), |(seqno, _)| *seqno).is_ok()
        })
    }

    /// Rollbacks there were.
    pub(crate) fn rollbacks(&self) -> u32 {
        self.logs.values().map(|log| log.epoch).sum()
    }

    /// What it amounts to, in these collections or in all.
    pub(crate) fn documents(&self, of: Option<&BTreeSet<u32>>) -> Documents {
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
                    Item::Emptied { collection, .. } => {
                        of_vbucket.retain(|(id, _), _| id != collection);
                    }
                    Item::Rollback(_) => {}
                }
            }
            documents.extend(of_vbucket);
        }
        if let Some(of) = of {
            documents.retain(|(collection, _), _| of.contains(collection));
        }
        documents
    }
}
