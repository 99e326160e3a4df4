//! A sink that keeps owned rows.

use dcp_proto::{
    BatchSink, Change, ChangeSink, Op, Rollback, SinkError, Snapshot, SystemEventRecord,
};
use dcp_wire::{Cas, CollectionId, Datatype, Seqno, Vbid};

/// A change as it was delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) op: Op,
    pub(crate) vbid: Vbid,
    pub(crate) seqno: Seqno,
    pub(crate) collection_id: CollectionId,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) datatype: Datatype,
    pub(crate) cas: Cas,
    pub(crate) flags: u32,
    pub(crate) expiry: u32,
    pub(crate) delete_time: u32,
}

/// What a sink was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Row(Row),
    Rollback(Rollback),
}

/// Keeps everything it is given.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    items: Vec<Item>,
    bytes: usize,
    /// Where each row says its snapshot lies.
    snapshots: Vec<(Seqno, Snapshot)>,
}

impl ChangeSink for Rows {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.bytes += change.key.len() + change.value.len();
        self.snapshots.push((change.seqno, change.snapshot));
        self.items.push(Item::Row(Row {
            op: change.op,
            vbid: change.vbid,
            seqno: change.seqno,
            collection_id: change.collection_id,
            key: change.key.to_vec(),
            value: change.value.to_vec(),
            datatype: change.datatype,
            cas: change.cas,
            flags: change.flags,
            expiry: change.expiry,
            delete_time: change.delete_time,
        }));
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        self.items.push(Item::Rollback(*rollback));
        Ok(())
    }

    fn system_event(&mut self, _event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
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
        for (seqno, snapshot) in self.snapshots.drain(..) {
            assert!(snapshot.start <= seqno && seqno <= snapshot.end, "{seqno} in {snapshot:?}");
        }
        Ok(std::mem::take(&mut self.items))
    }
}
