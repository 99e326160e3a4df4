//! Durable writes as recorded: the same writes are made, the same clients ask for them, and every
//! packet they get is held against the server's.
//!
//! Versions, times, branches and opaques are of each cluster's own making and left out.

use bytes::Bytes;
use dcp_producer::{Producer, WriteOptions};
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{DurabilityLevel, StreamRequest};
use dcp_wire::{CollectionId, Frame, MAX_BODY_LEN, Opcode, Status, Vbuuid};
use serde_json::Value;

use super::raw_client::RawClient;
use super::start;

fn parse(packet: &[u8]) -> Frame<'_> {
    Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap().0
}

fn is_stream_message(opcode: Opcode) -> bool {
    matches!(opcode.0, 0x56..=0x59 | 0x5f | 0x60 | 0x62..=0x64)
}

/// A stream message without what each cluster makes by itself.
fn comparable(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    // vBucket, opaque and CAS.
    packet[6..8].fill(0);
    packet[12..24].fill(0);
    // When it was deleted: in a prepare that is in the place of the expiry.
    if packet[1] == Opcode::DCP_DELETION.0 && packet[4] == 21 {
        packet[40..44].fill(0);
    } else if packet[1] == Opcode::DCP_PREPARE.0 {
        packet[44..48].fill(0);
    }
    packet
}

/// Seqnos of documents' versions and commits that the streams show, by key.
fn shown(scenario: &Scenario) -> Vec<(Vec<u8>, u64)> {
    let packets = scenario.events.iter().filter_map(|event| match &event.kind {
        EventKind::ServerPacket(packet) => Some(parse(packet)),
        _ => None,
    });
    let seqno = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
    packets
        .filter_map(|frame| match frame.header.opcode.0 {
            0x57 | 0x58 => Some((frame.key.to_vec(), seqno(&frame.extras[..8]))),
            0x62 => Some((frame.key.to_vec(), seqno(&frame.extras[8..]))),
            _ => None,
        })
        .collect()
}

/// A write, as it was recorded.
struct Write {
    key: String,
    /// `None` for a removal.
    value: Option<Bytes>,
    /// Where it began; `None` for one that was given up.
    seqno: Option<u64>,
    is_durable: bool,
}

fn writes(scenario: &Scenario) -> Vec<Write> {
    let ops = scenario.expected["kv_ops"].as_array().unwrap();
    let seqno = |op: &Value| op["seqno"].as_u64();
    let shown = shown(scenario);
    let mut writes = Vec::new();
    for (at, op) in ops.iter().enumerate() {
        let key = op["key"].as_str().unwrap().to_owned();
        let hex = op["value"].as_str().and_then(|value| value.strip_prefix("hex:"));
        let value = hex.map(|hex| Bytes::from(dcp_test::parse_hex(hex).unwrap()));
        let began = seqno(op);
        let next = ops.get(at + 1).and_then(seqno);
        let takes_two = began.is_some_and(|began| {
            next == Some(began + 2) || shown.contains(&(key.clone().into_bytes(), began + 1))
        });
        writes.push(Write { key, value, seqno: began, is_durable: began.is_none() || takes_two });
    }
    writes
}

/// Does a write, and says where it began if it is held until it is completed.
fn begin(producer: &Producer, write: &Write) -> u64 {
    let (key, options) = (write.key.as_bytes(), WriteOptions::default());
    let token = if write.is_durable {
        producer.prepare(key, write.value.clone(), options, DurabilityLevel::MAJORITY)
    } else {
        match write.value.clone() {
            Some(value) => producer.upsert(key, value, options),
            None => producer.remove(key, options),
        }
    };
    token.unwrap().seqno.0
}

fn complete(producer: &Producer, write: &Write) {
    let key = write.key.as_bytes();
    if !write.is_durable {
        return;
    }
    if write.seqno.is_some() {
        producer.commit(key, CollectionId::DEFAULT).unwrap();
    } else {
        producer.abort(key, CollectionId::DEFAULT).unwrap();
    }
}

/// Says on a connection what was said when it was recorded, up to its stream request.
async fn connect(producer: &Producer, scenario: &Scenario, conn: u32) -> RawClient {
    let mut client = RawClient::connect(producer, 0).await;
    let vbuuid = producer.failover_logs().into_values().next().unwrap()[0].vbuuid;
    for event in scenario.events.iter().filter(|event| event.conn == conn) {
        let EventKind::ClientPacket(packet) = &event.kind else { continue };
        let frame = parse(packet);
        match frame.header.opcode {
            Opcode::SASL_AUTH => client.log_in("Administrator", "password").await,
            Opcode::DCP_SEQNO_ACK => return client,
            _ => {
                let mut ours = packet.clone();
                if let Ok(request) = StreamRequest::decode(&frame) {
                    // There is one vBucket.
                    ours[6..8].fill(0);
                    if request.vbuuid != Vbuuid(0) {
                        ours[48..56].copy_from_slice(&vbuuid.0.to_be_bytes());
                    }
                }
                client.send(&ours).await;
                let answer = client.receive().await;
                assert_eq!(answer.opcode(), frame.header.opcode);
                assert_eq!(answer.status(), Status::SUCCESS, "{}", scenario.name);
            }
        }
    }
    client
}

/// Stream messages of a connection, as recorded.
fn recorded(scenario: &Scenario, conn: u32) -> Vec<Vec<u8>> {
    let of_it = scenario.events.iter().filter(|event| event.conn == conn);
    let packets = of_it.filter_map(|event| match &event.kind {
        EventKind::ServerPacket(packet) => Some(packet),
        _ => None,
    });
    let is_response = |packet: &&Vec<u8>| parse(packet).header.magic.is_response();
    let messages = packets.filter(|packet| !is_response(packet));
    let messages = messages.filter(|packet| is_stream_message(parse(packet).header.opcode));
    messages.map(|packet| comparable(packet)).collect()
}

