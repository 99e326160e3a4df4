//! Placement of the vBuckets' copies.

use dcp_wire::Vbid;

use super::ServedBucket;
use crate::Error;
use crate::bucket::Copies;

impl ServedBucket {
    /// Moves the copies of all vBuckets to an even layout, each with its history.
    pub(super) fn lay_out(&self, usable: &[usize]) -> Result<(), Error> {
        self.bucket.vbids().try_for_each(|vbid| self.lay_out_one(usable, vbid))
    }

    /// Whether the copies of a vBucket are placed as in an even layout.
    pub(super) fn is_in_place(&self, usable: &[usize], vbid: Vbid) -> bool {
        self.bucket.nodes_of(vbid) == self.chain(usable, vbid)
    }

    /// Whether a vBucket has as many copies as possible, each on a usable node.
    pub(super) fn is_complete(&self, usable: &[usize], vbid: Vbid) -> bool {
        let nodes = self.bucket.nodes_of(vbid);
        nodes.len() == self.chain(usable, vbid).len()
            && nodes.iter().all(|node| usable.contains(node))
    }

    /// Moves the copies of one vBucket to their place in an even layout.
    pub(super) fn lay_out_one(&self, usable: &[usize], vbid: Vbid) -> Result<(), Error> {
        let chain = self.chain(usable, vbid);
        let placed = self.bucket.rearrange(vbid, |copies| self.place(vbid, &chain, copies));
        placed.unwrap_or(Ok(()))
    }

    /// The nodes of a vBucket, the active one's first. Neighbours stay together: with 2 nodes the
    /// first has the lower half.
    fn chain(&self, usable: &[usize], vbid: Vbid) -> Vec<usize> {
        let count = usize::from(self.bucket.vbucket_count());
        let first = vbid.index() * usable.len() / count.max(1);
        let copies = (1 + usize::from(self.replicas())).min(usable.len());
        usable.iter().cycle().skip(first).take(copies).copied().collect()
    }

    fn place(&self, vbid: Vbid, chain: &[usize], copies: &mut Copies) -> Result<(), Error> {
        let Some(&active) = chain.first() else {
            return Ok(());
        };
        if copies.nodes().is_empty() {
            copies.set_active(self.bucket.new_copy(active, vbid));
        }
        if !copies.hand_over(active)? {
            copies.move_to(self.bucket.new_copy(active, vbid))?;
        }
        for &node in chain {
            if !copies.nodes().contains(&node) {
                copies.add_replica(self.bucket.new_copy(node, vbid));
            }
        }
        for node in copies.nodes() {
            if !chain.contains(&node) {
                copies.drop_replica(node);
            }
        }
        copies.arrange(chain);
        Ok(())
    }
}
