use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use dcp_wire::message::FailoverEntry;
use dcp_wire::{CollectionId, ScopeId, Seqno, Vbid, Vbuuid};
use proptest::prelude::*;

use super::*;
use crate::checkpoint::{CheckpointError, Form, StoredFilter};
use crate::consumer::{StreamFilter, StreamPosition};
use crate::topology::Manifest;
use crate::{CollectionPatterns, FailoverLog, OnPurge, OnRollback, Position, RowFilter, Snapshot};

const VB: Vbid = Vbid(3);
const A: u64 = 0xa;
const B: u64 = 0xb;
const C: u64 = 0xc;

fn log(entries: &[(u64, u64)]) -> FailoverLog {
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    FailoverLog::new(entries.iter().map(entry).collect()).unwrap()
}

/// The parts of a plan with ranges of these sizes, by the number of their node.
fn split(sizes: &[(u8, u64)], parts: usize) -> Vec<ReadPlan> {
    let range = |(vbid, &(_, size)): (u16, &(u8, u64))| {
        VbucketRange::new(Vbid(vbid), StreamPosition::new(Position::EARLIEST), Seqno(size))
    };
    let ranges = (0..).zip(sizes).map(range).collect();
    let nodes = (0..).map(Vbid).zip(sizes.iter().map(|(node, _)| node.to_string())).collect();
    let plan = ReadPlan::of_ranges("bucket", StoredFilter::default(), ranges, true);
    plan.split(&nodes, parts)
}

/// A vBucket all of which is persisted; its branches newest first.
fn seen(high: u64, entries: &[(u64, u64)]) -> Observed {
    Observed {
        high: Seqno(high),
        reported: Seqno(high),
        persisted: Some(Seqno(high)),
        purge: Some(Seqno::ZERO),
        answers: Vec::new(),
        log: log(entries),
        high_after_read: None,
    }
}

fn offset(seqno: u64, vbuuid: u64, epoch: u32) -> Offset {
    Offset { seqno: Seqno(seqno), vbuuid: Vbuuid(vbuuid), epoch }
}

fn at(offset: Offset) -> Offsets {
    let mut offsets = Offsets::new("bucket", StoredFilter::default(), 4);
    offsets.set(VB, offset);
    offsets
}

fn persisted() -> Limits {
    Limits { persisted_only: true, ..Limits::default() }
}

fn unpersisted() -> Limits {
    Limits { persisted_only: false, ..Limits::default() }
}

fn end(start: Offset, seen: Observed, limits: &Limits) -> Result<Offset, PlanError> {
    plan_end(&at(start).into(), &BTreeMap::from([(VB, seen)]), limits).map(|end| end.get(VB))
}

fn ranges(start: Offset, end: Offset, seen: Observed, limits: &Limits) -> Vec<VbucketRange> {
    plan_ranges(&at(start).into(), &at(end), &BTreeMap::from([(VB, seen)]), limits).unwrap()
}

#[test]
fn batch_goes_to_what_is_persisted_everywhere() {
    let mut observed = seen(100, &[(A, 0)]);
    observed.persisted = Some(Seqno(70));
    assert_eq!(end(offset(0, 0, 0), observed.clone(), &persisted()), Ok(offset(70, A, 0)));
    assert_eq!(end(offset(0, 0, 0), observed.clone(), &unpersisted()), Ok(offset(100, A, 0)));
    observed.persisted = None;
    assert_eq!(end(offset(50, A, 0), observed, &persisted()), Ok(offset(50, A, 0)), "unknown");
}

#[test]
fn batch_ends_where_a_stream_finds_the_vbucket_ends() {
    // An aborted write follows, which this server does not count.
    let now = || Observed { reported: Seqno(97), ..seen(100, &[(A, 0)]) };
    assert_eq!(end(offset(0, 0, 0), now(), &persisted()), Ok(offset(97, A, 0)));
    let from = offset(100, A, 0);
    assert_eq!(end(from, now(), &persisted()), Ok(from), "SEQNO_ADVANCED has come that far");
    // An end that was chosen at the highest seqno is read as far as it goes.
    let [range] = &ranges(offset(0, 0, 0), from, now(), &persisted())[..] else { panic!() };
    assert_eq!(range.to, Seqno(97));
    assert_eq!(ranges(offset(98, A, 0), from, now(), &persisted()), []);
}

