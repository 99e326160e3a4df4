//! The layout of each message: what of it must be there, may be, and must not.

use dcp_wire::message::Message;
use dcp_wire::{Cas, Datatype, Frame, Opcode};

use crate::frame;

/// Whether a part belongs to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Never,
    Maybe,
    Always,
}

use Part::{Always, Maybe, Never};

const RAW: &[u8] = &[0];
const ANY: &[u8] = &[0, 1, 2, 3, 4, 5, 6, 7];

/// Opcode, extras, key, value and datatypes.
type Layout = (Opcode, &'static [usize], Part, Part, &'static [u8]);

/// Keys of documents are checked by who knows whether they carry a collection; datatypes that mean
/// nothing by who takes requests.
const LAYOUTS: &[Layout] = &[
    (Opcode::DCP_OPEN, &[8], Always, Maybe, ANY),
    (Opcode::DCP_CLOSE_STREAM, &[0], Never, Never, ANY),
    (Opcode::DCP_STREAM_REQ, &[48], Never, Maybe, RAW),
    (Opcode::DCP_STREAM_END, &[4], Never, Never, ANY),
    (Opcode::DCP_MUTATION, &[31], Maybe, Maybe, ANY),
    (Opcode::DCP_DELETION, &[18, 21], Maybe, Maybe, ANY),
    (Opcode::DCP_EXPIRATION, &[20], Maybe, Maybe, ANY),
    (Opcode::DCP_SET_VBUCKET_STATE, &[1], Never, Never, ANY),
    (Opcode::DCP_BUFFER_ACK, &[4], Never, Never, ANY),
    (Opcode::DCP_CONTROL, &[0], Always, Always, ANY),
    (Opcode::DCP_SYSTEM_EVENT, &[13], Maybe, Maybe, ANY),
    (Opcode::DCP_PREPARE, &[31], Maybe, Maybe, ANY),
    (Opcode::DCP_SEQNO_ACK, &[8], Never, Never, ANY),
    (Opcode::DCP_COMMIT, &[16], Maybe, Never, ANY),
    (Opcode::DCP_ABORT, &[16], Maybe, Never, ANY),
    (Opcode::DCP_SEQNO_ADVANCED, &[8], Never, Never, ANY),
    (Opcode::DCP_OSO_SNAPSHOT, &[4], Never, Never, ANY),
    (Opcode::OBSERVE_SEQNO, &[0], Never, Always, ANY),
];

/// Whether a request with parts of these lengths is a message.
fn is_message(opcode: Opcode, extras: usize, key: bool, value: bool, datatype: u8) -> bool {
    let mut bytes = vec![0; extras];
    // Seqno 1, committed as 2; the first of a list; a level of durability.
    for (at, byte) in [(7, 1), (15, 2), (30, 1)] {
        if extras > at {
            bytes[at] = byte;
        }
    }
    if extras < 8
        && let Some(last) = bytes.last_mut()
    {
        *last = 1;
    }
    if opcode == Opcode::DCP_MUTATION && extras > 30 {
        bytes[30] = 0;
    }
    let mut packet = Vec::new();
    let request = Frame::request(opcode).with_extras(&bytes).with_cas(Cas(5));
    let request = request.with_key(if key { b"key" } else { b"" });
    let value: &[u8] = if value { b"\0\0\0\0\0\0\0\x01" } else { b"" };
    let request = request.with_value(value).with_datatype(Datatype(datatype));
    request.encode(&mut packet).unwrap();
    Message::decode(&frame(&packet)).is_ok()
}

#[test]
fn each_message_has_its_parts_and_no_others() {
    let mut wrong = Vec::new();
    for &(opcode, extras, key, value, datatypes) in LAYOUTS {
        let fits = |part: Part, is_there: bool| part == Maybe || is_there == (part == Always);
        let longest = extras.iter().max().copied().unwrap_or_default();
        for len in 0..longest + 4 {
            for (with_key, with_value) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                for datatype in 0..8 {
                    let wanted = extras.contains(&len)
                        && fits(key, with_key)
                        && fits(value, with_value)
                        && datatypes.contains(&datatype);
                    let is = is_message(opcode, len, with_key, with_value, datatype);
                    if is != wanted {
                        wrong.push(format!(
                            "{opcode}: extras {len}, key {with_key}, value {with_value}, \
                             datatype {datatype}: {is}"
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
