//! Several readers that go on from one stream, each with a checkpoint of its own.

use std::sync::Arc;

use dcp_wire::{Seqno, Vbid};

use super::{Checkpoint, CheckpointEntry, CheckpointError, StoredFilter};
use crate::Position;

impl Checkpoint {
    /// Where one stream of `filter` begins so that all of these readers can go on from it: the
    /// earliest of their positions in each vBucket, in the latest of their epochs. A vBucket that
    /// one of them has not read begins at 0.
    ///
    /// Each of them must have read everything in `filter` that it is interested in. One that was
    /// further leaves out what it has, as long as [`has_in_history`](Self::has_in_history) says so.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`].
    pub fn earliest_of(
        bucket_uuid: &str,
        filter: StoredFilter,
        readers: &[Self],
    ) -> Result<Self, CheckpointError> {
        let mut earliest = Self::new(bucket_uuid, filter);
        for reader in readers {
            reader.check_bucket(bucket_uuid)?;
        }
        let chunks = readers.iter().map(|reader| reader.chunks.len()).max().unwrap_or(0);
        let vbuckets = (0..=u16::MAX).take(chunks.saturating_mul(super::CHUNK));
        for vbid in vbuckets.map(Vbid) {
            let entries = readers.iter().map(|reader| reader.slot(vbid));
            let epoch = entries.clone().flatten().map(|entry| entry.position.epoch).max();
            let Some(epoch) = epoch else { continue };
            let seqno = |entry: &Option<&Arc<CheckpointEntry>>| {
                entry.map_or(Seqno::ZERO, |entry| entry.position.seqno)
            };
            match entries.min_by_key(seqno).flatten() {
                Some(entry) if entry.position.epoch == epoch => earliest.put(vbid, entry.clone()),
                Some(entry) => {
                    let position = Position { epoch, ..entry.position.clone() };
                    let history = entry.history.clone();
                    earliest.put(vbid, Arc::new(CheckpointEntry { position, history }));
                }
                None => earliest.set(vbid, Position { epoch, ..Position::EARLIEST }),
            }
        }
        Ok(earliest)
    }

    /// Whether another reader's position in a vBucket is on the history of this one's stream, as far
    /// as the server told it: what is beyond this position may still be lost.
    #[must_use]
    pub fn has_in_history(&self, vbid: Vbid, other: &Self) -> bool {
        let Some(theirs) = other.position(vbid).filter(|it| it.seqno != Seqno::ZERO) else {
            return true;
        };
        let Some(ours) = self.position(vbid) else { return false };
        let Some(log) = ours.failover_log.as_ref() else { return false };
        // Inside a snapshot, a change up to the seqno may be left out for one above it.
        let end = theirs.request_snapshot().end;
        log.branch_end(theirs.vbuuid()).is_some_and(|ends| ends.is_none_or(|ends| end <= ends))
    }

