//! The watch of lag: when nodes are asked for high seqnos, and which vBuckets do not advance.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dcp_proto::consumer::{CollectionSeqnos, StreamFilter};
use dcp_proto::topology::Manifest;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::shared_stats::KnownCollections;
use crate::driver::VbucketProgress;

/// How often high seqnos are requested.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// How soon they are requested after a stream was opened, so that its lag is known: thousands may
/// be opened at once.
const AFTER_OPENING: Duration = Duration::from_millis(100);

/// How soon they are requested after a stream was interrupted, if ends may have been rolled back.
const AFTER_INTERRUPTION: Duration = Duration::from_millis(500);

/// How long a vBucket may make no progress while the server has more changes and the application
/// waits. Servers are known to hold back the last change of a quiet vBucket until the next one.
const STALLED: Duration = Duration::from_secs(60);

/// How long it may wait for the rest of a snapshot from memory, which servers send at once. Those
/// with MB-73354 announce some up to a prepare or an abort that the stream is never sent; asked
/// again, they say so.
const LEFT_OPEN: Duration = Duration::from_secs(10);

/// Collections per round of requests. An answer has 10 bytes per vBucket, so rounds for more
/// collections are less frequent.
const PER_ROUND: usize = 100;

/// Most collections to request: no cluster has as many.
const MOST: usize = 2_000;

/// Lag of the vBuckets of a stream.
#[derive(Debug)]
pub(super) struct LagWatch {
    /// When high seqnos are requested next.
    poll_at: Instant,
    /// Whether a high seqno below the end means that the vBucket was rolled back.
    end_exists: bool,
    vbuckets: BTreeMap<Vbid, Lag>,
}

#[derive(Debug)]
struct Lag {
    /// Highest known seqno of the server.
    high_seqno: Seqno,
    /// The last progress, while the vBucket is behind the server.
    behind: Option<Behind>,
}

#[derive(Clone, Copy, Debug)]
struct Behind {
    /// Seqno of the vBucket.
    seqno: Seqno,
    /// Since when it has had that seqno.
    since: Instant,
    is_reported: bool,
    is_reopened: bool,
}

impl LagWatch {
    pub(super) fn new(end_exists: bool, now: Instant) -> Self {
        Self { poll_at: now + POLL_INTERVAL, end_exists, vbuckets: BTreeMap::new() }
    }

    /// A stream was opened.
    pub(super) fn opened(&mut self, now: Instant) {
        self.poll_at = self.poll_at.min(now + AFTER_OPENING);
    }

    /// Streams were interrupted: those that resume on another node may be on another history, so it
    /// is checked soon that their ends still exist.
    pub(super) fn interrupted(&mut self, now: Instant) {
        if self.end_exists {
            self.poll_at = self.poll_at.min(now + AFTER_INTERRUPTION);
        }
    }

    /// The application has read outdated figures.
    pub(super) fn stale_read(&mut self, now: Instant) {
        self.poll_at = self.poll_at.min(now);
    }

    /// When high seqnos are requested next.
    pub(super) const fn deadline(&self) -> Instant {
        self.poll_at
    }

    /// High seqnos are requested now, and those of so many collections: returns the regular time
    /// until the next request.
    pub(super) fn poll(&mut self, collections: usize, now: Instant) -> Duration {
        let rounds = u32::try_from(collections.div_ceil(PER_ROUND)).unwrap_or(u32::MAX);
        let interval = POLL_INTERVAL.saturating_mul(rounds.max(1));
        self.poll_at = now + interval;
        interval
    }

    /// Compares the position of a vBucket, which ends at `end_seqno`, with the highest seqno that
    /// its stream can deliver. Returns how long it has made no progress, if that is too long and was
    /// not reported yet.
    pub(super) fn compare(
        &mut self,
        progress: VbucketProgress,
        end_seqno: Seqno,
        now: Instant,
    ) -> Option<Duration> {
        let VbucketProgress { vbid, seqno, high_seqno, is_held_up, .. } = progress;
        let new = || Lag { high_seqno, behind: None };
        let lag = self.vbuckets.entry(vbid).or_insert_with(new);
        // The newest answer counts: after a failover it may be lower.
        lag.high_seqno = high_seqno;
        if seqno >= high_seqno.min(end_seqno) || is_held_up {
            lag.behind = None;
            return None;
        }
        match &mut lag.behind {
            Some(behind) if behind.seqno == seqno => {
                let stalled = now.saturating_duration_since(behind.since);
                let is_due = stalled >= STALLED && !behind.is_reported;
                behind.is_reported |= is_due;
                is_due.then_some(stalled)
            }
            behind => {
                let (is_reported, is_reopened) = (false, false);
                *behind = Some(Behind { seqno, since: now, is_reported, is_reopened });
                None
            }
        }
    }

