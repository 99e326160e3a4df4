//! Plans from a stream's checkpoint, and what a task is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_wire::message::FailoverEntry;
use dcp_wire::{ManifestUid, Seqno, Vbid, Vbuuid};

use super::*;
use crate::checkpoint::{Checkpoint, CheckpointError, Form, StoredFilter};
use crate::consumer::{EndKind, PositionUpdate, StreamPosition};
use crate::{FailoverLog, History, OnPurge, OnRollback, Position, Snapshot};

const VB: Vbid = Vbid(3);

fn log(entries: &[(u64, u64)]) -> FailoverLog {
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    FailoverLog::new(entries.iter().map(entry).collect()).unwrap()
}

fn position(seqno: u64, snapshot: (u64, u64)) -> Position {
    Position {
        seqno: Seqno(seqno),
        snapshot: Snapshot { start: Seqno(snapshot.0), end: Seqno(snapshot.1) },
        failover_log: Some(log(&[(0xa, 0)])),
        manifest_uid: ManifestUid(7),
        ..Position::EARLIEST
    }
}

/// A stream that was at the ends of snapshots 10 and 20 and stands at 25 in one up to 40.
fn start() -> Start {
    let mut history = History::default();
    history.push(&position(10, (10, 10)));
    history.push(&position(20, (20, 20)));
    let mut checkpoint = Checkpoint::new("bucket", StoredFilter::default());
    checkpoint.advance(PositionUpdate { vbid: VB, position: position(25, (20, 40)), history });
    Start::checkpoint(checkpoint, StoredFilter::default(), 4)
}

fn seen(persisted: u64, purge: Option<u64>, answers: &[(u64, Option<u64>)]) -> Observed {
    let answer = |&(seqno, rollback): &(u64, Option<u64>)| Answer {
        vbuuid: Vbuuid(0xa),
        seqno: Seqno(seqno),
        rollback: rollback.map(Seqno),
    };
    Observed {
        high: Seqno(100),
        reported: Seqno(100),
        persisted: Some(Seqno(persisted)),
        purge: purge.map(Seqno),
        answers: answers.iter().map(answer).collect(),
        log: log(&[(0xa, 0)]),
        high_after_read: None,
    }
}

fn limits() -> Limits {
    Limits { persisted_only: true, ..Limits::default() }
}

fn plan(seen: Observed, limits: &Limits) -> Result<Vec<VbucketRange>, PlanError> {
    let observed = BTreeMap::from([(VB, seen)]);
    let end = plan_end(&start(), &observed, limits)?;
    plan_ranges(&start(), &end, &observed, limits)
}

#[test]
fn rollback_probe_asks_about_one_point_of_the_history_after_the_other() {
    let mut answers = Vec::new();
    for wanted in [25, 20, 10] {
        let observed = BTreeMap::from([(VB, seen(100, Some(0), &answers))]);
        let asked = rollback_probes(&start(), &observed, &limits());
        assert_eq!(asked[&VB].seqno, Seqno(wanted));
        answers.push((wanted, Some(wanted - 5)));
    }
    let observed = BTreeMap::from([(VB, seen(100, Some(0), &answers))]);
    assert!(
        rollback_probes(&start(), &observed, &limits()).is_empty(),
        "from 0 everybody may read"
    );
    let [range] = &plan(seen(100, Some(0), &answers), &limits()).unwrap()[..] else { panic!() };
    assert_eq!((range.start_seqno(), range.epoch(), range.rolled_back), (Seqno(0), 1, true));

    let [range] = &plan(seen(100, Some(0), &answers[..1]), &limits()).unwrap()[..] else {
        panic!()
    };
    assert_eq!((range.start_seqno(), range.rolled_back), (Seqno(20), true));
    let fail = Limits { on_rollback: OnRollback::Fail, ..limits() };
    let error = plan(seen(100, Some(0), &answers[..1]), &fail).unwrap_err();
    assert!(matches!(error, PlanError::RolledBack { common: Seqno(20), .. }), "{error}");
}

