//! A plan into parts, for as many tasks.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use dcp_wire::Vbid;

use super::{ReadPlan, VbucketRange};

impl ReadPlan {
    /// Divides the plan into at most `parts` plans, but at least one per node; each has ranges of
    /// one node only, so that its read needs one connection.
    ///
    /// The parts of a node have about equally many seqnos; a range is never divided. No part is
    /// empty. `nodes` has the node of each vBucket.
    #[must_use]
    pub fn split(&self, nodes: &BTreeMap<Vbid, String>, parts: usize) -> Vec<Self> {
        let mut by_node: BTreeMap<&str, Vec<VbucketRange>> = BTreeMap::new();
        for range in self.ranges() {
            let node = nodes.get(&range.vbid).map_or("", String::as_str);
            by_node.entry(node).or_default().push(range);
        }
        let sizes: Vec<u128> =
            by_node.values().map(|ranges| ranges.iter().map(size).sum()).collect();
        let counts: Vec<usize> = by_node.values().map(Vec::len).collect();
        let parts = spread(&sizes, &counts, parts);
        let divided = by_node.into_iter().zip(parts).flat_map(|((node, ranges), parts)| {
            divide(ranges, parts).into_iter().map(move |ranges| (node, ranges))
        });
        divided.map(|(node, ranges)| self.with_ranges(node.to_owned(), ranges)).collect()
    }
}

/// Weight of a range: its seqnos, and a constant for its stream.
fn size(range: &VbucketRange) -> u128 {
    u128::from(range.size()) + 1
}

/// How many parts each node gets: one, and each further one goes to the node with the largest
/// parts.
fn spread(sizes: &[u128], counts: &[usize], parts: usize) -> Vec<usize> {
    let mut given = vec![1; sizes.len()];
    for _ in sizes.len()..parts.min(counts.iter().sum()) {
        let divisible = (0..sizes.len()).filter(|&node| given[node] < counts[node]);
        let largest = divisible.max_by_key(|&node| sizes[node] / given[node] as u128);
        let Some(node) = largest else { break };
        given[node] += 1;
    }
    given
}

/// The largest range first, each to the list that is smallest so far. Ranges within a list ascend
/// by vBucket.
fn divide(mut ranges: Vec<VbucketRange>, lists: usize) -> Vec<Vec<VbucketRange>> {
    ranges.sort_by_key(|range| (Reverse(size(range)), range.vbid));
    let mut lists: Vec<(u128, Vec<VbucketRange>)> = vec![(0, Vec::new()); lists];
    for range in ranges {
        if let Some((total, list)) = lists.iter_mut().min_by_key(|(total, _)| *total) {
            *total += size(&range);
            list.push(range);
        }
    }
    let mut lists: Vec<_> = lists.into_iter().map(|(_, list)| list).collect();
    lists.retain(|list| !list.is_empty());
    for list in &mut lists {
        list.sort_by_key(|range| range.vbid);
    }
    lists
}
