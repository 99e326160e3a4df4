//! What the cluster says of its vBuckets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dcp_consumer::{
    Client, ConnectOptions, Credentials, Dial, Dialing, End, Observation, Observer, Start,
    Transport,
};
use dcp_producer::{Condition, Producer, Reaction, Rule, WriteOptions};
use dcp_proto::topology::Address;
use dcp_wire::{Opcode, Seqno, Status, Vbid};
use tokio::io::{copy_bidirectional, duplex};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, connect, connect_as, options, producer, reader, write,
};
use crate::rows::Rows;

const VB: Vbid = Vbid(1);

async fn with_replica() -> Producer {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets, options.replicas) = (2, 4, 1);
    Producer::start(options).await.unwrap()
}

fn all() -> BTreeSet<Vbid> {
    (0..4).map(Vbid).collect()
}

#[tokio::test]
async fn seqnos_and_histories_are_those_of_the_active_copies() {
    let producer = producer(2, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    for round in 1..=3_u32 {
        let seen = observer.observe(&all(), false).await.unwrap();
        let high: Vec<_> = seen.iter().map(|(&vbid, seen)| (vbid, seen.high_seqno)).collect();
        assert_eq!(high, producer.high_seqnos().into_iter().collect::<Vec<_>>());
        assert!(seen.values().all(|seen| seen.persisted_seqno.is_none()));
        write(&producer, round * 100..round * 100 + 50);
    }
    let before = observer.observe(&BTreeSet::from([VB]), false).await.unwrap();
    producer.roll_back(VB, Seqno(5)).unwrap();
    let after = observer.observe(&BTreeSet::from([VB]), false).await.unwrap();
    assert_eq!(after[&VB].high_seqno, Seqno(5));
    assert_eq!(after[&VB].log.entries()[1], before[&VB].log.newest());
    assert_eq!(after.len(), 1, "only what was asked for");
}

/// Looks at the vBucket until it is as wanted.
async fn until(observer: &mut Observer, wanted: impl Fn(&Observation) -> bool) -> Observation {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let mut seen = observer.observe(&BTreeSet::from([VB]), true).await.unwrap();
        let seen = seen.remove(&VB).unwrap();
        if wanted(&seen) {
            return seen;
        }
        assert!(Instant::now() < deadline, "{seen:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn persisted_seqno_is_what_every_copy_has_on_disk() {
    let producer = with_replica().await;
    write(&producer, 0..100);
    let high = |producer: &Producer| producer.high_seqnos()[&VB];
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    let first = high(&producer);
    until(&mut observer, |seen| seen.persisted_seqno == Some(first)).await;

    for copy in [0, 1] {
        let before = high(&producer);
        producer.hold_persistence(VB, copy, true).unwrap();
        write(&producer, 0..100);
        producer.persist();
        let seen = until(&mut observer, |seen| seen.high_seqno == high(&producer)).await;
        assert_eq!(seen.persisted_seqno, Some(before), "copy {copy} is held");
        producer.hold_persistence(VB, copy, false).unwrap();
        until(&mut observer, |seen| seen.persisted_seqno == Some(high(&producer))).await;
    }
}

#[tokio::test]
async fn replica_that_does_not_answer_has_persisted_nothing() {
    let producer = with_replica().await;
    write(&producer, 0..100);
    producer.persist();
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    until(&mut observer, |seen| seen.persisted_seqno == Some(seen.high_seqno)).await;
    let active = |producer: &Producer| {
        let all = producer.connection_string();
        let by_node = client.vbuckets_by_node();
        let (address, _) = by_node.iter().find(|(_, vbids)| vbids.contains(&VB)).unwrap();
        all.trim_start_matches("couchbase://").split(',').position(|node| node == address).unwrap()
    };
    let replica = 1 - active(&producer);
    producer.kill(replica).unwrap();
    let seen = observer.observe(&BTreeSet::from([VB]), true).await.unwrap();
    assert_eq!(seen[&VB].persisted_seqno, Some(Seqno::ZERO));
    assert_eq!(seen[&VB].high_seqno, producer.high_seqnos()[&VB]);

    // Without the node in the map, the active copy alone counts.
    producer.failover(replica, false).unwrap();
    let seen = until(&mut observer, |seen| seen.persisted_seqno == Some(seen.high_seqno)).await;
    assert_eq!(seen.log.entries().len(), 1, "the active copy stayed where it was");
}

#[tokio::test]
async fn vbuckets_of_a_removed_node_are_asked_of_the_new_one() {
    let producer = with_replica().await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    let before = observer.observe(&all(), false).await.unwrap();
    producer.failover(0, false).unwrap();
    // The map of this client is the old one until the node that is left is asked for its own.
    let after = observer.observe(&all(), false).await.unwrap();
    let moved = |vbid: &Vbid| after[vbid].log.entries().len() > before[vbid].log.entries().len();
    assert_eq!(all().iter().filter(|vbid| moved(vbid)).count(), 2);
}

#[tokio::test]
async fn stream_finds_the_new_node_of_its_vbuckets_alone() {
    let producer = with_replica().await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let nodes = producer.connection_string();
    let first = nodes.trim_start_matches("couchbase://").split(',').next().unwrap();
    let by_node = client.vbuckets_by_node();
    let (_, gone) = by_node.into_iter().find(|(node, _)| node == first).unwrap();
    let rows = gone.iter().map(|vbid| producer.high_seqnos()[vbid].0).sum::<u64>();
    producer.failover(0, false).unwrap();
    let mut options = options(Start::Earliest, End::Now);
    options.vbuckets = Some(gone);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut read = 0;
    while let Some(delivered) = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap() {
        read += delivered.unwrap().rows;
    }
    assert_eq!(read as u64, rows);
}

#[tokio::test]
async fn purged_deletions_are_reported() {
    let producer = producer(2, 4).await;
    write(&producer, 0..100);
    for n in 0..100_u32 {
        producer.remove(format!("key-{n}").as_bytes(), WriteOptions::default()).unwrap();
    }
    // Statistics, which tell of them, are more than the reader's role allows.
    let administrator = Credentials::new("Administrator", "password");
    let client = connect_as(&producer, administrator).await;
    let mut observer = client.observer().unwrap();
    let seen = observer.observe(&all(), false).await.unwrap();
    assert!(seen.values().all(|seen| seen.purge_seqno == Some(Seqno::ZERO)));
    let high = producer.high_seqnos()[&VB];
    producer.purge(VB, Seqno(high.0 - 1)).unwrap();
    let seen = observer.observe(&all(), false).await.unwrap();
    let expected = |vbid| Some(if vbid == VB { Seqno(high.0 - 1) } else { Seqno::ZERO });
    assert!(seen.iter().all(|(&vbid, seen)| seen.purge_seqno == expected(vbid)), "{seen:?}");
}

#[tokio::test]
async fn reader_without_the_right_to_statistics_can_observe() {
    let producer = producer(2, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let seen = client.observer().unwrap().observe(&all(), false).await.unwrap();
    assert_eq!(seen.len(), 4);
    assert!(seen.values().all(|seen| seen.purge_seqno.is_none()));
}

fn is_send<T: Send>(future: T) -> T {
    future
}

#[tokio::test]
async fn nodes_restarted_between_two_polls_are_asked_again() {
    let producer = producer(3, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    for round in 0..9 {
        is_send(observer.observe(&all(), false)).await.unwrap();
        producer.restart(round % 3, true).await.unwrap();
        let seen = observer.observe(&all(), false).await.unwrap();
        assert_eq!(seen.len(), 4, "round {round}");
    }
}

#[tokio::test]
async fn node_that_refuses_briefly_is_asked_again_within_the_same_poll() {
    let producer = producer(2, 4).await;
    let client = connect(&producer).await;
    let mut observer = client.observer().unwrap();
    observer.observe(&all(), false).await.unwrap();
    let asked = Condition::opcode(Opcode::SELECT_BUCKET);
    let refused = Rule::new(asked, Reaction::Answer(Status::KEY_ENOENT));
    producer.set_faults(vec![refused]).unwrap();
    producer.restart(0, true).await.unwrap();
    let heals = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        producer.set_faults(Vec::new()).unwrap();
    };
    let vbids = all();
    let (seen, ()) = tokio::join!(observer.observe(&vbids, false), heals);
    assert_eq!(seen.unwrap().len(), 4);
}

/// Counts the connections that are open, by node.
#[derive(Clone, Debug, Default)]
struct Counted(Arc<Mutex<BTreeMap<String, usize>>>);

impl Counted {
    fn open(&self, node: &str) -> usize {
        self.0.lock().unwrap().get(node).copied().unwrap_or_default()
    }
}

impl Dial for Counted {
    fn dial(&self, address: &Address) -> Dialing {
        let (counted, node) = (self.clone(), address.to_string());
        Box::pin(async move {
            let mut stream = TcpStream::connect(&node).await?;
            let (near, mut far) = duplex(1 << 16);
            *counted.0.lock().unwrap().entry(node.clone()).or_default() += 1;
            tokio::spawn(async move {
                let _ = copy_bidirectional(&mut far, &mut stream).await;
                *counted.0.lock().unwrap().get_mut(&node).unwrap() -= 1;
            });
            Ok(Box::new(near) as Box<dyn Transport>)
        })
    }
}

#[tokio::test]
async fn node_that_lost_all_its_vbuckets_is_disconnected() {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets) = (3, 2);
    let producer = Producer::start(options).await.unwrap();
    write(&producer, 0..10);
    let counted = Counted::default();
    let options = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(reader())
        .with_dialer(Arc::new(counted.clone()));
    let client = Client::connect(options).await.unwrap();
    let nodes = producer.connection_string();
    let nodes: Vec<&str> = nodes.trim_start_matches("couchbase://").split(',').collect();
    let mut observer = client.observer().unwrap();
    let both = BTreeSet::from([Vbid(0), Vbid(1)]);
    observer.observe(&both, true).await.unwrap();
    let at = |vbid| producer.copies_of(Vbid(vbid)).unwrap()[0];
    let (first, second) = (at(0), at(1));
    producer.move_vbucket(Vbid(0), second).unwrap();
    assert_eq!(counted.open(nodes[first]), 1);
    observer.observe(&both, true).await.unwrap();
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while counted.open(nodes[first]) > 0 {
        assert!(Instant::now() < deadline, "its connection is kept");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    producer.kill(first).unwrap();
    producer.move_vbucket(Vbid(0), 3 - first - second).unwrap();
    let begun = Instant::now();
    for _ in 0..3 {
        observer.observe(&both, true).await.unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}