#[test]
fn batch_goes_no_further_than_what_was_there_when_it_was_planned() {
    let limits = Limits { until: Some(at(offset(40, A, 0))), ..persisted() };
    assert_eq!(end(offset(30, A, 0), seen(100, &[(A, 0)]), &limits), Ok(offset(40, A, 0)));
    assert_eq!(end(offset(45, A, 0), seen(100, &[(A, 0)]), &limits), Ok(offset(45, A, 0)));
}

#[test]
fn rollback_is_reported_and_read_again_from_the_common_seqno() {
    let (start, now) = (offset(100, A, 0), || seen(130, &[(B, 80), (A, 0)]));
    let next = end(start, now(), &persisted()).unwrap();
    assert_eq!(next, offset(130, B, 1));
    let [range] = &ranges(start, next, now(), &persisted())[..] else { panic!() };
    assert_eq!((range.vbid, range.vbuuid(), range.start_seqno()), (VB, Vbuuid(B), Seqno(80)));
    assert_eq!((range.to, range.epoch(), range.rolled_back), (Seqno(130), 1, true));

    let resync = Limits { on_rollback: OnRollback::Resync, ..persisted() };
    assert_eq!(end(start, now(), &resync), Ok(offset(130, B, 1)));
    let [whole] = &ranges(start, next, now(), &resync)[..] else { panic!() };
    assert_eq!((whole.vbuuid(), whole.start_seqno()), (Vbuuid(0), Seqno::ZERO));
    assert_eq!((whole.to, whole.epoch(), whole.rolled_back), (Seqno(130), 1, true));

    let fail = Limits { on_rollback: OnRollback::Fail, ..persisted() };
    let error = end(start, now(), &fail).unwrap_err();
    let (vbuuid, seqno, common) = (Vbuuid(A), Seqno(100), Seqno(80));
    assert_eq!(error, PlanError::RolledBack { vbid: VB, vbuuid, seqno, common });
}

#[test]
fn rollback_is_reported_though_there_is_nothing_to_read() {
    let (start, now) = (offset(100, A, 0), || seen(80, &[(B, 80), (A, 0)]));
    let limits = Limits { max_seqnos: Some(0), ..persisted() };
    let next = end(start, now(), &limits).unwrap();
    assert_eq!(next, offset(80, B, 1));
    let ranges = ranges(start, next, now(), &limits);
    assert_eq!((ranges.len(), ranges[0].size(), ranges[0].rolled_back), (1, 0, true));
}

#[test]
fn branch_above_a_persisted_offset_takes_nothing_away() {
    let now = || seen(130, &[(B, 100), (A, 0)]);
    let next = end(offset(100, A, 0), now(), &persisted()).unwrap();
    assert_eq!(next, offset(130, B, 0));
    let [range] = &ranges(offset(100, A, 0), next, now(), &persisted())[..] else { panic!() };
    assert_eq!(
        (range.vbuuid(), range.start_seqno(), range.rolled_back),
        (Vbuuid(A), Seqno(100), false)
    );
    let whole = range.from.position.request_snapshot();
    assert_eq!(whole, Snapshot::at(Seqno(100)), "an offset is the end of a snapshot");
    let still = end(offset(130, A, 2), seen(130, &[(B, 130), (A, 0)]), &persisted());
    assert_eq!(still, Ok(offset(130, A, 2)), "no empty batch for a name");
}

