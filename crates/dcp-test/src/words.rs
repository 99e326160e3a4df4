//! A short textual notation for stream messages, to write and to compare them.
//!
//! `MARK [0-3] 0x5 visible 3`, `MUT 1 key value`, `DEL 2 key`, `SYS 3 begin 9`, `ADV 4`, `OSO
//! start`, `END 0`, `NOOP`, followed by ` sid 7` on streams with ids. Tests of both ends use it:
//! [`message`] accepts the output of [`describe`], with default keys and values.

use dcp_wire::message::{
    Abort, Commit, Deletion, DurabilityLevel, Expiration, Mutation, OsoSnapshot, Prepare,
    SeqnoAdvanced, SetVbucketState, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd,
    StreamEndReason, SystemEvent, SystemEventId, SystemEventPayload,
};
use dcp_wire::{Cas, CollectionId, Frame, ManifestUid, Opcode, RevSeqno, ScopeId, Seqno, StreamId};

use crate::packet::Packet;

/// Parses a number.
///
/// # Panics
/// If it is not a number.
#[must_use]
pub fn number(word: &str) -> u64 {
    let hex = word.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    hex.unwrap_or_else(|| word.parse()).unwrap_or_else(|_| panic!("{word} is no number"))
}

fn seqno(word: &str) -> Seqno {
    Seqno(number(word))
}

/// Encodes the message described by `words`. Defaults: the key is `key`, the value of a mutation
/// `value`, `DEL2` is a deletion with a time (5 if not given), and a system event creates
/// collection 9.
///
/// # Panics
/// If `words` are not a valid description.
#[must_use]
pub fn message(words: &str, to: StreamAddress) -> Vec<u8> {
    let mut words: Vec<&str> = words.split(' ').collect();
    let mut to = to;
    if let [.., "sid", id] = words[..] {
        to.stream_id = Some(StreamId(u16::try_from(number(id)).expect("a stream id")));
        words.truncate(words.len() - 2);
    }
    let mut out = Vec::new();
    let key = words.get(2).copied().unwrap_or("key").as_bytes();
    let cas = Cas(1);
    match words[..] {
        ["NOOP"] => Frame::request(Opcode::DCP_NOOP).encode(&mut out),
        ["MARK", range, flags, ..] => marker(range, flags, &words[3..]).encode(to, &mut out),
        ["MUT", at, ..] => {
            let value = words.get(3).copied().unwrap_or("value").as_bytes();
            Mutation { seqno: seqno(at), cas, key, value, ..Default::default() }
                .encode(to, &mut out)
        }
        ["DEL", at, ..] => {
            Deletion { seqno: seqno(at), key, ..Default::default() }.encode(to, &mut out)
        }
        ["DEL2", at, ..] => {
            let time = words.get(3).map_or(5, |time| number(time));
            let delete_time = Some(u32::try_from(time).expect("a time"));
            Deletion { seqno: seqno(at), key, delete_time, ..Default::default() }
                .encode(to, &mut out)
        }
        ["EXP", at, ..] => {
            Expiration { seqno: seqno(at), key, ..Default::default() }.encode(to, &mut out)
        }
        ["SYS", at, ..] => system_event(seqno(at), &words[2..], to, &mut out),
        ["ADV", at] => SeqnoAdvanced { seqno: seqno(at) }.encode(to, &mut out),
        ["OSO", "start"] => OsoSnapshot::Start.encode(to, &mut out),
        ["OSO", "end"] => OsoSnapshot::End.encode(to, &mut out),
        ["END", reason] => {
            let reason = StreamEndReason(u32::try_from(number(reason)).expect("a reason"));
            StreamEnd { reason }.encode(to, &mut out)
        }
        ["PREPARE", at, ..] => prepare(seqno(at), key, to, &mut out),
        ["COMMIT", at, ..] => {
            let prepared_seqno = Seqno(number(at) - 1);
            Commit { prepared_seqno, commit_seqno: seqno(at), key }.encode(to, &mut out)
        }
        ["ABORT", at, ..] => {
            let prepared_seqno = Seqno(number(at) - 1);
            Abort { prepared_seqno, abort_seqno: seqno(at), key }.encode(to, &mut out)
        }
        _ => panic!("no message: {words:?}"),
    }
    .expect("it fits a packet");
    out
}

fn marker(range: &str, flags: &str, further: &[&str]) -> SnapshotMarker {
    let (start, end) = range.trim_matches(['[', ']']).split_once('-').expect("a range");
    let flags = u32::try_from(number(flags)).expect("flags");
    let flags = SnapshotFlags::from_bits_retain(flags);
    let mut marker = SnapshotMarker::new(seqno(start), seqno(end), flags);
    for pair in further.chunks(2) {
        let [what, at] = pair else { panic!("{further:?} are not pairs") };
        *match *what {
            "visible" => &mut marker.max_visible_seqno,
            "completed" => &mut marker.high_completed_seqno,
            "purge" => &mut marker.purge_seqno,
            "prepared" => &mut marker.high_prepared_seqno,
            what => panic!("a marker has no {what}"),
        } = Some(seqno(at));
    }
    marker
}

