use dcp_proto::consumer::OpenStreamError;
use dcp_proto::{Position, Rollback};
use dcp_wire::message::StreamEndReason;
use dcp_wire::{Status, Vbuuid};
use proptest::prelude::*;

use super::*;

const VB: Vbid = Vbid(3);
const ON: ConnectionId = ConnectionId(1);
const PATIENCE: Duration = Duration::from_secs(300);
const ATTEMPT: Duration = Duration::from_secs(20);
const LIMITS: (Duration, Duration) = (PATIENCE, ATTEMPT);

fn now() -> Instant {
    Instant::now()
}

fn position() -> Box<StreamPosition> {
    Box::new(StreamPosition::new(Position::EARLIEST))
}

fn one(now: Instant) -> Reconciler {
    one_with(PATIENCE, now)
}

fn one_with(patience: Duration, now: Instant) -> Reconciler {
    let vbuckets = [(VB, Seqno::MAX, *position())];
    Reconciler::new(vbuckets, (patience, ATTEMPT), now, crate::dial::randomness(None))
}

fn cause() -> Arc<Error> {
    Arc::new(Error::new(ErrorKind::Connect, "no route to host"))
}

/// One vBucket that streams on `ON`.
fn streaming(now: Instant) -> Reconciler {
    let mut reconciler = one(now);
    reopen(&mut reconciler, now);
    reconciler
}

fn reopen(reconciler: &mut Reconciler, now: Instant) {
    assert_eq!(reconciler.due(now), [VB]);
    reconciler.assign(VB, ON);
    assert!(reconciler.requesting().contains(&ON));
    assert_eq!(reconciler.take_requests(ON).len(), 1);
    assert_eq!(reconciler.take_requests(ON).len(), 0, "asked for once");
    assert!(reconciler.requesting().is_empty());
    reconciler.opened(VB, ON, now);
}

fn counts(reconciler: &Reconciler) -> [usize; 5] {
    let mut stats = StreamStats::default();
    reconciler.count(&mut stats);
    [stats.opening, stats.streaming, stats.backing_off, stats.complete, stats.failed]
}

/// What a table row expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Complete,
    /// Opened again, soon or in a second or more.
    Soon,
    Doubted,
    Later,
    /// The same once the map has been fetched.
    Moved,
    Fatal(ErrorKind),
}

use Expected::{Complete, Doubted, Fatal, Later, Moved, Soon};

fn verdict(cause: EndCause) -> Expected {
    let now = now();
    let mut reconciler = streaming(now);
    let verdict = reconciler.ended(VB, ON, cause, position(), now);
    let wait = reconciler.deadline().map(|at| at - now);
    match verdict {
        Verdict::Complete => {
            assert_eq!(counts(&reconciler), [0, 0, 0, 1, 0]);
            Complete
        }
        Verdict::Fatal(error) => {
            assert_eq!(counts(&reconciler), [0, 0, 0, 0, 1]);
            assert_eq!(error.vbid(), Some(VB));
            Fatal(error.kind())
        }
        Verdict::FilterRefused => {
            assert_eq!(counts(&reconciler), [0, 0, 1, 0, 0]);
            Doubted
        }
        Verdict::Retry { fetch_map } => {
            assert_eq!(counts(&reconciler), [0, 0, 1, 0, 0]);
            let soon = wait.unwrap() <= Duration::from_millis(50);
            if fetch_map {
                Moved
            } else if soon {
                Soon
            } else {
                Later
            }
        }
    }
}

#[test]
fn every_end_has_its_consequence() {
    let rows = [
        (StreamEndReason::OK, Soon),
        (StreamEndReason::CLOSED, Soon),
        (StreamEndReason::STATE_CHANGED, Moved),
        (StreamEndReason::DISCONNECTED, Soon),
        (StreamEndReason::SLOW, Soon),
        (StreamEndReason::BACKFILL_FAIL, Later),
        (StreamEndReason::ROLLBACK, Moved),
        (StreamEndReason::FILTER_EMPTY, Complete),
        (StreamEndReason::LOST_PRIVILEGES, Fatal(ErrorKind::AccessDenied)),
        (StreamEndReason(99), Later),
    ];
    for (reason, expected) in rows {
        assert_eq!(verdict(EndCause::Ended(reason)), expected, "{reason}");
    }
    assert_eq!(verdict(EndCause::Complete), Complete);
    assert_eq!(verdict(EndCause::Closed), Soon);
}