#[test]
fn offset_not_persisted_survives_only_a_branch_begun_above_its_snapshot() {
    let now = |high_after_read: Option<u64>| Observed {
        high_after_read: high_after_read.map(Seqno),
        ..seen(150, &[(B, 120), (A, 0)])
    };
    let start = offset(100, A, 0);
    let next = |after| end(start, now(after), &unpersisted()).unwrap();
    assert_eq!(next(Some(120)), offset(150, B, 0));
    for unsure in [None, Some(121), Some(99)] {
        assert_eq!(next(unsure), offset(150, B, 1), "{unsure:?}");
        let [range] = &ranges(start, next(unsure), now(unsure), &unpersisted())[..] else {
            panic!()
        };
        assert_eq!((range.start_seqno(), range.rolled_back), (Seqno::ZERO, true));
    }
    let named = end(offset(150, A, 0), now(Some(150)), &unpersisted()).unwrap();
    assert_eq!(named, offset(150, B, 1), "a branch below the offset");
    let above = Observed { high_after_read: Some(Seqno(150)), ..seen(150, &[(B, 150), (A, 0)]) };
    let renamed = end(offset(150, A, 0), above, &unpersisted()).unwrap();
    assert_eq!(renamed, offset(150, B, 0), "its name shows later that nothing was removed");
    let empty = end(offset(0, 0, 0), seen(0, &[(B, 0)]), &unpersisted()).unwrap();
    assert_eq!(empty, offset(0, 0, 0), "nothing was read");
}

#[test]
fn history_that_nobody_knows_is_read_again() {
    for limits in [persisted(), unpersisted()] {
        let now = || seen(90, &[(C, 20), (B, 0)]);
        let next = end(offset(100, A, 4), now(), &limits).unwrap();
        assert_eq!(next, offset(90, C, 5));
        assert_eq!(ranges(offset(100, A, 4), next, now(), &limits)[0].start_seqno(), Seqno::ZERO);
        let lower = end(offset(100, A, 4), seen(90, &[(A, 0)]), &limits).unwrap();
        assert_eq!(lower, offset(90, A, 5), "fewer changes on the same branch");
    }
}

#[test]
fn batch_whose_end_was_rolled_back_since_is_cut() {
    let (start, planned) = (offset(100, A, 0), offset(150, A, 0));
    let now = |branch| seen(200, &[(B, branch), (A, 0)]);
    let to: Vec<_> = ranges(start, planned, now(120), &persisted());
    assert_eq!((to.len(), to[0].start_seqno(), to[0].to), (1, Seqno(100), Seqno(120)));
    assert_eq!(ranges(start, planned, now(100), &persisted()), []);
    assert_eq!(ranges(start, planned, now(90), &persisted()), [], "not even its start is left");
    let after = end(planned, now(90), &persisted()).unwrap();
    assert_eq!(after, offset(200, B, 1));
}

#[test]
fn rollback_that_was_planned_leads_where_it_leads_by_now() {
    let (start, planned) = (offset(100, A, 0), offset(130, B, 1));
    let now = seen(60, &[(C, 50), (A, 0)]);
    let [range] = &ranges(start, planned, now, &persisted())[..] else { panic!() };
    assert_eq!((range.start_seqno(), range.to), (Seqno(50), Seqno(50)));
    assert_eq!((range.epoch(), range.rolled_back), (1, true));
}

#[test]
fn rollback_after_the_last_planned_batch_is_reported_by_that_batch() {
    let last = Limits { is_last: true, ..persisted() };
    let now = seen(130, &[(B, 80), (A, 0)]);
    let [range] = &ranges(offset(100, A, 0), offset(130, A, 0), now, &last)[..] else { panic!() };
    assert_eq!((range.start_seqno(), range.to), (Seqno(80), Seqno(80)));
    assert_eq!((range.epoch(), range.rolled_back), (1, true));
}

#[test]
fn purged_deletions_are_reported_or_ignored() {
    let now = || Observed { purge: Some(Seqno(60)), ..seen(100, &[(A, 0)]) };
    let error = end(offset(59, A, 0), now(), &persisted()).unwrap_err();
    assert_eq!(error, PlanError::Purged { vbid: VB, seqno: Seqno(59), purge: Some(Seqno(60)) });
    assert_eq!(end(offset(60, A, 0), now(), &persisted()), Ok(offset(100, A, 0)));
    assert_eq!(end(offset(0, 0, 0), now(), &persisted()), Ok(offset(100, A, 0)));
    let limits = Limits { on_purge: OnPurge::Resync, ..persisted() };
    let next = end(offset(59, A, 0), now(), &limits).unwrap();
    assert_eq!(next, offset(100, A, 1));
    assert_eq!(ranges(offset(59, A, 0), next, now(), &limits)[0].start_seqno(), Seqno::ZERO);
    let now = || Observed { purge: Some(Seqno(60)), ..seen(100, &[(B, 50), (A, 0)]) };
    let next = end(offset(70, A, 0), now(), &persisted()).unwrap();
    let [range] = &ranges(offset(70, A, 0), next, now(), &persisted())[..] else { panic!() };
    assert_eq!(range.start_seqno(), Seqno::ZERO, "the server lets nobody go on from 50");
}

