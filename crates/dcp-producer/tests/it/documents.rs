use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{DocumentError, Producer, WriteOptions};
use dcp_wire::{Cas, Datatype, Feature, Frame, Opcode, Seqno, Status, Vbid, snappy, xattr};

use super::raw_client::{Packet, RawClient};
use super::{start, start_one};

const ALL: &[Feature] = &[
    Feature::XERROR,
    Feature::JSON,
    Feature::SNAPPY,
    Feature::XATTR,
    Feature::MUTATION_SEQNO,
    Feature::COLLECTIONS,
    Feature::ALT_REQUEST_SUPPORT,
    Feature::PRESERVE_TTL,
];

/// Flags 7 and the expiry of a write.
fn store_extras(expiry: u32) -> [u8; 8] {
    let [a, b, c, d] = expiry.to_be_bytes();
    [0, 0, 0, 7, a, b, c, d]
}

/// A client and a key of vBucket 0 as that client sends it.
async fn client_and_key(producer: &Producer) -> (RawClient, Vec<u8>) {
    let client = RawClient::ready(producer, 0, ALL).await;
    let key = (0..).map(|n| format!("key-{n}")).find(|key| producer.vbid_of(key.as_bytes()).0 == 0);
    (client, [b"\0", key.unwrap().as_bytes()].concat())
}

async fn set(client: &mut RawClient, key: &[u8], value: &[u8]) -> Packet {
    let extras = store_extras(0);
    let request = Frame::request(Opcode::SET).with_key(key).with_extras(&extras);
    client.succeed(request.with_value(value)).await
}

async fn body(client: &mut RawClient, key: &[u8]) -> Vec<u8> {
    client.succeed(Frame::request(Opcode::GET).with_key(key)).await.frame().value.to_vec()
}

#[tokio::test]
async fn document_is_written_read_replaced_and_removed() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let get = Frame::request(Opcode::GET).with_key(&key);
    client.fail(get, Status::KEY_ENOENT).await;
    let extras = store_extras(0);
    let replace = Frame::request(Opcode::REPLACE).with_key(&key).with_extras(&extras);
    client.fail(replace.with_value(b"1"), Status::KEY_ENOENT).await;
    let add = Frame::request(Opcode::ADD).with_key(&key).with_extras(&extras);
    let added = client.succeed(add.with_value(b"{\"a\":1}")).await;
    assert_eq!(added.frame().extras.len(), 16);
    assert_eq!(added.frame().extras[8..], 1u64.to_be_bytes());
    client.fail(add.with_value(b"2"), Status::KEY_EEXISTS).await;
    let got = client.succeed(get).await;
    assert_eq!(got.frame().value, b"{\"a\":1}");
    assert_eq!(got.frame().extras, [0, 0, 0, 7]);
    assert_eq!(got.frame().header.datatype, Datatype::JSON);
    let cas = got.frame().header.cas;
    assert_eq!(cas, added.frame().header.cas);
    client.fail(replace.with_cas(Cas(cas.0 + 1)).with_value(b"x"), Status::KEY_EEXISTS).await;
    let replaced = client.succeed(replace.with_cas(cas).with_value(b"not json")).await;
    assert!(replaced.frame().header.cas > cas);
    let got = client.succeed(get).await;
    assert_eq!((got.frame().value, got.frame().header.datatype), (&b"not json"[..], Datatype::RAW));
    client.succeed(Frame::request(Opcode::DELETE).with_key(&key)).await;
    client.fail(Frame::request(Opcode::DELETE).with_key(&key), Status::KEY_ENOENT).await;
    client.fail(get, Status::KEY_ENOENT).await;
}

