//! Faults of the connections between nodes: what replicas miss, and how they catch up.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_producer::{Error, Producer, WriteOptions, parse_rules};
use dcp_wire::{Feature, Frame, Opcode, Status, Vbid};

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);
const FEATURES: &[Feature] =
    &[Feature::XERROR, Feature::ALT_REQUEST_SUPPORT, Feature::SYNC_REPLICATION];
/// Both levels wait for a majority, the second for its disks, at most 300 ms.
const LEVELS: [[u8; 4]; 2] = [[0x13, 1, 1, 44], [0x13, 3, 1, 44]];

/// Three nodes, and two replicas of vBucket 0, which is active on node 0.
async fn three_nodes() -> Producer {
    let producer = start(|options| {
        (options.nodes, options.replicas, options.vbuckets) = (3, 2, 1);
    })
    .await;
    assert_eq!(producer.copies_of(VB).unwrap(), [0, 1, 2]);
    producer
}

fn set_faults(producer: &Producer, rules: &str) {
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
}

fn write(producer: &Producer, key: &str) {
    producer.upsert(key.as_bytes(), Bytes::from_static(b"{}"), WriteOptions::default()).unwrap();
}

fn set<'a>(key: &'a str, durability: &'a [u8]) -> Frame<'a> {
    let frame = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    frame.with_value(b"{}").with_framing_extras(durability)
}

/// Whether the replica on a node has a document.
async fn has(producer: &Producer, node: usize, key: &str) -> bool {
    let mut client = RawClient::ready(producer, node, FEATURES).await;
    let get = Frame::request(Opcode::GET_REPLICA).with_vbid(VB).with_key(key.as_bytes());
    match client.ask(get).await.status() {
        Status::SUCCESS => true,
        Status::KEY_ENOENT => false,
        status => panic!("{status}"),
    }
}

