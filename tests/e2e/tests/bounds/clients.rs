//! Clients that send packets of every layout to a cluster.

use std::time::Duration;

use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_wire::message::{
    BufferAck, CloseStream, Control, ObserveSeqno, Open, OpenFlags, StreamAddress, StreamRequest,
    StreamRequestFlags,
};
use dcp_wire::{
    Datatype, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::layouts::{headers, layouts};
use crate::messages;
use crate::tally::{Outcome, PATIENCE, PROBE, Report, SOON, Tally};
use dcp_meter::{Meter, alone};

/// What the cluster may hold beyond what it was sent: what an idle connection reads into and writes
/// from, and 64 KiB.
const BEYOND: usize = (64 << 10) + (64 << 10) + (64 << 10);

/// A value next to which what a connection holds anyway is little.
const LARGE: usize = 4 << 20;

/// Connects and logs in.
pub(crate) async fn ready(producer: &Producer) -> Peer<TcpStream> {
    let address = producer.connection_string();
    let address = address.strip_prefix("couchbase://").expect("as clients take it");
    let socket = TcpStream::connect(address).await.expect("the cluster listens");
    socket.set_nodelay(true).expect("a socket");
    let mut client = Peer::new(socket);
    let features: Vec<u8> = [Feature::XERROR, Feature::XATTR, Feature::JSON, Feature::SNAPPY]
        .iter()
        .flat_map(|feature| feature.0.to_be_bytes())
        .collect();
    client.ask_for(Frame::request(Opcode::HELLO).with_value(&features), Status::SUCCESS).await;
    client.log_in("Administrator", "password", "default").await;
    client
}

/// Sends a packet and a noop, which the cluster answers at any time.
async fn probe(client: &mut Peer<TcpStream>, packet: &[u8]) -> Outcome {
    let noop = encoded(&Frame::request(Opcode::NOOP).with_opaque(PROBE));
    if client.io.write_all(packet).await.and(client.io.write_all(&noop).await).is_err() {
        return Outcome::Closed;
    }
    let answer = async {
        while let Some(answer) = client.next().await {
            if (answer.opaque(), answer.opcode()) == (PROBE, Opcode::NOOP) {
                return Outcome::Tolerated;
            }
        }
        Outcome::Closed
    };
    let is_whole =
        matches!(Frame::parse(packet, MAX_BODY_LEN), Ok(Some((_, len))) if len == packet.len());
    let patience = if is_whole { PATIENCE } else { SOON };
    timeout(patience, answer).await.unwrap_or(Outcome::Waited)
}

/// Says that nothing more comes, and waits until the connection is closed.
async fn finish(mut client: Peer<TcpStream>) {
    let _ = client.io.shutdown().await;
    let closed = async { while client.next().await.is_some() {} };
    timeout(PATIENCE, closed).await.expect("it is not closed");
}

/// Packets as they should be: whether DCP is open before each, its name and itself.
fn packets() -> Vec<(bool, &'static str, Vec<u8>)> {
    let own = |frame: Frame<'_>| encoded(&frame.with_opaque(Opaque(7)));
    let made = |encode: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        encode(&mut out);
        out
    };
    let to = StreamAddress { vbid: Vbid(0), opaque: Opaque(9), stream_id: None };
    let open =
        Open { flags: OpenFlags::PRODUCER, name: b"reader", value: b"", datatype: Datatype::RAW };
    let stream = StreamRequest {
        vbid: Vbid(0),
        opaque: Opaque(9),
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno(1),
        end_seqno: Seqno(5),
        vbuuid: Vbuuid(1),
        snapshot_start: Seqno(1),
        snapshot_end: Seqno(1),
        value: br#"{"collections":["0"]}"#,
    };
    let control = Control { key: b"connection_buffer_size", value: b"65536" };
    vec![
        (
            false,
            "HELLO",
            own(Frame::request(Opcode::HELLO).with_key(b"a").with_value(&[0, 8, 0, 6])),
        ),
        (
            false,
            "SASL_AUTH",
            own(Frame::request(Opcode::SASL_AUTH).with_key(b"PLAIN").with_value(b"\0u\0p")),
        ),
        (
            false,
            "SCRAM",
            own(Frame::request(Opcode::SASL_AUTH)
                .with_key(b"SCRAM-SHA1")
                .with_value(b"n,,n=u,r=abcdef")),
        ),
        (false, "SELECT_BUCKET", own(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default"))),
        (false, "GET_CLUSTER_CONFIG", own(Frame::request(Opcode::GET_CLUSTER_CONFIG))),
        (false, "manifest", own(Frame::request(Opcode::GET_COLLECTIONS_MANIFEST))),
        (false, "STAT", own(Frame::request(Opcode::STAT).with_key(b"vbucket-seqno"))),
        (
            false,
            "OBSERVE_SEQNO",
            made(&|out| {
                ObserveSeqno { vbuuid: Vbuuid(1) }.encode(Vbid(0), Opaque(7), out).expect("small");
            }),
        ),
        (false, "GET", own(Frame::request(Opcode::GET).with_key(b"key"))),
        (
            false,
            "SET",
            own(Frame::request(Opcode::SET)
                .with_key(b"key")
                .with_extras(&[0; 8])
                .with_value(b"{}")
                .with_datatype(Datatype::JSON)),
        ),
        (
            false,
            "compressed SET",
            own(Frame::request(Opcode::SET)
                .with_key(b"key")
                .with_extras(&[0; 8])
                .with_value(&[4, 12, b'a', b'b', b'c', b'd'])
                .with_datatype(Datatype::SNAPPY)),
        ),
        (false, "DELETE", own(Frame::request(Opcode::DELETE).with_key(b"key"))),
        (false, "DCP_OPEN", made(&|out| open.encode(Opaque(7), out).expect("small"))),
        (true, "DCP_CONTROL", made(&|out| control.encode(Opaque(7), out).expect("small"))),
        (true, "DCP_STREAM_REQ", made(&|out| stream.encode(out).expect("small"))),
        (true, "DCP_CLOSE_STREAM", made(&|out| CloseStream.encode(to, out).expect("small"))),
        (true, "DCP_BUFFER_ACK", made(&|out| BufferAck { bytes: 100 }.encode(out).expect("small"))),
        (true, "DCP_GET_FAILOVER_LOG", own(Frame::request(Opcode::DCP_GET_FAILOVER_LOG))),
        (
            true,
            "GET_ALL_VB_SEQNOS",
            own(Frame::request(Opcode::GET_ALL_VB_SEQNOS).with_extras(&[0, 0, 0, 1])),
        ),
    ]
}

async fn play(producer: &Producer, tally: &mut Tally) {
    for (is_dcp, name, packet) in packets().into_iter().chain(messages::of_clients()) {
        let open = packets().into_iter().find(|(_, name, _)| *name == "DCP_OPEN");
        let (_, _, open) = open.expect("it is there");
        let mut client = None;
        let mut layouts = layouts(&packet).into_iter().peekable();
        while let Some(layout) = layouts.peek() {
            let mut peer = match client.take() {
                Some(client) => client,
                None => {
                    let mut client = ready(producer).await;
                    if is_dcp {
                        client.send(&open).await;
                        assert_eq!(client.receive().await.status(), Status::SUCCESS);
                    }
                    client
                }
            };
            let probing = async |layout: &[u8]| probe(&mut peer, layout).await;
            let report = Report::of(layout.clone(), probing).await;
            if tally.add(name, &report, BEYOND) {
                layouts.next();
            }
            match report.outcome {
                Outcome::Tolerated => client = Some(peer),
                Outcome::Closed => {}
                Outcome::Waited => finish(peer).await,
            }
        }
    }
}

#[test]
fn a_cluster_answers_or_closes_whatever_the_layout_and_holds_little() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let tally = runtime.expect("a runtime").block_on(async {
        let mut options = ProducerOptions::default();
        options.vbuckets = 1;
        let producer = Producer::start(options).await.expect("loopback ports are there");
        producer.upsert(b"other", "1".into(), WriteOptions::default()).expect("a document");
        let mut other = ready(&producer).await;
        let mut tally = Tally::default();
        play(&producer, &mut tally).await;
        // Others are not disturbed.
        other.ask_for(Frame::request(Opcode::GET).with_key(b"other"), Status::SUCCESS).await;
        tally
    });
    tally.judge([9_760, 1_001, 201]);
}

#[test]
fn a_large_packet_takes_a_cluster_four_times_its_size_at_most() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (layouts, most) = runtime.expect("a runtime").block_on(async {
        let mut options = ProducerOptions::default();
        options.vbuckets = 1;
        let producer = Producer::start(options).await.expect("loopback ports are there");
        let value = vec![b'v'; LARGE];
        let set = Frame::request(Opcode::SET).with_key(b"key").with_extras(&[0; 8]);
        let packet = encoded(&set.with_value(&value));
        let (headers, mut most) = (headers(&packet), 0);
        for header in &headers {
            let layout = &[header, &packet[header.len()..]].concat()[..];
            let mut client = ready(&producer).await;
            let meter = Meter::start();
            let outcome = probe(&mut client, layout).await;
            let held = meter.most();
            assert!(
                held <= 4 * layout.len() + BEYOND,
                "{:02x?} of {} bytes: {held}",
                &layout[..24],
                layout.len()
            );
            most = most.max(held);
            if outcome == Outcome::Waited {
                finish(client).await;
            }
        }
        (headers.len(), most)
    });
    eprintln!("{layouts} layouts of {} KiB: {} KiB at most", LARGE >> 10, most >> 10);
    assert!(most < MAX_BODY_LEN, "{} MiB", most >> 20);
    assert!(most > LARGE, "no large packet came through");
}

