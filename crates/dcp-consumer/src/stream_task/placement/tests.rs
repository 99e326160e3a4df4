use dcp_proto::consumer::OpenStreamError;
use dcp_proto::{Position, Rollback};
use dcp_wire::message::StreamEndReason;
use dcp_wire::{Status, Vbuuid};
use proptest::prelude::*;

use super::*;

const VB: Vbid = Vbid(3);
const ON: ConnectionId = ConnectionId(1);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
const ATTEMPT: Duration = Duration::from_secs(20);
const LIMITS: (Duration, Duration) = (ANSWER_TIMEOUT, ATTEMPT);

fn now() -> Instant {
    Instant::now()
}

fn position() -> Box<StreamPosition> {
    Box::new(StreamPosition::new(Position::EARLIEST))
}

fn one(now: Instant) -> Placement {
    one_with(ANSWER_TIMEOUT, now)
}

fn one_with(retry_timeout: Duration, now: Instant) -> Placement {
    let vbuckets = [VbucketRange::new(VB, *position(), Seqno::MAX)];
    Placement::new(vbuckets, (retry_timeout, ATTEMPT), now, crate::dial::randomness(None))
}

fn cause() -> Arc<Error> {
    Arc::new(Error::new(ErrorKind::Connect, "no route to host"))
}

/// One vBucket that streams on `ON`.
fn streaming(now: Instant) -> Placement {
    let mut placement = one(now);
    reopen(&mut placement, now);
    placement
}

fn reopen(placement: &mut Placement, now: Instant) {
    assert_eq!(placement.due(now), [VB]);
    placement.assign(VB, ON);
    assert!(placement.requesting().contains(&ON));
    assert_eq!(placement.take_requests(ON).len(), 1);
    assert_eq!(placement.take_requests(ON).len(), 0, "asked for once");
    assert!(placement.requesting().is_empty());
    placement.opened(VB, ON, now);
}

