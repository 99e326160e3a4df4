//! Messages whose fields are written down one by one: opcode, extras, key and value.

use dcp_test::packet::encoded;
use dcp_wire::{Frame, Opaque, Opcode, Status, Vbid};

use crate::tap::Open;

type Parts<'a> = (Opcode, Vec<&'a [u8]>, &'a [u8], Vec<&'a [u8]>);

const ZERO: &[u8] = &[0; 8];
const ONE: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 1];

/// Frame that puts a request on stream 7 of its vBucket.
const STREAM_7: &[u8] = &[0x22, 0, 7];

/// What a server sends besides the plain documents.
pub(crate) const OF_SERVERS: [&str; 18] = [
    "marker of version 2.2",
    "deletion without a time",
    "prepare",
    "commit",
    "abort",
    "out-of-order snapshot",
    "collection that expires",
    "changed collection",
    "dropped collection",
    "scope",
    "mutation in another collection",
    "mutation of another stream",
    "state of a vBucket",
    "cached documents",
    "failover log",
    "unknown collection",
    "stream that is elsewhere",
    "observed seqno",
];

/// One of [`OF_SERVERS`] for a stream.
pub(crate) fn of_server(name: &str, stream: &Open) -> Option<Vec<u8>> {
    let seqno = &(stream.seqno + 1).to_be_bytes()[..];
    let last = &(stream.seqno + 50).to_be_bytes()[..];
    if let Some((opcode, status, value)) = answer(name) {
        let frame = Frame::response(opcode, status).with_opaque(stream.opaque);
        return Some(encoded(&frame.with_value(&value)));
    }
    let (uid, scope, collection) = (ONE, &[0, 0, 0, 8][..], &[0, 0, 0, 9][..]);
    let (opcode, extras, key, value): Parts<'_> = match name {
        "marker of version 2.2" => {
            let value = vec![seqno, last, &[0, 0, 0, 6], last, seqno, ONE, seqno];
            (Opcode::DCP_SNAPSHOT_MARKER, vec![&[2]], b"", value)
        }
        "deletion without a time" => {
            (Opcode::DCP_DELETION, vec![seqno, ONE, &[0, 0]], b"\0k", vec![])
        }
        "prepare" => {
            let extras = vec![seqno, ONE, ZERO, &[0, 0, 0, 0], &[0], &[0], &[1]];
            (Opcode::DCP_PREPARE, extras, b"\0k", vec![b"{}"])
        }
        "commit" => (Opcode::DCP_COMMIT, vec![ONE, seqno], b"\0k", vec![]),
        "abort" => (Opcode::DCP_ABORT, vec![ONE, seqno], b"\0k", vec![]),
        "out-of-order snapshot" => (Opcode::DCP_OSO_SNAPSHOT, vec![&[0, 0, 0, 1]], b"", vec![]),
        "collection that expires" => {
            let value = vec![uid, scope, collection, &[0, 1, 0, 0]];
            (Opcode::DCP_SYSTEM_EVENT, vec![seqno, &[0, 0, 0, 0], &[1]], b"name", value)
        }
        "changed collection" => {
            let value = vec![uid, scope, collection, &[0, 1, 0, 0], &[1]];
            (Opcode::DCP_SYSTEM_EVENT, vec![seqno, &[0, 0, 0, 5], &[2]], b"name", value)
        }
        "dropped collection" => {
            let value = vec![uid, scope, collection];
            (Opcode::DCP_SYSTEM_EVENT, vec![seqno, &[0, 0, 0, 1], &[0]], b"", value)
        }
        "scope" => {
            let extras = vec![seqno, &[0, 0, 0, 3], &[0]];
            (Opcode::DCP_SYSTEM_EVENT, extras, b"scope", vec![uid, scope])
        }
        "mutation in another collection" | "mutation of another stream" => {
            let extras = vec![seqno, ONE, ZERO, &[0, 0, 0, 0], &[0, 0], &[2]];
            (Opcode::DCP_MUTATION, extras, b"\x89\x08key", vec![b"{}"])
        }
        "state of a vBucket" => (Opcode::DCP_SET_VBUCKET_STATE, vec![&[1]], b"", vec![]),
        "cached documents" => (Opcode::DCP_CACHE_TRANSFER, vec![], b"", vec![&[0; 44]]),
        _ => return None,
    };
    let framing = if name == "mutation of another stream" { STREAM_7 } else { b"" };
    let (extras, value) = (extras.concat(), value.concat());
    let frame = Frame::request(opcode).with_vbid(stream.vbid).with_opaque(stream.opaque);
    let frame = if framing.is_empty() { frame } else { frame.with_framing_extras(framing) };
    Some(encoded(&frame.with_extras(&extras).with_key(key).with_value(&value)))
}