#[test]
fn every_refusal_has_its_consequence() {
    let status = Fatal(ErrorKind::Status);
    let rows = [
        (Status::EINVAL, status),
        // It has streamed: the node starts, or does not know yet what the user may do.
        (Status::EACCESS, Soon),
        (Status::KEY_ENOENT, Soon),
        (Status::KEY_EEXISTS, Soon),
        (Status::NOT_MY_VBUCKET, Moved),
        (Status::ERANGE, status),
        (Status::ETMPFAIL, Soon),
        (Status::EBUSY, Soon),
        (Status::ENOMEM, Soon),
        (Status::NOT_INITIALIZED, Soon),
        (Status::COLLECTIONS_MANIFEST_IS_AHEAD, Soon),
        (Status::UNKNOWN_COLLECTION, Doubted),
        (Status::UNKNOWN_SCOPE, Doubted),
        (Status::DCP_STREAMID_INVALID, status),
        (Status::NOT_SUPPORTED, status),
        (Status::EINTERNAL, Soon),
    ];
    for (status, expected) in rows {
        let refused = OpenStreamError::Refused { status, manifest_uid: None };
        assert_eq!(verdict(EndCause::Refused(refused)), expected, "{status}");
    }
    assert_eq!(verdict(EndCause::Refused(OpenStreamError::RollbackAtZero)), Soon);
}

#[test]
fn what_is_refused_before_anything_streamed_is_refused_for_good() {
    for (status, kind) in
        [(Status::EACCESS, ErrorKind::AccessDenied), (Status::KEY_ENOENT, ErrorKind::Status)]
    {
        let at = now();
        let mut reconciler = one(at);
        reconciler.assign(VB, ON);
        reconciler.take_requests(ON);
        let refused = OpenStreamError::Refused { status, manifest_uid: None };
        let verdict = reconciler.ended(VB, ON, EndCause::Refused(refused), position(), at);
        let Verdict::Fatal(error) = verdict else { panic!("{verdict:?}") };
        assert_eq!((error.kind(), error.status()), (kind, Some(status)));
    }
}

#[test]
fn what_was_refused_for_too_long_is_told_with_its_kind() {
    let at = now();
    let mut reconciler = streaming(at);
    let refused = OpenStreamError::Refused { status: Status::EACCESS, manifest_uid: None };
    reconciler.ended(VB, ON, EndCause::Refused(refused), position(), at);
    let (vbid, idle, cause) = reconciler.stalled(at + PATIENCE).unwrap();
    let error = Error::out_of_reach(vbid, idle, cause);
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::AccessDenied, Some(VB)));
    assert!(error.to_string().contains("EACCESS"), "{error}");
}

#[test]
fn a_rollback_that_is_to_be_raised_ends_the_stream() {
    let rollback = Rollback {
        vbid: VB,
        seqno: Seqno(20),
        from_seqno: Seqno(30),
        old_vbuuid: Vbuuid(1),
        new_vbuuid: Vbuuid(1),
        epoch: 1,
    };
    assert_eq!(
        verdict(EndCause::RolledBack { rollback, to: rollback.seqno }),
        Fatal(ErrorKind::Rollback)
    );
}

#[test]
fn a_vbucket_is_complete_once_everything_its_refused_filter_names_is_gone() {
    let at = now();
    let status = Status::UNKNOWN_COLLECTION;
    let refused = || EndCause::Refused(OpenStreamError::Refused { status, manifest_uid: None });
    let mut reconciler = one(at);
    reconciler.assign(VB, ON);
    reconciler.take_requests(ON);
    let verdict = reconciler.ended(VB, ON, refused(), position(), at);
    assert!(matches!(verdict, Verdict::FilterRefused), "{verdict:?}");
    assert!(!reconciler.complete_refused(), "it never streamed: the filter was wrong");
    let mut reconciler = streaming(at);
    assert!(reconciler.complete_refused());
    assert_eq!(counts(&reconciler), [0, 1, 0, 0, 0], "what streams ends by itself");
    reconciler.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
    assert!(reconciler.complete_refused());
    assert_eq!(counts(&reconciler), [0, 0, 1, 0, 0], "it is opened again for another reason");
    let later = at + Duration::from_secs(60);
    assert_eq!(reconciler.due(later), [VB]);
    reconciler.assign(VB, ON);
    reconciler.ended(VB, ON, refused(), position(), later);
    assert!(reconciler.complete_refused());
    assert_eq!(counts(&reconciler), [0, 0, 0, 1, 0]);
}

