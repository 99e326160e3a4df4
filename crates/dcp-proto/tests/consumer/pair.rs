//! A consumer's machine against a producer's: what both must agree on.

use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{ConnectionConfig, Resume};
use dcp_test::bucket::{VBucket, docs};
use dcp_test::harness::config;
use dcp_test::pair::Pair;
use dcp_wire::Seqno;

const SECOND: Duration = Duration::from_secs(1);

fn from_the_beginning() -> Resume {
    Resume::new(Position::EARLIEST)
}

#[test]
fn fc_36_both_ends_count_the_same_bytes() {
    let narrow = ConnectionConfig { window: 1000, ..config() };
    let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=100)), narrow);
    pair.stream(from_the_beginning(), Seqno::MAX);
    let mut rounds = 0;
    while pair.reader.seqnos().len() < 100 {
        assert!(pair.node.unacked_bytes() >= 1000, "it waits for the consumer");
        pair.assert_accounts_agree();
        pair.release();
        pair.assert_accounts_agree();
        rounds += 1;
        assert!(rounds < 100, "it stands still");
    }
    // Noops count at neither end.
    pair.pass(21 * SECOND);
    pair.assert_accounts_agree();
    pair.release();
    pair.pass(SECOND);
    assert_eq!(pair.node.unacked_bytes(), 0, "all is acknowledged");
    pair.assert_accounts_agree();
    assert!(rounds >= 5, "{rounds}");
}

#[test]
fn whoever_is_cut_off_anywhere_goes_on_without_a_gap() {
    for seen in 0..=20 {
        let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=10)), config());
        pair.stream(from_the_beginning(), Seqno(10));
        pair.write(docs(11..=20));
        assert_eq!(pair.reader.seqnos(), (1..=10).collect::<Vec<_>>(), "{seen}");
        let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=20)), {
            // A window that lets through about so many changes.
            ConnectionConfig { window: 44 + seen * 70, ..config() }
        });
        pair.stream(from_the_beginning(), Seqno::MAX);
        let before = pair.reader.seqnos().len();
        pair.reconnect(config(), Seqno::MAX);
        assert_eq!(pair.reader.seqnos(), (1..=20).collect::<Vec<_>>(), "cut after {before}");
    }
}
