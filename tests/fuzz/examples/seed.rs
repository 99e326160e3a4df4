//! Writes inputs for the fuzz targets, made of the packets recorded from real servers.
//!
//! Usage: `cargo run -p dcp-fuzz --example seed -- FOLDER`; each target has a folder in it.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::{env, fs};

use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::plan::{Offset, Offsets};
use dcp_proto::{FailoverLog, Position, Snapshot};
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{Deletion, Mutation, SystemEvent, SystemEventId};
use dcp_wire::{
    Datatype, Frame, Header, MAX_BODY_LEN, Magic, Opaque, Opcode, Status, Vbid, snappy,
};

/// Longest input, in bytes: longer ones are slow to change anything about.
const LONGEST: usize = 2048;

/// Inputs of each target.
#[derive(Default)]
struct Seeds(BTreeMap<&'static str, BTreeSet<Vec<u8>>>);

impl Seeds {
    fn add(&mut self, target: &'static str, parts: &[&[u8]]) {
        let input = parts.concat();
        if input.len() <= LONGEST {
            self.0.entry(target).or_default().insert(input);
        }
    }
}

/// The first byte of an input of `documents`: each group of columns, and each other kind of table.
const TABLES: [u8; 11] = [0, 4, 8, 12, 16, 20, 24, 28, 1, 2, 3];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).ok_or("usage: seed FOLDER")?;
    let mut seeds = Seeds::default();
    let mut kinds = BTreeSet::new();
    for scenario in Scenario::load_all()? {
        of_scenario(&scenario, &mut seeds);
        let packets = scenario.events.iter().filter_map(|event| event.packet());
        for packet in packets {
            let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
            of_packet(packet, &frame, &mut kinds, &mut seeds);
        }
    }
    written_by_hand(&mut seeds);
    for (target, inputs) in &seeds.0 {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder)?;
        for input in inputs {
            fs::write(folder.join(format!("{:08x}", crc32fast::hash(input))), input)?;
        }
    }
    Ok(())
}

/// What the connections of a recording said, as long as it is short.
fn of_scenario(scenario: &Scenario, seeds: &mut Seeds) {
    for number in scenario.connections() {
        let events = scenario.events.iter().filter(|event| event.conn == number);
        let (mut stream, mut requests, mut items) = (Vec::new(), Vec::new(), Vec::new());
        for event in events {
            match &event.kind {
                EventKind::ClientPacket(packet) if requests.len() + packet.len() < LONGEST / 2 => {
                    let Ok(len) = u16::try_from(packet.len()) else { continue };
                    requests.push(0);
                    requests.extend_from_slice(&len.to_be_bytes());
                    requests.extend_from_slice(packet);
                }
                EventKind::ServerPacket(packet) if items.len() + packet.len() < LONGEST / 2 => {
                    stream.extend_from_slice(packet);
                    items.extend(item(packet).unwrap_or_default());
                }
                _ => {}
            }
        }
        if !stream.is_empty() {
            seeds.add("framing", &[&[3 | 6 << 2], &stream]);
        }
        if !requests.is_empty() {
            // With nothing done before it, and on a connection that is ready.
            seeds.add("cluster", &[&[0xfe], &requests]);
            seeds.add("cluster", &[&[0xe0], &requests]);
        }
        if !items.is_empty() {
            for how in [0, 4, 0x44, 0xe4] {
                seeds.add("client", &[&[how, 1], &items]);
            }
        }
    }
}

/// A stream's message as one of the stream that the target has open, and its arrival.
fn item(packet: &[u8]) -> Option<Vec<u8>> {
    let (mut frame, _) = Frame::parse(packet, MAX_BODY_LEN).ok()??;
    if frame.header.magic != Magic::CLIENT_REQUEST || !frame.header.opcode.is_dcp() {
        return None;
    }
    frame = frame.with_vbid(Vbid(0)).with_opaque(Opaque(0x1_0000));
    let mut packet = Vec::new();
    frame.encode(&mut packet).ok()?;
    let len = u8::try_from(packet.len()).ok()?;
    Some([&[48, len], &packet[..], &[58]].concat())
}