#[test]
fn end_seqno_is_not_repeated_for_ever_after_a_purge_on_a_new_branch() {
    // A node was restarted uncleanly after the end had been written down, then deletions were purged.
    let now = || Observed { purge: Some(Seqno(70)), ..seen(90, &[(B, 50), (A, 0)]) };
    let (start, planned) = (offset(23, A, 0), offset(43, A, 0));
    for limits in [unpersisted(), persisted()] {
        let plan = |limits: &Limits| {
            let observed = BTreeMap::from([(VB, now())]);
            plan_ranges(&at(start).into(), &at(planned), &observed, limits)
        };
        let purged = PlanError::Purged { vbid: VB, seqno: Seqno(23), purge: Some(Seqno(70)) };
        assert_eq!(plan(&limits), Err(purged), "the server resumes from no seqno so old");
        let ranges = plan(&Limits { on_purge: OnPurge::Resync, ..limits }).unwrap();
        assert_eq!((ranges.len(), ranges[0].start_seqno()), (1, Seqno::ZERO));
    }
    // A start that was rolled back is not read from: the next plan says so.
    let lost = || Observed { purge: Some(Seqno(30)), ..seen(90, &[(B, 10), (A, 0)]) };
    assert_eq!(ranges(start, planned, lost(), &persisted()), []);
}

#[test]
fn offsets_are_small_and_read_by_every_later_release() {
    let mut offsets =
        Offsets::new("0123456789abcdef0123456789abcdef", StoredFilter::default(), 1024);
    for vbid in 0..1024 {
        offsets.set(Vbid(vbid), offset(1_000_000 + u64::from(vbid), 0x1234_5678_9abc, 0));
    }
    offsets.set(Vbid(17), offset(5, A, 2));
    let json = offsets.to_json();
    assert!(json.len() < 20_000, "{}", json.len());
    assert!(!json.contains('\n'));
    assert_eq!(Offsets::from_json(&json), Ok(offsets));

    let v1 =
        r#"{"v":1,"bucket":"b","s":[0,7],"u":"AAAAAAAAAAAAAAAAAAAACg","e":{"1":2},"c":"df86a03b"}"#;
    let read = Offsets::from_json(v1).unwrap();
    assert_eq!((read.get(Vbid(0)), read.get(Vbid(1))), (offset(0, 0, 0), offset(7, A, 2)));
    assert_eq!((read.bucket_uuid(), read.num_vbuckets(), read.filter()), ("b", 2, None));
    assert_eq!(read.to_json(), v1, "and this release writes the same");

    let v2 = r#"{"v":2,"bucket":"b","f":{"scope":"00000008","system_documents":true},"s":[0,7],"u":"AAAAAAAAAAAAAAAAAAAACg","e":{"1":2},"c":"5b602637"}"#;
    let read = Offsets::from_json(v2).unwrap();
    assert_eq!((read.get(Vbid(0)), read.get(Vbid(1))), (offset(0, 0, 0), offset(7, A, 2)));
    let shop = StoredFilter::new(StreamFilter::Scope(ScopeId(8)), true);
    assert_eq!(read.filter(), Some(&shop));
    assert_eq!(read.to_json(), v2, "and this release writes the same");
}

