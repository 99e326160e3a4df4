//! Requests that lie next to those which the tables of inputs and answers number.

use dcp_wire::message::OpenFlags;
use dcp_wire::{Feature, Frame, Opcode, Status, Vbid};

use super::raw_client::RawClient;
use super::{start, start_one};

const COLLECTIONS: [Feature; 2] = [Feature::XERROR, Feature::COLLECTIONS];

#[tokio::test]
async fn error_map_is_of_a_version_that_the_client_knows() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let ask = Frame::request(Opcode::GET_ERROR_MAP);
    for (highest, version) in [([0, 1], 1), ([0, 2], 2), ([0, 3], 2), ([0xff, 0xff], 2)] {
        let map = client.succeed(ask.with_value(&highest)).await;
        let map: serde_json::Value = serde_json::from_slice(map.frame().value).unwrap();
        assert_eq!(map["version"], version);
        assert_eq!(map["errors"]["7"]["name"], "NOT_MY_VBUCKET");
    }
    client.fail(ask.with_value(&[0, 0]), Status::KEY_ENOENT).await;
    client.fail(ask.with_value(&[1]), Status::EINVAL).await;
    client.fail(ask.with_value(&[0, 0, 1]), Status::EINVAL).await;
    client.fail(ask, Status::EINVAL).await;
}

#[tokio::test]
async fn hello_grants_the_known_among_any_features() {
    let producer = start_one().await;
    let mut client = RawClient::connect(&producer, 0).await;
    let hello = Frame::request(Opcode::HELLO);
    assert!(client.succeed(hello).await.frame().value.is_empty());
    client.fail(hello.with_value(&[0]), Status::EINVAL).await;
    client.fail(hello.with_value(&[0, 7, 0]), Status::EINVAL).await;
    client.fail(hello.with_extras(&[0]), Status::EINVAL).await;
    let granted = client.succeed(hello.with_value(&[0xff, 0xff, 0, 7, 0, 0, 0, 7])).await;
    assert_eq!(granted.frame().value, [0, 7]);
}

#[tokio::test]
async fn seqnos_of_states_without_vbuckets_are_an_empty_list() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    for state in [2, 3, 4] {
        assert!(client.succeed(ask.with_extras(&[0, 0, 0, state])).await.frame().value.is_empty());
    }
    for extras in [&[0; 1][..], &[0; 2], &[0; 5], &[0; 7], &[0; 12], &[0, 0, 0, 5], &[1, 0, 0, 1]] {
        client.fail(ask.with_extras(extras), Status::EINVAL).await;
    }
    client.fail(ask.with_key(b"k"), Status::EINVAL).await;
    client.fail(ask.with_value(b"v"), Status::EINVAL).await;
    let of_unknown = [0, 0, 0, 1, 0, 0, 0, 9];
    client.fail(ask.with_extras(&of_unknown), Status::UNKNOWN_COLLECTION).await;
}

#[tokio::test]
async fn observe_and_failover_log_requests_are_checked() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let observe = Frame::request(Opcode::OBSERVE_SEQNO);
    client.fail(observe.with_value(&[0; 8]), Status::KEY_ENOENT).await;
    client.fail(observe.with_value(&[0; 7]), Status::EINVAL).await;
    client.fail(observe.with_value(&[0; 9]), Status::EINVAL).await;
    client.fail(observe, Status::EINVAL).await;
    client.fail(observe.with_vbid(Vbid(9)).with_value(&[0; 8]), Status::NOT_MY_VBUCKET).await;
    let log = Frame::request(Opcode::GET_FAILOVER_LOG);
    client.fail(log.with_vbid(Vbid(4)), Status::NOT_MY_VBUCKET).await;
    client.fail(log.with_extras(&[0]), Status::EINVAL).await;
    client.fail(log.with_key(b"k"), Status::EINVAL).await;
}

#[tokio::test]
async fn bucket_is_selected_until_the_connection_is_for_dcp() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let select = Frame::request(Opcode::SELECT_BUCKET);
    client.fail(select.with_key(b"no such bucket"), Status::KEY_ENOENT).await;
    client.fail(select.with_key(b"default").with_extras(&[0]), Status::EINVAL).await;
    client.fail(select.with_key(b"default").with_value(b"v"), Status::EINVAL).await;
    client.succeed(select.with_key(b"@no bucket@")).await;
    client.fail(Frame::request(Opcode::GET).with_key(b"k"), Status::NO_BUCKET).await;
    client.succeed(select.with_key(b"default")).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    client.fail(select.with_key(b"default"), Status::NOT_SUPPORTED).await;
}

