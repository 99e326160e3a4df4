//! Nodes that fail, come back, fall silent or are all gone, and servers that answer strangely.

use dcp_test::with;
use std::time::Duration;

use dcp_consumer::{
    ChangeStream, Client, ConnectOptions, Credentials, End, ErrorKind, Start, StreamEvent,
    StreamOptions,
};
use dcp_producer::{Producer, parse_rules};
use dcp_test::scripted_server::ScriptedServer;
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::StreamEndReason;
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Seqno, Vbid};
use tokio::time::{Instant, sleep, timeout};

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, connect, options, read_all, row, take, write,
};
use crate::rows::{Item, Rows};

async fn cluster(nodes: usize, vbuckets: u16, replicas: u8) -> Producer {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets, options.replicas) = (nodes, vbuckets, replicas);
    Producer::start(options).await.unwrap()
}

async fn endless(
    producer: &Producer,
    change: impl Fn(&mut StreamOptions),
) -> ChangeStream<Vec<Item>> {
    let client = connect(producer).await;
    let mut options = options(Start::Earliest, End::Never);
    change(&mut options);
    client.stream(options, Rows::default).await.unwrap()
}

/// Keys of rows, however often each came; no rollback may be among them.
async fn take_keys(stream: &mut ChangeStream<Vec<Item>>, wanted: u32, prefix_from: u32) {
    let items = take(stream, wanted as usize).await;
    let mut keys: Vec<Vec<u8>> = items.into_iter().map(|item| row(item).key).collect();
    let mut all: Vec<Vec<u8>> =
        (prefix_from..prefix_from + wanted).map(|key| format!("key-{key}").into_bytes()).collect();
    keys.sort();
    all.sort();
    assert_eq!(keys, all, "each once");
}

#[tokio::test]
async fn client_whose_first_map_names_no_node_learns_the_next_one() {
    let producer = cluster(2, 1, 0).await;
    let [node] = producer.copies_of(Vbid(0)).unwrap()[..] else { panic!("one copy") };
    producer.failover(node, false).unwrap();
    let client = connect(&producer).await;
    assert!(client.vbuckets_by_node().is_empty(), "the only copy is gone");
    producer.restart(node, true).await.unwrap();
    producer.rebalance().unwrap();
    let high = timeout(ANSWER_TIMEOUT, client.high_seqnos()).await.unwrap().unwrap();
    assert_eq!(high.len(), 1);
}

#[tokio::test]
async fn nodes_are_lost_and_regained_without_a_change_lost() {
    let producer = cluster(3, 12, 1).await;
    let mut stream = endless(&producer, |_| {}).await;
    write(&producer, 0..100);
    take_keys(&mut stream, 100, 0).await;
    producer.persist();
    producer.failover(0, false).unwrap();
    write(&producer, 100..200);
    take_keys(&mut stream, 100, 100).await;
    producer.restart(0, false).await.unwrap();
    producer.rebalance().unwrap();
    write(&producer, 200..300);
    take_keys(&mut stream, 100, 200).await;
    producer.failover(1, true).unwrap();
    write(&producer, 300..400);
    take_keys(&mut stream, 100, 300).await;
    producer.add_node().await.unwrap();
    producer.rebalance().unwrap();
    write(&producer, 400..500);
    take_keys(&mut stream, 100, 400).await;
    let stats = stream.stats();
    assert_eq!((stats.failed, stats.connection.rollbacks), (0, 0), "{stats:?}");
}

