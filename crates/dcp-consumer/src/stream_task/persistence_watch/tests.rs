use super::*;

const ON: ConnectionId = ConnectionId(1);
const BRANCH: Vbuuid = Vbuuid(7);
const VB: Vbid = Vbid(3);

fn address(port: u16) -> Address {
    Address { host: "node".to_owned(), port }
}

fn copies(ports: &[u16]) -> Vec<Option<Address>> {
    ports.iter().map(|&port| Some(address(port))).collect()
}

fn now() -> Instant {
    Instant::now()
}

fn waiting(ports: &[u16], now: Instant) -> PersistenceWatch {
    let mut persistence = PersistenceWatch::default();
    persistence.unpersisted(VB, (ON, BRANCH), copies(ports), now);
    persistence
}

fn says(
    persistence: &mut PersistenceWatch,
    port: u16,
    vbuuid: Vbuuid,
    seqno: u64,
    now: Instant,
) -> Option<u64> {
    let advanced =
        persistence.answered(&address(port), Some(&[(VB, Some((vbuuid, Seqno(seqno))))]), now);
    assert!(advanced.len() <= 1);
    advanced.first().map(|advanced| {
        assert_eq!((advanced.on, advanced.vbid, advanced.vbuuid), (ON, VB, BRANCH));
        advanced.seqno.0
    })
}

#[test]
fn persistence_is_that_of_the_slowest_copy_once_all_have_answered() {
    let now = now();
    let mut persistence = waiting(&[1, 2, 3], now);
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, now), None);
    assert_eq!(says(&mut persistence, 2, BRANCH, 5, now), None, "one was not heard from");
    assert_eq!(says(&mut persistence, 3, BRANCH, 7, now), Some(5));
    assert_eq!(says(&mut persistence, 2, BRANCH, 8, now), Some(7));
    assert_eq!(says(&mut persistence, 1, BRANCH, 10, now), None, "nothing new");
    assert_eq!(persistence.persisted(VB), Some(Seqno(7)));
}

#[test]
fn persistence_stays_at_zero_while_a_copy_is_silent_or_diverged() {
    let now = now();
    let mut persistence = waiting(&[1, 2], now);
    says(&mut persistence, 1, BRANCH, 9, now);
    assert_eq!(says(&mut persistence, 2, BRANCH, 9, now), Some(9));
    assert_eq!(says(&mut persistence, 2, Vbuuid(8), 9, now), Some(0));
    assert_eq!(says(&mut persistence, 2, BRANCH, 9, now), Some(9));
    let advanced = persistence.answered(&address(1), None, now);
    assert_eq!(advanced[0].seqno, Seqno::ZERO, "the node did not answer");
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, now), Some(9));
    let advanced = persistence.answered(&address(1), Some(&[(VB, None)]), now);
    assert_eq!(advanced[0].seqno, Seqno::ZERO, "it does not know the branch");
}

#[test]
fn persistence_counts_copies_that_join_or_leave_from_the_map_on() {
    let now = now();
    let mut persistence = waiting(&[1, 2], now);
    says(&mut persistence, 1, BRANCH, 9, now);
    assert_eq!(persistence.follow(|_| copies(&[1, 2]), now), []);
    let advanced = persistence.follow(|_| copies(&[1]), now);
    assert_eq!(advanced, [], "nothing had passed");
    assert!(persistence.needs(&address(1)) && !persistence.needs(&address(2)));
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, now), Some(9));
    let advanced = persistence.follow(|_| vec![Some(address(1)), None], now);
    assert_eq!(advanced[0].seqno, Seqno::ZERO, "a node without an address cannot be asked");
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, now), None);
}

#[test]
fn nodes_are_asked_about_unpersisted_vbuckets_each_at_its_own_pace() {
    let start = now();
    let mut persistence = waiting(&[1, 2], start);
    let other = Vbid(4);
    persistence.unpersisted(other, (ON, BRANCH), copies(&[2]), start);
    let mut due = persistence.due(start + SHORTEST);
    due.sort_by_key(|(address, _)| address.port);
    let both = vec![(VB, BRANCH), (other, BRANCH)];
    assert_eq!(due, [(address(1), vec![(VB, BRANCH)]), (address(2), both)]);
    assert_eq!(persistence.deadline(), None, "both are being asked");
    // Node 2 says nothing for long; node 1 is asked on and on, more and more rarely.
    let (mut now, mut pauses) = (start + SHORTEST, Vec::new());
    for _ in 0..9 {
        says(&mut persistence, 1, BRANCH, 5, now);
        let next = persistence.deadline().unwrap();
        pauses.push((next - now).as_millis());
        now = next;
        assert_eq!(persistence.due(now).len(), 1);
    }
    assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
    says(&mut persistence, 1, BRANCH, 6, now);
    assert_eq!(persistence.deadline(), Some(now + SHORTEST), "something has moved");
    persistence.all_persisted(VB, ON);
    assert_eq!(persistence.deadline(), None, "nothing waits for it any more");
    persistence.unpersisted(VB, (ON, BRANCH), copies(&[1, 2]), now);
    assert_eq!(persistence.deadline(), Some(now + SHORTEST));
}

