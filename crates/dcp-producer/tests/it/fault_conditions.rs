//! Every reaction under every condition: it happens where the condition holds, and nowhere else.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use dcp_producer::{OsoBackfill, Producer, WriteOptions, parse_rules};
use dcp_wire::message::{
    OpenFlags, SeqnoAdvanced, StreamAddress, StreamRequest, StreamRequestFlags,
};
use dcp_wire::{Feature, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde_json::{Value, json};

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);
const OPAQUE: Opaque = Opaque(1);

/// A reaction and what it makes of the stream of the first of two changes.
struct Case {
    reaction: Value,
    /// What it is ordered for.
    opcode: &'static str,
    seen: Vec<u8>,
    ending: Ending,
}

/// What comes after the last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Nothing: the last packet told the end.
    Ended,
    /// Nothing, for as long as one cares to wait.
    Silent,
    /// The connection is closed.
    Closed,
}

/// The packets of streams without a fault.
struct Plain {
    /// Answer, snapshot marker, mutation, end.
    first: Vec<Vec<u8>>,
    /// The same up to the second change: answer, marker, mutation, marker, mutation, end.
    both: Vec<Vec<u8>>,
    /// The first in the order of the keys: answer, begin, mutation, ...
    unordered: Vec<Vec<u8>>,
    map: Vec<u8>,
}

impl Plain {
    async fn of(producer: &Producer) -> Self {
        let first = read(connect(producer, false).await, 1).await;
        let both = read(connect(producer, false).await, 2).await;
        let unordered = read(connect(producer, true).await, 1).await;
        let opcodes = |packets: &[Vec<u8>]| packets.iter().map(|p| p[1]).collect::<Vec<_>>();
        assert_eq!(opcodes(&first), [0x53, 0x56, 0x57, 0x55]);
        assert_eq!(opcodes(&both), [0x53, 0x56, 0x57, 0x56, 0x57, 0x55]);
        assert_eq!(opcodes(&unordered)[..4], [0x53, 0x65, 0x57, 0x65]);
        let mut client = connect(producer, false).await;
        let map = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
        Self { first, both, unordered, map: map.frame().value.to_vec() }
    }

    fn cases(&self) -> Vec<Case> {
        use Ending::{Closed, Ended, Silent};
        let case = |reaction, opcode, seen, ending| Case { reaction, opcode, seen, ending };
        let [ok, marker, mutation, end] = &self.first[..] else { panic!("four packets") };
        let told = |packets: &[&[u8]]| packets.concat();
        let (markers, requests) = ("DCP_SNAPSHOT_MARKER", "DCP_STREAM_REQ");
        let map = answer(Status::NOT_MY_VBUCKET, &self.map);
        let no_map = json!({"not_my_vbucket": {"map": false}});
        let mut corrupt = marker.clone();
        corrupt[31] = !corrupt[31];
        let mut advanced = BytesMut::new();
        let to = StreamAddress { vbid: VB, opaque: OPAQUE, stream_id: None };
        SeqnoAdvanced { seqno: Seqno(1) }.encode(to, &mut advanced).unwrap();
        let (endless, alone) = (told(&[ok, marker, mutation]), told(&[ok, marker, end]));
        let cut = told(&[ok, marker, &mutation[..30]]);
        let advanced = told(&[ok, marker, &advanced, mutation, end]);
        let truncated = told(&[ok, &marker[..24], mutation, end]);
        let corrupt = told(&[ok, &corrupt, mutation, end]);
        let refused = answer(Status::ETMPFAIL, b"");
        let rollback = answer(Status::ROLLBACK, &9u64.to_be_bytes());
        let unmapped = answer(Status::NOT_MY_VBUCKET, b"");
        vec![
            case(json!("drop"), markers, told(&[ok, mutation, end]), Ended),
            case(json!({"delay": {"seconds": 3600}}), markers, ok.clone(), Silent),
            case(json!("half_open"), markers, ok.clone(), Silent),
            case(json!("disconnect"), markers, ok.clone(), Closed),
            case(json!({"disconnect_after": {"bytes": 30}}), "DCP_MUTATION", cut, Closed),
            case(json!({"answer": {"status": "ETMPFAIL"}}), requests, refused, Silent),
            case(json!("not_my_vbucket"), requests, map, Silent),
            case(no_map, requests, unmapped, Silent),
            case(json!({"rollback": {"seqno": 9}}), requests, rollback, Silent),
            case(json!("no_stream_end"), "DCP_STREAM_END", endless, Silent),
            case(json!({"items_past_end": {"items": 1}}), requests, self.both.concat(), Ended),
            case(json!("marker_without_items"), markers, alone, Ended),
            case(json!("seqno_advanced_before_item"), "DCP_MUTATION", advanced, Ended),
            case(
                json!({"oso_cut": {"items": 1}}),
                "DCP_OSO_SNAPSHOT",
                self.unordered[..3].concat(),
                Closed,
            ),
            case(json!({"truncate": {"bytes": 24}}), markers, truncated, Ended),
            case(json!({"corrupt": {"offset": 31}}), markers, corrupt, Ended),
        ]
    }
}