#[tokio::test]
async fn documents_are_the_same_for_the_handle_and_for_clients() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let token =
        producer.upsert(&key[1..], Bytes::from_static(b"[1]"), WriteOptions::default()).unwrap();
    assert_eq!((token.vbid, token.seqno), (Vbid(0), Seqno(1)));
    assert_eq!(body(&mut client, &key).await, b"[1]");
    set(&mut client, &key, b"[2]").await;
    let document = producer.get(&key[1..]).unwrap();
    assert_eq!((document.value.as_ref(), document.seqno), (&b"[2]"[..], Seqno(2)));
    assert_eq!((document.rev_seqno.0, document.flags), (2, 7));
    assert_eq!(
        producer.insert(&key[1..], Bytes::new(), WriteOptions::default()),
        Err(DocumentError::Exists)
    );
    let mut stale = WriteOptions::default();
    stale.cas = token.cas;
    assert_eq!(producer.remove(&key[1..], stale), Err(DocumentError::CasMismatch(token.cas)));
    producer.remove(&key[1..], WriteOptions::default()).unwrap();
    assert_eq!(producer.get(&key[1..]), None);
    assert_eq!(producer.remove(&key[1..], WriteOptions::default()), Err(DocumentError::NotFound));
    let too_long = vec![b'k'; 251];
    assert!(matches!(
        producer.upsert(&too_long, Bytes::new(), WriteOptions::default()),
        Err(DocumentError::InvalidKey { len: 251, max: 250 })
    ));
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(3));
}

#[tokio::test]
async fn counters_appends_and_touches_change_what_is_there() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let mut extras = [0; 20];
    extras[7] = 5;
    extras[15] = 10;
    let increment = Frame::request(Opcode::INCREMENT).with_key(&key).with_extras(&extras);
    for expected in [10u64, 15] {
        let answer = client.succeed(increment).await;
        assert_eq!(answer.frame().value, expected.to_be_bytes());
    }
    let decrement = Frame::request(Opcode::DECREMENT).with_key(&key).with_extras(&extras);
    for expected in [10u64, 5, 0, 0] {
        let answer = client.succeed(decrement).await;
        assert_eq!(answer.frame().value, expected.to_be_bytes());
    }
    client.succeed(Frame::request(Opcode::APPEND).with_key(&key).with_value(b"7")).await;
    client.succeed(Frame::request(Opcode::PREPEND).with_key(&key).with_value(b"x")).await;
    assert_eq!(body(&mut client, &key).await, b"x07");
    client.fail(increment, Status::DELTA_BADVAL).await;
    let missing = Frame::request(Opcode::APPEND).with_key(b"\0no such key").with_value(b"7");
    client.fail(missing, Status::NOT_STORED).await;
    let in_an_hour = 3600u32.to_be_bytes();
    let touch = Frame::request(Opcode::GET_AND_TOUCH).with_key(&key).with_extras(&in_an_hour);
    assert_eq!(client.succeed(touch).await.frame().value, b"x07");
    assert_ne!(producer.get(&key[1..]).unwrap().expiry, 0);
}

#[tokio::test]
async fn document_whose_time_has_passed_is_gone_and_leaves_an_expiration() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let extras = store_extras(1);
    let write = Frame::request(Opcode::SET).with_key(&key).with_extras(&extras);
    client.succeed(write.with_value(b"{}")).await;
    assert!(producer.get(&key[1..]).is_some());
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(1), "nothing happens by itself");
    client.fail(Frame::request(Opcode::GET).with_key(&key), Status::KEY_ENOENT).await;
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(2));
    assert_eq!(producer.expire_due(), 0);
    client.succeed(write.with_value(b"{}")).await;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert_eq!(producer.expire_due(), 1);
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(4));
}

#[tokio::test]
async fn values_that_are_compressed_are_inflated_and_forged_ones_refused() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let value = vec![b'a'; 10_000];
    let compressed = snappy::compress(&value).unwrap();
    let extras = store_extras(0);
    let write = Frame::request(Opcode::SET)
        .with_key(&key)
        .with_extras(&extras)
        .with_datatype(Datatype::SNAPPY);
    client.succeed(write.with_value(&compressed)).await;
    assert_eq!(body(&mut client, &key).await, value);
    client.fail(write.with_value(b"garbage"), Status::EINVAL).await;
    // Claims to inflate to 4 GiB.
    client.fail(write.with_value(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0]), Status::EINVAL).await;
    let xattr = write.with_datatype(Datatype::XATTR).with_value(b"\0\0\0\0{}");
    client.fail(xattr, Status::EINVAL).await;
    let mut plain = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let write = Frame::request(Opcode::SET).with_key(&key[1..]).with_extras(&extras);
    plain.fail(write.with_datatype(Datatype::JSON).with_value(b"{}"), Status::EINVAL).await;
}

