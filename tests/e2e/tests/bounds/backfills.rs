//! Clients that read a bucket from disk more slowly than the cluster could send it.

use std::sync::Arc;
use std::time::Duration;

use dcp_meter::{Meter, alone};
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_wire::message::{
    Open, OpenFlags, SnapshotFlags, SnapshotMarker, StreamRequest, StreamRequestFlags,
};
use dcp_wire::{Datatype, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::clients::ready;

/// Documents of the buckets that are compared.
const FEW: usize = 8_000;
const MANY: usize = 32_000;

/// Clients of each bucket at a time.
const CLIENTS: usize = 4;

/// What may be held more of the larger bucket. A pointer to each document for each client would be
/// three times as much.
const MORE: usize = 256 << 10;

/// A cluster with a bucket that is read from disk.
async fn on_disk(documents: usize, keeps_compressed: bool) -> Producer {
    let mut options = ProducerOptions::default();
    (options.vbuckets, options.keeps_compressed) = (1, keeps_compressed);
    let producer = Producer::start(options).await.expect("loopback ports are there");
    for n in 0..documents {
        let value = vec![b'v'; 100].into();
        producer.upsert(&n.to_be_bytes(), value, WriteOptions::default()).expect("there is room");
    }
    producer.persist();
    producer
}

/// Reads the bucket in bursts. Only TCP limits what the cluster sends meanwhile.
async fn read_slowly(producer: &Producer, name: &[u8], documents: usize) {
    let mut client = ready(producer).await;
    let open = Open { flags: OpenFlags::PRODUCER, name, value: b"", datatype: Datatype::RAW };
    let request = StreamRequest {
        vbid: Vbid(0),
        opaque: Opaque(1),
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno::ZERO,
        end_seqno: Seqno::MAX,
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno::ZERO,
        snapshot_end: Seqno::ZERO,
        value: b"",
    };
    let mut packets = Vec::new();
    open.encode(Opaque(0), &mut packets).expect("small");
    request.encode(&mut packets).expect("small");
    client.send(&packets).await;
    for _ in 0..2 {
        assert_eq!(client.receive().await.status(), Status::SUCCESS);
    }
    let marker = client.receive().await;
    let marker = SnapshotMarker::decode(&marker.frame()).expect("a marker");
    assert!(marker.flags.contains(SnapshotFlags::DISK), "{marker:?}");
    for read in 0..documents {
        if read.is_multiple_of(1000) {
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(client.receive().await.opcode(), Opcode::DCP_MUTATION);
    }
}

/// The most that is held beyond the bucket while it is read.
async fn held(documents: usize, keeps_compressed: bool) -> usize {
    let producer = Arc::new(on_disk(documents, keeps_compressed).await);
    let mut clients = JoinSet::new();
    let meter = Meter::start();
    for number in 0..CLIENTS {
        let (producer, name) = (Arc::clone(&producer), format!("reader {number}"));
        clients.spawn(async move { read_slowly(&producer, name.as_bytes(), documents).await });
    }
    while let Some(done) = clients.join_next().await {
        done.expect("everything is read");
    }
    let most = meter.most();
    // Not to be freed while the next one is measured.
    producer.shutdown().await;
    most
}

#[test]
fn slow_readers_of_a_bucket_on_disk_are_held_no_more_for_if_it_is_larger() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    for keeps_compressed in [false, true] {
        let held = |documents| runtime.block_on(held(documents, keeps_compressed));
        let (few, many) = (held(FEW), held(MANY));
        let figures = format!(
            "compressed: {keeps_compressed}, {FEW} documents: {} KiB held, {MANY}: {} KiB",
            few >> 10,
            many >> 10
        );
        eprintln!("{figures}");
        assert!(many <= few + MORE, "{figures}");
    }
}
