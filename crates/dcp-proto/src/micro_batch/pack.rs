//! Ranges into tasks.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::SeqnoRange;

/// A range and the node of its vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Address of the vBucket's node.
    pub node: String,
    /// What to read.
    pub range: SeqnoRange,
}

/// Packs ranges into at most `tasks` lists, but at least one per node; each list has ranges of one
/// node only.
///
/// A task then reads from one connection. The lists of a node have about equally many seqnos; a
/// range is never divided. Ranges within a list ascend by vBucket. No list is empty.
#[must_use]
pub fn pack(ranges: Vec<Located>, tasks: usize) -> Vec<Vec<Located>> {
    let mut by_node: BTreeMap<String, Vec<Located>> = BTreeMap::new();
    for range in ranges {
        by_node.entry(range.node.clone()).or_default().push(range);
    }
    let sizes: Vec<u128> = by_node.values().map(|ranges| ranges.iter().map(size).sum()).collect();
    let counts: Vec<usize> = by_node.values().map(Vec::len).collect();
    let tasks = spread(&sizes, &counts, tasks);
    by_node.into_values().zip(tasks).flat_map(|(ranges, tasks)| divide(ranges, tasks)).collect()
}

/// Weight of a range: its seqnos, and a constant for its stream.
fn size(located: &Located) -> u128 {
    u128::from(located.range.size()) + 1
}

/// How many tasks each node gets: one, and each further one goes to the node with the largest
/// tasks.
fn spread(sizes: &[u128], counts: &[usize], tasks: usize) -> Vec<usize> {
    let mut given = vec![1; sizes.len()];
    for _ in sizes.len()..tasks.min(counts.iter().sum()) {
        let divisible = (0..sizes.len()).filter(|&node| given[node] < counts[node]);
        let largest = divisible.max_by_key(|&node| sizes[node] / given[node] as u128);
        let Some(node) = largest else { break };
        given[node] += 1;
    }
    given
}

/// The largest range first, each to the list that is smallest so far.
fn divide(mut ranges: Vec<Located>, tasks: usize) -> Vec<Vec<Located>> {
    ranges.sort_by_key(|located| (Reverse(size(located)), located.range.vbid));
    let mut lists: Vec<(u128, Vec<Located>)> = vec![(0, Vec::new()); tasks];
    for range in ranges {
        if let Some((total, list)) = lists.iter_mut().min_by_key(|(total, _)| *total) {
            *total += size(&range);
            list.push(range);
        }
    }
    let mut lists: Vec<_> = lists.into_iter().map(|(_, list)| list).collect();
    lists.retain(|list| !list.is_empty());
    for list in &mut lists {
        list.sort_by_key(|located| located.range.vbid);
    }
    lists
}
