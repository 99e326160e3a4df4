//! Lists of stream messages in words, as in `expected.seen`: the same words from the decoded
//! packets must contain them in order.

use std::collections::BTreeMap;
use std::fmt::Write;

use dcp_test::facts::item_in_words;
use dcp_test::traces::EventKind;
use dcp_wire::message::{Message, OsoSnapshot, Request, SnapshotMarker};
use dcp_wire::{Frame, MAX_BODY_LEN};
use serde_json::Value;

use super::{Facts, Recording};

const END_OF_CONNECTION: &str = "EOF";

pub(super) fn check(recording: &Recording<'_>, facts: &mut Facts) {
    let mut timelines: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for event in &recording.scenario.events {
        let words = match &event.kind {
            EventKind::ServerClosed => END_OF_CONNECTION.to_owned(),
            EventKind::ClientPacket(_) => continue,
            EventKind::ServerPacket(bytes) => match words(bytes) {
                Some(words) => words,
                None => continue,
            },
        };
        timelines.entry(event.conn).or_default().push(words);
    }
    walk(&recording.scenario.expected, &timelines, facts);
}

/// Finds every list of stream messages, however deep it lies.
fn walk(value: &Value, timelines: &BTreeMap<u32, Vec<String>>, facts: &mut Facts) {
    match value {
        Value::Object(members) => {
            if let Some(last) = members.get("last").and_then(Value::as_str) {
                let known = timelines.values().flatten().any(|words| words == last);
                facts.check("last message", known, || last.to_owned());
            }
            members.values().for_each(|member| walk(member, timelines, facts));
        }
        Value::Array(elements) => {
            elements.iter().for_each(|element| walk(element, timelines, facts));
            let list: Vec<&str> =
                elements.iter().filter_map(Value::as_str).filter(|text| is_message(text)).collect();
            if list.is_empty() {
                return;
            }
            let found = timelines.values().any(|timeline| contains_in_order(timeline, &list));
            for words in &list {
                facts.check(kind(words), found, || format!("{words} of a list in order"));
            }
        }
        _ => {}
    }
}

fn contains_in_order(timeline: &[String], list: &[&str]) -> bool {
    let mut timeline = timeline.iter();
    list.iter().all(|words| timeline.any(|each| each == words))
}

const KINDS: [&str; 10] = [
    "SNAP_MARKER",
    "MUTATION",
    "DELETION",
    "EXPIRATION",
    "SYSTEM_EVENT",
    "SEQNO_ADVANCED",
    "OSO_SNAPSHOT",
    "STREAM_END",
    "PREPARE",
    "COMMIT",
];

fn is_message(text: &str) -> bool {
    text == END_OF_CONNECTION
        || text.starts_with("ABORT seq=")
        || text.starts_with("REQ DCP_NOOP ")
        || KINDS.iter().any(|kind| text.starts_with(kind))
}

fn kind(words: &str) -> &'static str {
    KINDS.into_iter().find(|kind| words.starts_with(kind)).unwrap_or("ABORT, NOOP or EOF")
}

/// A stream message in the words of the recordings.
fn words(bytes: &[u8]) -> Option<String> {
    let (frame, _) = Frame::parse(bytes, MAX_BODY_LEN).ok()??;
    let Message::Request(request) = Message::decode(&frame).ok()? else { return None };
    let item = |name: &str, seqno| {
        item_in_words(name, seqno, frame.key, frame.header.datatype, frame.value.len())
    };
    let mut text = match request {
        Request::SnapshotMarker(marker) => marker_in_words(&frame, &marker),
        Request::Mutation(message) => item("MUTATION", message.seqno),
        Request::Deletion(message) => item("DELETION", message.seqno),
        Request::Expiration(message) => item("EXPIRATION", message.seqno),
        Request::SystemEvent(message) => item("SYSTEM_EVENT", message.seqno),
        Request::SeqnoAdvanced(message) => item("SEQNO_ADVANCED", message.seqno),
        Request::Prepare(message) => item("PREPARE", message.seqno),
        Request::Commit(message) => item("COMMIT", message.commit_seqno),
        Request::Abort(message) => item("ABORT", message.abort_seqno),
        Request::StreamEnd(message) => format!("STREAM_END flags={}", message.reason.0),
        Request::OsoSnapshot(OsoSnapshot::Start) => "OSO_SNAPSHOT flags=1".to_owned(),
        Request::OsoSnapshot(OsoSnapshot::End) => "OSO_SNAPSHOT flags=2".to_owned(),
        Request::Plain => format!(
            "REQ DCP_NOOP opq={:x} vb=0 dt=0 cas=0 ext= key=b'' val=b''",
            frame.header.opaque.0
        ),
        _ => return None,
    };
    if !frame.framing_extras.is_empty() {
        text.push_str(" frame=");
        for byte in frame.framing_extras {
            write!(text, "{byte:02x}").unwrap();
        }
    }
    Some(text)
}

fn marker_in_words(frame: &Frame<'_>, marker: &SnapshotMarker) -> String {
    let SnapshotMarker { start_seqno: start, end_seqno: end, flags, .. } = marker;
    let range = format!("{start}-{end} f={:#x}", flags.bits());
    let visible = marker.max_visible_seqno.unwrap_or_default();
    let completed = marker.high_completed_seqno.unwrap_or_default();
    match (frame.extras.len(), marker.purge_seqno) {
        (1, None) => format!("SNAP_MARKERv2.0[{range} mvs={visible} hcs={completed}]"),
        (1, Some(purge)) => {
            format!("SNAP_MARKERv2.2[{range} mvs={visible} hcs={completed} purge={purge}]")
        }
        _ => format!("SNAP_MARKERv1[{range}]"),
    }
}
