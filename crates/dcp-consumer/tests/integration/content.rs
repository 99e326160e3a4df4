//! What of a document the server is asked to send.

use bytes::Bytes;
use dcp_consumer::{Content, End, Start};
use dcp_producer::{Producer, WriteOptions};
use dcp_proto::Op;
use dcp_test::with;
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Cas, Datatype, snappy};

use crate::embedded::{connect, options, producer, read_all, row};
use crate::rows::{Row, Rows};

/// Writes a document with a user's and a system's attribute.
fn write_attributed(producer: &Producer, key: &[u8]) {
    let mut value = Vec::new();
    let attributes = [("_sync", "{\"a\":1}"), ("user", "2")];
    let attributes =
        attributes.map(|(key, value)| Xattr { name: key.as_bytes(), value: value.as_bytes() });
    xattr::encode(attributes, &mut value).unwrap();
    value.extend_from_slice(b"{\"n\":1}");
    let mut with = WriteOptions::default();
    with.datatype = Some(Datatype::JSON.with(Datatype::XATTR));
    producer.upsert(key, value.into(), with).unwrap();
}

/// A document with attributes, one without, one removed, one expired.
fn write(producer: &Producer) {
    write_attributed(producer, b"attributed");
    let plain = WriteOptions::default;
    for key in [&b"plain"[..], b"removed", b"expired"] {
        producer.upsert(key, Bytes::from_static(b"{\"n\":2}"), plain()).unwrap();
    }
    producer.remove(b"removed", plain()).unwrap();
    producer.expire(b"expired", plain()).unwrap();
}

async fn read(producer: &Producer, content: Content) -> Vec<Row> {
    let client = connect(producer).await;
    let options = with(options(Start::Earliest, End::Now), |o| o.content = content);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let mut rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
    rows.sort_by(|one, other| one.key.cmp(&other.key));
    rows
}

fn by_key<'a>(rows: &'a [Row], key: &str) -> &'a Row {
    rows.iter().find(|row| row.key == key.as_bytes()).unwrap()
}

#[tokio::test]
async fn stream_without_values_delivers_everything_but_the_value() {
    for on_disk in [false, true] {
        let producer = producer(1, 1).await;
        write(&producer);
        if on_disk {
            producer.persist();
        }
        let with = read(&producer, Content::default()).await;
        let without = read(&producer, Content { values: false, xattrs: false }).await;
        assert_eq!((with.len(), without.len()), (4, 4));
        for (with, without) in with.iter().zip(&without) {
            assert!(without.value.is_empty());
            // The document's own datatype, which says that it has attributes.
            let datatype = if with.key == b"attributed" {
                with.datatype.with(Datatype::XATTR)
            } else {
                with.datatype
            };
            assert_eq!(&Row { value: Vec::new(), datatype, ..with.clone() }, without);
            assert_ne!(without.cas, Cas(0), "a tombstone is no mutation without CAS");
        }
        assert_eq!(by_key(&without, "plain").datatype, Datatype::JSON);
        assert_eq!(by_key(&without, "removed").op, Op::Deletion);
        assert_eq!(by_key(&without, "expired").op, Op::Expiration);
    }
}

#[tokio::test]
async fn xattrs_come_only_on_demand() {
    let producer = producer(1, 1).await;
    write(&producer);
    let without = read(&producer, Content::default()).await;
    let row = by_key(&without, "attributed");
    assert_eq!((&row.value[..], row.datatype), (&b"{\"n\":1}"[..], Datatype::JSON));
    let with = read(&producer, Content { values: true, xattrs: true }).await;
    let row = by_key(&with, "attributed");
    assert!(row.datatype.contains(Datatype::XATTR));
    let (_, body) = xattr::split(&row.value).unwrap();
    assert_eq!(body, b"{\"n\":1}");
    assert_eq!(by_key(&with, "plain").datatype, Datatype::JSON);
    let only = read(&producer, Content { values: false, xattrs: true }).await;
    let row = by_key(&only, "attributed");
    let (_, body) = xattr::split(&row.value).unwrap();
    assert_eq!((body, row.datatype.contains(Datatype::XATTR)), (&b""[..], true));
}

#[tokio::test]
async fn expiration_keeps_its_xattrs() {
    let producer = producer(1, 1).await;
    write_attributed(&producer, b"session");
    producer.expire(b"session", WriteOptions::default()).unwrap();
    let rows = read(&producer, Content { values: true, xattrs: true }).await;
    let row = by_key(&rows, "session");
    assert_eq!((row.op, row.datatype.contains(Datatype::XATTR)), (Op::Expiration, true));
    let (section, body) = xattr::split(&row.value).unwrap();
    let names: Vec<_> = section.map(|pair| pair.unwrap().name.to_vec()).collect();
    assert_eq!((names, body), (vec![b"_sync".to_vec()], &b""[..]), "those of systems");
}

#[tokio::test]
async fn documents_come_compressed_on_demand() {
    let producer = producer(1, 1).await;
    let long = format!("{{\"n\":\"{}\"}}", "1".repeat(1000));
    for (key, value) in [("long", &long[..]), ("short", "{}")] {
        let value = Bytes::copy_from_slice(value.as_bytes());
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    }
    let client = connect(&producer).await;
    for compressed in [false, true] {
        let options = with(options(Start::Earliest, End::Now), |o| o.compressed = compressed);
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        let rows: Vec<Row> = read_all(&mut stream).await.into_iter().map(row).collect();
        let row = by_key(&rows, "long");
        let expected = if compressed {
            (Datatype::JSON.with(Datatype::SNAPPY), snappy::compress(long.as_bytes()).unwrap())
        } else {
            (Datatype::JSON, long.clone().into_bytes())
        };
        assert_eq!((row.datatype, row.value.clone()), expected);
        // Would not get any smaller.
        assert_eq!(by_key(&rows, "short").datatype, Datatype::JSON);
    }
}