#[tokio::test]
async fn cluster_that_was_gone_altogether_is_found_again() {
    let producer = cluster(2, 4, 0).await;
    let mut stream = endless(&producer, |_| {}).await;
    write(&producer, 0..100);
    take_keys(&mut stream, 100, 0).await;
    producer.persist();
    for node in 0..2 {
        producer.kill(node).unwrap();
    }
    let gone = async {
        while stream.stats().connections > 0 || stream.stats().streaming > 0 {
            // Nothing comes; what is told is looked at meanwhile.
            let _ = timeout(Duration::from_millis(10), stream.next()).await;
        }
    };
    timeout(ANSWER_TIMEOUT, gone).await.unwrap();
    // Each node is tried several times meanwhile, and is one outage.
    sleep(Duration::from_secs(2)).await;
    for node in 0..2 {
        producer.restart(node, false).await.unwrap();
    }
    write(&producer, 100..200);
    take_keys(&mut stream, 100, 100).await;
    assert_eq!(stream.stats().reconnects, 2);
    let events = stream.take_events();
    let lost = |event: &StreamEvent| match event {
        StreamEvent::ConnectionLost { cause, .. } => Some(*cause),
        _ => None,
    };
    let causes: Vec<ErrorKind> = events.iter().filter_map(lost).collect();
    assert_eq!(causes, [ErrorKind::ConnectionLost; 2]);
}

#[tokio::test]
async fn connection_that_falls_silent_is_made_again() {
    let producer = cluster(1, 1, 0).await;
    write(&producer, 0..20);
    // The connection takes nothing and says nothing from the eleventh change on; the next one works.
    let rules =
        r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 11}, "reaction": "half_open"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let interval = |options: &mut StreamOptions| options.noop_interval = Duration::from_secs(1);
    let mut stream = endless(&producer, interval).await;
    take_keys(&mut stream, 20, 0).await;
    assert_eq!(stream.stats().reconnects, 1);
}

/// What a stream says of the connections it has lost: node and reason.
fn lost(stream: &ChangeStream<Vec<Item>>) -> Vec<(String, String)> {
    let lost = |event| match event {
        StreamEvent::ConnectionLost { node, error, .. } => Some((node, error)),
        _ => None,
    };
    stream.take_events().into_iter().filter_map(lost).collect()
}

#[tokio::test]
async fn sv_11_vbucket_whose_close_is_never_answered_moves_all_the_same() {
    let producer = cluster(2, 1, 0).await;
    let interval = |options: &mut StreamOptions| options.noop_interval = Duration::from_secs(1);
    let mut stream = endless(&producer, interval).await;
    write(&producer, 0..10);
    take_keys(&mut stream, 10, 0).await;
    // The node answers noops, and neither the close nor that it has ended the stream gets through.
    let rules = r#"[
        {"condition": {"opcode": "DCP_CLOSE_STREAM", "direction": "to_server"}, "reaction": "drop"},
        {"reaction": "no_stream_end"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let [node] = producer.copies_of(Vbid(0)).unwrap()[..] else { panic!("one copy") };
    producer.move_vbucket(Vbid(0), 1 - node).unwrap();
    write(&producer, 10..20);
    take_keys(&mut stream, 10, 10).await;
    let lost = lost(&stream);
    let [(_, reason)] = &lost[..] else { panic!("{lost:?}") };
    assert!(reason.contains("has not answered the close of vb:0"), "{reason}");
}

#[tokio::test]
async fn sv_12_nodes_that_are_cut_off_together_are_noticed_within_two_noop_intervals() {
    const INTERVAL: Duration = Duration::from_secs(1);
    let producer = cluster(4, 8, 2).await;
    let mut stream = endless(&producer, |options| options.noop_interval = INTERVAL).await;
    write(&producer, 0..100);
    take_keys(&mut stream, 100, 0).await;
    producer.persist();
    // The sockets stay open, and nothing is heard any more.
    let rules = r#"[{"condition": {"any": [{"node": 0}, {"node": 1}]}, "reaction": "half_open"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let begun = Instant::now();
    let mut nodes = Vec::new();
    while nodes.len() < 2 {
        let _ = timeout(Duration::from_millis(10), stream.next()).await;
        nodes.extend(lost(&stream));
        assert!(begun.elapsed() < INTERVAL * 5 / 2, "{nodes:?}");
    }
    assert!(nodes.iter().all(|(_, reason)| reason.contains("nothing arrived")), "{nodes:?}");
    assert_eq!(stream.stats().connections, 2, "the others go on");
    for node in [0, 1] {
        producer.failover(node, false).unwrap();
    }
    write(&producer, 100..200);
    take_keys(&mut stream, 100, 100).await;
}

/// The end of a stream is altered to one that is sent once the user's role was taken away.
#[tokio::test]
async fn sv_13_stream_whose_user_loses_the_privilege_ends_with_what_came_before() {
    let mut scenario = Scenario::load("8.0.2-stream-end-state-replica").unwrap();
    let mut ends = 0;
    for event in &mut scenario.events {
        if let EventKind::ServerPacket(bytes) = &mut event.kind
            && let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN)
            && frame.header.opcode == Opcode::DCP_STREAM_END
        {
            let reason = StreamEndReason::LOST_PRIVILEGES.0.to_be_bytes();
            let at = bytes.len() - reason.len();
            bytes[at..].copy_from_slice(&reason);
            ends += 1;
        }
    }
    assert!(ends > 0);
    let server = ScriptedServer::start(&scenario).await.unwrap();
    let connection = ConnectOptions::new(server.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("reader", "password"));
    let client = Client::connect(connection).await.unwrap();
    let options = with(options(Start::Earliest, End::Never), |o| {
        o.vbuckets = Some(server.vbids());
    });
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut rows = 0;
    let error = loop {
        match timeout(ANSWER_TIMEOUT, stream.next()).await.expect("it stalls").unwrap() {
            Ok(delivered) => rows += delivered.rows,
            Err(error) => break error,
        }
    };
    assert!(rows > 0, "what came before the end");
    assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::AccessDenied, false));
    let text = error.to_string();
    for part in ["user 'reader'", "data_dcp_reader", "lost the privilege"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(server.finish().await.connections, 2, "nothing is tried again");
}

