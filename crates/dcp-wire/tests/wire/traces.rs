//! Every recorded packet decodes to a typed message and encodes to the same bytes.

use std::collections::BTreeMap;
use std::fs;

use dcp_test::traces::{self, EventKind, Scenario};
use dcp_wire::message::Message;
use dcp_wire::{DecodeError, Frame, MAX_BODY_LEN};

/// Opcodes of the project's scenarios `errors` that have no message type: the first does not exist, the
/// second counts in a document (without the key it needs).
const RAW: [u8; 2] = [0x6f, 0xcf];

/// Opaques of the requests in the project's scenarios `errors` that break the layout of their opcode on
/// purpose: wrong length of the extras, a key too many, no key, no value.
const MALFORMED: [u32; 8] = [0x504, 0x505, 0x50b, 0x50c, 0x519, 0x51b, 0x51d, 0x52d];

/// What a packet came to.
enum Outcome {
    Typed,
    Raw,
    Malformed,
    NoFrame(DecodeError),
}

#[test]
fn packets_on_record_decode_typed_and_encode_to_the_same_bytes() {
    let (mut packets, mut exceptions) = (0, 0);
    let mut problems = Vec::new();
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let is_own_folder = traces::is_own_folder();
    for scenario in Scenario::load_all().unwrap() {
        // Of other recordings it is not known which packets are wrong on purpose.
        let errors = !is_own_folder || scenario.name.ends_with("-errors");
        for (index, event) in scenario.events.iter().enumerate() {
            let Some(bytes) = event.packet() else { continue };
            packets += 1;
            let outcome = match decode_and_encode(bytes, &mut kinds) {
                Ok(outcome) => outcome,
                Err(problem) => {
                    problems.push(format!("{} event {index}: {problem}", scenario.name));
                    continue;
                }
            };
            let from_client = matches!(event.kind, EventKind::ClientPacket(_));
            let expected = errors && from_client;
            let opaque = bytes.get(12..16).and_then(|opaque| opaque.try_into().ok());
            let opaque = opaque.map_or(0, u32::from_be_bytes);
            let fine = match outcome {
                Outcome::Typed => true,
                Outcome::Raw if !is_own_folder => true,
                Outcome::Raw => expected && RAW.contains(&bytes[1]),
                Outcome::Malformed => expected && (MALFORMED.contains(&opaque) || !is_own_folder),
                Outcome::NoFrame(DecodeError::InvalidMagic(magic)) => {
                    expected && (magic == 0x42 || !is_own_folder)
                }
                Outcome::NoFrame(_) => expected && !is_own_folder,
            };
            if !fine {
                problems.push(format!("{} event {index}: {bytes:02x?}", scenario.name));
            }
            if !matches!(outcome, Outcome::Typed) {
                exceptions += 1;
                // The server did not take these packets either.
                if !server_refused(&scenario, index, opaque) {
                    problems.push(format!("{} event {index} was accepted", scenario.name));
                }
            }
        }
    }
    println!("{packets} packets, of which {exceptions} are malformed or unknown on purpose");
    println!("{kinds:#?}");
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert_eq!(packets, packets_in_the_folder());
    assert!(packets > 0);
}

fn decode_and_encode(bytes: &[u8], kinds: &mut BTreeMap<String, usize>) -> Result<Outcome, String> {
    let frame = match Frame::parse(bytes, MAX_BODY_LEN) {
        Ok(Some((frame, used))) if used == bytes.len() => frame,
        Ok(_) => return Err("not one whole packet".to_owned()),
        Err(error) => return Ok(Outcome::NoFrame(error)),
    };
    let mut again = Vec::new();
    let Ok(message) = Message::decode(&frame) else {
        // No message, but a well-formed frame.
        frame.encode(&mut again).map_err(|error| error.to_string())?;
        return if again == bytes {
            Ok(Outcome::Malformed)
        } else {
            Err("not the same".to_owned())
        };
    };
    message.encode(frame.envelope(), &mut again).map_err(|error| error.to_string())?;
    if again != bytes {
        return Err(format!("{bytes:02x?} encodes to {again:02x?}"));
    }
    let text = format!("{message:?}");
    let kind = text.split(['(', ')', ' ']).take(2).collect::<Vec<_>>().join(" ");
    *kinds.entry(kind).or_default() += 1;
    Ok(if matches!(message, Message::Raw(_)) { Outcome::Raw } else { Outcome::Typed })
}

/// Whether the server answered the packet of event `index` with an error, or closed.
fn server_refused(scenario: &Scenario, index: usize, opaque: u32) -> bool {
    let conn = scenario.events[index].conn;
    let mut after = scenario.events[index + 1..].iter().filter(|event| event.conn == conn);
    after.any(|event| match &event.kind {
        EventKind::ServerClosed => true,
        EventKind::ServerPacket(bytes) => {
            bytes[12..16] == opaque.to_be_bytes() && bytes[6..8] != [0, 0]
        }
        EventKind::ClientPacket(_) => false,
    })
}

/// Counts the packets of the folder without the reader under test.
fn packets_in_the_folder() -> usize {
    let mut count = 0;
    for entry in fs::read_dir(traces::folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            count += fs::read_to_string(path).unwrap().matches("\"hex\"").count();
        }
    }
    count
}

#[test]
fn packet_on_record_cut_anywhere_asks_for_more() {
    let mut truncations = 0;
    for scenario in Scenario::load_all().unwrap() {
        // One packet of each opcode is enough of each recording.
        let mut seen = [false; 256];
        for bytes in scenario.events.iter().filter_map(|event| event.packet()) {
            let is_frame = Frame::parse(bytes, MAX_BODY_LEN).is_ok();
            if core::mem::replace(&mut seen[usize::from(bytes[1])], true) || !is_frame {
                continue;
            }
            for len in 0..bytes.len() {
                assert_eq!(Frame::parse(&bytes[..len], MAX_BODY_LEN), Ok(None));
                let wanted = Frame::wanted(&bytes[..len], MAX_BODY_LEN).unwrap();
                assert_eq!(wanted, if len < 24 { 24 } else { bytes.len() });
                truncations += 1;
            }
        }
    }
    assert!(truncations > 0);
}