fn counts(placement: &Placement) -> [usize; 5] {
    let mut stats = StreamStats::default();
    placement.count(&mut stats);
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
    let mut placement = streaming(now);
    let verdict = placement.ended(VB, ON, cause, position(), now);
    let wait = placement.deadline().map(|at| at - now);
    match verdict {
        Verdict::Complete => {
            assert_eq!(counts(&placement), [0, 0, 0, 1, 0]);
            Complete
        }
        Verdict::Fatal(error) => {
            assert_eq!(counts(&placement), [0, 0, 0, 0, 1]);
            assert_eq!(error.vbid(), Some(VB));
            Fatal(error.kind())
        }
        Verdict::FilterRefused => {
            assert_eq!(counts(&placement), [0, 0, 1, 0, 0]);
            Doubted
        }
        Verdict::Retry { fetch_map } => {
            assert_eq!(counts(&placement), [0, 0, 1, 0, 0]);
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
fn stream_ends_each_have_their_decision() {
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
fn refusals_each_have_their_decision() {
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
        (Status::ENCRYPTION_KEY_NOT_AVAILABLE, Later),
        (Status::SUBDOC_PATH_ENOENT, Soon),
        (Status(0x5555), Soon),
    ];
    for (status, expected) in rows {
        let refused = OpenStreamError::Refused { status, manifest_uid: None };
        assert_eq!(verdict(EndCause::Refused(refused)), expected, "{status}");
    }
    assert_eq!(verdict(EndCause::Refused(OpenStreamError::RollbackAtZero)), Soon);
}

#[test]
fn refusal_before_anything_streamed_is_final() {
    for (status, kind) in
        [(Status::EACCESS, ErrorKind::AccessDenied), (Status::KEY_ENOENT, ErrorKind::Status)]
    {
        let at = now();
        let mut placement = one(at);
        placement.assign(VB, ON);
        placement.take_requests(ON);
        let refused = OpenStreamError::Refused { status, manifest_uid: None };
        let verdict = placement.ended(VB, ON, EndCause::Refused(refused), position(), at);
        let Verdict::Fatal(error) = verdict else { panic!("{verdict:?}") };
        assert_eq!((error.kind(), error.status()), (kind, Some(status)));
    }
}

#[test]
fn refusal_that_lasts_too_long_is_reported_with_its_kind() {
    let at = now();
    let mut placement = streaming(at);
    let refused = OpenStreamError::Refused { status: Status::EACCESS, manifest_uid: None };
    placement.ended(VB, ON, EndCause::Refused(refused), position(), at);
    let (vbid, idle, cause) = placement.stalled(at + ANSWER_TIMEOUT).unwrap();
    let error = Error::out_of_reach(vbid, idle, cause);
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::AccessDenied, Some(VB)));
    assert!(error.to_string().contains("EACCESS"), "{error}");
}

#[test]
fn rollback_with_on_rollback_fail_ends_the_stream() {
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
    assert_eq!(verdict(EndCause::Overtaken(3)), Fatal(ErrorKind::Rollback));
}

#[test]
fn vbucket_is_complete_once_everything_its_refused_filter_names_is_gone() {
    let at = now();
    let status = Status::UNKNOWN_COLLECTION;
    let refused = || EndCause::Refused(OpenStreamError::Refused { status, manifest_uid: None });
    let mut placement = one(at);
    placement.assign(VB, ON);
    placement.take_requests(ON);
    let verdict = placement.ended(VB, ON, refused(), position(), at);
    assert!(matches!(verdict, Verdict::FilterRefused), "{verdict:?}");
    assert!(!placement.complete_refused(), "it never streamed: the filter was wrong");
    let mut placement = streaming(at);
    assert!(placement.complete_refused());
    assert_eq!(counts(&placement), [0, 1, 0, 0, 0], "what streams ends by itself");
    placement.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
    assert!(placement.complete_refused());
    assert_eq!(counts(&placement), [0, 0, 1, 0, 0], "it is opened again for another reason");
    let later = at + Duration::from_secs(60);
    assert_eq!(placement.due(later), [VB]);
    placement.assign(VB, ON);
    placement.ended(VB, ON, refused(), position(), later);
    assert!(placement.complete_refused());
    assert_eq!(counts(&placement), [0, 0, 0, 1, 0]);
}

#[test]
fn failures_in_a_row_back_off_until_a_stream_has_lived() {
    let mut at = now();
    let mut placement = streaming(at);
    let mut waits = Vec::new();
    for _ in 0..6 {
        placement.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
        waits.push(placement.deadline().unwrap() - at);
        at = placement.deadline().unwrap();
        reopen(&mut placement, at);
    }
    // Each is at least half of its full length, and full lengths double.
    assert!(waits[5] > waits[0] * 8, "{waits:?}");
    at += SETTLED;
    placement.ended(VB, ON, EndCause::Ended(StreamEndReason::SLOW), position(), at);
    assert!(placement.deadline().unwrap() - at <= Duration::from_millis(50));
}

#[test]
fn connection_that_is_lost_gives_back_its_streams_open_and_pending() {
    let now = now();
    let vbuckets = (0..3).map(|vbid| VbucketRange::new(Vbid(vbid), *position(), Seqno::MAX));
    let mut placement = Placement::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
    assert_eq!(placement.due(now).len(), 3);
    placement.assign(Vbid(0), ON);
    placement.take_requests(ON);
    placement.opened(Vbid(0), ON, now);
    placement.assign(Vbid(1), ON);
    placement.assign(Vbid(2), ConnectionId(2));
    assert_eq!(counts(&placement), [2, 1, 0, 0, 0]);
    placement.lost(ON, vec![(Vbid(0), *position())], &cause(), now);
    assert_eq!(counts(&placement), [1, 0, 2, 0, 0], "the other connection is not concerned");
    assert!(placement.check(|id| id == ConnectionId(2)).is_ok());
}

#[test]
fn vbuckets_that_wait_for_their_node_are_due_once_it_has_a_connection() {
    let now = now();
    let vbuckets = (0..6).map(|vbid| VbucketRange::new(Vbid(vbid), *position(), Seqno::MAX));
    let mut placement = Placement::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
    // One streams, one ended, and one connection is lost.
    for vbid in 0..2 {
        placement.assign(Vbid(vbid), ON);
    }
    placement.take_requests(ON);
    placement.opened(Vbid(0), ON, now);
    placement.opened(Vbid(1), ON, now);
    placement.ended(Vbid(1), ON, EndCause::Ended(StreamEndReason::SLOW), position(), now);
    placement.lost(ON, vec![(Vbid(0), *position())], &cause(), now);
    // The next one cannot be made.
    let next = ConnectionId(2);
    for vbid in 2..4 {
        placement.assign(Vbid(vbid), next);
    }
    placement.unreachable(next, &cause(), now);
    placement.postpone(Vbid(4), Some(cause()), true, now);
    placement.postpone(Vbid(5), Some(cause()), false, now);
    assert_eq!(placement.due(now), []);

    placement.reached(|vbid| vbid != Vbid(3), now);
    assert_eq!(placement.due(now), [Vbid(2), Vbid(4)], "one is elsewhere, others wait for more");
}

#[test]
fn reports_of_an_old_connection_change_nothing() {
    let now = now();
    let mut placement = streaming(now);
    let old = ConnectionId(0);
    placement.ended(VB, old, EndCause::Complete, position(), now);
    placement.lost(old, vec![(VB, *position())], &cause(), now);
    placement.opened(VB, old, now);
    assert_eq!(counts(&placement), [0, 1, 0, 0, 0]);
}

#[test]
fn vbucket_without_a_stream_for_too_long_is_reported() {
    let start = now();
    let mut placement = one(start);
    assert!(placement.stalled(start + ANSWER_TIMEOUT - Duration::from_secs(1)).is_none());
    assert!(placement.deadline().unwrap() <= start + ANSWER_TIMEOUT);
    let mut at = start;
    while at < start + ANSWER_TIMEOUT {
        placement.postpone(VB, Some(cause()), true, at);
        at += Duration::from_secs(10);
    }
    let (vbid, idle, last) = placement.stalled(at).unwrap();
    assert_eq!((vbid, idle), (VB, at - start));
    assert_eq!(last.unwrap().to_string(), "no route to host");
    reopen(&mut placement, at + Duration::from_secs(20));
    assert!(
        placement.stalled(at + ANSWER_TIMEOUT * 2).is_none(),
        "a stream counts from its last end"
    );
}

#[test]
fn retry_timeout_of_zero_ends_the_stream_at_the_first_failure() {
    let start = now();
    let mut placement = one_with(Duration::ZERO, start);
    assert!(placement.stalled(start + Duration::from_secs(1)).is_none(), "it is not made yet");
    reopen(&mut placement, start + Duration::from_secs(1));
    assert!(placement.stalled(start + ANSWER_TIMEOUT).is_none(), "it streams");

    // One that is closed in order to be moved has not failed.
    let later = start + ANSWER_TIMEOUT;
    placement.ended(VB, ON, EndCause::Closed, position(), later);
    assert!(placement.stalled(later).is_none());
    let due = placement.deadline().unwrap();
    reopen(&mut placement, due);
    placement.lost(ON, vec![(VB, *position())], &cause(), later);
    let (_, _, last) = placement.stalled(later).unwrap();
    assert_eq!(last.unwrap().kind(), ErrorKind::Connect);

    let mut placement = one_with(Duration::ZERO, start);
    placement.assign(VB, ON);
    assert!(placement.stalled(start + ATTEMPT).is_some(), "an attempt that has no end");
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "is on a connection that no longer exists"))]
fn vbucket_that_was_forgotten_is_found() {
    let mut placement = streaming(now());
    let error = placement.check(|_| false).unwrap_err();
    assert_eq!(error.vbid(), Some(VB));
}

