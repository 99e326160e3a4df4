use dcp_producer::Producer;
use dcp_proto::topology::{BucketConfig, GlobalConfig, Manifest};
use dcp_wire::{Feature, Frame, Magic, Opcode, Status, Vbid};

use super::raw_client::{Packet, RawClient};
use super::{start, start_one};

async fn two_nodes() -> Producer {
    start(|options| {
        options.nodes = 2;
        options.vbuckets = 64;
    })
    .await
}

fn json(packet: &Packet) -> serde_json::Value {
    serde_json::from_slice(packet.frame().value).unwrap()
}

#[tokio::test]
async fn map_names_every_node_and_spreads_the_vbuckets_evenly() {
    let producer = two_nodes().await;
    let mut client = RawClient::ready(&producer, 1, &[Feature::XERROR, Feature::JSON]).await;
    let map = json(&client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await);
    assert_eq!(map["uuid"], producer.bucket_uuid());
    BucketConfig::parse(map.to_string().as_bytes(), "127.0.0.1").unwrap();
    assert_eq!(map["nodes"].as_array().unwrap().len(), 2);
    let nodes = map["nodesExt"].as_array().unwrap();
    assert_eq!(nodes[1]["thisNode"], true);
    assert!(nodes[0].get("thisNode").is_none());
    assert_ne!(nodes[0]["services"]["mgmt"], nodes[1]["services"]["mgmt"]);
    let owners = map["vBucketServerMap"]["vBucketMap"].as_array().unwrap();
    let of_first = owners.iter().filter(|owner| owner[0] == 0).count();
    assert_eq!((owners.len(), of_first), (64, 32));
}

#[tokio::test]
async fn map_names_what_the_bucket_can_do() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR, Feature::JSON]).await;
    let map = json(&client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await);
    let capabilities = map["bucketCapabilities"].as_array().unwrap();
    for offered in ["dcp.IgnorePurgedTombstones", "subdoc.ReplicaRead", "tombstonedUserXAttrs"] {
        assert!(capabilities.contains(&offered.into()), "{offered}");
    }
    // By these, clients would take for granted what is not there.
    for missing in ["rangeScan", "couchapi", "nonDedupedHistory", "subdoc.ReviveDocument"] {
        assert!(!capabilities.contains(&missing.into()), "{missing}");
    }
}

#[tokio::test]
async fn map_without_a_bucket_is_the_global_one() {
    let producer = two_nodes().await;
    let mut client = RawClient::connect(&producer, 0).await;
    client.hello(&[Feature::XERROR, Feature::JSON]).await;
    client.log_in("Administrator", "password").await;
    let global = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    GlobalConfig::parse(global.frame().value, "127.0.0.1").unwrap();
    let map = json(&global);
    assert_eq!(map["nodesExt"].as_array().unwrap().len(), 2);
    assert!(map.get("vBucketServerMap").is_none());
    client.fail(Frame::request(Opcode::SELECT_BUCKET).with_key(b"other"), Status::KEY_ENOENT).await;
    client.fail(Frame::request(Opcode::GET).with_key(b"key"), Status::NO_BUCKET).await;
}

#[tokio::test]
async fn map_comes_once_with_not_my_vbucket_where_duplicates_are_left_out() {
    let producer = two_nodes().await;
    let dedupe = Feature::DEDUPE_NOT_MY_VBUCKET_CLUSTER_MAP;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR, dedupe]).await;
    let wrong = Frame::request(Opcode::GET).with_key(b"key").with_vbid(Vbid(63));
    let first = client.fail(wrong, Status::NOT_MY_VBUCKET).await;
    assert_eq!(json(&first)["rev"], 1);
    let second = client.fail(wrong, Status::NOT_MY_VBUCKET).await;
    assert!(second.frame().value.is_empty());
    producer.move_vbucket(Vbid(0), 1).unwrap();
    let third = client.fail(wrong, Status::NOT_MY_VBUCKET).await;
    assert_eq!(json(&third)["rev"], 2);
    client.fail(wrong.with_vbid(Vbid(0)), Status::NOT_MY_VBUCKET).await;
    client.fail(wrong.with_vbid(Vbid(64)), Status::NOT_MY_VBUCKET).await;
}

#[tokio::test]
async fn map_version_that_is_known_is_answered_with_nothing() {
    let producer = start_one().await;
    let known = Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR, known]).await;
    let mut extras = [0; 16];
    (extras[7], extras[15]) = (1, 1);
    let ask = Frame::request(Opcode::GET_CLUSTER_CONFIG);
    assert!(client.succeed(ask.with_extras(&extras)).await.frame().value.is_empty());
    extras[7] = 0;
    assert_eq!(json(&client.succeed(ask.with_extras(&extras)).await)["revEpoch"], 1);
}

#[tokio::test]
async fn map_that_is_new_is_pushed_as_the_client_wants_it() {
    let producer = two_nodes().await;
    let full = [Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION];
    let brief = [Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF];
    let mut full = RawClient::ready(&producer, 0, &full).await;
    let mut brief = RawClient::ready(&producer, 1, &brief).await;
    let mut neither = RawClient::ready(&producer, 1, &[]).await;
    for rev in [2u8, 3] {
        producer.move_vbucket(Vbid(u16::from(rev)), 1).unwrap();
        for (client, has_map) in [(&mut full, true), (&mut brief, false)] {
            let pushed = client.receive().await;
            let frame = pushed.frame();
            assert_eq!(frame.header.magic, Magic::SERVER_REQUEST);
            assert_eq!(frame.header.opcode, Opcode::CLUSTER_MAP_CHANGE);
            assert_eq!((frame.key, frame.extras[15]), (&b"default"[..], rev));
            assert_eq!(frame.value.is_empty(), !has_map);
        }
    }
    neither.expect_silence().await;
    neither.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn collection_names_become_ids() {
    let producer = start_one().await;
    let features = [Feature::XERROR, Feature::COLLECTIONS];
    let mut client = RawClient::ready(&producer, 0, &features).await;
    let manifest = client.succeed(Frame::request(Opcode::GET_COLLECTIONS_MANIFEST)).await;
    Manifest::parse(manifest.frame().value).unwrap();
    let ask = Frame::request(Opcode::GET_COLLECTION_ID);
    for path in [&b"_default._default"[..], b"._default", b"."] {
        assert_eq!(client.succeed(ask.with_value(path)).await.frame().extras, [0; 12]);
    }
    client.fail(ask.with_value(b"_default.x"), Status::UNKNOWN_COLLECTION).await;
    client.fail(ask.with_value(b"x.y"), Status::UNKNOWN_SCOPE).await;
    client.fail(ask.with_value(b"x"), Status::EINVAL).await;
    let ask = Frame::request(Opcode::GET_SCOPE_ID);
    assert_eq!(client.succeed(ask.with_value(b"_default")).await.frame().extras, [0; 12]);
    client.fail(ask.with_value(b"x"), Status::UNKNOWN_SCOPE).await;
}