#[test]
fn rollback_probe_is_sent_only_where_the_failover_log_is_not_enough() {
    let mut offsets = Offsets::new("bucket", StoredFilter::default(), 4);
    offsets.set(VB, Offset { seqno: Seqno(25), vbuuid: Vbuuid(0xa), epoch: 0 });
    let offsets = Start::from(offsets);
    for (from, high, purge, is_asked) in [
        // Only the purge seqno shows what is missing above an offset, if there is anything.
        (&offsets, 26, None, true),
        (&offsets, 25, None, false),
        (&offsets, 24, None, false),
        (&offsets, 26, Some(0), false),
        // A position may lie inside a snapshot.
        (&start(), 26, Some(0), true),
        (&start(), 25, None, true),
    ] {
        let observed = Observed { high: Seqno(high), ..seen(high, purge, &[]) };
        let asked = rollback_probes(from, &BTreeMap::from([(VB, observed)]), &limits());
        assert_eq!(asked.contains_key(&VB), is_asked, "{from:?} of {high}, {purge:?}");
    }
}

#[test]
fn purge_behind_a_checkpoint_is_no_rollback() {
    for purge in [Some(30), None] {
        let now = || seen(100, purge, &[(25, Some(0))]);
        let error = plan(now(), &limits()).unwrap_err();
        assert!(matches!(error, PlanError::Purged { seqno: Seqno(25), .. }), "{error}");
        let allowed = Limits { on_purge: OnPurge::Resync, ..limits() };
        let [range] = &plan(now(), &allowed).unwrap()[..] else { panic!() };
        assert_eq!((range.start_seqno(), range.epoch()), (Seqno(0), 1));
    }
}

#[test]
fn purge_is_the_reason_only_where_the_whole_snapshot_is_on_the_branch() {
    let refused = |purge| seen(100, purge, &[(25, Some(20))]);
    let branches = |newer: u64| log(&[(0xb, newer), (0xa, 0)]);
    for (now, is_purged) in [
        (refused(Some(26)), true),
        (refused(Some(25)), false),
        (Observed { log: branches(40), ..refused(None) }, true),
        (Observed { log: branches(39), ..refused(None) }, false),
        (Observed { high: Seqno(25), ..refused(None) }, true),
        (Observed { high: Seqno(24), ..refused(None) }, false),
    ] {
        let last = Limits { is_last: true, ..limits() };
        match plan(now.clone(), &last) {
            Err(PlanError::Purged { .. }) => assert!(is_purged, "{now:?}"),
            Ok(ranges) => {
                let [range] = &ranges[..] else { panic!("{now:?}") };
                let told = (range.start_seqno(), range.rolled_back);
                assert_eq!((told, is_purged), ((Seqno(20), true), false), "{now:?}");
            }
            Err(error) => panic!("{error}: {now:?}"),
        }
    }
}

#[test]
fn offset_inside_a_checkpoints_snapshot_is_never_claimed() {
    let error = plan(seen(39, Some(0), &[(25, None)]), &limits()).unwrap_err();
    let (end, persisted) = (Seqno(40), Seqno(39));
    assert_eq!(error, PlanError::NotPersisted { vbid: VB, end, persisted });
    let few = Limits { max_seqnos: Some(1), ..limits() };
    let [range] = &plan(seen(60, Some(0), &[(25, None)]), &few).unwrap()[..] else { panic!() };
    assert_eq!((range.start_seqno(), range.to), (Seqno(25), Seqno(40)));
    assert_eq!(range.from.position, position(25, (20, 40)), "with snapshot and manifest");
    let last = Limits { is_last: true, ..limits() };
    let [range] = &plan(seen(0, Some(0), &[(25, None)]), &last).unwrap()[..] else { panic!() };
    assert_eq!(range.to, Seqno(100), "all there is");
}

#[test]
fn offsets_not_claimed_persisted_may_lie_inside_a_checkpoints_snapshot() {
    let unpersisted = Limits { max_seqnos: Some(1), persisted_only: false, ..limits() };
    let claimed = Limits { persisted_only: true, ..unpersisted.clone() };
    let last = Limits { is_last: true, ..claimed.clone() };
    for (limits, rollback, to) in [
        (unpersisted, None, 26),
        (last, None, 26),
        (claimed.clone(), None, 40),
        // A rollback has left the snapshot.
        (claimed, Some(20), 21),
    ] {
        let ranges = plan(seen(100, Some(0), &[(25, rollback)]), &limits).unwrap();
        assert_eq!(ranges[0].to, Seqno(to), "{limits:?} {rollback:?}");
    }
}