/// What one packet and its parts are.
fn of_packet<'a>(
    packet: &[u8],
    frame: &Frame<'a>,
    kinds: &mut BTreeSet<(Magic, Opcode, u16, u8, bool, u8)>,
    seeds: &mut Seeds,
) {
    let Header { magic, opcode, extras_len, datatype, .. } = frame.header;
    let status = if magic.is_response() { frame.header.vbid_or_status } else { 0 };
    if kinds.insert((magic, opcode, status, extras_len, frame.value.is_empty(), datatype.0)) {
        seeds.add("messages", &[&[6], packet]);
    }
    let value = match opcode {
        Opcode::DCP_MUTATION => Mutation::decode(frame).map_or(&b""[..], |item| item.value),
        Opcode::DCP_DELETION => Deletion::decode(frame).map_or(&b""[..], |item| item.value),
        _ => b"",
    };
    of_value(value, datatype, seeds);
    if let Ok(SystemEvent { id, version, key, value, seqno }) = SystemEvent::decode(frame) {
        let place = SystemEventId::KNOWN.iter().position(|&known| known == id).unwrap_or(0);
        let seqno = seqno.0.to_be_bytes();
        let head = [u8::try_from(place).unwrap_or(0), version];
        seeds.add("system_events", &[&head, &[short_len(key)], key, &seqno, value]);
    }
    let is_answer = magic.is_response() && frame.header.status() == Status::SUCCESS;
    match opcode {
        Opcode::GET_CLUSTER_CONFIG if is_answer => seeds.add("cluster_config", &[frame.value]),
        Opcode::GET_COLLECTIONS_MANIFEST if is_answer => seeds.add("manifest", &[frame.value]),
        Opcode::SASL_AUTH | Opcode::SASL_STEP => {
            for how in [0, 1, 2, 7, 12] {
                seeds.add("sasl", &[&[how], frame.value]);
            }
        }
        Opcode::DCP_STREAM_REQ if is_answer => of_log(frame.value, seeds),
        _ => {}
    }
}

fn of_value(value: &[u8], datatype: Datatype, seeds: &mut Seeds) {
    if value.is_empty() || value.len() > 200 {
        return;
    }
    for table in TABLES {
        seeds.add("documents", &[&[table, 0x10, datatype.0, b'k', short_len(value)], value]);
    }
    if datatype.contains(Datatype::SNAPPY) {
        seeds.add("snappy", &[value]);
        if let Ok(value) = snappy::decompress(value, MAX_BODY_LEN) {
            of_value(&value, Datatype(datatype.0 & !Datatype::SNAPPY.0), seeds);
        }
    } else if datatype.contains(Datatype::XATTR) {
        seeds.add("xattrs", &[value]);
    }
}