async fn next_message(client: &mut RawClient) -> Vec<u8> {
    loop {
        let packet = client.receive().await;
        if is_stream_message(packet.opcode()) {
            return comparable(packet.bytes());
        }
    }
}

/// One vBucket that persists when it is told to.
async fn one_vbucket() -> Producer {
    start(|options| {
        (options.vbuckets, options.persist_delay) = (1, std::time::Duration::from_secs(3600));
    })
    .await
}

#[tokio::test]
async fn durable_writes_on_disk_are_sent_as_recorded() {
    for source in ["disk", "memory"] {
        for client in ["none", "syncwrites", "syncrepl"] {
            let name = format!("8.0.2-sync-{source}-{client}");
            let scenario = Scenario::load(&name).unwrap();
            let producer = one_vbucket().await;
            let mut made = 0;
            for write in writes(&scenario) {
                let seqno = begin(&producer, &write);
                // The token tells where a durable write began.
                assert!(write.seqno.is_none_or(|recorded| recorded == seqno), "{name}: {seqno}");
                complete(&producer, &write);
                made += 1;
            }
            assert_eq!(made, 6, "{name}");
            producer.persist();
            let mut client = connect(&producer, &scenario, 0).await;
            let expected = recorded(&scenario, 0);
            assert!(expected.len() >= 5, "{name}");
            for (at, message) in expected.iter().enumerate() {
                assert_eq!(next_message(&mut client).await, *message, "{name}, message {at}");
            }
        }
    }
}

#[tokio::test]
async fn prepare_is_sent_to_replicas_and_its_commit_to_other_clients() {
    let scenario = Scenario::load("8.0.2-sync-live-replica-ack").unwrap();
    let producer = one_vbucket().await;
    // What was there before: a deletion as the third version of a document, and so on.
    let options = WriteOptions::default();
    let write = |key: &str| producer.upsert(key.as_bytes(), "{}".into(), options).unwrap();
    ["deleted", "deleted"].into_iter().for_each(|key| _ = write(key));
    producer.remove(b"deleted", options).unwrap();
    ["a", "b", "c", "d", "e"].into_iter().for_each(|key| _ = write(key));
    producer.prepare(b"gone", Some(Bytes::new()), options, DurabilityLevel::MAJORITY).unwrap();
    producer.abort(b"gone", CollectionId::DEFAULT).unwrap();
    producer.persist();
    let mut replica = connect(&producer, &scenario, 0).await;
    let mut other = connect(&producer, &scenario, 1).await;
    let value = Bytes::from_static(br#"{"live":1}"#);
    producer.prepare(b"live-dur", Some(value), options, DurabilityLevel::MAJORITY).unwrap();
    let expected = recorded(&scenario, 0);
    let mut got = vec![next_message(&mut replica).await, next_message(&mut replica).await];
    producer.commit(b"live-dur", CollectionId::DEFAULT).unwrap();
    got.extend([next_message(&mut replica).await, next_message(&mut replica).await]);
    assert_eq!(got, expected);
    let expected = recorded(&scenario, 1);
    let got = [next_message(&mut other).await, next_message(&mut other).await];
    assert_eq!(got[..], expected[..]);
}

/// The seqno of a change, or up to which there is none.
fn seqno_of(message: &[u8]) -> Option<u64> {
    let frame = parse(message);
    let at = match frame.header.opcode.0 {
        0x56 => return None,
        // Commits and aborts begin with that of the prepare.
        0x62 | 0x63 => 8,
        _ => 0,
    };
    frame.extras.get(at..)?.first_chunk().map(|seqno| u64::from_be_bytes(*seqno))
}

/// Four clients look on: with and without durable writes, as a replica, and with collections.
#[tokio::test]
async fn durable_writes_are_sent_as_each_client_requested() {
    let scenario = Scenario::load("8.0.2-sync-live").unwrap();
    let producer = one_vbucket().await;
    let mut clients = Vec::new();
    for conn in 0..4 {
        let mut expected = recorded(&scenario, conn);
        if conn == 1 {
            // It looked while the first write went on, and the others did not.
            expected.retain(|message| seqno_of(message).is_some());
        }
        expected.reverse();
        clients.push((connect(&producer, &scenario, conn).await, expected));
    }
    let high_seqno = || *producer.high_seqnos().values().next().unwrap();
    for write in writes(&scenario) {
        begin(&producer, &write);
        if write.seqno.is_none() {
            // All looked while this one went on.
            see(&mut clients, high_seqno().0).await;
        }
        complete(&producer, &write);
        see(&mut clients, high_seqno().0).await;
    }
    assert!(clients.iter().all(|(_, expected)| expected.is_empty()));
}

/// Reads what the clients are to see up to a seqno.
async fn see(clients: &mut [(RawClient, Vec<Vec<u8>>)], seqno: u64) {
    for (conn, (client, expected)) in clients.iter_mut().enumerate() {
        let is_due = |message: &Vec<u8>| seqno_of(message).is_some_and(|at| at <= seqno);
        while let Some(last) = expected.iter().rposition(|message| seqno_of(message).is_some())
            && is_due(&expected[last])
        {
            for expected in expected.split_off(last).into_iter().rev() {
                let mut message = next_message(client).await;
                while conn == 1 && seqno_of(&message).is_none() {
                    message = next_message(client).await;
                }
                assert_eq!(message, expected, "connection {conn}");
            }
        }
    }
}