#[test]
fn failures_in_a_row_wait_longer_and_longer_until_a_stream_has_lived() {
    let mut at = now();
    let mut reconciler = streaming(at);
    let mut waits = Vec::new();
    for _ in 0..6 {
        reconciler.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
        waits.push(reconciler.deadline().unwrap() - at);
        at = reconciler.deadline().unwrap();
        reopen(&mut reconciler, at);
    }
    // Each is at least half of its full length, and full lengths double.
    assert!(waits[5] > waits[0] * 8, "{waits:?}");
    at += SETTLED;
    reconciler.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
    assert!(reconciler.deadline().unwrap() - at <= Duration::from_millis(50));
}

#[test]
fn a_lost_connection_gives_back_what_streamed_and_what_was_to_be_opened() {
    let now = now();
    let vbuckets = (0..3).map(|vbid| (Vbid(vbid), Seqno::MAX, *position()));
    let mut reconciler = Reconciler::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
    assert_eq!(reconciler.due(now).len(), 3);
    reconciler.assign(Vbid(0), ON);
    reconciler.take_requests(ON);
    reconciler.opened(Vbid(0), ON, now);
    reconciler.assign(Vbid(1), ON);
    reconciler.assign(Vbid(2), ConnectionId(2));
    assert_eq!(counts(&reconciler), [2, 1, 0, 0, 0]);
    reconciler.lost(ON, vec![(Vbid(0), *position())], &cause(), now);
    assert_eq!(counts(&reconciler), [1, 0, 2, 0, 0], "the other connection is not concerned");
    assert!(reconciler.check(|id| id == ConnectionId(2)).is_ok());
}

#[test]
fn what_an_old_connection_reports_changes_nothing() {
    let now = now();
    let mut reconciler = streaming(now);
    let old = ConnectionId(0);
    reconciler.ended(VB, old, EndCause::Complete, position(), now);
    reconciler.lost(old, vec![(VB, *position())], &cause(), now);
    reconciler.opened(VB, old, now);
    assert_eq!(counts(&reconciler), [0, 1, 0, 0, 0]);
}

#[test]
fn a_vbucket_without_a_stream_for_too_long_is_told() {
    let start = now();
    let mut reconciler = one(start);
    assert!(reconciler.stalled(start + PATIENCE - Duration::from_secs(1)).is_none());
    assert!(reconciler.deadline().unwrap() <= start + PATIENCE);
    let mut at = start;
    while at < start + PATIENCE {
        reconciler.postpone(VB, Some(cause()), at);
        at += Duration::from_secs(10);
    }
    let (vbid, idle, last) = reconciler.stalled(at).unwrap();
    assert_eq!((vbid, idle), (VB, at - start));
    assert_eq!(last.unwrap().to_string(), "no route to host");
    reopen(&mut reconciler, at + Duration::from_secs(20));
    assert!(reconciler.stalled(at + PATIENCE * 2).is_none(), "a stream counts from its last end");
}

#[test]
fn without_patience_the_first_attempt_is_made_and_the_first_failure_ends_the_stream() {
    let start = now();
    let mut reconciler = one_with(Duration::ZERO, start);
    assert!(reconciler.stalled(start + Duration::from_secs(1)).is_none(), "it is not made yet");
    reopen(&mut reconciler, start + Duration::from_secs(1));
    assert!(reconciler.stalled(start + PATIENCE).is_none(), "it streams");

    // One that is closed in order to be moved has not failed.
    let later = start + PATIENCE;
    reconciler.ended(VB, ON, EndCause::Closed, position(), later);
    assert!(reconciler.stalled(later).is_none());
    let due = reconciler.deadline().unwrap();
    reopen(&mut reconciler, due);
    reconciler.lost(ON, vec![(VB, *position())], &cause(), later);
    let (_, _, last) = reconciler.stalled(later).unwrap();
    assert_eq!(last.unwrap().kind(), ErrorKind::Connect);

    let mut reconciler = one_with(Duration::ZERO, start);
    reconciler.assign(VB, ON);
    assert!(reconciler.stalled(start + ATTEMPT).is_some(), "an attempt that has no end");
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "is on a connection that no longer exists"))]
fn a_forgotten_vbucket_is_found() {
    let mut reconciler = streaming(now());
    let error = reconciler.check(|_| false).unwrap_err();
    assert_eq!(error.vbid(), Some(VB));
}

fn progress(seqno: u64, high_seqno: u64) -> Progress {
    Progress {
        vbid: VB,
        seqno: Seqno(seqno),
        high_seqno: Seqno(high_seqno),
        is_held_up: false,
        has_lost_end: false,
    }
}

