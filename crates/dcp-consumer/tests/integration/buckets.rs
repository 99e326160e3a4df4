//! What may happen to a bucket while it is read, short of a failing node: it is paused, hibernated,
//! recreated with another number of vBuckets, or loses documents to eviction; and its cluster may come
//! back at other addresses.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dcp_consumer::{
    ChangeStream, Client, ConnectOptions, Credentials, Dial, Dialing, End, Error, ErrorKind, Start,
    StreamOptions, Transport,
};
use dcp_producer::{Producer, ProducerOptions, WriteOptions, parse_rules};
use dcp_proto::Op;
use dcp_proto::topology::Address;
use dcp_test::with;
use dcp_wire::{Seqno, Status, Vbid};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::embedded::{ANSWER_TIMEOUT, connect, options, producer, read_all, row, take, write};
use crate::rows::{Item, Rows};

/// Longer than a handful of attempts take.
const A_WHILE: Duration = Duration::from_secs(1);

async fn endless(client: &Client, retry_timeout: Duration) -> ChangeStream<Vec<Item>> {
    let options = with(options(Start::Earliest, End::Never), |o| o.retry_timeout = retry_timeout);
    client.stream(options, Rows::default).await.unwrap()
}

async fn failure(stream: &mut ChangeStream<Vec<Item>>) -> Error {
    timeout(ANSWER_TIMEOUT, stream.next()).await.expect("it stalls").unwrap().unwrap_err()
}

/// As a node does: closes the connections to the bucket, and refuses to select it.
async fn pause(producer: &Producer) {
    let rules = r#"[{"condition": {"opcode": "SELECT_BUCKET"},
        "reaction": {"answer": {"status": "BUCKET_PAUSED"}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    producer.persist();
    producer.kill(0).unwrap();
    producer.restart(0, true).await.unwrap();
}

#[tokio::test]
async fn sv_08_bucket_that_is_paused_is_waited_for() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    pause(&producer).await;
    let next = timeout(A_WHILE, stream.next()).await;
    assert!(next.is_err(), "{next:?}");
    // Clients that connect meanwhile wait for their connect timeout.
    let connection = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"))
        .with_connect_timeout(A_WHILE);
    let error = Client::connect(connection).await.unwrap_err();
    assert_eq!((error.status(), error.is_retryable()), (Some(Status::BUCKET_PAUSED), true));
    producer.set_faults(Vec::new()).unwrap();
    write(&producer, 10..20);
    take(&mut stream, 10).await;
    assert_eq!(stream.stats().connection.rollbacks, 0);
}

#[tokio::test]
async fn sv_08_bucket_that_stays_paused_ends_the_stream_with_that_status() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let mut stream = endless(&client, A_WHILE).await;
    take(&mut stream, 10).await;
    let begun = Instant::now();
    pause(&producer).await;
    let error = failure(&mut stream).await;
    assert!(begun.elapsed() >= A_WHILE);
    assert_eq!((error.kind(), error.status()), (ErrorKind::Timeout, Some(Status::BUCKET_PAUSED)));
    assert!(error.is_retryable() && error.to_string().contains("BUCKET_PAUSED"), "{error}");
    // Nothing was lost: another stream goes on where this one ended.
    producer.set_faults(Vec::new()).unwrap();
    write(&producer, 10..20);
    let from = Start::Checkpoint(stream.checkpoint());
    let mut stream = client.stream(options(from, End::Now), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 10);
}

/// Hibernation removes the bucket, and what is restored later has another identity.
#[tokio::test]
async fn sv_09_bucket_that_was_hibernated_is_waited_for_and_what_comes_back_is_another() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    producer.drop_bucket().unwrap();
    let next = timeout(A_WHILE, stream.next()).await;
    assert!(next.is_err(), "{next:?}");
    producer.create_bucket().unwrap();
    write(&producer, 0..10);
    let error = failure(&mut stream).await;
    assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::BucketNotFound, false));
    assert!(error.to_string().contains("'default' was recreated"), "{error}");

    // One that does not come back in time.
    let client = connect(&producer).await;
    let mut stream = endless(&client, A_WHILE).await;
    take(&mut stream, 10).await;
    producer.drop_bucket().unwrap();
    let error = failure(&mut stream).await;
    assert_eq!(error.kind(), ErrorKind::BucketNotFound, "{error}");
    assert!(error.to_string().contains("'default' not found"), "{error}");
}

/// Leads a host name, and the addresses that a cluster had, to where another cluster is.
#[derive(Debug, Default)]
struct Names {
    /// Addresses that lead elsewhere, and the address to which they and the name lead.
    moved: Mutex<(BTreeSet<String>, String)>,
}

const NAME: &str = "cluster.test";

impl Names {
    fn lead_to(&self, producer: &Producer) {
        let (moved, to) = &mut *self.moved.lock().unwrap();
        let before = std::mem::replace(to, first_address(producer));
        moved.insert(before);
    }

    /// Of an address that was left, or of the name.
    fn resolve(&self, address: &Address) -> String {
        let (moved, to) = &*self.moved.lock().unwrap();
        let written = address.to_string();
        let is_moved = address.host == NAME || moved.contains(&written);
        if is_moved { to.clone() } else { written }
    }
}