#[tokio::test]
async fn value_stored_compressed_is_sent_so_to_clients_that_negotiated_it() {
    let producer = start(|options| options.keeps_compressed = true).await;
    let (mut client, key) = client_and_key(&producer).await;
    let document = [br#"{"pad":""#, &[b'a'; 1000][..], br#""}"#].concat();
    let compressed = snappy::compress(&document).unwrap();
    let extras = store_extras(0);
    let write = Frame::request(Opcode::SET).with_key(&key).with_extras(&extras);
    let both = Datatype::JSON.with(Datatype::SNAPPY);
    client.succeed(write.with_datatype(both).with_value(&compressed)).await;

    let without_json = [Feature::XERROR, Feature::SNAPPY, Feature::COLLECTIONS];
    let without_snappy = [Feature::XERROR, Feature::JSON, Feature::COLLECTIONS];
    let ways: [(&[Feature], Datatype, &[u8]); 3] = [
        (ALL, both, &compressed),
        (&without_json, Datatype::SNAPPY, &compressed),
        (&without_snappy, Datatype::JSON, &document),
    ];
    for (features, datatype, value) in ways {
        let mut reader = RawClient::ready(&producer, 0, features).await;
        // The second time with an expiry, which is no reason to store it otherwise.
        let touch = Frame::request(Opcode::GET_AND_TOUCH).with_extras(&[0, 0, 0x10, 0]);
        for read in [Frame::request(Opcode::GET), touch, Frame::request(Opcode::GET)] {
            let got = reader.succeed(read.with_key(&key)).await;
            assert_eq!(got.frame().header.datatype, datatype, "{features:?}");
            assert_eq!(got.frame().value, value, "{features:?}");
        }
    }
    let get_meta = Frame::request(Opcode::GET_META).with_key(&key).with_extras(&[2]);
    assert_eq!(client.succeed(get_meta).await.frame().extras[20], both.0, "as it is stored");

    // Whoever changes it in part gets at what it says, and stores it as written.
    let append = Frame::request(Opcode::APPEND).with_key(&key);
    client.succeed(append.with_value(b" ")).await;
    let got = client.succeed(Frame::request(Opcode::GET).with_key(&key)).await;
    assert_eq!(got.frame().value, [&document[..], b" "].concat());
    assert_eq!(got.frame().header.datatype, Datatype::JSON);
}

#[tokio::test]
async fn writes_with_metadata_keep_it_and_resolve_conflicts() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let meta = |rev: u64, cas: u64| {
        let mut extras = vec![0, 0, 0, 9, 0, 0, 0, 0];
        extras.extend_from_slice(&rev.to_be_bytes());
        extras.extend_from_slice(&cas.to_be_bytes());
        extras
    };
    let extras = meta(5, 1000);
    let write = Frame::request(Opcode::SET_WITH_META).with_key(&key);
    client.succeed(write.with_extras(&extras).with_value(b"{}")).await;
    let get_meta = Frame::request(Opcode::GET_META).with_key(&key).with_extras(&[2]);
    let got = client.succeed(get_meta).await;
    assert_eq!(got.frame().header.cas, Cas(1000));
    assert_eq!(got.frame().extras[..8], [0, 0, 0, 0, 0, 0, 0, 9]);
    assert_eq!(got.frame().extras[12..], [0, 0, 0, 0, 0, 0, 0, 5, 1]);
    let older = meta(4, 2000);
    client.fail(write.with_extras(&older).with_value(b"{}"), Status::KEY_EEXISTS).await;
    let mut forced = older.clone();
    forced.extend_from_slice(&8u32.to_be_bytes());
    client.succeed(write.with_extras(&forced).with_value(b"[]")).await;
    let newer = meta(9, 3000);
    let delete = Frame::request(Opcode::DELETE_WITH_META).with_key(&key);
    client.fail(delete.with_extras(&newer).with_value(b"body"), Status::EINVAL).await;
    client.succeed(delete.with_extras(&newer)).await;
    let got = client.succeed(get_meta).await;
    assert_eq!(got.frame().extras[..4], [0, 0, 0, 1], "a tombstone");
    client.fail(Frame::request(Opcode::GET).with_key(&key), Status::KEY_ENOENT).await;
    let written = set(&mut client, &key, b"1").await;
    assert!(written.frame().header.cas > Cas(3000));
    assert_eq!(producer.get(&key[1..]).unwrap().rev_seqno.0, 10);
}

