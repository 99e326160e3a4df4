//! A node's copies, fed by consumers over sockets.

use dcp_producer_proto::replica::{Completion, NotApplied, ReplicaPosition, ReplicaStore};
use dcp_producer_proto::{FailoverTable, Item, VBucketState};
use dcp_wire::message::{DurabilityLevel, SnapshotMarker};
use dcp_wire::{Seqno, Vbid};

use super::served::NodeBucket;
use crate::bucket::VBucket;

impl NodeBucket<'_> {
    fn with<T>(&self, vbid: Vbid, op: impl FnOnce(&mut VBucket) -> T) -> Option<T> {
        self.served.bucket.with_on(self.node, vbid, op)
    }

    /// Like `with`, unless the copy has become active meanwhile.
    fn with_replica<T>(&self, vbid: Vbid, op: impl FnOnce(&mut VBucket) -> T) -> Option<T> {
        let is_fed = |copy: &VBucket| copy.state != VBucketState::Active;
        self.with(vbid, |copy| is_fed(copy).then(|| op(copy))).flatten()
    }
}

impl ReplicaStore for NodeBucket<'_> {
    fn state(&self, vbid: Vbid) -> Option<VBucketState> {
        self.with(vbid, |copy| copy.state)
    }

    fn position(&self, vbid: Vbid) -> Option<ReplicaPosition> {
        self.with(vbid, |copy| copy.replica_position())
    }

    fn failover_table(&self, vbid: Vbid) -> Option<FailoverTable> {
        self.with(vbid, |copy| copy.failover.clone())
    }

    fn set_failover_table(&self, vbid: Vbid, table: FailoverTable) {
        self.with_replica(vbid, |copy| copy.failover = table);
    }

    fn drop_newest_branch(&self, vbid: Vbid) {
        self.with_replica(vbid, VBucket::drop_newest_branch);
    }

    fn roll_back(&self, vbid: Vbid, to: Seqno) {
        self.with_replica(vbid, |copy| copy.roll_back_replica(to));
    }

    fn begin_snapshot(&self, vbid: Vbid, marker: &SnapshotMarker) {
        self.with_replica(vbid, |copy| copy.begin_snapshot(marker));
    }

    fn apply(&self, vbid: Vbid, item: Item) {
        self.with_replica(vbid, |copy| copy.receive(item));
    }

    fn complete(&self, vbid: Vbid, completion: &Completion<'_>) -> Result<(), NotApplied> {
        self.with_replica(vbid, |copy| copy.receive_completion(completion)).unwrap_or(Ok(()))
    }

    fn advance(&self, vbid: Vbid, seqno: Seqno) {
        self.with_replica(vbid, |copy| copy.receive_nothing_up_to(seqno));
    }

    fn prepared(&self, vbid: Vbid) -> Vec<(Seqno, DurabilityLevel)> {
        self.with(vbid, |copy| copy.prepared()).unwrap_or_default()
    }

    fn set_state(&self, vbid: Vbid, state: VBucketState) {
        self.with(vbid, |copy| copy.take_over(state));
    }
}