/// The address of the first node.
fn first_address(producer: &Producer) -> String {
    let all = producer.connection_string();
    all.trim_start_matches("couchbase://").split(',').next().unwrap().to_owned()
}

#[derive(Debug)]
struct ByName(Arc<Names>);

impl Dial for ByName {
    fn dial(&self, address: &Address) -> Dialing {
        let to = self.0.resolve(address);
        Box::pin(async move {
            let stream: io::Result<TcpStream> = TcpStream::connect(to).await;
            Ok(Box::new(stream?) as Box<dyn Transport>)
        })
    }
}

fn by_name(names: &Arc<Names>) -> ConnectOptions {
    ConnectOptions::new(format!("couchbase://{NAME}:11210"))
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"))
        .with_dialer(Arc::new(ByName(Arc::clone(names))))
}

async fn started(vbuckets: u16, change: impl FnOnce(&mut ProducerOptions)) -> Producer {
    let mut options = ProducerOptions::default();
    options.vbuckets = vbuckets;
    change(&mut options);
    Producer::start(options).await.unwrap()
}

/// All nodes are gone and none of the addresses in the cluster map answers any more: names are looked
/// up again at each attempt.
#[tokio::test]
async fn sv_05_cluster_that_comes_back_at_other_addresses_is_found_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let start = || started(4, |options| options.data = Some(folder.path().to_owned()));
    let before = start().await;
    let names = Arc::new(Names::default());
    names.lead_to(&before);
    let client = Client::connect(by_name(&names)).await.unwrap();
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    write(&before, 0..20);
    take(&mut stream, 20).await;
    before.persist();
    let left = first_address(&before);
    before.shutdown().await;
    drop(before);
    sleep(A_WHILE).await;
    let after = start().await;
    assert_ne!(first_address(&after), left, "it has the same address by chance: run it again");
    write(&after, 20..40);
    // Only the name leads there.
    names.moved.lock().unwrap().1 = first_address(&after);
    let items = take(&mut stream, 20).await;
    let keys: BTreeSet<_> = items.into_iter().map(|item| row(item).key).collect();
    assert_eq!(keys, (20..40).map(|key| format!("key-{key}").into_bytes()).collect());
    assert_eq!(stream.stats().connection.rollbacks, 0);
}

/// The bucket of the name has twice as many vBuckets: no position of the old one is used for it.
#[tokio::test]
async fn sv_06_bucket_recreated_with_another_number_of_vbuckets_is_not_taken_for_the_old_one() {
    let before = started(4, |_| {}).await;
    let names = Arc::new(Names::default());
    names.lead_to(&before);
    write(&before, 0..20);
    let client = Client::connect(by_name(&names)).await.unwrap();
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 20).await;
    let checkpoint = stream.checkpoint();
    let after = started(8, |options| options.nodes = 2).await;
    // Its map is newer, as if it were that of the same cluster.
    after.failover_unsafely(&[1]).unwrap();
    after.restart(1, true).await.unwrap();
    after.rebalance().unwrap();
    write(&after, 0..30);
    before.shutdown().await;
    names.lead_to(&after);
    let error = failure(&mut stream).await;
    assert_eq!(error.kind(), ErrorKind::BucketNotFound, "{error}");
    assert!(error.to_string().contains("'default' was recreated"), "{error}");

    let client = Client::connect(by_name(&names)).await.unwrap();
    let from = options(Start::Checkpoint(checkpoint), End::Now);
    let error = client.stream(from, Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint, "{error}");
    let mut stream =
        client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 30, "from all eight");
}

/// An ephemeral bucket that is full deletes documents, and soon forgets their tombstones.
#[tokio::test]
async fn sv_07_documents_evicted_from_an_ephemeral_bucket_are_deletions() {
    let producer = started(1, |options| options.ephemeral = true).await;
    write(&producer, 0..10);
    let client = Client::connect(
        ConnectOptions::new(producer.connection_string())
            .with_bucket("default")
            .with_credentials(Credentials::new("Administrator", "password")),
    );
    let client = client.await.unwrap();
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    let before = stream.checkpoint();
    for key in 0..5 {
        producer.remove(format!("key-{key}").as_bytes(), WriteOptions::default()).unwrap();
    }
    let evicted = take(&mut stream, 5).await;
    assert!(evicted.into_iter().all(|item| row(item).op == Op::Deletion));
    write(&producer, 10..11);
    take(&mut stream, 1).await;

    // A reader that was away for longer than the tombstones are kept begins again.
    producer.purge(Vbid(0), Seqno(15)).unwrap();
    let from: StreamOptions = options(Start::Checkpoint(before), End::Now);
    let mut late = client.stream(from, Rows::default).await.unwrap();
    let items = read_all(&mut late).await;
    let Some((Item::Rollback(rollback), rows)) = items.split_first() else { panic!("{items:?}") };
    assert_eq!((rollback.seqno, rollback.from_seqno), (Seqno(0), Seqno(10)));
    let keys: BTreeSet<_> = rows.iter().cloned().map(|item| row(item).key).collect();
    assert_eq!(keys, (5..11).map(|key| format!("key-{key}").into_bytes()).collect());
}