#[tokio::test]
async fn system_xattrs_outlive_the_document_and_user_xattrs_do_not() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let mut value = Vec::new();
    let system = xattr::Xattr { name: b"_sync", value: b"1" };
    let user = xattr::Xattr { name: b"tag", value: b"\"x\"" };
    xattr::encode([system, user], &mut value).unwrap();
    value.extend_from_slice(b"{}");
    let mut options = WriteOptions::default();
    options.datatype = Some(Datatype::XATTR.with(Datatype::JSON));
    producer.upsert(&key[1..], value.into(), options).unwrap();
    assert_eq!(body(&mut client, &key).await, b"{}", "readers get the body alone");
    client.succeed(Frame::request(Opcode::DELETE).with_key(&key)).await;
    // GET in the xattrs, of tombstones as well.
    let lookup = |path: &[u8]| {
        let mut spec = vec![0xc5, 0x04, 0, u8::try_from(path.len()).unwrap()];
        spec.extend_from_slice(path);
        spec
    };
    let request = Frame::request(Opcode::SUBDOC_MULTI_LOOKUP).with_key(&key).with_extras(&[4]);
    let spec = lookup(b"_sync");
    let found = client.fail(request.with_value(&spec), Status::SUBDOC_SUCCESS_DELETED).await;
    assert_eq!(found.frame().value, [0, 0, 0, 0, 0, 1, b'1']);
    let spec = lookup(b"tag");
    let status = Status::SUBDOC_MULTI_PATH_FAILURE_DELETED;
    let found = client.fail(request.with_value(&spec), status).await;
    assert_eq!(found.frame().value[..2], Status::SUBDOC_PATH_ENOENT.0.to_be_bytes());
}

/// Extras and value of a request of one path.
fn of_path(flags: u8, path: &str, value: &str) -> ([u8; 3], Vec<u8>) {
    let [high, low] = u16::try_from(path.len()).unwrap().to_be_bytes();
    ([high, low, flags], [path, value].concat().into_bytes())
}