    /// Whether a vBucket that was compared now has waited too long for the rest of a snapshot from
    /// memory, so that its stream must be opened again; once without progress.
    pub(super) fn is_left_open(&mut self, progress: VbucketProgress, now: Instant) -> bool {
        let lag = self.vbuckets.get_mut(&progress.vbid);
        let Some(behind) = lag.and_then(|lag| lag.behind.as_mut()) else { return false };
        let waited = now.saturating_duration_since(behind.since);
        let is_due = progress.awaits_snapshot_end && waited >= LEFT_OPEN && !behind.is_reopened;
        behind.is_reopened |= is_due;
        is_due
    }

    /// The highest known seqno of the server.
    pub(super) fn high_seqno(&self, vbid: Vbid) -> Option<Seqno> {
        Some(self.vbuckets.get(&vbid)?.high_seqno)
    }
}

/// The collections that a filter passes; `None` if there are too many to request their seqnos.
pub(super) fn passed(filter: &StreamFilter, manifest: &Manifest) -> Option<Vec<CollectionId>> {
    let ids: Vec<_> = match filter {
        StreamFilter::All => manifest.collections().map(|entry| entry.id).collect(),
        StreamFilter::Scope(scope) => {
            let inside = manifest.collections().filter(|entry| entry.scope_id == *scope);
            inside.map(|entry| entry.id).collect()
        }
        StreamFilter::Collections(ids) => ids.clone(),
    };
    (ids.len() <= MOST).then_some(ids)
}

/// The progress of these vBuckets in all collections of a filter; empty if a collection was not
/// answered.
pub(super) fn in_collections(
    answers: &[CollectionSeqnos],
    streaming: &[VbucketProgress],
) -> Vec<VbucketProgress> {
    let mut highest = BTreeMap::<Vbid, Seqno>::new();
    for answer in answers {
        let Ok(seqnos) = &answer.seqnos else { return Vec::new() };
        for &(vbid, seqno) in seqnos {
            let most = highest.entry(vbid).or_default();
            *most = seqno.max(*most);
        }
    }
    // A vBucket without an entry has nothing of these collections.
    let of = |vbid| highest.get(&vbid).copied().unwrap_or_default();
    streaming.iter().map(|each| VbucketProgress { high_seqno: of(each.vbid), ..*each }).collect()
}