/// Asks for a document again and again, reading nothing, until the cluster closes the connection.
async fn flood(mut client: Peer<TcpStream>) {
    let requests = encoded(&Frame::request(Opcode::GET).with_key(b"large")).repeat(1000);
    let asking = async { while client.io.write_all(&requests).await.is_ok() {} };
    timeout(PATIENCE, asking).await.expect("it may flood the cluster for ever");
}

#[test]
fn clients_that_ask_for_much_and_read_nothing_are_held_little_for() {
    const CLIENTS: usize = 16;
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let most = runtime.expect("a runtime").block_on(async {
        let mut options = ProducerOptions::default();
        (options.vbuckets, options.idle_timeout) = (1, Duration::from_millis(500));
        let producer = Producer::start(options).await.expect("loopback ports are there");
        let large = vec![b'v'; 1 << 20];
        producer.upsert(b"large", large.into(), WriteOptions::default()).expect("a document");
        let mut floods = tokio::task::JoinSet::new();
        let meter = Meter::start();
        for _ in 0..CLIENTS {
            floods.spawn(flood(ready(&producer).await));
        }
        while let Some(over) = floods.join_next().await {
            over.expect("it does not panic");
        }
        meter.most()
    });
    // What the first thousand requests of each ask for would be 16 GB. Twice an answer and what is
    // written at a time, as a buffer grows.
    assert!(most < CLIENTS * (4 << 20), "{} MiB", most >> 20);
}