#[tokio::test]
async fn map_versions_are_compared_by_epoch_and_then_by_revision() {
    let producer = start(|options| options.nodes = 2).await;
    producer.move_vbucket(Vbid(0), 1).unwrap();
    let known = Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR, known]).await;
    let ask = Frame::request(Opcode::GET_CLUSTER_CONFIG);
    for ((epoch, rev), is_told) in
        [((1, 1), true), ((1, 2), false), ((1, 3), false), ((2, 1), false), ((0, 9), true)]
    {
        let extras = [u64::to_be_bytes(epoch), u64::to_be_bytes(rev)].concat();
        let answer = client.succeed(ask.with_extras(&extras)).await;
        assert_eq!(!answer.frame().value.is_empty(), is_told, "({epoch}, {rev})");
    }
    for extras in [&[0; 8][..], &[0; 15], &[0; 24], &[0xff; 16]] {
        client.fail(ask.with_extras(extras), Status::EINVAL).await;
    }
    client.fail(ask.with_key(b"default"), Status::EINVAL).await;
}

#[tokio::test]
async fn collection_names_are_two_words() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    let collection = Frame::request(Opcode::GET_COLLECTION_ID);
    for path in [&b"a.b.c"[..], b"..", b"a"] {
        client.fail(collection.with_value(path), Status::EINVAL).await;
    }
    client.fail(collection.with_value(b"x."), Status::UNKNOWN_SCOPE).await;
    assert_eq!(client.succeed(collection.with_value(b"_default.")).await.frame().extras, [0; 12]);
    client.fail(collection.with_value(b".x"), Status::UNKNOWN_COLLECTION).await;
}

#[tokio::test]
async fn keys_must_name_possible_collections() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    let get = Frame::request(Opcode::GET);
    // None, no logical key, reserved, without an end, too long by its last byte.
    for key in [
        &b""[..],
        b"\0",
        b"\x08",
        b"\x01a",
        b"\x07a",
        b"\x80",
        b"\x80\x00a",
        b"\xff\xff\xff\xff\xffa",
    ] {
        client.fail(get.with_key(key), Status::EINVAL).await;
    }
    unknown_collection(&mut client).await;
    client.fail(get.with_key(&[&b"\0"[..], &[b'k'; 250]].concat()), Status::KEY_ENOENT).await;
    client.fail(get.with_key(&[&b"\0"[..], &[b'k'; 251]].concat()), Status::EINVAL).await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    client.fail(get.with_key(&[b'k'; 250]), Status::KEY_ENOENT).await;
    client.fail(get.with_key(&[b'k'; 251]), Status::EINVAL).await;
}

#[tokio::test]
async fn dcp_is_refused_with_unordered_execution() {
    let producer = start_one().await;
    let unordered = [Feature::XERROR, Feature::UNORDERED_EXECUTION];
    let mut client = RawClient::ready(&producer, 0, &unordered).await;
    let open = Frame::request(Opcode::DCP_OPEN).with_extras(&[0, 0, 0, 0, 0, 0, 0, 1]);
    client.fail(open.with_key(b"n"), Status::NOT_SUPPORTED).await;
    client.fail(Frame::request(Opcode::DCP_GET_FAILOVER_LOG), Status::NOT_SUPPORTED).await;
    client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG)).await;
}

/// Whatever is asked about a document of a collection that is not there is told so.
async fn unknown_collection(client: &mut RawClient) {
    let count = [&[0; 15][..], &[1], &[0xff; 4]].concat();
    // The length of a path, flags, and the path; read, and changed without making the document.
    let (lookup, change) = (b"\0\x01\0a", b"\0\x01\0");
    for (opcode, extras, value) in [
        (Opcode::GET, &[][..], &b""[..]),
        (Opcode::GET_META, &[], b""),
        (Opcode::GET_AND_TOUCH, &[0; 4], b""),
        (Opcode::TOUCH, &[0; 4], b""),
        (Opcode::DELETE, &[], b""),
        (Opcode::REPLACE, &[0; 8], b"1"),
        (Opcode::APPEND, &[], b"1"),
        (Opcode::INCREMENT, &count, b""),
        (Opcode::SUBDOC_GET, &lookup[..3], b"a"),
        (Opcode::SUBDOC_DICT_UPSERT, change, b"a1"),
    ] {
        let request = Frame::request(opcode).with_key(b"\x09a").with_extras(extras);
        let refused = client.fail(request.with_value(value), Status::UNKNOWN_COLLECTION).await;
        let body: serde_json::Value = serde_json::from_slice(refused.frame().value).unwrap();
        assert_eq!(body["manifest_uid"], "0", "{opcode}");
    }
}