#[test]
fn batch_replayed_after_a_purge_begins_at_zero_or_fails() {
    let at = |seqno| {
        let mut offsets = Offsets::new("bucket", StoredFilter::default(), 4);
        offsets.set(VB, Offset { seqno: Seqno(seqno), vbuuid: Vbuuid(0xa), epoch: 2 });
        offsets
    };
    let (start, end) = (at(20).into(), at(60));
    for now in [seen(100, Some(30), &[]), seen(100, None, &[(20, Some(0))])] {
        let observed = BTreeMap::from([(VB, now)]);
        let error = plan_ranges(&start, &end, &observed, &limits()).unwrap_err();
        assert!(matches!(error, PlanError::Purged { .. }), "{error}");
        let allowed = Limits { on_purge: OnPurge::Resync, ..limits() };
        let ranges = plan_ranges(&start, &end, &observed, &allowed).unwrap();
        let [range] = &ranges[..] else { panic!() };
        assert_eq!((range.start_seqno(), range.to), (Seqno(0), Seqno(60)));
        assert_eq!((range.epoch(), range.rolled_back), (2, false), "later batches have that epoch");
        assert!(!range.past_purge);
        // A server that can goes on from the start: no row comes twice in an epoch.
        let able = Limits { ignores_purges: true, ..allowed };
        let ranges = plan_ranges(&start, &end, &observed, &able).unwrap();
        let [range] = &ranges[..] else { panic!() };
        assert_eq!((range.start_seqno(), range.to, range.past_purge), (Seqno(20), Seqno(60), true));
        let refused =
            plan_ranges(&start, &end, &observed, &Limits { ignores_purges: true, ..limits() });
        assert!(matches!(refused, Err(PlanError::Purged { .. })), "the loss was not allowed");
    }
}

#[test]
fn a_plan_is_read_back_as_it_was_sent() {
    let from = StreamPosition::with_history(position(25, (20, 40)), History::default());
    let range = |vbid, to, rolled_back| VbucketRange {
        rolled_back,
        past_purge: rolled_back,
        ..VbucketRange::new(vbid, from.clone(), Seqno(to))
    };
    let ranges = vec![range(VB, 60, false), range(Vbid(4), 25, true)];
    let plan = ReadPlan {
        persisted_only: true,
        end_persisted: true,
        on_rollback: OnRollback::Resync,
        retry_timeout: Duration::from_secs(7),
        ..ReadPlan::of_ranges("bucket", StoredFilter::default(), ranges, true)
    };
    let nodes = [VB, Vbid(4)].map(|vbid| (vbid, "there:11210".to_owned())).into();
    let [sent] = &plan.split(&nodes, 1)[..] else { panic!() };
    assert_eq!((sent.node.as_deref(), sent.past_purge), (Some("there:11210"), true), "of any");
    assert_eq!(ReadPlan { node: None, ..sent.clone() }, plan);
    let json = sent.to_json();
    assert_eq!(ReadPlan::from_json(&json), Ok(sent.clone()));
    for cut in 0..json.len() {
        assert!(ReadPlan::from_json(&json[..cut]).is_err());
    }
    for (found, put) in [("[3,60]", "[3,61]"), ("\"clamp\":true", "\"clamp\":false")] {
        let changed = json.replacen(found, put, 1);
        assert_ne!(changed, json);
        let refused = ReadPlan::from_json(&changed).unwrap_err();
        assert_eq!(refused, CheckpointError::damaged(Form::Plan, "checksum mismatch"));
    }
    let later = json.replacen("\"version\":1", "\"version\":2", 1);
    let refused = ReadPlan::from_json(&later).unwrap_err();
    assert!(matches!(refused, CheckpointError::Version { form: Form::Plan, found: 2, .. }));
    let seen: Vec<_> = sent.ranges().map(|range| (range.vbid, range.rollback())).collect();
    let rollback = seen[1].1.expect("one to deliver");
    assert_eq!((seen[0], seen[1].0), ((VB, None), Vbid(4)));
    assert_eq!((rollback.seqno, rollback.new_vbuuid), (Seqno(25), Vbuuid(0xa)));
    let streamed: Vec<_> = sent.streamed().map(|range| (range.vbid, range.to)).collect();
    assert_eq!(streamed, [(VB, Seqno(60))], "the other has only a rollback");
    assert_eq!(sent.check("bucket"), Ok(()));
    assert!(matches!(sent.check("other"), Err(CheckpointError::OtherBucket { .. })));
}