/// An answer with the opaque of the stream's request.
fn answer(name: &str) -> Option<(Opcode, Status, Vec<u8>)> {
    Some(match name {
        "failover log" => {
            (Opcode::DCP_GET_FAILOVER_LOG, Status::SUCCESS, [ONE, ONE, ONE, ZERO].concat())
        }
        "unknown collection" => {
            let body = br#"{"manifest_uid":"7"}"#.to_vec();
            (Opcode::DCP_STREAM_REQ, Status::UNKNOWN_COLLECTION, body)
        }
        "stream that is elsewhere" => {
            let body = br#"{"rev":9,"name":"default"}"#.to_vec();
            (Opcode::DCP_STREAM_REQ, Status::NOT_MY_VBUCKET, body)
        }
        "observed seqno" => {
            let body = [&[0, 0, 0][..], ONE, ONE, ONE].concat();
            (Opcode::OBSERVE_SEQNO, Status::SUCCESS, body)
        }
        _ => return None,
    })
}

/// What a client sends besides what this project's own does: whether DCP is open before each, its
/// name and itself.
pub(crate) fn of_clients() -> Vec<(bool, &'static str, Vec<u8>)> {
    let (expiry, delta) = (&[0, 0, 0, 9][..], ONE);
    let path: &[u8] = b"path";
    let spec = [&[0xc8, 0][..], &[0, 4], &[0, 0, 0, 1], path, b"1"].concat();
    let plain: [(&'static str, Parts<'_>); 21] = [
        ("VERSION", (Opcode::VERSION, vec![], b"", vec![])),
        ("SASL_LIST_MECHS", (Opcode::SASL_LIST_MECHS, vec![], b"", vec![])),
        ("SASL_STEP", (Opcode::SASL_STEP, vec![], b"SCRAM-SHA1", vec![b"c=biws,r=a,p=b"])),
        ("GET_ERROR_MAP", (Opcode::GET_ERROR_MAP, vec![], b"", vec![&[0, 2]])),
        ("GET_COLLECTION_ID", (Opcode::GET_COLLECTION_ID, vec![], b"", vec![b"_default._default"])),
        ("GET_SCOPE_ID", (Opcode::GET_SCOPE_ID, vec![], b"", vec![b"_default"])),
        ("GET_FAILOVER_LOG", (Opcode::GET_FAILOVER_LOG, vec![], b"", vec![])),
        ("ADD", (Opcode::ADD, vec![&[0; 4], expiry], b"key", vec![b"{}"])),
        ("REPLACE", (Opcode::REPLACE, vec![&[0; 4], expiry], b"key", vec![b"{}"])),
        ("APPEND", (Opcode::APPEND, vec![], b"key", vec![b"{}"])),
        ("TOUCH", (Opcode::TOUCH, vec![expiry], b"key", vec![])),
        ("GET_AND_TOUCH", (Opcode::GET_AND_TOUCH, vec![expiry], b"key", vec![])),
        ("INCREMENT", (Opcode::INCREMENT, vec![delta, delta, expiry], b"count", vec![])),
        ("DECREMENT", (Opcode::DECREMENT, vec![delta, delta, expiry], b"count", vec![])),
        ("PREPEND", (Opcode::PREPEND, vec![], b"key", vec![b"{}"])),
        ("SUBDOC_GET", (Opcode::SUBDOC_GET, vec![&[0, 4], &[0]], b"key", vec![path])),
        ("GET_META", (Opcode::GET_META, vec![], b"key", vec![])),
        (
            "SET_WITH_META",
            (Opcode::SET_WITH_META, vec![&[0; 4], expiry, ONE, ONE], b"key", vec![b"{}"]),
        ),
        (
            "DELETE_WITH_META",
            (Opcode::DELETE_WITH_META, vec![&[0; 4], expiry, ONE, ONE], b"key", vec![]),
        ),
        (
            "SUBDOC_DICT_UPSERT",
            (Opcode::SUBDOC_DICT_UPSERT, vec![&[0, 4], &[1]], b"key", vec![path, b"1"]),
        ),
        ("SUBDOC_MULTI_MUTATION", (Opcode::SUBDOC_MULTI_MUTATION, vec![&[1]], b"key", vec![&spec])),
    ];
    let on_dcp: [(&'static str, Parts<'_>); 5] = [
        ("DCP_NOOP", (Opcode::DCP_NOOP, vec![], b"", vec![])),
        ("second DCP_OPEN", (Opcode::DCP_OPEN, vec![&[0; 4], &[0, 0, 0, 1]], b"again", vec![])),
        ("DCP_ADD_STREAM", (Opcode::DCP_ADD_STREAM, vec![&[0; 4]], b"", vec![])),
        ("DCP_SEQNO_ACK", (Opcode::DCP_SEQNO_ACK, vec![ONE], b"", vec![])),
        ("DCP_CLOSE_STREAM of a stream", (Opcode::DCP_CLOSE_STREAM, vec![], b"", vec![])),
    ];
    let all = plain.map(|each| (false, each)).into_iter().chain(on_dcp.map(|each| (true, each)));
    all.map(|(is_dcp, (name, (opcode, extras, key, value)))| {
        let (extras, value) = (extras.concat(), value.concat());
        let frame = Frame::request(opcode).with_vbid(Vbid(0)).with_opaque(Opaque(7));
        let frame = match name.ends_with("of a stream") {
            true => frame.with_framing_extras(STREAM_7),
            false => frame,
        };
        (is_dcp, name, encoded(&frame.with_extras(&extras).with_key(key).with_value(&value)))
    })
    .collect()
}