/// The answer to a stream request.
fn answer(status: Status, value: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    let datatype = if value.first() == Some(&b'{') {
        dcp_wire::Datatype::JSON
    } else {
        dcp_wire::Datatype::RAW
    };
    let answer = Frame::response(Opcode::DCP_STREAM_REQ, status).with_opaque(OPAQUE);
    answer.with_datatype(datatype).with_value(value).encode(&mut out).unwrap();
    out.to_vec()
}

const CONDITIONS: usize = 21;

/// Conditions for packets of an opcode on a connection to node 0 that is opened as `reader`, and
/// whether they hold. Of what a reaction is ordered for there is one packet.
fn conditions(opcode: &str, connection: u64) -> [(Value, bool); CONDITIONS] {
    [
        (json!({"opcode": ["DCP_DELETION", opcode]}), true),
        (json!({"opcode": "DCP_DELETION"}), false),
        (json!({"opcode": opcode, "vbucket": [1, 0]}), true),
        (json!({"opcode": opcode, "vbucket": 1}), false),
        (json!({"opcode": opcode, "connection": connection}), true),
        (json!({"opcode": opcode, "connection": connection + 1}), false),
        (json!({"opcode": opcode, "connection": "reader"}), true),
        (json!({"opcode": opcode, "connection": "read*"}), true),
        (json!({"opcode": opcode, "connection": "reade"}), false),
        (json!({"opcode": opcode, "node": 0}), true),
        (json!({"opcode": opcode, "node": 1}), false),
        (json!({"opcode": opcode, "nth": 1}), true),
        (json!({"opcode": opcode, "nth": 9}), false),
        (json!({"opcode": opcode, "every": 1}), true),
        (json!({"opcode": opcode, "every": 9}), false),
        (json!({"opcode": opcode, "probability": 1, "seed": 5}), true),
        (json!({"opcode": opcode, "probability": 0, "seed": 5}), false),
        (json!({"opcode": opcode, "any": [{"vbucket": 7}, {"node": 0}]}), true),
        (json!({"opcode": opcode, "any": [{"vbucket": 7}, {"node": 1}]}), false),
        (json!({"opcode": opcode, "not": {"vbucket": 7}}), true),
        (json!({"opcode": opcode, "not": {"vbucket": 0}}), false),
    ]
}

/// A cluster with one change on disk and one in memory in vBucket 0.
async fn cluster() -> Producer {
    let producer = start(|options| {
        options.nodes = 2;
        options.persist_delay = Duration::from_secs(3600);
    })
    .await;
    let mut config = producer.dcp_config();
    config.oso_backfill = OsoBackfill::Enabled;
    producer.set_dcp_config(config);
    let keys = (0..).map(|n| format!("key-{n}"));
    let mut keys = keys.filter(|key| producer.vbid_of(key.as_bytes()) == VB);
    for persisted in [true, false] {
        let key = keys.next().unwrap();
        let value = Bytes::from_static(b"{}");
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
        if persisted {
            producer.persist();
        }
    }
    producer
}

async fn connect(producer: &Producer, out_of_order: bool) -> RawClient {
    let mut client = RawClient::ready(producer, 0, &[Feature::XERROR, Feature::JSON]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    if out_of_order {
        client.control(b"enable_out_of_order_snapshots", b"true").await;
    }
    client
}

/// Asks for vBucket 0 from the beginning.
async fn ask(client: &mut RawClient, end: u64) {
    let request = StreamRequest {
        vbid: VB,
        opaque: OPAQUE,
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno::ZERO,
        end_seqno: Seqno(end),
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno::ZERO,
        snapshot_end: Seqno::ZERO,
        value: b"",
    };
    let mut out = BytesMut::new();
    request.encode(&mut out).unwrap();
    client.send(&out).await;
}

/// Every packet of a stream that ends.
async fn read(mut client: RawClient, end: u64) -> Vec<Vec<u8>> {
    ask(&mut client, end).await;
    let mut packets = Vec::new();
    loop {
        let packet = client.receive().await;
        packets.push(packet.bytes().to_vec());
        if packet.opcode() == Opcode::DCP_STREAM_END {
            return packets;
        }
    }
}

#[tokio::test]
async fn fault_reactions_happen_where_their_condition_holds_and_nowhere_else() {
    let producer = cluster().await;
    let plain = Plain::of(&producer).await;
    // Connections so far.
    let mut connections = 4;
    for case in plain.cases() {
        let out_of_order = case.opcode == "DCP_OSO_SNAPSHOT";
        let without = if out_of_order { &plain.unordered } else { &plain.first };
        for index in 0..CONDITIONS {
            connections += 1;
            let mut client = connect(&producer, out_of_order).await;
            let (condition, holds) = conditions(case.opcode, connections)[index].clone();
            let rule = json!([{"condition": condition, "reaction": case.reaction}]).to_string();
            producer.set_faults(parse_rules(&rule).unwrap()).unwrap();
            ask(&mut client, 1).await;
            let expected = if holds { case.seen.clone() } else { without.concat() };
            let seen = client.bytes(expected.len()).await;
            assert!(seen == expected, "{rule}:\n{seen:02x?}, not\n{expected:02x?}");
            match case.ending {
                Ending::Closed if holds => client.expect_end().await,
                // Once: it takes its time.
                Ending::Silent if index == 0 => client.expect_silence().await,
                _ => {}
            }
            assert_eq!(producer.fault_counts(), [u64::from(holds)], "{rule}");
            producer.set_faults(Vec::new()).unwrap();
        }
    }
}