#[test]
fn plan_that_contradicts_itself_is_refused() {
    let range = |vbid, seqno, to| {
        let from = StreamPosition::new(position(seqno, (seqno, seqno)));
        VbucketRange { rolled_back: true, ..VbucketRange::new(Vbid(vbid), from, Seqno(to)) }
    };
    let of = |ranges| ReadPlan::of_ranges("bucket", StoredFilter::default(), ranges, true);
    let plan = of(vec![range(3, 40, 60), range(4, 25, 25)]);
    assert_eq!(ReadPlan::from_json(&plan.to_json()), Ok(plan.clone()));
    let twice = ReadPlan { rolled_back: vec![VB, VB], ..plan.clone() };
    for (json, what) in [
        (of(vec![range(3, 40, 39)]).to_json(), "a range that ends before it begins"),
        (twice.to_json(), "a vBucket that is rolled back twice"),
    ] {
        let refused = ReadPlan::from_json(&json).unwrap_err();
        assert_eq!(refused, CheckpointError::damaged(Form::Plan, what));
    }
    let named = ReadPlan { ends: Ends::Given, ..of(vec![range(3, 40, 39)]) };
    assert_eq!(ReadPlan::from_json(&named.to_json()), Ok(named), "a stream may be past its end");
}

#[test]
fn plan_ends_are_trusted_depending_on_where_they_are_from() {
    let range = |seqno, to| {
        let from = StreamPosition::new(position(seqno, (seqno, seqno)));
        VbucketRange::new(VB, from, Seqno(to))
    };
    let plan = ReadPlan::of_ranges("bucket", StoredFilter::default(), Vec::new(), false);
    for (ends, from, high, seen, kind) in [
        (Ends::Never, 5, 20, true, EndKind::Awaited),
        (Ends::Now, 5, 20, false, EndKind::Latest),
        (Ends::Exist, 5, 20, false, EndKind::Required),
        (Ends::Given, 5, 20, false, EndKind::Awaited),
        (Ends::Given, 5, 20, true, EndKind::Latest),
        (Ends::Given, 30, 20, false, EndKind::Latest),
        (Ends::Given, 5, 30, false, EndKind::Seen),
    ] {
        let plan = ReadPlan { ends, ..plan.clone() };
        assert_eq!(plan.end_kind(&range(from, 30), Seqno(high), seen), kind, "{ends:?}");
    }
}

#[test]
fn end_seqno_inside_a_snapshot_is_taken_and_must_be_persisted() {
    let until = |seqno| {
        let mut until = Offsets::new("bucket", StoredFilter::default(), 4);
        until.set(VB, Offset { seqno: Seqno(seqno), vbuuid: Vbuuid(0xa), epoch: 0 });
        Limits { until: Some(until), ..limits() }
    };
    let now = |persisted| seen(persisted, Some(0), &[(25, None)]);
    let error = plan(now(30), &until(40)).unwrap_err();
    let (end, persisted) = (Seqno(40), Seqno(30));
    assert_eq!(error, PlanError::NotPersisted { vbid: VB, end, persisted });
    assert_eq!(plan(now(40), &until(40)).unwrap()[0].to, Seqno(40));
    assert_eq!(plan(now(30), &until(39)).unwrap()[0].to, Seqno(30), "already checked");
}

#[test]
fn plan_without_a_filter_is_refused() {
    // As the first release wrote it: a hash of the filter.
    let hashed = br#"{"format":"dcp_rs checkpoint","version":1,"crc32":"6c134e0e","content":{"bucket_uuid":"b","filter":"000000000000feed","positions":{"7":{"seqno":5,"snapshot":[0,9],"failover_log":[["0000000000000abc",4]],"manifest":"000000000000001f","purge_seqno":1,"epoch":2}}}}"#;
    let start = Checkpoint::from_json(hashed).unwrap();
    let known = ReadPlan::of_ranges("b", StoredFilter::default(), Vec::new(), false);
    assert_eq!(ReadPlan::from_json(&known.to_json()), Ok(known.clone()));
    let refused = ReadPlan::from_json(&ReadPlan { start, ..known }.to_json());
    assert!(matches!(refused, Err(CheckpointError::Damaged { .. })), "{refused:?}");
}