#[tokio::test]
async fn replica_that_was_cut_off_catches_up() {
    for reaction in ["disconnect", "half_open"] {
        let producer = three_nodes().await;
        write(&producer, "before");
        let rule = r#"{"condition": {"between": [0, [1]]}, "reaction": "#;
        set_faults(&producer, &format!(r#"[{rule}"{reaction}"}}]"#));
        assert_eq!(producer.fault_counts(), [1], "one replica is fed over this connection");
        write(&producer, "meanwhile");
        assert!(has(&producer, 1, "before").await);
        assert!(!has(&producer, 1, "meanwhile").await, "{reaction}");
        assert!(has(&producer, 2, "meanwhile").await);
        assert_eq!(producer.faults()[0].condition.between, [[0], [1]]);
        producer.set_faults(Vec::new()).unwrap();
        assert!(has(&producer, 1, "meanwhile").await, "{reaction}");
    }
}

#[tokio::test]
async fn durable_write_is_not_acknowledged_by_a_minority() {
    for reaction in ["disconnect", "half_open"] {
        for level in LEVELS {
            let producer = three_nodes().await;
            let mut client = RawClient::ready(&producer, 0, FEATURES).await;
            let partition = |groups| {
                let condition = format!(r#"{{"condition": {{"between": {groups}}}"#);
                set_faults(&producer, &format!(r#"[{condition}, "reaction": "{reaction}"}}]"#));
            };
            partition("[[0, 1], 2]");
            client.succeed(set("majority", &level)).await;
            partition("[0, [1, 2]]");
            let begun = Instant::now();
            client.fail(set("minority", &level), Status::SYNC_WRITE_AMBIGUOUS).await;
            assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
            client.succeed(set("plain", &[])).await;
            producer.set_faults(Vec::new()).unwrap();
            for node in [1, 2] {
                assert!(has(&producer, node, "majority").await);
                assert!(has(&producer, node, "plain").await);
                assert!(!has(&producer, node, "minority").await, "it was aborted");
            }
            client.succeed(set("minority", &level)).await;
        }
    }
}

#[tokio::test]
async fn connection_between_nodes_may_stand_still_in_one_direction() {
    let producer = three_nodes().await;
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    // The changes get through, the acknowledgements do not.
    let answers = r#"[{"condition": {"between": [0, [1, 2]], "from": [1, 2]},
                       "reaction": "half_open"}]"#;
    set_faults(&producer, answers);
    client.succeed(set("plain", &[])).await;
    assert!(has(&producer, 1, "plain").await);
    client.fail(set("durable", &LEVELS[0]), Status::SYNC_WRITE_AMBIGUOUS).await;
    // Here it is the other way round.
    let changes =
        r#"[{"condition": {"between": [0, [1, 2]], "from": 0}, "reaction": "half_open"}]"#;
    set_faults(&producer, changes);
    client.succeed(set("late", &[])).await;
    assert!(!has(&producer, 1, "late").await);
    client.fail(set("durable", &LEVELS[0]), Status::SYNC_WRITE_AMBIGUOUS).await;
    producer.set_faults(Vec::new()).unwrap();
    for node in [1, 2] {
        assert!(has(&producer, node, "late").await);
        assert!(!has(&producer, node, "durable").await);
    }
    client.succeed(set("durable", &LEVELS[0])).await;
}

#[tokio::test]
async fn replicas_roll_back_once_they_reach_an_active_copy_that_lost_changes() {
    let producer = three_nodes().await;
    write(&producer, "kept");
    producer.persist();
    producer.hold_persistence(VB, 0, true).unwrap();
    write(&producer, "lost");
    let rule = r#"[{"condition": {"between": [0, [1, 2]]}, "reaction": "disconnect"}]"#;
    set_faults(&producer, rule);
    producer.kill(0).unwrap();
    producer.restart(0, false).await.unwrap();
    write(&producer, "new");
    assert!(has(&producer, 1, "lost").await);
    assert!(!has(&producer, 1, "new").await);
    producer.set_faults(Vec::new()).unwrap();
    for node in [1, 2] {
        assert!(has(&producer, node, "kept").await);
        assert!(has(&producer, node, "new").await);
        assert!(!has(&producer, node, "lost").await);
    }
}

#[tokio::test]
async fn replica_that_has_more_takes_over() {
    let producer = three_nodes().await;
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    set_faults(&producer, r#"[{"condition": {"between": [[0, 2], 1]}, "reaction": "half_open"}]"#);
    client.succeed(set("durable", &LEVELS[0])).await;
    producer.failover(0, false).unwrap();
    assert_eq!(producer.copies_of(VB).unwrap(), [2, 1]);
    assert!(producer.get(b"durable").is_some());
    assert!(producer.failover(2, true).is_err(), "nodes 1 and 2 do not reach each other");
    producer.set_faults(Vec::new()).unwrap();
    producer.failover(2, true).unwrap();
    assert!(producer.get(b"durable").is_some());
}

#[tokio::test]
async fn lag_and_a_window_apply_to_all_replicas_of_a_pair_of_nodes() {
    let producer = three_nodes().await;
    let rules = r#"[{"condition": {"between": [0, 1]}, "reaction": {"lag": {"changes": 2}}},
                    {"condition": {"between": [0, [1, 2]], "vbucket": [0, 3]},
                     "reaction": {"window": {"bytes": 50}}},
                    {"condition": {"between": [0, 1], "vbucket": 3}, "reaction": "half_open"}]"#;
    set_faults(&producer, rules);
    assert_eq!(producer.fault_counts(), [1, 2, 0]);
    for key in ["1", "2", "3", "4"] {
        write(&producer, key);
    }
    assert!(has(&producer, 1, "2").await && !has(&producer, 1, "3").await);
    assert!(has(&producer, 2, "4").await);
    // A packet at a time.
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.succeed(set("durable", &LEVELS[1])).await;
    assert!(!has(&producer, 1, "durable").await);
    producer.set_faults(Vec::new()).unwrap();
    assert!(has(&producer, 1, "durable").await);
}

#[tokio::test]
async fn vbuckets_do_not_move_between_nodes_that_do_not_reach_each_other() {
    let producer = three_nodes().await;
    set_faults(&producer, r#"[{"condition": {"between": [[0, 1], 2]}, "reaction": "half_open"}]"#);
    for error in [producer.rebalance(), producer.move_vbucket(VB, 2), producer.failover(2, true)] {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::NodesCutOff { .. }), "{error}");
    }
    producer.move_vbucket(VB, 1).unwrap();
    producer.set_faults(Vec::new()).unwrap();
    producer.move_vbucket(VB, 2).unwrap();
    producer.rebalance().unwrap();
}

#[tokio::test]
async fn clients_do_not_notice_faults_between_nodes() {
    let producer = three_nodes().await;
    set_faults(&producer, r#"[{"condition": {"between": [0, 1, 2]}, "reaction": "disconnect"}]"#);
    for node in 0..3 {
        RawClient::ready(&producer, node, FEATURES).await;
    }
    assert_eq!(producer.fault_counts(), [2]);
}