/// `begin 9 v0 key=fruit uid=2 ttl=60 flush=3`; version 2 without `v0` or `v1`.
fn system_event(
    seqno: Seqno,
    words: &[&str],
    to: StreamAddress,
    out: &mut Vec<u8>,
) -> Result<(), dcp_wire::EncodeError> {
    let (kind, about) = match words {
        [kind, id, ..] => (*kind, u32::from_str_radix(id, 16).expect("a hexadecimal id")),
        _ => ("begin", 9),
    };
    let id = match kind {
        "begin" => SystemEventId::BEGIN_COLLECTION,
        "end" => SystemEventId::END_COLLECTION,
        "modify" => SystemEventId::MODIFY_COLLECTION,
        "scope" => SystemEventId::CREATE_SCOPE,
        "dropscope" => SystemEventId::DROP_SCOPE,
        _ => panic!("no such event: {kind}"),
    };
    let named =
        |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let of_scope = kind.ends_with("scope");
    let payload = SystemEventPayload {
        manifest_uid: ManifestUid(named("uid").map_or(0, number)),
        scope_id: ScopeId(if of_scope { about } else { 0 }),
        collection_id: (!of_scope).then_some(CollectionId(about)),
        name: named("key").unwrap_or_default().as_bytes(),
        max_ttl: named("ttl").map(|ttl| u32::try_from(number(ttl)).expect("a time")),
        history: false,
        flush_uid: ManifestUid(named("flush").map_or(0, number)),
    };
    let is_plain = words.contains(&"v0") || words.contains(&"v1");
    let (value, version) =
        if is_plain { payload.to_plain() } else { (payload.to_flatbuffers(id), 2) };
    SystemEvent { seqno, id, version, key: payload.name, value: &value }.encode(to, out)
}

fn prepare(
    seqno: Seqno,
    key: &[u8],
    to: StreamAddress,
    out: &mut Vec<u8>,
) -> Result<(), dcp_wire::EncodeError> {
    Prepare {
        seqno,
        rev_seqno: RevSeqno(1),
        cas: Cas(1),
        datatype: dcp_wire::Datatype::RAW,
        flags: 0,
        expiry: 0,
        lock_time: 0,
        nru: 0,
        deleted: false,
        level: DurabilityLevel::MAJORITY,
        key,
        value: b"value",
    }
    .encode(to, out)
}

/// Describes a stream message or a noop.
///
/// # Panics
/// If it is another message.
#[must_use]
pub fn describe(packet: &Packet) -> String {
    let frame = packet.frame();
    let text = match frame.header.opcode {
        Opcode::DCP_SNAPSHOT_MARKER => describe_marker(&SnapshotMarker::decode(&frame).unwrap()),
        Opcode::DCP_MUTATION => format!("MUT {}", Mutation::decode(&frame).unwrap().seqno),
        Opcode::DCP_DELETION => format!("DEL {}", Deletion::decode(&frame).unwrap().seqno),
        Opcode::DCP_EXPIRATION => format!("EXP {}", Expiration::decode(&frame).unwrap().seqno),
        Opcode::DCP_SYSTEM_EVENT => format!("SYS {}", SystemEvent::decode(&frame).unwrap().seqno),
        Opcode::DCP_SEQNO_ADVANCED => {
            format!("ADV {}", SeqnoAdvanced::decode(&frame).unwrap().seqno)
        }
        Opcode::DCP_STREAM_END => format!("END {}", StreamEnd::decode(&frame).unwrap().reason.0),
        Opcode::DCP_PREPARE => format!("PREPARE {}", Prepare::decode(&frame).unwrap().seqno),
        Opcode::DCP_COMMIT => format!("COMMIT {}", Commit::decode(&frame).unwrap().commit_seqno),
        Opcode::DCP_ABORT => format!("ABORT {}", Abort::decode(&frame).unwrap().abort_seqno),
        Opcode::DCP_SET_VBUCKET_STATE => {
            let state = SetVbucketState::decode(&frame).unwrap().state;
            format!("STATE {}", state.name().unwrap())
        }
        Opcode::DCP_OSO_SNAPSHOT => match OsoSnapshot::decode(&frame).unwrap() {
            OsoSnapshot::Start => "OSO start".to_owned(),
            OsoSnapshot::End => "OSO end".to_owned(),
        },
        Opcode::DCP_NOOP => format!("NOOP {}", frame.header.opaque),
        other => panic!("unexpected {other}"),
    };
    match frame.stream_id().unwrap() {
        Some(id) => format!("{text} sid {id}"),
        None => text,
    }
}

fn describe_marker(marker: &SnapshotMarker) -> String {
    let mut text =
        format!("MARK [{}-{}] {:#x}", marker.start_seqno, marker.end_seqno, marker.flags.bits());
    for (name, seqno) in [
        ("visible", marker.max_visible_seqno),
        ("completed", marker.high_completed_seqno),
        ("purge", marker.purge_seqno),
        ("prepared", marker.high_prepared_seqno),
    ] {
        if let Some(seqno) = seqno {
            text += &format!(" {name} {seqno}");
        }
    }
    text
}