#[test]
fn offsets_of_a_filter_unknown_to_earlier_releases_have_their_own_version() {
    let rows = RowFilter::new(Some(vec!["a*".to_owned()]), None, None).unwrap();
    let patterns = CollectionPatterns::new(["shop.*"]).unwrap();
    let all = StoredFilter::default();
    for (filter, version) in
        [(all.clone(), 2), (all.clone().with_rows(rows), 3), (all.with_patterns(patterns), 3)]
    {
        let offsets = Offsets::new("b", filter, 2);
        let json = offsets.to_json();
        assert!(json.starts_with(&format!(r#"{{"v":{version},"#)), "{json}");
        assert_eq!(Offsets::from_json(&json), Ok(offsets));
    }
}

#[test]
fn offsets_serve_their_filter_and_parts_of_it() {
    let manifest = Manifest::parse(
        br#"{"uid":"7","scopes":[{"name":"shop","uid":"8","collections":
            [{"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]}]}"#,
    )
    .unwrap();
    let filter = |ids: &[u32]| {
        let ids = ids.iter().copied().map(CollectionId).collect();
        StoredFilter::new(StreamFilter::Collections(ids), false)
    };
    let narrowed = |offsets: &Offsets, filter: &StoredFilter| {
        offsets.clone().narrowed_to("bucket", 4, filter, &manifest)
    };
    let whole = at(offset(7, A, 0));
    let both = narrowed(&whole, &filter(&[9, 10])).unwrap();
    assert_eq!((both.filter(), both.get(VB)), (Some(&filter(&[9, 10])), whole.get(VB)));
    let observed = BTreeMap::from([(VB, seen(9, &[(A, 0)]))]);
    let next = plan_end(&both.clone().into(), &observed, &unpersisted()).unwrap();
    assert_eq!((next.filter(), next.get(VB)), (both.filter(), offset(9, A, 0)));
    let refused = narrowed(&next, &StoredFilter::default()).unwrap_err();
    assert!(matches!(refused, CheckpointError::OtherFilter(_)), "{refused}");
    let orders = narrowed(&next, &filter(&[9])).unwrap();
    let refused = narrowed(&orders, &filter(&[9, 10])).unwrap_err();
    assert!(refused.to_string().contains("also asks for collection shop.carts (0xa)"), "{refused}");

    let unknown =
        r#"{"v":1,"bucket":"b","s":[0,7],"u":"AAAAAAAAAAAAAAAAAAAACg","e":{"1":2},"c":"df86a03b"}"#;
    let unknown = Offsets::from_json(unknown).unwrap();
    let stored = unknown.narrowed_to("b", 2, &filter(&[10]), &manifest).unwrap();
    assert_eq!(stored.filter(), Some(&filter(&[10])));
}

#[test]
fn offsets_that_are_damaged_or_foreign_are_refused() {
    let json = at(offset(7, A, 1)).to_json();
    for cut in 0..json.len() {
        assert!(matches!(Offsets::from_json(&json[..cut]), Err(CheckpointError::Damaged { .. })));
    }
    for (found, put) in [("7", "8"), ("\"3\":1", "\"3\":2"), ("bucket\":\"b", "bucket\":\"c")] {
        let changed = json.replacen(found, put, 1);
        assert_ne!(changed, json);
        assert!(matches!(Offsets::from_json(&changed), Err(CheckpointError::Damaged { .. })));
    }
    for at in 0..json.len() {
        for flip in [0x01, 0x02, 0x10, 0x20] {
            let mut damaged = json.clone().into_bytes();
            damaged[at] ^= flip;
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(Offsets::from_json(&damaged).is_err(), "{damaged}");
        }
    }
    let later = json.replacen("\"v\":2", "\"v\":4", 1);
    assert_eq!(
        Offsets::from_json(&later),
        Err(CheckpointError::Version { form: Form::Offsets, found: 4, supported: 3 })
    );
    let offsets = Offsets::from_json(&json).unwrap();
    assert_eq!(offsets.check("bucket", 4), Ok(()));
    assert!(matches!(offsets.check("other", 4), Err(CheckpointError::OtherBucket { .. })));
    assert!(matches!(offsets.check("bucket", 8), Err(CheckpointError::OtherShape { .. })));
}

#[test]
fn offsets_of_the_largest_number_of_vbuckets_are_read() {
    let read = |seqnos: usize, vbuuids: usize| {
        let (s, u) = (vec!["7"; seqnos].join(","), STANDARD_NO_PAD.encode(vec![0; 8 * vbuuids]));
        let content = format!(r#""v":1,"bucket":"b","s":[{s}],"u":"{u}""#);
        let crc = crc32fast::hash(format!("{{{content}}}").as_bytes());
        Offsets::from_json(&format!(r#"{{{content},"c":"{crc:08x}"}}"#))
    };
    let offsets = read(1 << 16, 1 << 16).unwrap();
    assert_eq!(offsets.get(Vbid(u16::MAX)), offset(7, 0, 0));
    for (seqnos, vbuuids) in [(0, 0), ((1 << 16) + 1, (1 << 16) + 1), (2, 1), (1, 2)] {
        let error = read(seqnos, vbuuids).unwrap_err();
        let is_damaged = matches!(&error, CheckpointError::Damaged { .. });
        assert!(is_damaged && !error.to_string().contains("checksum"), "{error}");
    }
}

#[test]
fn tasks_are_added_where_the_tasks_are_largest() {
    let sizes = [[(0, 24); 4], [(1, 14); 4]].concat();
    for (tasks, expected) in [(2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (5, (3, 2)), (8, (4, 4))] {
        let parts = split(&sizes, tasks);
        let count = |node| parts.iter().filter(|part| part.node.as_deref() == Some(node)).count();
        assert_eq!((count("0"), count("1")), expected, "{tasks} tasks");
    }
}

#[test]
fn range_without_changes_costs_a_stream_all_the_same() {
    let parts = split(&[(0, 0); 4], 2);
    assert_eq!(parts.iter().map(|part| part.to.len()).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn row_limit_below_the_number_of_vbuckets_reaches_them_in_turn() {
    let limits = Limits { max_seqnos: Some(1), ..unpersisted() };
    let observed: BTreeMap<_, _> = (0..4).map(|n| (Vbid(n), seen(9, &[(A, 0)]))).collect();
    let mut offsets = Offsets::new("bucket", StoredFilter::default(), 4);
    for batch in 1..=8 {
        offsets = plan_end(&offsets.into(), &observed, &limits).unwrap();
        let read: Vec<u64> = offsets.iter().map(|(_, offset)| offset.seqno.0).collect();
        assert_eq!(read.iter().sum::<u64>(), batch);
        let (least, most) = (read.iter().min().unwrap(), read.iter().max().unwrap());
        assert!(most - least <= 1, "{read:?}");
    }
}

/// A vBucket's true history: what it holds, and its branches.
#[derive(Clone, Debug)]
struct History {
    /// Change `n` has seqno `n + 1`.
    changes: Vec<u32>,
    /// Newest first.
    branches: Vec<(u64, u64)>,
    made: u32,
}

impl History {
    fn new() -> Self {
        Self { changes: Vec::new(), branches: vec![(1, 0)], made: 0 }
    }

    fn write(&mut self, count: u8) {
        for _ in 0..count {
            self.changes.push(self.made);
            self.made += 1;
        }
    }

    /// A copy is promoted that has lost the last changes, or that opens its branch below them.
    fn fail_over(&mut self, lost: u8, below: u8) {
        let kept = self.changes.len().saturating_sub(usize::from(lost));
        self.changes.truncate(kept);
        let branch = kept.saturating_sub(usize::from(below)) as u64;
        let vbuuid = self.branches[0].0 + 1;
        self.branches.retain(|&(_, seqno)| seqno <= branch);
        self.branches.insert(0, (vbuuid, branch));
    }

    fn seen(&self) -> Observed {
        seen(self.changes.len() as u64, &self.branches)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u8),
    FailOver {
        lost: u8,
        below: u8,
    },
    /// Plans a batch.
    Plan {
        limit: u64,
    },
    /// Runs the batch that was planned, maybe for the second time.
    Run {
        again: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..9_u8).prop_map(Step::Write),
        1 => (0..6_u8, 0..4_u8).prop_map(|(lost, below)| Step::FailOver { lost, below }),
        3 => (1..9_u64).prop_map(|limit| Step::Plan { limit }),
        3 => any::<bool>().prop_map(|again| Step::Run { again }),
    ]
}

/// A table that applies batches: rows by seqno, and those above a rollback forgotten.
fn apply(table: &mut Vec<u32>, ranges: &[VbucketRange], history: &History) {
    for range in ranges {
        if range.rolled_back {
            table.truncate(range.start_seqno().0 as usize);
        }
        assert!(table.len() as u64 >= range.start_seqno().0, "a gap below {range:?}");
        for seqno in range.start_seqno().0..range.to.0 {
            let change = history.changes[seqno as usize];
            match table.get_mut(seqno as usize) {
                Some(same) => *same = change,
                None => table.push(change),
            }
        }
    }
}

fn batches_reach_the_servers_history(steps: Vec<Step>, on_rollback: OnRollback) {
    let mut history = History::new();
    let limits = |max_seqnos| Limits { max_seqnos, on_rollback, ..persisted() };
    let (mut start, mut planned) = (at(Offset::default()), None);
    let mut table = Vec::new();
    let plan = |start: &Offsets, history: &History, limit| {
        plan_end(&start.clone().into(), &BTreeMap::from([(VB, history.seen())]), &limits(limit))
            .unwrap()
    };
    let mut run = |start: &Offsets, end: &Offsets, history: &History| {
        let seen = BTreeMap::from([(VB, history.seen())]);
        let ranges = plan_ranges(&start.clone().into(), end, &seen, &limits(None)).unwrap();
        apply(&mut table, &ranges, history);
        table.clone()
    };
    for step in steps {
        match step {
            Step::Write(count) => history.write(count),
            Step::FailOver { lost, below } => history.fail_over(lost, below),
            Step::Plan { limit } => {
                if planned.is_none() {
                    let end = plan(&start, &history, Some(limit));
                    let read = end.get(VB).seqno.0.saturating_sub(start.get(VB).seqno.0);
                    assert!(read <= limit || end.get(VB).epoch > start.get(VB).epoch);
                    planned = Some(end);
                }
            }
            Step::Run { again } => {
                if let Some(end) = planned.take() {
                    run(&start, &end, &history);
                    if again {
                        planned = Some(end);
                    } else {
                        start = end;
                    }
                }
            }
        }
    }
    if let Some(end) = planned {
        run(&start, &end, &history);
        start = end;
    }
    // Two more: a batch that was cut is told of by the next.
    for _ in 0..2 {
        let end = plan(&start, &history, None);
        run(&start, &end, &history);
        start = end;
    }
    assert_eq!(run(&start, &start, &history), history.changes);
    assert_eq!(start.get(VB).seqno.0, history.changes.len() as u64);
}

proptest! {
    #[test]
    fn batches_in_a_row_make_the_servers_history(
        steps in prop::collection::vec(step(), 0..30),
        resync: bool,
    ) {
        let on_rollback = if resync { OnRollback::Resync } else { OnRollback::Emit };
        batches_reach_the_servers_history(steps, on_rollback);
    }

    #[test]
    fn a_split_loses_and_doubles_nothing(
        sizes in prop::collection::vec((0..4_u8, 0..1_000_u64), 0..40),
        tasks in 0..12_usize,
    ) {
        let parts = split(&sizes, tasks);
        let read = parts.iter().flat_map(|part| {
            part.ranges().map(|range| (range.vbid, (part.node.clone(), range.to)))
        });
        let read: Vec<_> = read.collect();
        prop_assert_eq!(read.len(), sizes.len());
        let read: BTreeMap<_, _> = read.into_iter().collect();
        let all = (0..).map(Vbid).zip(sizes.iter().map(|(node, size)| (Some(node.to_string()), Seqno(*size))));
        prop_assert_eq!(read, all.collect());
        let nodes: std::collections::BTreeSet<_> = sizes.iter().map(|(node, _)| node).collect();
        prop_assert!(parts.len() <= tasks.max(nodes.len()));
        prop_assert!(parts.iter().all(|part| !part.to.is_empty()));
        if sizes.len() >= tasks {
            prop_assert!(parts.len() >= tasks.min(sizes.len()));
        }
    }
}