#[test]
fn map_that_is_new_moves_streams_once_closed_and_others_at_once() {
    let now = now();
    let vbuckets = (0..5).map(|vbid| VbucketRange::new(Vbid(vbid), *position(), Seqno::MAX));
    let mut placement = Placement::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
    let other = ConnectionId(2);
    let node = |port| Address { host: "node".to_owned(), port };
    for (vbid, on) in [(0, ON), (1, other), (2, ON)] {
        placement.assign(Vbid(vbid), on);
    }
    placement.take_requests(ON);
    placement.take_requests(other);
    placement.opened(Vbid(0), ON, now);
    placement.opened(Vbid(1), other, now);
    placement.assign(Vbid(3), ON);
    // All are active on a node that has the other connection, but for one that is on none.
    let home = |vbid: Vbid| (vbid != Vbid(2)).then(|| (node(2), Some(other)));
    let misplaced = placement.follow_map(home, now);
    assert_eq!(misplaced, [Misplaced { vbid: Vbid(0), on: ON, to: node(2) }]);
    assert_eq!(placement.due(now), [Vbid(3), Vbid(4)]);
    assert_eq!(placement.placed().len(), 3, "streams stay until they have ended");
    // Its node has no connection yet.
    let misplaced = placement.follow_map(|_| Some((node(3), None)), now);
    assert_eq!(misplaced.len(), 3);
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
    fn vbucket_is_in_one_state_and_always_has_a_next_step(
        happenings in proptest::collection::vec(happening(), 1..60),
    ) {
        let mut now = now();
        let vbuckets = (0..4).map(|vbid| VbucketRange::new(Vbid(vbid), *position(), Seqno::MAX));
        let mut placement = Placement::new(vbuckets, LIMITS, now, crate::dial::randomness(None));
        for happening in happenings {
            match happening {
                Happening::Place(on) => {
                    for vbid in placement.due(now) {
                        placement.assign(vbid, ConnectionId(on));
                    }
                    placement.take_requests(ConnectionId(on));
                }
                Happening::Open(vbid, on) => placement.opened(Vbid(vbid), ConnectionId(on), now),
                Happening::End(vbid, on, reason) => {
                    let cause = EndCause::Ended(StreamEndReason(reason));
                    let on = ConnectionId(on);
                    let _ = placement.ended(Vbid(vbid), on, cause, position(), now);
                }
                Happening::Lose(on) => {
                    let on = ConnectionId(on);
                    let there = placement.placed().into_iter().filter(|placed| placed.1 == on);
                    let streams = there.map(|(vbid, _)| (vbid, *position())).collect();
                    placement.lost(on, streams, &cause(), now);
                    prop_assert!(placement.placed().iter().all(|placed| placed.1 != on));
                }
                Happening::Unreachable(on) => {
                    placement.unreachable(ConnectionId(on), &cause(), now);
                }
                Happening::Postpone(vbid) => placement.postpone(Vbid(vbid), None, false, now),
                Happening::Wait(millis) => now += Duration::from_millis(millis),
            }
            prop_assert_eq!(counts(&placement).iter().sum::<usize>(), 4);
            prop_assert!(placement.check(|_| true).is_ok());
            for (vbid, state, _) in placement.states() {
                let placed = placement.connection_of(vbid).is_some();
                let waits = placement.wait_of(vbid, now).is_some();
                let on_its_way = placed || waits;
                let is_final = matches!(state, VbucketState::Complete | VbucketState::Failed);
                prop_assert!(on_its_way != is_final, "{} is {:?}", vbid, state);
            }
        }
    }
}
