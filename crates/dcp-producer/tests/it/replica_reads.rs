//! Documents read from replicas.

use bytes::Bytes;
use dcp_producer::{Producer, User, WriteOptions};
use dcp_wire::{Feature, Frame, Opcode, Status, Vbid};

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);
/// Flags of the document: read a replica, and tombstones too.
const REPLICA_READ: u8 = 0x20;
const ACCESS_DELETED: u8 = 0x04;
/// Flag of a path: it leads into the xattrs.
const XATTR: u8 = 0x04;

/// vBucket 0 is active on node 0, its replica on node 1.
async fn two_nodes() -> Producer {
    start(|options| {
        options.nodes = 2;
        options.replicas = 1;
        options.users = vec![User {
            username: "elsewhere".to_owned(),
            password: "word".to_owned(),
            reads: Some(vec!["inventory".to_owned()]),
        }];
    })
    .await
}

/// Writes a document of vBucket 0; returns its key.
fn write(producer: &Producer, prefix: &str, options: WriteOptions) -> Vec<u8> {
    let mut keys = (0..).map(|n| format!("{prefix}-{n}").into_bytes());
    let key = keys.find(|key| producer.vbid_of(key) == VB).unwrap();
    producer.upsert(&key, Bytes::from_static(br#"{"n":1}"#), options).unwrap();
    key
}

async fn clients(producer: &Producer) -> [RawClient; 2] {
    let active = RawClient::ready(producer, 0, &[Feature::XERROR]).await;
    [active, RawClient::ready(producer, 1, &[Feature::XERROR]).await]
}

/// Extras of a lookup: length of the path, its flags, those of the document if there are any.
fn extras(path: &str, flags: u8, doc_flags: u8) -> Vec<u8> {
    let mut extras = u16::try_from(path.len()).unwrap().to_be_bytes().to_vec();
    extras.push(flags);
    extras.extend(Some(doc_flags).filter(|flags| *flags != 0));
    extras
}

#[tokio::test]
async fn replicas_are_read_where_they_lie() {
    let producer = two_nodes().await;
    let key = write(&producer, "a", WriteOptions::default());
    let read = Frame::request(Opcode::GET_REPLICA).with_vbid(VB).with_key(&key);
    let [mut active, mut replica] = clients(&producer).await;
    active.fail(read, Status::NOT_MY_VBUCKET).await;
    assert_eq!(replica.succeed(read).await.frame().value, br#"{"n":1}"#);
    let get = Frame::request(Opcode::GET).with_vbid(VB).with_key(&key);
    replica.fail(get, Status::NOT_MY_VBUCKET).await;
    replica.fail(read.with_key(b"none"), Status::KEY_ENOENT).await;
    replica.fail(read.with_vbid(Vbid(99)), Status::NOT_MY_VBUCKET).await;
}

#[tokio::test]
async fn replica_subdoc_reads_need_the_replica_flag() {
    let producer = two_nodes().await;
    let key = write(&producer, "a", WriteOptions::default());
    let [mut active, mut replica] = clients(&producer).await;
    let (plain, flagged) = (extras("n", 0, 0), extras("n", 0, REPLICA_READ));
    let one = Frame::request(Opcode::SUBDOC_GET).with_vbid(VB).with_key(&key).with_value(b"n");
    // GET of one path.
    let value = [&[0xc5, 0, 0, 1][..], b"n"].concat();
    let many = Frame::request(Opcode::SUBDOC_MULTI_LOOKUP).with_vbid(VB).with_key(&key);
    let many = many.with_value(&value);

    assert_eq!(replica.succeed(one.with_extras(&flagged)).await.frame().value, b"1");
    let found = replica.succeed(many.with_extras(&[REPLICA_READ])).await;
    assert_eq!(found.frame().value, [0, 0, 0, 0, 0, 1, b'1']);
    replica.fail(one.with_extras(&plain), Status::NOT_MY_VBUCKET).await;
    replica.fail(many, Status::NOT_MY_VBUCKET).await;
    active.fail(one.with_extras(&flagged), Status::NOT_MY_VBUCKET).await;
    active.fail(many.with_extras(&[REPLICA_READ]), Status::NOT_MY_VBUCKET).await;
    replica.fail(one.with_extras(&flagged).with_key(b"none"), Status::KEY_ENOENT).await;

    // Nothing is written to a replica, whatever the flags say.
    let upsert = Frame::request(Opcode::SUBDOC_DICT_UPSERT).with_vbid(VB).with_key(&key);
    let upsert = upsert.with_value(b"n2");
    replica.fail(upsert.with_extras(&plain), Status::NOT_MY_VBUCKET).await;
    replica.fail(upsert.with_extras(&flagged), Status::EINVAL).await;
    active.fail(upsert.with_extras(&flagged), Status::EINVAL).await;
}

#[tokio::test]
async fn replica_shows_tombstones_to_who_asks_and_expires_nothing() {
    let producer = two_nodes().await;
    let gone = write(&producer, "gone", WriteOptions::default());
    producer.remove(&gone, WriteOptions::default()).unwrap();
    let mut options = WriteOptions::default();
    // Long ago.
    options.expiry = 60 * 60 * 24 * 365;
    let expired = write(&producer, "expired", options);
    let before = producer.high_seqnos()[&VB];
    let [_, mut replica] = clients(&producer).await;

    let path = "$document.deleted";
    let lookup = Frame::request(Opcode::SUBDOC_GET).with_vbid(VB).with_value(path.as_bytes());
    let both = extras(path, XATTR, REPLICA_READ | ACCESS_DELETED);
    let found = lookup.with_key(&gone).with_extras(&both);
    let found = replica.fail(found, Status::SUBDOC_SUCCESS_DELETED).await;
    assert_eq!(found.frame().value, b"true");
    let alone = extras(path, XATTR, REPLICA_READ);
    for key in [&gone, &expired] {
        replica.fail(lookup.with_key(key).with_extras(&alone), Status::KEY_ENOENT).await;
        let read = Frame::request(Opcode::GET_REPLICA).with_vbid(VB).with_key(key);
        replica.fail(read, Status::KEY_ENOENT).await;
    }
    assert_eq!(producer.high_seqnos()[&VB], before);
}

#[tokio::test]
async fn replica_reads_need_the_right_to_their_collection() {
    let producer = two_nodes().await;
    let key = write(&producer, "a", WriteOptions::default());
    let mut client = RawClient::connect(&producer, 1).await;
    client.hello(&[Feature::XERROR]).await;
    client.log_in("elsewhere", "word").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    let flagged = extras("n", 0, REPLICA_READ);
    let lookup = Frame::request(Opcode::SUBDOC_GET).with_extras(&flagged).with_value(b"n");
    for request in [Frame::request(Opcode::GET_REPLICA), lookup] {
        client.fail(request.with_vbid(VB).with_key(&key), Status::EACCESS).await;
    }
}

#[tokio::test]
async fn collection_that_does_not_exist_is_missing_on_replicas_too() {
    let producer = two_nodes().await;
    let features = [Feature::XERROR, Feature::COLLECTIONS];
    let mut replica = RawClient::ready(&producer, 1, &features).await;
    let flagged = extras("n", 0, REPLICA_READ);
    let lookup = Frame::request(Opcode::SUBDOC_GET).with_extras(&flagged).with_value(b"n");
    for request in [Frame::request(Opcode::GET_REPLICA), lookup] {
        let request = request.with_vbid(VB).with_key(b"\x09a");
        replica.fail(request, Status::UNKNOWN_COLLECTION).await;
    }
}
