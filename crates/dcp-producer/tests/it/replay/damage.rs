//! The replay notices what is changed in a recording: it takes nothing from the markers it judges.

use dcp_test::packet::encoded;
use dcp_test::traces::{Event, EventKind, Scenario};
use dcp_wire::message::{Message, Request, SnapshotFlags, SnapshotMarker};
use dcp_wire::{Frame, Header, MAX_BODY_LEN, Seqno};

use super::markers::Field;
use super::{Found, read_all, replay_all, tests_folder};

/// Fields of a marker of version 1: byte, and which of its bits are changed.
const FIELDS: [(Field, usize, u8); 4] = [
    (Field::Start, 7, 0x01),
    (Field::End, 15, 0x01),
    (Field::Place, 19, 0x03),
    (Field::Checkpoint, 19, 0x04),
];

/// Where the fields of a marker begin; `None` if it is none that a server sends.
fn fields_of(event: &Event) -> Option<usize> {
    let EventKind::ServerPacket(packet) = &event.kind else { return None };
    let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).ok()??;
    SnapshotMarker::decode(&frame).ok()?;
    let is_v1 = frame.extras.len() == SnapshotMarker::EXTRAS_LEN_V1;
    let before = frame.framing_extras.len() + if is_v1 { 0 } else { frame.extras.len() };
    Some(Header::LEN + before)
}

/// The recordings with one field of one marker changed in each, under names of their own.
fn changed(scenarios: &[Scenario]) -> Vec<(Field, String, Scenario)> {
    let mut all = Vec::new();
    for scenario in scenarios {
        for (at, event) in scenario.events.iter().enumerate() {
            let Some(begin) = fields_of(event) else { continue };
            for (field, byte, bits) in FIELDS {
                let mut changed = scenario.clone();
                changed.name =
                    format!("{}, {field:?} of the marker in line {}", scenario.name, at + 2);
                if let EventKind::ServerPacket(packet) = &mut changed.events[at].kind {
                    packet[begin + byte] ^= bits;
                }
                all.push((field, scenario.name.clone(), changed));
            }
        }
    }
    all
}

/// The project's recordings, whatever folder others come from.
fn own() -> Vec<Scenario> {
    let folder = tests_folder("any").with_file_name("");
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|ending| ending == "jsonl")).collect();
    paths.sort();
    read_all(&paths).0
}

#[test]
#[expect(clippy::print_stdout, reason = "a test over a folder tells how much it has seen")]
fn marker_fields_that_are_judged_never_change_unnoticed() {
    let scenarios = own();
    let before = replay_all(&scenarios, Found::default());
    let changed = changed(&scenarios);
    assert!(changed.len() > 900, "only {} changes", changed.len());
    let damaged: Vec<_> = changed.iter().map(|(.., scenario)| scenario.clone()).collect();
    let after = replay_all(&damaged, Found::default());
    let is_taken = |name: &String| after.not_judged[&Field::Place].contains(name);
    let (mut differ, mut listed, mut unnoticed) = (0, 0, Vec::new());
    for (field, of, scenario) in &changed {
        let name = &scenario.name;
        if after.differs[name] != before.differs[of] {
            differ += 1;
        } else if *field == Field::Place && is_taken(name) {
            // That memory was emptied only the marker says: `normalised.json` lists such recordings.
            listed += 1;
        } else {
            unnoticed.push(name);
        }
    }
    println!("{} changes: {differ} make a difference, {listed} are not judged", changed.len());
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}

/// A recording whose markers of version 1 are changed, left out or doubled.
fn with_markers(
    mut scenario: Scenario,
    mut change: impl FnMut(&mut SnapshotMarker) -> bool,
) -> Scenario {
    scenario.events.retain_mut(|event| {
        let EventKind::ServerPacket(packet) = &mut event.kind else { return true };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { return true };
        let Ok(mut marker) = SnapshotMarker::decode(&frame) else { return true };
        let is_kept = change(&mut marker);
        let mut extras = marker.start_seqno.0.to_be_bytes().to_vec();
        extras.extend(marker.end_seqno.0.to_be_bytes());
        extras.extend(marker.flags.bits().to_be_bytes());
        let changed = encoded(&frame.with_extras(&extras));
        *packet = changed;
        is_kept
    });
    scenario
}

/// The event of the change that has `seqno`.
fn change_at(scenario: &Scenario, seqno: u64) -> usize {
    let is_it = |event: &Event| {
        let EventKind::ServerPacket(packet) = &event.kind else { return false };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { return false };
        matches!(Message::decode(&frame), Ok(Message::Request(Request::Mutation(change)))
            if change.seqno == Seqno(seqno))
    };
    scenario.events.iter().position(is_it).unwrap()
}

fn differs(scenario: Scenario) -> Vec<String> {
    let name = scenario.name.clone();
    replay_all(&[scenario], Found::default()).differs.remove(&name).unwrap()
}

#[test]
fn snapshot_may_be_any_burst_that_was_there() {
    let scenario = Scenario::load("8.0.2-memory-fresh").unwrap();
    assert_eq!(differs(scenario.clone()), [""; 0]);
    // Seqnos 1 to 10 were written in one burst, before the stream was opened.
    let mut divided = with_markers(scenario, |marker| {
        if marker.start_seqno == Seqno::ZERO {
            marker.end_seqno = Seqno(9);
        }
        true
    });
    let at = change_at(&divided, 10);
    let marker = divided.events.iter().position(|event| fields_of(event).is_some()).unwrap();
    let mut second = divided.events[marker].clone();
    if let EventKind::ServerPacket(packet) = &mut second.kind {
        packet[Header::LEN + 7] = 10;
        packet[Header::LEN + 15] = 10;
        packet[Header::LEN + 19] = SnapshotFlags::MEMORY.bits() as u8;
    }
    divided.events.insert(at, second);
    let differs = differs(divided);
    assert!(differs.iter().any(|what| what.contains("DCP_SNAPSHOT_MARKER")), "{differs:?}");
}

#[test]
fn snapshot_may_not_join_bursts_that_lie_apart() {
    // Without seqno 13, which deletes 11: the last marker and its change.
    let mut scenario = Scenario::load("8.0.2-memory-fresh").unwrap();
    scenario.events.truncate(scenario.events.len() - 2);
    scenario.expected["kv_ops"].as_array_mut().unwrap().pop();
    assert_eq!(differs(scenario.clone()), [""; 0]);
    // Seqno 12 came 0.7 s after 11.
    let united = with_markers(scenario, |marker| {
        if marker.start_seqno == Seqno(11) {
            marker.end_seqno = Seqno(12);
        }
        marker.start_seqno <= Seqno(11)
    });
    let differs = differs(united);
    assert!(differs.iter().any(|what| what.contains("DCP_SNAPSHOT_MARKER")), "{differs:?}");
}