#[tokio::test]
async fn node_that_is_wrong_is_left_with_and_without_a_map_in_its_answer() {
    for map in [true, false] {
        let producer = cluster(2, 4, 0).await;
        write(&producer, 0..40);
        let rules = format!(
            r#"[{{"condition": {{"opcode": "DCP_STREAM_REQ", "nth": 2}},
                 "reaction": {{"not_my_vbucket": {{"map": {map}}}}}}}]"#
        );
        producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
        let mut stream = endless(&producer, |_| {}).await;
        take_keys(&mut stream, 40, 0).await;
        assert_eq!(producer.fault_counts(), [1]);
        assert_eq!(stream.stats().streaming, 4);
    }
}

#[tokio::test]
async fn map_that_is_not_pushed_is_requested() {
    let producer = cluster(2, 4, 0).await;
    let mut stream = endless(&producer, |_| {}).await;
    write(&producer, 0..40);
    take_keys(&mut stream, 40, 0).await;
    let rules = r#"[{"condition": {"opcode": 1}, "reaction": "drop"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    for vbid in (0..4).map(Vbid) {
        let [node] = producer.copies_of(vbid).unwrap()[..] else { panic!("one copy") };
        producer.move_vbucket(vbid, 1 - node).unwrap();
    }
    write(&producer, 40..80);
    take_keys(&mut stream, 40, 40).await;
    assert_ne!(producer.fault_counts(), [0], "maps were pushed and lost");
}

#[tokio::test]
async fn connection_to_a_removed_node_is_closed_however_few_nodes_are_read() {
    let producer = cluster(3, 12, 1).await;
    let is_on = |vbid: &Vbid| producer.copies_of(*vbid).unwrap()[0] == 2;
    let vbid = (0..12).map(Vbid).find(is_on).unwrap();
    let stream = endless(&producer, |options| options.vbuckets = Some(vec![vbid])).await;
    let opened = async || {
        let is_opened = |event: &StreamEvent| matches!(event, StreamEvent::Opened { .. });
        while !stream.take_events().iter().any(is_opened) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, opened()).await.expect("it is not opened");
    // The node stays reachable, and as many nodes remain as the stream has connections then.
    producer.failover(2, true).unwrap();
    let moved = async {
        opened().await;
        while stream.stats().connections > 1 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, moved).await.expect("it is kept");
    assert_eq!((stream.stats().connections, stream.stats().streaming), (1, 1));
}