/// Checkpoints of one position on these branches.
fn of_log(value: &[u8], seeds: &mut Seeds) {
    let Ok(log) = FailoverLog::decode(value) else { return };
    let seqno = log.newest().seqno;
    let position = Position {
        seqno,
        snapshot: Snapshot { start: seqno, end: seqno },
        failover_log: Some(log.clone()),
        ..Position::EARLIEST
    };
    let mut checkpoint = Checkpoint::new("6cf5", StoredFilter::default());
    checkpoint.set(Vbid(3), position);
    let document = checkpoint.to_json();
    seeds.add("checkpoint", &[&[0], document.as_bytes()]);
    if let Some((_, content)) = document.split_once(r#""content":"#) {
        let content = content.strip_suffix('}').unwrap_or(content);
        seeds.add("checkpoint", &[&[3], content.as_bytes()]);
        let tail = br#""ends":[[3,9]],"rolled_back":[3],"is_followed":true,"persisted_only":false,"on_rollback":"emit","retry_timeout_ms":5}"#;
        seeds.add("checkpoint", &[&[7], content.as_bytes(), b"\n", tail]);
        let older = content
            .replace(r#""filter":{"system_documents":true}"#, r#""filter":"0000000000000001""#);
        seeds.add("checkpoint", &[&[2], older.as_bytes()]);
    }
    let mut offsets = Offsets::new("6cf5", StoredFilter::default(), 2);
    offsets.set(Vbid(1), Offset { seqno, vbuuid: log.newest().vbuuid, epoch: 1 });
    let document = offsets.to_json();
    seeds.add("checkpoint", &[&[4], document.as_bytes()]);
    if let Some((content, _)) = document.rsplit_once(r#","c":"#) {
        seeds.add("checkpoint", &[&[5], content.as_bytes(), b"}"]);
    }
}

/// What no recording has.
fn written_by_hand(seeds: &mut Seeds) {
    for text in [
        "couchbase://node1,[fd00::2]:9000/travel?timeout=5",
        "couchbases://node1.example.com",
        "couchbase://10.0.0.1:11210,10.0.0.2/b%20c/",
        "couchbase://a?x=%41&y",
        "couchbase://u:p@host",
        "http://host:8091",
        "couchbase://host:8091",
    ] {
        seeds.add("connection_string", &[text.as_bytes()]);
    }
    let external = br#"{"rev":3,"revEpoch":1,"name":"default","uuid":"ab","nodesExt":[{"services":{"kv":11210,"kvSSL":11207,"mgmt":8091},"hostname":"n1","thisNode":true,"alternateAddresses":{"external":{"hostname":"e1","ports":{"kv":9000}}}},{"services":{"kv":11210},"hostname":"[::2]"}],"vBucketServerMap":{"serverList":["n1:11210","[::2]:11210"],"numReplicas":1,"vBucketMap":[[0,1],[1,-1]]},"bucketCapabilities":["collections","couchapi"],"collectionsManifestUid":"1f"}"#;
    seeds.add("cluster_config", &[external]);
    let manifest = br#"{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"},{"name":"a","uid":"8","maxTTL":5}]},{"name":"s","uid":"8","collections":[{"name":"b","uid":"9"}]}]}"#;
    seeds.add("manifest", &[manifest]);
    for (how, text) in [
        (2, "n,,n=user,r=abcdef\nc=biws,r=%,p=AAAAAAAAAAAAAAAAAAAAAAAAAAA="),
        (2, "n,,n=u=2Cv=3D,r=abc\nc=eSws,r=%,p=AAAA"),
        (7, "r=%xyz,s=c2FsdHktc2FsdA==,i=1000\nv=AAAAAAAAAAAAAAAAAAAAAAAAAAA="),
        (7, "r=%xyz,s=c2FsdHktc2FsdA==,i=4294967295\ne=invalid-proof"),
        (1, "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"),
        (12, "\u{1}\u{0}\u{0}user"),
        (0, "\0user\0password"),
    ] {
        for hash in 0..3_u8 {
            seeds.add("sasl", &[&[how | hash << 4], text.as_bytes()]);
        }
    }
    for value in [
        r#"{"s":"text","b":true,"t":1,"h":-2,"i":3,"l":9007199254740993,"f":1.5,"d":-2e3}"#,
        r#"{"m":1.2345,"w":"123.4","y":"2024-02-29","z":"2024-01-01T00:00:00Z","x":"AQI="}"#,
        r#"{"n":"2024-01-01T00:00:00","v":{"a":[1,null]},"a":[1,null,3],"o":{"k":1.0}}"#,
        r#"{"r":{"s":"x","a":[{"i":1,"v":[]}],"o":{"k":["a"]}}}"#,
        r#"{"s":"\ud83d\ude00\n","l":1e2,"d":NaN}"#,
    ] {
        let document = value.as_bytes();
        let packed = snappy::compress(document).unwrap_or_default();
        seeds.add("snappy", &[&packed]);
        for table in TABLES {
            seeds.add("documents", &[&[table, 0, 1, short_len(document)], document]);
            seeds.add("documents", &[&[table, 0, 3, short_len(&packed)], &packed]);
        }
    }
    // Every answer as it should be, for each way of setting up.
    for how in 0..16 {
        seeds.add("setup", &[&[how], &[0; 24]]);
        seeds.add("setup", &[&[how], &[0, 0, 0, 24 << 3, 0, 27 << 3, 0, 28 << 3, 0, 0, 0, 0]]);
    }
    // Snapshots of items that rise, deletions, events, ends, and what applications do.
    for how in [0, 2, 4, 0x24, 0x44, 0xc4] {
        let play =
            [17, 0, 9, 1, 0, 0, 0, 58, 12, 0, 58, 44, 3, 27, 0, 58, 50, 1, 40, 58, 31, 0, 58];
        seeds.add("client", &[&[how, 0], &play]);
        let play = [17, 0, 20, 2, 0, 0, 41, 1, 22, 0, 0, 0, 12, 53, 9, 58, 57, 28, 2, 1, 58];
        seeds.add("client", &[&[how, 0], &play]);
    }
    for opcode in 0..Opcode::KNOWN.len() {
        let opcode = u8::try_from(opcode).unwrap_or(0);
        for shape in [0, 9, 0x4a, 0x5b, 0x0c] {
            seeds.add("cluster", &[&[0xe0], &[0x40, opcode, 0, shape]]);
            seeds.add("cluster", &[&[0x00], &[0x41, opcode, 1, shape, 0, 0, 0, 1]]);
        }
    }
}

/// Length of a part that is short.
fn short_len(part: &[u8]) -> u8 {
    u8::try_from(part.len()).unwrap_or(u8::MAX - 1)
}
