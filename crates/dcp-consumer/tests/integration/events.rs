//! What a stream tells about itself.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{Client, End, Start, StreamEvent, VbucketState, VbucketStats};
use dcp_producer::{Producer, WriteOptions, parse_rules};
use dcp_test::with;
use dcp_wire::{Seqno, Vbid};
use tokio::time::{sleep, timeout};

use crate::embedded::{ANSWER_TIMEOUT, connect, options, producer, take, write};
use crate::rows::Rows;

#[tokio::test]
async fn events_report_opened_rolled_back_and_moved_vbuckets() {
    let producer = producer(2, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let options = options(Start::Earliest, End::Never);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    take(&mut stream, 100).await;
    let events = stream.take_events();
    let opened: BTreeSet<(Vbid, String)> = events
        .into_iter()
        .filter_map(|event| match event {
            StreamEvent::Opened { vbid, node } => Some((vbid, node)),
            StreamEvent::CaughtUp(_) => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(opened.iter().map(|(vbid, _)| vbid.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let by_node = client.vbuckets_by_node();
    for (vbid, node) in &opened {
        assert!(by_node.iter().any(|(named, vbids)| named == node && vbids.contains(vbid)));
    }
    assert!(stream.take_events().is_empty(), "each is told once");

    producer.roll_back(Vbid(1), Seqno(5)).unwrap();
    producer.move_vbucket(Vbid(2), 1 - node_of(&producer, &client, Vbid(2))).unwrap();
    write(&producer, 200..300);
    let high = producer.high_seqnos();
    while high.iter().any(|(&vbid, &high)| {
        stream.checkpoint().position(vbid).is_none_or(|position| position.seqno != high)
    }) {
        timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap();
    }
    let events = stream.take_events();
    let has = |wanted: &dyn Fn(&StreamEvent) -> bool| events.iter().any(wanted);
    assert!(has(&|event| matches!(event, StreamEvent::RolledBack(record) if record.vbid.0 == 1)));
    assert!(has(&|event| matches!(event, StreamEvent::Ended { vbid: Vbid(1), .. })));
    // The vBucket that was rolled back was ended for that; the other is on another node.
    let waits = |wanted: Vbid, why: &str| {
        has(&|event| {
            matches!(event, StreamEvent::BackingOff { vbid, cause, .. }
            if *vbid == wanted && cause == why)
        })
    };
    assert!(waits(Vbid(1), "state_changed") && waits(Vbid(2), "state_changed"), "{events:?}");
    assert!(has(&|event| matches!(event, StreamEvent::Ended { vbid: Vbid(2), .. })));
    assert!(has(&|event| matches!(event, StreamEvent::Opened { vbid: Vbid(2), .. })));
}

/// The producer's number of the vBucket's node. The client has the nodes in the order of their
/// ports, the producer in the order it made them.
fn node_of(producer: &Producer, client: &Client, vbid: Vbid) -> usize {
    let by_node = client.vbuckets_by_node();
    let (address, _) = by_node.iter().find(|(_, vbids)| vbids.contains(&vbid)).unwrap();
    let all = producer.connection_string();
    all.trim_start_matches("couchbase://").split(',').position(|node| node == address).unwrap()
}

#[tokio::test]
async fn stream_that_the_server_forgot_to_end_is_moved_with_the_map() {
    let producer = producer(2, 4).await;
    let rules = r#"[{"condition": {}, "reaction": "no_stream_end"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let options = options(Start::Earliest, End::Never);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    take(&mut stream, 100).await;
    let _ = stream.take_events();

    producer.move_vbucket(Vbid(2), 1 - node_of(&producer, &client, Vbid(2))).unwrap();
    write(&producer, 100..200);
    take(&mut stream, 100).await;
    let events = stream.take_events();
    let moved = events.iter().find_map(|event| match event {
        StreamEvent::Moved { vbid: Vbid(2), node } => Some(node.clone()),
        _ => None,
    });
    let node = moved.unwrap_or_else(|| panic!("{events:?}"));
    assert!(events.contains(&StreamEvent::Opened { vbid: Vbid(2), node }), "{events:?}");
}

#[tokio::test]
async fn lag_of_a_vbucket_is_what_its_snapshot_still_holds() {
    let producer = producer(1, 2).await;
    write(&producer, 0..40);
    let high = producer.high_seqnos();
    let client = connect(&producer).await;
    let mut options = options(Start::Earliest, End::Now);
    options.batch.max_rows = 10;
    options.vbuckets = Some(vec![Vbid(1)]);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let [vbucket] = &stream.vbucket_stats()[..] else { panic!("one vbucket") };
    assert_eq!((vbucket.vbid, vbucket.seqno), (Vbid(1), Seqno(10)));
    assert_eq!(vbucket.high_seqno, Some(high[&Vbid(1)]));
    assert_eq!(vbucket.lag(), Some(high[&Vbid(1)].0 - 10));
    while let Some(delivered) = stream.next().await {
        delivered.unwrap();
    }
    let [vbucket] = &stream.vbucket_stats()[..] else { panic!("one vbucket") };
    assert_eq!((vbucket.state, vbucket.lag()), (VbucketState::Complete, Some(0)));
    assert!(!stream.stats().elapsed.is_zero());
}

#[tokio::test]
async fn vbucket_is_complete_as_soon_as_its_stream_has_ended() {
    let producer = producer(2, 16).await;
    let value = Bytes::from(vec![b'v'; 4_000]);
    for key in 0..400 {
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    // Room for a part only, so that the streams end one after the other.
    let options = with(options(Start::Earliest, End::Now), |o| o.buffer_size = 64 << 10);
    let mut stream = connect(&producer).await.stream(options, Rows::default).await.unwrap();
    let mut seen = Vec::new();
    while let Some(delivered) = stream.next().await {
        delivered.unwrap();
        let vbuckets = stream.vbucket_stats();
        let complete = |each: &&VbucketStats| each.state == VbucketState::Complete;
        let number = vbuckets.iter().filter(complete).count();
        assert_eq!((vbuckets.len(), number), (16, stream.stats().complete));
        seen.push(number);
    }
    let vbuckets = stream.vbucket_stats();
    assert!(vbuckets.iter().all(|each| each.state == VbucketState::Complete), "{vbuckets:?}");
    assert!(seen.iter().any(|number| (1..16).contains(number)), "{seen:?}");
}

#[tokio::test]
async fn lag_is_known_soon_after_streams_are_opened() {
    let producer = producer(2, 64).await;
    let value = Bytes::from(vec![b'v'; 20_000]);
    for key in 0..400 {
        let key = format!("key-{key}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    let high = producer.high_seqnos();
    // Most vBuckets have no room to send anything.
    let options = with(options(Start::Earliest, End::Never), |o| o.buffer_size = 64 << 10);
    let stream = connect(&producer).await.stream(options, Rows::default).await.unwrap();
    let known = async {
        // Nothing is taken.
        let lags = || stream.vbucket_stats().iter().filter_map(VbucketStats::lag).count();
        while lags() < 64 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(3), known).await.expect("the lag is not known");
    for vbucket in stream.vbucket_stats() {
        assert_eq!(vbucket.high_seqno, high.get(&vbucket.vbid).copied(), "{}", vbucket.vbid);
    }
}