#[tokio::test]
async fn stream_of_one_node_that_is_cut_off_from_its_cluster_finds_the_next_one() {
    let producer = cluster(2, 2, 0).await;
    let is_on = |vbid: &Vbid| producer.copies_of(*vbid).unwrap() == [0];
    let vbid = (0..2).map(Vbid).find(is_on).unwrap();
    let high = || usize::try_from(producer.high_seqnos()[&vbid].0).unwrap();
    write(&producer, 0..40);
    let mut stream = endless(&producer, |options| options.vbuckets = Some(vec![vbid])).await;
    let first = high();
    take(&mut stream, first).await;
    // It has given the vBucket away, and knows of no newer map.
    let rules = r#"[
        {"condition": {"opcode": 1, "node": 0}, "reaction": "drop"},
        {"condition": {"opcode": "GET_CLUSTER_CONFIG", "node": 0},
         "reaction": {"answer": {"status": "ETMPFAIL"}}},
        {"condition": {"opcode": "DCP_STREAM_REQ", "node": 0},
         "reaction": {"not_my_vbucket": {"map": false}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    producer.move_vbucket(vbid, 1).unwrap();
    write(&producer, 40..80);
    take(&mut stream, high() - first).await;
}

#[tokio::test]
async fn stream_that_is_refused_is_requested_again() {
    for status in ["ETMPFAIL", "EBUSY", "NOT_INITIALIZED", "KEY_EEXISTS"] {
        let producer = cluster(1, 2, 0).await;
        write(&producer, 0..20);
        let rules = format!(
            r#"[{{"condition": {{"opcode": "DCP_STREAM_REQ", "nth": 1}},
                 "reaction": {{"answer": {{"status": "{status}"}}}}}}]"#
        );
        producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
        let mut stream = endless(&producer, |_| {}).await;
        take_keys(&mut stream, 20, 0).await;
        assert_eq!(producer.fault_counts(), [1], "{status}");
    }
}

#[tokio::test]
async fn node_that_is_cut_off_but_streams_is_left_for_the_next_one() {
    let producer = cluster(3, 3, 0).await;
    let is_on = |vbid: &Vbid| producer.copies_of(*vbid).unwrap() == [0];
    let vbid = (0..3).map(Vbid).find(is_on).unwrap();
    let high = || usize::try_from(producer.high_seqnos()[&vbid].0).unwrap();
    write(&producer, 0..40);
    let mut stream = endless(&producer, |options| options.vbuckets = Some(vec![vbid])).await;
    let first = high();
    take(&mut stream, first).await;
    // It knows neither that it has given the vBucket away nor of a newer map.
    let rules = r#"[
        {"condition": {"opcode": [1, "DCP_STREAM_END"], "node": 0}, "reaction": "drop"},
        {"condition": {"opcode": "GET_CLUSTER_CONFIG", "node": 0},
         "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    producer.move_vbucket(vbid, 1).unwrap();
    write(&producer, 40..80);
    take(&mut stream, high() - first).await;
    assert_eq!((stream.stats().reconnects, stream.stats().connection.rollbacks), (0, 0));
}

#[tokio::test]
async fn connection_that_lost_its_login_or_its_bucket_is_replaced() {
    for status in ["AUTH_STALE", "NO_BUCKET"] {
        let producer = cluster(1, 2, 0).await;
        write(&producer, 0..20);
        // The first connection is that of the client, the second that of the stream.
        let rules = format!(
            r#"[{{"condition": {{"opcode": "DCP_STREAM_REQ", "connection": 2}},
                 "reaction": {{"answer": {{"status": "{status}"}}}}}}]"#
        );
        producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
        let mut stream = endless(&producer, |_| {}).await;
        take_keys(&mut stream, 20, 0).await;
        let lost = stream.take_events().into_iter().find_map(|event| match event {
            StreamEvent::ConnectionLost { error, .. } => Some(error),
            _ => None,
        });
        assert!(lost.is_some_and(|error| error.contains(status)), "{status}");
        assert_eq!(stream.stats().reconnects, 1);
    }
}