/// Takes a node's answers about collections; `streaming` are the vBuckets that stream from it.
pub(super) fn update_collections(
    known: &mut KnownCollections,
    answers: &[CollectionSeqnos],
    streaming: &[VbucketProgress],
    manifest: &Manifest,
) {
    let requested: BTreeSet<_> = answers.iter().map(|answer| answer.collection).collect();
    known.retain(|id, _| requested.contains(id));
    for CollectionSeqnos { collection, seqnos } in answers {
        let Ok(seqnos) = seqnos else {
            known.remove(collection);
            continue;
        };
        let seqnos: BTreeMap<Vbid, Seqno> = seqnos.iter().copied().collect();
        let entry = known.entry(*collection).or_default();
        if let Some((scope, name)) = manifest.names(*collection) {
            entry.name = format!("{scope}.{name}");
        }
        for VbucketProgress { vbid, .. } in streaming {
            let seqno = seqnos.get(vbid).copied().unwrap_or_default();
            entry.seqnos.insert(*vbid, seqno);
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::Status;

    use super::*;

    const VB: Vbid = Vbid(3);

    fn watch(now: Instant) -> LagWatch {
        LagWatch::new(true, now)
    }

    fn progress(seqno: u64, high_seqno: u64) -> VbucketProgress {
        VbucketProgress {
            vbid: VB,
            seqno: Seqno(seqno),
            high_seqno: Seqno(high_seqno),
            is_held_up: false,
            has_lost_end: false,
            awaits_snapshot_end: false,
        }
    }

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn vbucket_that_lags_without_progress_is_reported_once() {
        let start = Instant::now();
        let mut watch = watch(start);
        let mut compare = |seqno, high_seqno, at| {
            watch.compare(progress(seqno, high_seqno), Seqno::MAX, start + seconds(at))
        };
        assert_eq!(compare(5, 9, 0), None);
        assert_eq!(compare(5, 9, 59), None);
        assert_eq!(compare(5, 12, 60), Some(seconds(60)));
        assert_eq!(compare(5, 12, 200), None, "reported once");
        assert_eq!(compare(6, 12, 210), None, "it has advanced");
        assert_eq!(compare(6, 12, 270), Some(seconds(60)), "and stalls again");
    }

    #[test]
    fn snapshot_that_is_left_open_is_asked_for_again_once() {
        let start = Instant::now();
        let mut watch = watch(start);
        let mut is_left_open = |progress: VbucketProgress, at| {
            watch.compare(progress, Seqno::MAX, start + seconds(at));
            watch.is_left_open(progress, start + seconds(at))
        };
        let waits = |seqno| VbucketProgress { awaits_snapshot_end: true, ..progress(seqno, 9) };
        assert!(!is_left_open(waits(5), 0));
        assert!(!is_left_open(waits(5), 9));
        assert!(!is_left_open(progress(5, 9), 10), "the disk may take longer");
        assert!(is_left_open(waits(5), 10));
        assert!(!is_left_open(waits(5), 30), "once");
        assert!(!is_left_open(waits(6), 40), "it has advanced");
        assert!(is_left_open(waits(6), 50));
        assert!(!is_left_open(VbucketProgress { is_held_up: true, ..waits(7) }, 99));
    }

    #[test]
    fn vbucket_that_waits_for_the_application_or_for_nothing_does_not_lag() {
        let (start, later) = (Instant::now(), Instant::now() + seconds(600));
        let held_up = VbucketProgress { is_held_up: true, ..progress(5, 9) };
        for (nothing, end) in
            [(held_up, Seqno::MAX), (progress(9, 9), Seqno::MAX), (progress(5, 9), Seqno(5))]
        {
            let mut watch = watch(start);
            assert_eq!(watch.compare(progress(5, 9), Seqno::MAX, start), None);
            assert_eq!(watch.compare(nothing, end, start), None);
            assert_eq!(watch.compare(progress(5, 9), Seqno::MAX, later), None, "{nothing:?}");
        }
    }

    #[test]
    fn high_seqno_that_is_newest_counts_even_if_it_is_lower() {
        let now = Instant::now();
        let mut watch = watch(now);
        assert_eq!(watch.high_seqno(VB), None);
        for high_seqno in [9, 7] {
            watch.compare(progress(5, high_seqno), Seqno::MAX, now);
            assert_eq!(watch.high_seqno(VB), Some(Seqno(high_seqno)));
        }
    }

    #[test]
    fn high_seqnos_are_requested_at_intervals_and_soon_after_something_happened() {
        let now = Instant::now();
        let mut watch = watch(now);
        assert_eq!(watch.deadline(), now + POLL_INTERVAL);
        watch.interrupted(now);
        assert_eq!(watch.deadline(), now + AFTER_INTERRUPTION);
        watch.opened(now);
        assert_eq!(watch.deadline(), now + AFTER_OPENING);
        watch.interrupted(now);
        assert_eq!(watch.deadline(), now + AFTER_OPENING, "the earlier one");
        watch.stale_read(now);
        assert_eq!(watch.deadline(), now);
        assert_eq!(watch.poll(0, now), POLL_INTERVAL);
        assert_eq!(watch.deadline(), now + POLL_INTERVAL);
    }

    #[test]
    fn interruption_is_no_reason_if_no_end_is_known_to_exist() {
        let now = Instant::now();
        let mut watch = LagWatch::new(false, now);
        watch.interrupted(now);
        assert_eq!(watch.deadline(), now + POLL_INTERVAL);
    }

    #[test]
    fn collection_seqnos_of_many_are_requested_less_often() {
        let now = Instant::now();
        let mut watch = watch(now);
        for (collections, rounds) in [(0, 1), (1, 1), (PER_ROUND, 1), (PER_ROUND + 1, 2)] {
            assert_eq!(watch.poll(collections, now), POLL_INTERVAL * rounds);
        }
    }

    fn answer(id: u32, seqnos: &[(u16, u64)]) -> CollectionSeqnos {
        let seqnos = seqnos.iter().map(|&(vbid, seqno)| (Vbid(vbid), Seqno(seqno)));
        CollectionSeqnos { collection: CollectionId(id), seqnos: Ok(seqnos.collect()) }
    }

    fn refused(id: u32) -> CollectionSeqnos {
        CollectionSeqnos { collection: CollectionId(id), seqnos: Err(Status::UNKNOWN_COLLECTION) }
    }

    #[test]
    fn lag_of_a_filtered_vbucket_counts_only_its_collections() {
        let other = VbucketProgress { vbid: Vbid(4), ..progress(1, 0) };
        let streaming = [progress(5, 0), other];
        let answers = [answer(8, &[(3, 7)]), answer(9, &[(3, 6)])];
        let high: Vec<_> =
            in_collections(&answers, &streaming).iter().map(|each| each.high_seqno.0).collect();
        assert_eq!(high, [7, 0], "the second has nothing of them");
        assert!(in_collections(&[answer(8, &[(3, 7)]), refused(9)], &streaming).is_empty());
    }

    #[test]
    fn collections_that_are_refused_or_no_longer_requested_are_forgotten() {
        let mut known = KnownCollections::new();
        let manifest = Manifest::default();
        let streaming = [progress(5, 0)];
        let mut update = |answers: &[CollectionSeqnos]| -> Vec<(u32, Option<Seqno>)> {
            update_collections(&mut known, answers, &streaming, &manifest);
            known.iter().map(|(id, known)| (id.0, known.seqnos.get(&VB).copied())).collect()
        };
        let all = [answer(8, &[(3, 7), (4, 9)]), answer(9, &[])];
        assert_eq!(update(&all), [(8, Some(Seqno(7))), (9, Some(Seqno::ZERO))]);
        assert_eq!(update(&[answer(8, &[(3, 8)]), refused(9)]), [(8, Some(Seqno(8)))]);
        assert_eq!(update(&[answer(9, &[])]), [(9, Some(Seqno::ZERO))]);
    }
}