    /// The checkpoint with the positions that `other` has in some vBuckets.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`].
    pub fn with_positions_of(
        &self,
        other: &Self,
        vbids: impl IntoIterator<Item = Vbid>,
    ) -> Result<Self, CheckpointError> {
        other.check_bucket(self.bucket_uuid())?;
        let mut taken = self.clone();
        for vbid in vbids {
            if let Some(entry) = other.slot(vbid) {
                taken.put(vbid, Arc::clone(entry));
            }
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::message::FailoverEntry;
    use dcp_wire::{CollectionId, Vbuuid};

    use super::*;
    use crate::consumer::StreamFilter;
    use crate::{FailoverLog, Snapshot};

    const BUCKET: &str = "b";

    fn filter(id: u32) -> StoredFilter {
        StoredFilter::new(StreamFilter::Collections(vec![CollectionId(id)]), false)
    }

    fn at(seqno: u64, end: u64, epoch: u32, log: &[(u64, u64)]) -> Position {
        let entry =
            |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
        Position {
            seqno: Seqno(seqno),
            snapshot: Snapshot { start: Seqno(seqno), end: Seqno(end) },
            failover_log: FailoverLog::new(log.iter().map(entry).collect()).ok(),
            epoch,
            ..Position::EARLIEST
        }
    }

    fn reader(id: u32, positions: &[(u16, Position)]) -> Checkpoint {
        let start = Checkpoint::new(BUCKET, filter(id));
        positions.iter().cloned().fold(start, |it, (vbid, at)| it.with_position(Vbid(vbid), at))
    }

    #[test]
    fn checkpoint_of_several_readers_is_the_earliest_position_in_the_latest_epoch() {
        let log = [(0xa, 0)];
        let first = reader(8, &[(0, at(10, 10, 0, &log)), (1, at(7, 9, 2, &log))]);
        let second = reader(9, &[(0, at(5, 5, 1, &log)), (40, at(3, 3, 4, &log))]);
        let found = Checkpoint::earliest_of(BUCKET, filter(8), &[first, second]).unwrap();
        assert_eq!(found.position(Vbid(0)), Some(&at(5, 5, 1, &log)));
        let unread = |epoch| Position { epoch, ..Position::EARLIEST };
        assert_eq!(found.position(Vbid(1)), Some(&unread(2)), "the second has not read it");
        assert_eq!(found.position(Vbid(40)), Some(&unread(4)), "the first has not read it");
        assert_eq!(found.positions().count(), 3);
        assert_eq!(found.filter(), Some(&filter(8)));
    }

    #[test]
    fn checkpoint_of_several_readers_refuses_one_of_another_bucket() {
        let other = Checkpoint::new("another", filter(8));
        assert!(Checkpoint::earliest_of(BUCKET, filter(8), std::slice::from_ref(&other)).is_err());
        assert!(reader(8, &[]).with_positions_of(&other, []).is_err());
    }

    #[test]
    fn position_is_in_the_history_of_a_stream_whose_log_has_it_on_its_branch() {
        let stream = reader(8, &[(0, at(20, 20, 0, &[(0xc, 15), (0xb, 10), (0xa, 0)]))]);
        let holds = |position| stream.has_in_history(Vbid(0), &reader(9, &[(0, position)]));
        assert!(holds(at(9, 9, 0, &[(0xa, 0)])));
        assert!(holds(at(10, 10, 0, &[(0xa, 0)])), "where the next branch begins");
        assert!(!holds(at(12, 12, 0, &[(0xa, 0)])), "lost by the failover at 10");
        assert!(!holds(at(8, 12, 0, &[(0xa, 0)])), "inside a snapshot that was lost in part");
        assert!(holds(at(12, 12, 0, &[(0xb, 10), (0xa, 0)])));
        assert!(holds(at(17, 17, 0, &[(0xc, 15), (0xb, 10), (0xa, 0)])));
        assert!(!holds(at(12, 12, 0, &[(0xd, 11), (0xa, 0)])), "a branch of others");
        assert!(holds(at(21, 21, 0, &[(0xc, 15)])), "not reached yet");
        assert!(!holds(at(21, 21, 0, &[(0xb, 10)])), "not reached, and lost by the failover at 15");
        assert!(stream.has_in_history(Vbid(0), &reader(9, &[])));
    }

    #[test]
    fn positions_of_another_reader_replace_those_of_their_vbuckets_only() {
        let log = [(0xa, 0)];
        let stream = reader(8, &[(0, at(10, 10, 0, &log)), (1, at(7, 7, 0, &log))]);
        let other = reader(9, &[(0, at(15, 15, 0, &log)), (1, at(9, 9, 0, &log))]);
        let found = stream.with_positions_of(&other, [Vbid(1), Vbid(2)]).unwrap();
        assert_eq!(found.position(Vbid(0)).unwrap().seqno, Seqno(10));
        assert_eq!(found.position(Vbid(1)).unwrap().seqno, Seqno(9));
        assert_eq!(found.filter(), Some(&filter(8)));
    }
}