#[tokio::test]
async fn connections_that_serve_no_stream_are_made_ever_more_seldom() {
    let outages = async |reaction: &str| {
        let producer = cluster(1, 512, 0).await;
        write(&producer, 0..2048);
        let rules = format!(
            r#"[{{"condition": {{"opcode": ["DCP_STREAM_REQ", "DCP_MUTATION"]}},
                 "reaction": {reaction}}}]"#
        );
        producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
        let stream = endless(&producer, |_| {}).await;
        sleep(Duration::from_secs(4)).await;
        let is_lost = |event: &StreamEvent| matches!(event, StreamEvent::ConnectionLost { .. });
        let lost = stream.take_events().iter().filter(|event| is_lost(event)).count();
        assert!((2..12).contains(&lost), "{reaction}: {lost}");
        stream.stats().reconnects
    };
    assert_eq!(outages(r#"{"answer": {"status": "NO_BUCKET"}}"#).await, 1);
    // Streams are opened: each loss is an outage.
    assert!(outages(r#"{"disconnect_after": {"bytes": 100}}"#).await > 1);
}

#[tokio::test]
async fn vbucket_that_moves_during_a_connect_is_requested_from_its_new_node() {
    let producer = cluster(2, 2, 0).await;
    let is_on = |vbid: &Vbid| producer.copies_of(*vbid).unwrap() == [0];
    let vbid = (0..2).map(Vbid).find(is_on).unwrap();
    let high = || usize::try_from(producer.high_seqnos()[&vbid].0).unwrap();
    write(&producer, 0..40);
    let mut stream = endless(&producer, |options| options.vbuckets = Some(vec![vbid])).await;
    let first = high();
    take(&mut stream, first).await;
    let rules = r#"[
        {"condition": {"opcode": "DCP_STREAM_REQ", "node": 0},
         "reaction": {"answer": {"status": "ETMPFAIL"}}},
        {"condition": {"opcode": "DCP_MUTATION", "node": 0, "nth": 1}, "reaction": "disconnect"},
        {"condition": {"opcode": "HELLO", "node": 0, "direction": "to_server"},
         "reaction": {"delay": {"seconds": 1}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    write(&producer, 40..80);
    let is_lost = |event: &StreamEvent| matches!(event, StreamEvent::ConnectionLost { .. });
    let lost = async {
        while !stream.take_events().iter().any(is_lost) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, lost).await.unwrap();
    sleep(Duration::from_millis(200)).await;
    producer.move_vbucket(vbid, 1).unwrap();
    take(&mut stream, high() - first).await;
    assert_eq!(producer.fault_counts()[..2], [0, 1], "the node that has it no more is not asked");
}

#[tokio::test]
async fn marker_whose_items_never_came_is_not_part_of_the_position() {
    let producer = cluster(1, 1, 0).await;
    write(&producer, 0..10);
    let mut stream = endless(&producer, |_| {}).await;
    take_keys(&mut stream, 10, 0).await;
    let rules = r#"[{"condition": {"opcode": "DCP_SNAPSHOT_MARKER", "nth": 1},
                     "reaction": "marker_without_items"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    write(&producer, 10..20);
    let counted = async {
        while producer.fault_counts() != [1] {
            let _ = timeout(Duration::from_millis(10), stream.next()).await;
        }
    };
    timeout(ANSWER_TIMEOUT, counted).await.unwrap();
    let position = stream.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!((position.seqno, position.snapshot.end), (Seqno(10), Seqno(10)));
    producer.persist();
    producer.kill(0).unwrap();
    producer.restart(0, true).await.unwrap();
    write(&producer, 20..30);
    take_keys(&mut stream, 20, 10).await;
}

#[tokio::test]
async fn seqno_that_was_advanced_to_may_come_as_a_change() {
    let producer = cluster(1, 1, 0).await;
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 5},
                     "reaction": "seqno_advanced_before_item"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    write(&producer, 0..10);
    let mut stream = endless(&producer, |_| {}).await;
    take_keys(&mut stream, 10, 0).await;
    assert_eq!(stream.stats().connection.repeated_seqnos, 1);
}

#[tokio::test]
async fn stream_that_is_clamped_takes_nothing_past_its_end() {
    let producer = cluster(1, 1, 0).await;
    write(&producer, 0..10);
    producer.persist();
    write(&producer, 10..20);
    let rules = r#"[{"condition": {"opcode": "DCP_STREAM_REQ"},
                     "reaction": {"items_past_end": {"items": 5}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let client = connect(&producer).await;
    let at = End::At([(Vbid(0), Seqno(10))].into());
    let options = with(options(Start::Earliest, at), |o| o.clamp = true);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 10);
    let position = stream.checkpoint().position(Vbid(0)).cloned().unwrap();
    assert_eq!(position.seqno, Seqno(10));
    assert_eq!(producer.fault_counts(), [1]);
}

#[tokio::test]
async fn node_that_does_not_answer_for_its_seqnos_is_asked_again() {
    let producer = cluster(2, 8, 0).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let rules = r#"[{"condition": {"opcode": "GET_ALL_VB_SEQNOS", "node": 1, "nth": 1},
                     "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    assert_eq!(client.high_seqnos().await.unwrap(), producer.high_seqnos(), "of every vBucket");
    assert_eq!(producer.fault_counts(), [1]);
}

#[tokio::test]
async fn start_at_the_latest_waits_for_vbuckets_whose_node_is_down() {
    let producer = cluster(2, 4, 0).await;
    write(&producer, 0..40);
    producer.persist();
    let client = connect(&producer).await;
    producer.kill(1).unwrap();
    let options = options(Start::Latest, End::Never);
    let opening = client.stream(options, Rows::default);
    let comes_back = async {
        sleep(Duration::from_millis(300)).await;
        producer.restart(1, true).await.unwrap();
    };
    let (stream, ()) = tokio::join!(timeout(ANSWER_TIMEOUT, opening), comes_back);
    let mut stream = stream.expect("never opened").unwrap();
    for (vbid, seqno) in producer.high_seqnos() {
        let position = stream.checkpoint().position(vbid).map(|position| position.seqno);
        assert_eq!(position, Some(seqno), "{vbid}");
    }
    write(&producer, 40..80);
    take_keys(&mut stream, 40, 40).await;
}

#[tokio::test]
async fn vbucket_that_moves_while_it_is_rolled_back_is_rolled_back_once() {
    for moves_first in [true, false] {
        let producer = cluster(2, 1, 1).await;
        let mut stream = endless(&producer, |_| {}).await;
        for round in 0..3 {
            write(&producer, round * 10..round * 10 + 10);
            take_keys(&mut stream, 10, round * 10).await;
        }
        // Requests take long enough for both to be under way.
        let rules = r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "direction": "to_server"},
            "reaction": {"delay": {"seconds": 0.1}}}]"#;
        producer.set_faults(parse_rules(rules).unwrap()).unwrap();
        let to = producer.copies_of(Vbid(0)).unwrap()[1];
        if moves_first {
            producer.move_vbucket(Vbid(0), to).unwrap();
        }
        producer.roll_back(Vbid(0), Seqno(20)).unwrap();
        if !moves_first {
            // The refused request or the one after it is on its way.
            sleep(Duration::from_millis(150)).await;
            producer.move_vbucket(Vbid(0), to).unwrap();
        }
        write(&producer, 30..40);
        let items = take(&mut stream, 11).await;
        let [Item::Rollback(rollback), rows @ ..] = &items[..] else { panic!("{items:?}") };
        assert_eq!((rollback.seqno, rollback.epoch), (Seqno(20), 1), "{moves_first}");
        let seqnos: Vec<u64> = rows.iter().map(|item| row(item.clone()).seqno.0).collect();
        assert_eq!(seqnos, (21..=30).collect::<Vec<_>>(), "{moves_first}");
        assert_eq!(stream.stats().connection.rollbacks, 1, "{moves_first}");
    }
}