#[test]
fn copies_are_asked_once_about_a_stream_that_was_opened() {
    let start = now();
    let mut persistence = PersistenceWatch::default();
    persistence.watch(VB, (ON, BRANCH), copies(&[1, 2]), start);
    assert_eq!(persistence.unpersisted_since(VB), (None, false));
    let mut due = persistence.due(start);
    due.sort_by_key(|(address, _)| address.port);
    assert_eq!(due, [(address(1), vec![(VB, BRANCH)]), (address(2), vec![(VB, BRANCH)])]);
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, start), None, "one was not heard from");
    assert_eq!(says(&mut persistence, 2, BRANCH, 8, start), Some(8));
    assert_eq!(persistence.deadline(), None, "nothing waits");
    // What is on disk already is known when the first change comes that is not.
    persistence.unpersisted(VB, (ON, BRANCH), copies(&[1, 2]), start);
    assert_eq!(persistence.persisted(VB), Some(Seqno(8)));
    persistence.all_persisted(VB, ON);
    persistence.follow(|_| copies(&[1, 3]), start);
    assert_eq!(persistence.persisted(VB), Some(Seqno::ZERO));
    let due = persistence.due(start + SHORTEST);
    assert_eq!(due.len(), 2, "the copies of a new map: {due:?}");
    persistence.answered(&address(1), None, start + SHORTEST);
    says(&mut persistence, 3, BRANCH, 9, start + SHORTEST);
    assert_eq!(persistence.deadline(), None, "not again where nothing waits");
}

#[test]
fn persistence_of_a_vbucket_starts_anew_with_a_new_stream() {
    let now = now();
    let mut persistence = waiting(&[1], now);
    assert_eq!(says(&mut persistence, 1, BRANCH, 9, now), Some(9));
    let next = ConnectionId(2);
    persistence.forget(VB, next);
    assert_eq!(persistence.persisted(VB), Some(Seqno(9)), "another connection's");
    persistence.unpersisted(VB, (next, Vbuuid(8)), copies(&[1]), now);
    assert_eq!(persistence.persisted(VB), Some(Seqno::ZERO));
    persistence.forget_all(next);
    assert_eq!((persistence.persisted(VB), persistence.deadline()), (None, None));
}

#[test]
fn changes_unpersisted_for_too_long_are_reported_once() {
    let start = now();
    let mut persistence = waiting(&[1, 2], start);
    assert_eq!(persistence.overdue(start + OVERDUE / 2), []);
    assert_eq!(persistence.overdue(start + OVERDUE), [(VB, OVERDUE)]);
    assert_eq!(persistence.overdue(start + OVERDUE * 2), []);
}

#[test]
fn persistence_shows_since_when_changes_wait_and_that_copies_diverged() {
    let start = now();
    let mut persistence = waiting(&[1, 2], start);
    assert_eq!(persistence.unpersisted_since(VB), (Some(start), false), "nobody was heard from");
    says(&mut persistence, 1, BRANCH, 9, start);
    says(&mut persistence, 2, Vbuuid(8), 9, start);
    assert_eq!(persistence.unpersisted_since(VB), (Some(start), true));
    says(&mut persistence, 2, BRANCH, 5, start);
    assert_eq!(
        persistence.unpersisted_since(VB),
        (Some(start), false),
        "on one branch, and still behind"
    );
    persistence.all_persisted(VB, ON);
    assert_eq!(persistence.unpersisted_since(VB), (None, false));
    assert_eq!(persistence.unpersisted_since(Vbid(4)), (None, false));
}

fn refusal() -> Polled {
    Polled::Refused(Error::new(crate::ErrorKind::AccessDenied, "the user may not"))
}

fn answers(seqno: u64) -> Polled {
    Polled::Answers { answers: vec![(VB, Some((BRANCH, Seqno(seqno))))], is_map_old: false }
}

#[test]
fn refusal_before_any_answer_is_final_and_later_ones_are_retried() {
    let (start, retry_timeout) = (now(), Duration::from_secs(300));
    let mut persistence = waiting(&[1], start);
    let node = address(1);
    let refused = persistence.polled(&node, refusal(), retry_timeout, start);
    assert_eq!(refused.unwrap_err().kind(), crate::ErrorKind::AccessDenied);

    let mut persistence = waiting(&[1], start);
    let mut polled = |polled, at| persistence.polled(&node, polled, retry_timeout, start + at);
    assert_eq!(polled(answers(9), Duration::ZERO).unwrap().len(), 1);
    let withdrawn = polled(refusal(), Duration::ZERO).unwrap();
    assert_eq!(withdrawn[0].seqno, Seqno::ZERO, "the copy is unknown");
    let last = retry_timeout - Duration::from_secs(1);
    assert!(polled(refusal(), last).is_ok());
    assert!(polled(answers(9), last).is_ok());
    assert!(polled(refusal(), retry_timeout).is_ok(), "it has answered in between");
    assert!(polled(refusal(), retry_timeout * 2).is_err());
}

#[test]
fn nodes_that_are_lost_or_no_longer_have_a_copy_put_the_map_in_doubt() {
    let lost = Polled::Lost(Error::new(crate::ErrorKind::ConnectionLost, "it broke"));
    assert!(lost.is_map_doubtful() && !refusal().is_map_doubtful());
    assert!(!answers(9).is_map_doubtful());
    assert!(Polled::Answers { answers: vec![(VB, None)], is_map_old: true }.is_map_doubtful());
}