#[test]
fn a_vbucket_that_lags_without_progress_is_told_once() {
    let start = now();
    let mut reconciler = streaming(start);
    let at = |seconds| start + Duration::from_secs(seconds);
    assert_eq!(reconciler.progressed(progress(5, 9), at(0)), None);
    assert_eq!(reconciler.progressed(progress(5, 9), at(59)), None);
    let still = Some(Duration::from_secs(60));
    assert_eq!(reconciler.progressed(progress(5, 12), at(60)), still);
    assert_eq!(reconciler.progressed(progress(5, 12), at(200)), None, "told once");
    assert_eq!(reconciler.progressed(progress(6, 12), at(210)), None, "it has moved");
    assert_eq!(reconciler.progressed(progress(6, 12), at(270)), still, "and stands again");
}

#[test]
fn a_vbucket_that_waits_for_the_application_or_for_nothing_does_not_lag() {
    let start = now();
    let mut reconciler = streaming(start);
    let later = start + Duration::from_secs(600);
    let held_up = Progress { is_held_up: true, ..progress(5, 9) };
    for nothing in [held_up, progress(9, 9)] {
        assert_eq!(reconciler.progressed(progress(5, 9), start), None);
        assert_eq!(reconciler.progressed(nothing, start), None);
        assert_eq!(reconciler.progressed(progress(5, 9), later), None, "{nothing:?}");
        reconciler.progressed(progress(9, 9), later);
    }
}

/// Something that happens to a vBucket or a connection.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Place(u64),
    Open(u16, u64),
    End(u16, u64, u32),
    Lose(u64),
    Unreachable(u64),
    Postpone(u16),
    Wait(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    let (vbid, connection) = (0..4_u16, 1..4_u64);
    prop_oneof![
        connection.clone().prop_map(Happening::Place),
        (vbid.clone(), connection.clone()).prop_map(|(vbid, on)| Happening::Open(vbid, on)),
        (vbid.clone(), connection.clone(), 0..10_u32)
            .prop_map(|(vbid, on, reason)| Happening::End(vbid, on, reason)),
        connection.clone().prop_map(Happening::Lose),
        connection.prop_map(Happening::Unreachable),
        vbid.prop_map(Happening::Postpone),
        (0..20_000_u64).prop_map(Happening::Wait),
    ]
}

proptest! {
    #[test]
    fn every_vbucket_is_in_one_state_and_has_somebody_or_some_moment(
        happenings in proptest::collection::vec(happening(), 1..60),
    ) {
        let mut now = now();
        let vbuckets = (0..4).map(|vbid| (Vbid(vbid), Seqno::MAX, *position()));
        let mut reconciler = Reconciler::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
        for happening in happenings {
            match happening {
                Happening::Place(on) => {
                    for vbid in reconciler.due(now) {
                        reconciler.assign(vbid, ConnectionId(on));
                    }
                    reconciler.take_requests(ConnectionId(on));
                }
                Happening::Open(vbid, on) => reconciler.opened(Vbid(vbid), ConnectionId(on), now),
                Happening::End(vbid, on, reason) => {
                    let cause = EndCause::Ended(StreamEndReason(reason));
                    let on = ConnectionId(on);
                    let _ = reconciler.ended(Vbid(vbid), on, cause, position(), now);
                }
                Happening::Lose(on) => {
                    let on = ConnectionId(on);
                    let there = reconciler.placed().into_iter().filter(|placed| placed.1 == on);
                    let streams = there.map(|(vbid, _)| (vbid, *position())).collect();
                    reconciler.lost(on, streams, &cause(), now);
                    prop_assert!(reconciler.placed().iter().all(|placed| placed.1 != on));
                }
                Happening::Unreachable(on) => {
                    reconciler.unreachable(ConnectionId(on), &cause(), now);
                }
                Happening::Postpone(vbid) => reconciler.postpone(Vbid(vbid), None, now),
                Happening::Wait(millis) => now += Duration::from_millis(millis),
            }
            prop_assert_eq!(counts(&reconciler).iter().sum::<usize>(), 4);
            prop_assert!(reconciler.check(|_| true).is_ok());
            for (vbid, state, _) in reconciler.states() {
                let placed = reconciler.connection_of(vbid).is_some();
                let waits = reconciler.wait_of(vbid, now).is_some();
                let on_its_way = placed || waits;
                let is_final = matches!(state, VbucketState::Complete | VbucketState::Failed);
                prop_assert!(on_its_way != is_final, "{} is {:?}", vbid, state);
            }
        }
    }
}
