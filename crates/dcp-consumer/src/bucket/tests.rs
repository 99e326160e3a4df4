use std::net::SocketAddr;

use dcp_test::login::{Login, PASSWORD, USERNAME};
use dcp_test::peer::Peer;
use dcp_wire::Status;
use dcp_wire::message::encode_vb_seqnos;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

use super::*;
use crate::observe::Nodes;
use crate::{ConnectOptions, Credentials};

/// A node whose map is of this version and has the vBuckets on `port`; ends when aborted.
async fn node(epoch: i64, rev: i64, port: u16) -> (SocketAddr, AbortHandle) {
    node_of("ab", epoch, rev, port).await
}

/// The same for the bucket with this UUID.
async fn node_of(uuid: &str, epoch: i64, rev: i64, port: u16) -> (SocketAddr, AbortHandle) {
    let map = format!(
        r#"{{"rev":{rev},"revEpoch":{epoch},"name":"default","uuid":"{uuid}","nodesExt":[],
        "vBucketServerMap":{{"serverList":["127.0.0.1:{port}"],"vBucketMap":[[0],[0]]}}}}"#
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (listener.local_addr().unwrap(), serve(listener, map, None))
}

/// Serves a map, and the high seqno of a vBucket if the node has it, until aborted.
fn serve(listener: TcpListener, map: String, high_seqno: Option<(Vbid, Seqno)>) -> AbortHandle {
    let map: &'static [u8] = Vec::leak(map.into_bytes());
    let mut seqnos = Vec::new();
    encode_vb_seqnos(high_seqno, &mut seqnos);
    let seqnos: &'static [u8] = seqnos.leak();
    let serving = tokio::spawn(async move {
        let mut clients = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            clients.spawn(async move {
                let mut peer = Peer::new(stream);
                let mut login = Login::answering(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS, map);
                login.instead.push((Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS, seqnos));
                while let Some(request) = peer.next().await {
                    let answer = login.answer(&request);
                    if peer.io.write_all(&answer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    serving.abort_handle()
}

const LIMIT: Duration = Duration::from_secs(5);

fn address(at: SocketAddr) -> Address {
    Address::new(at.ip().to_string(), at.port())
}

async fn open(seeds: &str) -> Bucket {
    open_within(seeds, LIMIT).await
}

async fn open_within(seeds: &str, limit: Duration) -> Bucket {
    let options = ConnectOptions::new(format!("couchbase://{seeds}"))
        .with_bucket("default")
        .with_credentials(Credentials::new(USERNAME, PASSWORD))
        .with_connect_timeout(limit);
    Bucket::connect(Connector::new(options).unwrap()).await.unwrap()
}

fn rev(bucket: &Bucket) -> (i64, i64) {
    let config = bucket.config();
    (config.revision().epoch, config.revision().rev)
}

#[tokio::test]
async fn map_that_is_older_from_an_isolated_node_is_never_believed() {
    // The vBuckets are where nobody listens, so that the seeds are asked for another map.
    let (isolated, _isolated) = node(1, 900, 1).await;
    let (current, current_serves) = node(2, 3, 1).await;
    let bucket = open(&format!("{current},{isolated}")).await;
    assert_eq!(rev(&bucket), (2, 3));
    bucket.connect_to(&address(isolated), None, LIMIT).await.unwrap();
    assert_eq!(rev(&bucket), (2, 3), "a larger rev of an older epoch");

    let bucket = Arc::new(bucket);
    current_serves.abort();
    bucket.fetch_map().await.unwrap();
    assert_eq!(rev(&bucket), (2, 3), "after everything was lost, from the other seed");

    let (newer, _newer) = node(3, 1, 1).await;
    bucket.connect_to(&address(newer), None, LIMIT).await.unwrap();
    assert_eq!(rev(&bucket), (3, 1), "a newer one is");
}

/// A bucket whose first vBucket was on a node that has given it up and was then cut off from its
/// cluster. The node has the lower address and an old map; the other one has the vBucket, with
/// seqno 7, and the current map.
async fn cut_off() -> (Arc<Bucket>, [AbortHandle; 2]) {
    let bind = || TcpListener::bind("127.0.0.1:0");
    let mut nodes = [bind().await.unwrap(), bind().await.unwrap()];
    nodes.sort_by_key(|node| node.local_addr().unwrap().port());
    let [isolated, current] = nodes;
    let [first, second] = [&isolated, &current].map(|node| node.local_addr().unwrap());
    let map = |rev, active| {
        format!(
            r#"{{"rev":{rev},"name":"default","uuid":"ab","nodesExt":[],"vBucketServerMap":
            {{"serverList":["{first}","{second}"],"vBucketMap":[[{active}],[1]]}}}}"#
        )
    };
    let isolated = serve(isolated, map(1, 0), None);
    let bucket = open_within(&first.to_string(), Duration::from_secs(60)).await;
    let current = serve(current, map(2, 1), Some((Vbid(0), Seqno(7))));
    (Arc::new(bucket), [isolated, current])
}

#[tokio::test]
async fn node_that_is_first_but_cut_off_is_not_the_only_one_asked() {
    let (bucket, _nodes) = cut_off().await;
    for _ in 0..64 {
        bucket.fetch_map().await.unwrap();
        if rev(&bucket) == (0, 2) {
            return;
        }
    }
    panic!("only the first is asked");
}

#[tokio::test]
async fn vbucket_is_looked_for_beyond_the_only_node_that_is_asked() {
    let (bucket, _nodes) = cut_off().await;
    let mut nodes = Nodes::new(bucket, None);
    let high = nodes.high_seqnos(&[Vbid(0)].into()).await.unwrap();
    assert_eq!(high, [(Vbid(0), Seqno(7))].into());
}

#[tokio::test]
async fn connection_timeouts_may_be_endless() {
    let (at, _serves) = node(1, 1, 1).await;
    let options = ConnectOptions::new(format!("couchbase://{at}"))
        .with_bucket("default")
        .with_credentials(Credentials::new(USERNAME, PASSWORD))
        .with_connect_timeout(Duration::MAX)
        .with_keep_connections(Duration::MAX);
    let bucket = Bucket::connect(Connector::new(options).unwrap()).await.unwrap();
    let address = address(at);
    let limit = bucket.connect_timeout();
    let connection = bucket.connect_to(&address, None, limit).await.unwrap();
    let bucket = Arc::new(bucket);
    bucket.put_into_pool(connection, None);
    assert!(bucket.pool().take(&address, None).await.is_some());
}

#[tokio::test]
async fn map_of_a_bucket_of_another_name_says_nothing_of_this_one() {
    let (known, _known) = node(1, 3, 1).await;
    let bucket = open(&known.to_string()).await;
    for uuid in ["cd", "ab"] {
        let map = format!(
            r#"{{"rev":900,"revEpoch":1,"name":"other","uuid":"{uuid}","nodesExt":[],
            "vBucketServerMap":{{"serverList":["127.0.0.1:1"],"vBucketMap":[[0],[0]]}}}}"#
        );
        bucket.apply(BucketConfig::parse(map.as_bytes(), "127.0.0.1").unwrap());
        assert_eq!(rev(&bucket), (1, 3), "uuid {uuid}");
        bucket.check_identity().unwrap();
    }
}

#[tokio::test]
async fn node_with_another_bucket_of_the_same_name_is_never_used() {
    let (known, _known) = node_of("ab", 1, 900, 1).await;
    let bucket = open(&known.to_string()).await;
    // Of a cluster that was set up again at the old addresses, or of a node that lags.
    let (other, _other) = node_of("cd", 1, 3, 1).await;
    let error = bucket.connect_to(&address(other), None, LIMIT).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BucketNotFound);
    for part in [&other.to_string(), "'default'", "cd", "ab"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(bucket.may_pass(&error), "the node may only lag");
    bucket.check_identity().unwrap();
    let (newer, _newer) = node_of("cd", 1, 901, 1).await;
    let error = bucket.connect_to(&address(newer), None, LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("was recreated") && !bucket.may_pass(&error));
}