#[tokio::test]
async fn subdoc_command_reads_or_changes_one_path() {
    const CREATE_XATTR: u8 = 0x05;
    const XATTR: u8 = 0x04;
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    set(&mut client, &key, br#"{"a":{"n":1},"list":[1,2]}"#).await;
    let good = [
        (Opcode::SUBDOC_COUNTER, 0, "a.n", "5", "6"),
        (Opcode::SUBDOC_GET, 0, "list[1]", "", "2"),
        (Opcode::SUBDOC_EXISTS, 0, "a.n", "", ""),
        (Opcode::SUBDOC_GET_COUNT, 0, "list", "", "2"),
        (Opcode::SUBDOC_ARRAY_PUSH_LAST, 0, "list", "3", ""),
        (Opcode::SUBDOC_GET, 0, "list", "", "[1,2,3]"),
        (Opcode::SUBDOC_DICT_UPSERT, CREATE_XATTR, "_x.tag", "7", ""),
        (Opcode::SUBDOC_GET, XATTR, "_x.tag", "", "7"),
        (Opcode::SUBDOC_GET, XATTR, "$XTOC", "", r#"["_x"]"#),
        (Opcode::SUBDOC_GET, XATTR, "$vbucket.HLC.mode", "", r#""real""#),
    ];
    for (opcode, flags, path, value, expected) in good {
        let (extras, value) = of_path(flags, path, value);
        let request = Frame::request(opcode).with_key(&key).with_extras(&extras);
        let answer = client.succeed(request.with_value(&value)).await;
        assert_eq!(answer.frame().value, expected.as_bytes(), "{opcode} of {path}");
    }
    let bad = [
        (Opcode::SUBDOC_GET, "gone", "", Status::SUBDOC_PATH_ENOENT),
        (Opcode::SUBDOC_COUNTER, "list", "1", Status::SUBDOC_PATH_MISMATCH),
        (Opcode::SUBDOC_GET, "list", "value", Status::EINVAL),
    ];
    for (opcode, path, value, status) in bad {
        let (extras, value) = of_path(0, path, value);
        let request = Frame::request(opcode).with_key(&key).with_extras(&extras);
        client.fail(request.with_value(&value), status).await;
    }
    // A path that is longer than the packet.
    let request = Frame::request(Opcode::SUBDOC_GET).with_key(&key).with_extras(&[0, 9, 0]);
    client.fail(request.with_value(b"list"), Status::EINVAL).await;
    assert_eq!(body(&mut client, &key).await, br#"{"a":{"n":6},"list":[1,2,3]}"#);
}

/// The macros of a document that is being created are zeros.
#[tokio::test]
async fn subdoc_macros_of_a_missing_document_are_empty() {
    const XATTR_WITH_MACROS: u8 = 0x04 | 0x10;
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let zeros = r#""0x0000000000000000""#;
    for (name, expected) in [
        (".CAS", Some(zeros)),
        (".vbucket_uuid", Some(zeros)),
        (".seqno", Some(zeros)),
        (".revid", Some(r#""0""#)),
        (".exptime", Some("0")),
        (".flags", Some("0")),
        (".deleted", Some("true")),
        (".datatype", Some(r#"["raw"]"#)),
        (".value_bytes", Some("2")),
        (".last_modified", None),
        (".nothing", None),
    ] {
        let value = format!("\"${{$document{name}}}\"");
        let (extras, path) = of_path(XATTR_WITH_MACROS, "was", &value);
        // Without an expiry, with the flag for creating the document.
        let extras = [&extras[..], &[0, 0, 0, 0, 1]].concat();
        let write = Frame::request(Opcode::SUBDOC_DICT_UPSERT).with_key(&key);
        let write = write.with_extras(&extras).with_value(&path);
        let Some(expected) = expected else {
            client.fail(write, Status(0xd0)).await;
            continue;
        };
        client.succeed(write).await;
        let (extras, path) = of_path(0x04, "was", "");
        let read = Frame::request(Opcode::SUBDOC_GET).with_key(&key).with_extras(&extras);
        let found = client.succeed(read.with_value(&path)).await;
        assert_eq!(found.frame().value, expected.as_bytes(), "{name}");
        client.succeed(Frame::request(Opcode::DELETE).with_key(&key)).await;
    }
}

#[tokio::test]
async fn subdoc_paths_are_created_with_their_document() {
    const CREATE: u8 = 0x01;
    const ADD: u8 = 0x02;
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    // DICT_ADD in the xattrs and SET of the body, as SDKs begin the record of their transactions.
    let mut specs = vec![0xc7, 0x04, 0, 6, 0, 0, 0, 2];
    specs.extend_from_slice(b"_a.b.c{}");
    specs.extend_from_slice(&[0x01, 0, 0, 0, 0, 0, 0, 1, 0]);
    let request = Frame::request(Opcode::SUBDOC_MULTI_MUTATION).with_key(&key).with_value(&specs);
    let (extras, path) = of_path(0x04, "_a.b", "");
    let lookup = Frame::request(Opcode::SUBDOC_GET).with_key(&key).with_extras(&extras);
    for flag in [CREATE, ADD] {
        client.succeed(request.with_extras(&[flag])).await;
        let found = client.succeed(lookup.with_value(&path)).await;
        assert_eq!(found.frame().value, br#"{"c":{}}"#);
        assert_eq!(body(&mut client, &key).await, b"\0");
        client.succeed(Frame::request(Opcode::DELETE).with_key(&key)).await;
    }
    set(&mut client, &key, b"{}").await;
    client.fail(request, Status::SUBDOC_MULTI_PATH_FAILURE).await;
}

#[tokio::test]
async fn bucket_that_is_full_refuses_writes_until_there_is_room() {
    let producer = start(|options| options.memory_quota_bytes = 1 << 20).await;
    let (mut client, key) = client_and_key(&producer).await;
    let value = vec![b'v'; 600_000];
    set(&mut client, &key, &value).await;
    let extras = store_extras(0);
    let other = [key.as_slice(), b"x"].concat();
    let vbid = producer.vbid_of(&other[1..]);
    let write = Frame::request(Opcode::SET).with_vbid(vbid).with_key(&other).with_extras(&extras);
    client.fail(write.with_value(&value), Status::ENOMEM).await;
    client.succeed(Frame::request(Opcode::DELETE).with_key(&key)).await;
    client.succeed(write.with_value(&value)).await;
}

#[tokio::test]
async fn commands_that_are_not_offered_are_refused_as_such() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    for opcode in [Opcode(0x77), Opcode::OBSERVE] {
        client.fail(Frame::request(opcode).with_key(&key), Status::UNKNOWN_COMMAND).await;
    }
    let extras = store_extras(0);
    let write = Frame::request(Opcode::SET).with_key(&key).with_extras(&extras).with_value(b"1");
    client.fail(write.with_framing_extras(&[0xd0]), Status::UNKNOWN_FRAME_INFO).await;
    let get = Frame::request(Opcode::GET).with_key(b"\x08key");
    client.fail(get, Status::UNKNOWN_COLLECTION).await;
    let elsewhere = Frame::request(Opcode::SET).with_key(b"\x08key").with_extras(&extras);
    let refused = client.fail(elsewhere.with_value(b"1"), Status::UNKNOWN_COLLECTION).await;
    let said: serde_json::Value = serde_json::from_slice(refused.frame().value).unwrap();
    assert_eq!(said["manifest_uid"], "0");
    assert!(said["error"]["context"].is_string());
}

#[tokio::test]
async fn document_that_is_locked_is_written_by_its_lock_holder_only() {
    let producer = start_one().await;
    let (mut client, key) = client_and_key(&producer).await;
    let lock = |seconds: &'static [u8]| Frame::request(Opcode::GET_LOCKED).with_extras(seconds);
    client.fail(lock(&[]).with_key(&key), Status::KEY_ENOENT).await;
    let first = set(&mut client, &key, b"1").await.frame().header.cas;
    let unlock = Frame::request(Opcode::UNLOCK).with_key(&key);
    client.fail(unlock.with_cas(first), Status::NOT_LOCKED).await;
    client.fail(unlock, Status::EINVAL).await;
    let locked = client.succeed(lock(&[0, 0, 0, 30]).with_key(&key)).await;
    assert_eq!((locked.frame().value, locked.frame().extras), (&b"1"[..], &[0, 0, 0, 7][..]));
    let cas = locked.frame().header.cas;
    assert_ne!(cas, first);

    let mut other = RawClient::ready(&producer, 0, ALL).await;
    let get = Frame::request(Opcode::GET).with_key(&key);
    assert_eq!(other.succeed(get).await.frame().header.cas, Cas(u64::MAX));
    let extras = store_extras(0);
    let write = Frame::request(Opcode::SET).with_key(&key).with_extras(&extras).with_value(b"2");
    other.fail(write, Status::LOCKED).await;
    other.fail(write.with_cas(first), Status::LOCKED).await;
    other.fail(Frame::request(Opcode::DELETE).with_key(&key), Status::LOCKED).await;
    other
        .fail(Frame::request(Opcode::TOUCH).with_key(&key).with_extras(&[0; 4]), Status::LOCKED)
        .await;
    other.fail(lock(&[]).with_key(&key), Status::LOCKED).await;
    other.fail(unlock.with_cas(first), Status::LOCKED).await;

    client.succeed(unlock.with_cas(cas)).await;
    assert_eq!(other.succeed(get).await.frame().header.cas, cas);
    let again = client.succeed(lock(&[]).with_key(&key)).await.frame().header.cas;
    client.succeed(write.with_cas(again)).await;
    client.fail(unlock.with_cas(again), Status::NOT_LOCKED).await;
    // Nobody but the clients noticed the locks.
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(2));

    client.succeed(lock(&[0, 0, 0, 1]).with_key(&key)).await;
    let begun = std::time::Instant::now();
    while other.ask(write).await.frame().header.status() == Status::LOCKED {
        assert!(begun.elapsed() < Duration::from_secs(5), "the lock does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(begun.elapsed() > Duration::from_millis(900));
}
