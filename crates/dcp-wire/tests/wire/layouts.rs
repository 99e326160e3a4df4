//! The layout of each message: what of it must be there, may be, and must not.

use dcp_wire::message::*;
use dcp_wire::{Cas, Datatype, DecodeError, Frame, Opcode, Status};

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

/// Opcode, lengths of extras, key, value and datatypes.
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
    (Opcode::DCP_ADD_STREAM, &[4], Never, Never, ANY),
    (Opcode::DCP_CACHE_TRANSFER_END, &[0], Never, Never, ANY),
    (Opcode::DCP_NOOP, &[0], Never, Never, ANY),
    (Opcode::DCP_GET_FAILOVER_LOG, &[0], Never, Never, ANY),
    (Opcode::GET, &[0], Always, Never, ANY),
    (Opcode::DELETE, &[0], Always, Never, ANY),
    (Opcode::SET, &[8], Always, Maybe, ANY),
    (Opcode::ADD, &[8], Always, Maybe, ANY),
    (Opcode::REPLACE, &[8], Always, Maybe, ANY),
    (Opcode::INCREMENT, &[20], Always, Never, ANY),
    (Opcode::DECREMENT, &[20], Always, Never, ANY),
    (Opcode::TOUCH, &[4], Always, Never, ANY),
    (Opcode::GET_AND_TOUCH, &[4], Always, Never, ANY),
    (Opcode::GET_META, &[0, 1], Always, Never, ANY),
    (Opcode::SET_WITH_META, &[24, 26, 28, 30], Always, Maybe, ANY),
    (Opcode::ADD_WITH_META, &[24, 26, 28, 30], Always, Maybe, ANY),
    (Opcode::DELETE_WITH_META, &[24, 26, 28, 30], Always, Maybe, ANY),
    (Opcode::SUBDOC_MULTI_LOOKUP, &[0, 1], Always, Maybe, ANY),
    (Opcode::SUBDOC_MULTI_MUTATION, &[0, 1, 4, 5, 8, 9], Always, Maybe, ANY),
    (Opcode::STAT, &[0], Maybe, Never, ANY),
    (Opcode::HELLO, &[0], Maybe, Maybe, ANY),
    (Opcode::SASL_LIST_MECHS, &[0], Never, Never, ANY),
    (Opcode::SASL_AUTH, &[0], Maybe, Maybe, ANY),
    (Opcode::SASL_STEP, &[0], Maybe, Maybe, ANY),
    (Opcode::SELECT_BUCKET, &[0], Maybe, Never, ANY),
    (Opcode::GET_ERROR_MAP, &[0], Never, Always, ANY),
    (Opcode::GET_CLUSTER_CONFIG, &[0, 16], Never, Never, ANY),
    (Opcode::SET_CLUSTER_CONFIG, &[0, 16], Maybe, Maybe, ANY),
    (Opcode::GET_COLLECTIONS_MANIFEST, &[0], Never, Never, ANY),
    (Opcode::GET_COLLECTION_ID, &[0], Never, Maybe, ANY),
    (Opcode::GET_SCOPE_ID, &[0], Never, Maybe, ANY),
    (Opcode::GET_ALL_VB_SEQNOS, &[0, 4, 8], Never, Never, ANY),
    (Opcode::GET_FAILOVER_LOG, &[0], Never, Never, ANY),
    (Opcode::SEQNO_PERSISTENCE, &[8], Never, Never, ANY),
    (Opcode::NOOP, &[0], Never, Never, ANY),
    (Opcode::QUIT, &[0], Never, Never, ANY),
    (Opcode::VERSION, &[0], Never, Never, ANY),
];

/// Opcode, lengths of extras, key and value of a response of success.
type ResponseLayout = (Opcode, &'static [usize], Part, Part);

const RESPONSES: &[ResponseLayout] = &[
    (Opcode::HELLO, &[0], Never, Maybe),
    (Opcode::SASL_LIST_MECHS, &[0], Never, Maybe),
    (Opcode::SASL_AUTH, &[0], Never, Maybe),
    (Opcode::SASL_STEP, &[0], Never, Maybe),
    (Opcode::GET_ERROR_MAP, &[0], Never, Maybe),
    (Opcode::GET_CLUSTER_CONFIG, &[0], Never, Maybe),
    (Opcode::GET_COLLECTIONS_MANIFEST, &[0], Never, Maybe),
    (Opcode::VERSION, &[0], Never, Maybe),
    (Opcode::DCP_STREAM_REQ, &[0], Never, Always),
    (Opcode::DCP_GET_FAILOVER_LOG, &[0], Never, Always),
    (Opcode::GET_FAILOVER_LOG, &[0], Never, Always),
    (Opcode::GET_ALL_VB_SEQNOS, &[0], Never, Maybe),
    (Opcode::OBSERVE_SEQNO, &[0], Never, Always),
    (Opcode::GET_COLLECTION_ID, &[12], Never, Never),
    (Opcode::GET_SCOPE_ID, &[12], Never, Never),
    (Opcode::STAT, &[0], Maybe, Maybe),
    (Opcode::DCP_ADD_STREAM, &[4], Never, Never),
    (Opcode::GET, &[4], Maybe, Maybe),
    (Opcode::GET_AND_TOUCH, &[4], Maybe, Maybe),
    (Opcode::GET_META, &[20, 21], Never, Never),
    (Opcode::INCREMENT, &[0, 16], Never, Always),
    (Opcode::DECREMENT, &[0, 16], Never, Always),
    (Opcode::SUBDOC_MULTI_LOOKUP, &[0], Never, Maybe),
    (Opcode::SUBDOC_MULTI_MUTATION, &[0, 16], Never, Maybe),
    (Opcode::SET, &[0, 16], Never, Never),
    (Opcode::ADD, &[0, 16], Never, Never),
    (Opcode::REPLACE, &[0, 16], Never, Never),
    (Opcode::DELETE, &[0, 16], Never, Never),
    (Opcode::SET_WITH_META, &[0, 16], Never, Never),
    (Opcode::ADD_WITH_META, &[0, 16], Never, Never),
    (Opcode::DELETE_WITH_META, &[0, 16], Never, Never),
];

fn fits(part: Part, is_there: bool) -> bool {
    part == Maybe || is_there == (part == Always)
}

/// With and without a key, with and without a value.
const PARTS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

fn longest(extras: &[usize]) -> usize {
    extras.iter().max().copied().unwrap_or_default()
}

/// A value that the message of `opcode` can have.
const fn request_value(opcode: Opcode) -> &'static [u8] {
    match opcode {
        Opcode::GET_ERROR_MAP => &[0, 2],
        // Two lookups of the whole document, or one change of it.
        Opcode::SUBDOC_MULTI_LOOKUP | Opcode::SUBDOC_MULTI_MUTATION => &[0; 8],
        _ => &[0, 0, 0, 0, 0, 0, 0, 1],
    }
}

/// A value that the response of `opcode` can have.
const fn response_value(opcode: Opcode) -> &'static [u8] {
    match opcode {
        Opcode::DCP_STREAM_REQ | Opcode::DCP_GET_FAILOVER_LOG | Opcode::GET_FAILOVER_LOG => {
            &[0; 16]
        }
        Opcode::GET_ALL_VB_SEQNOS => &[0; 10],
        Opcode::OBSERVE_SEQNO => &[0; 27],
        Opcode::SUBDOC_MULTI_LOOKUP => &[0; 6],
        Opcode::SUBDOC_MULTI_MUTATION => &[0; 7],
        _ => &[0; 8],
    }
}

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
    let value = if value { request_value(opcode) } else { &[] };
    let request = request.with_value(value).with_datatype(Datatype(datatype));
    request.encode(&mut packet).unwrap();
    is_typed(&packet)
}

/// Whether a packet decodes to a message with a type of its own.
fn is_typed(packet: &[u8]) -> bool {
    matches!(
        Message::decode(&frame(packet)),
        Ok(Message::Request(_) | Message::Response(_) | Message::ClusterMapChange(_))
    )
}

#[test]
fn messages_have_their_parts_and_no_others() {
    let mut wrong = Vec::new();
    for &(opcode, extras, key, value, datatypes) in LAYOUTS {
        for len in 0..longest(extras) + 4 {
            for (with_key, with_value) in PARTS {
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

#[test]
fn responses_of_success_have_their_parts_and_no_others() {
    let mut wrong = Vec::new();
    for &(opcode, extras, key, value) in RESPONSES {
        for len in 0..longest(extras) + 4 {
            for (with_key, with_value) in PARTS {
                let wanted =
                    extras.contains(&len) && fits(key, with_key) && fits(value, with_value);
                let mut packet = Vec::new();
                let bytes = vec![0; len];
                let response = Frame::response(opcode, Status::SUCCESS).with_extras(&bytes);
                let response = response.with_key(if with_key { b"key" } else { b"" });
                let response =
                    response.with_value(if with_value { response_value(opcode) } else { &[] });
                response.encode(&mut packet).unwrap();
                let is = is_typed(&packet);
                if is != wanted {
                    wrong.push(format!(
                        "{opcode}: extras {len}, key {with_key}, value {with_value}: {is}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Each type refuses the packet of another message, whatever else it holds.
#[test]
fn message_is_read_only_from_a_packet_with_its_opcode() {
    macro_rules! read {
        ($($type:ident),*) => {
            [$((stringify!($type), |frame| $type::decode(frame).map(drop))),*]
        };
    }
    type Read = fn(&Frame<'_>) -> Result<(), DecodeError>;
    let read: [(&str, Read); 37] = read!(
        Abort,
        AddStream,
        BufferAck,
        CloseStream,
        Commit,
        Control,
        Counter,
        Deletion,
        Expiration,
        GetAllVbSeqnos,
        GetClusterConfig,
        GetErrorMap,
        GetMeta,
        Hello,
        KeyRequest,
        Mutation,
        ObserveSeqno,
        Open,
        OsoSnapshot,
        Prepare,
        ResolveName,
        Sasl,
        SelectBucket,
        SeqnoAck,
        SeqnoAdvanced,
        SeqnoPersistence,
        SetClusterConfig,
        SetVbucketState,
        SnapshotMarker,
        Store,
        StreamEnd,
        StreamRequest,
        SubdocLookup,
        SubdocMutation,
        SystemEvent,
        Touch,
        WithMeta
    );
    for (name, read) in read {
        for len in 0..49 {
            for (key, value) in [(&b""[..], &b""[..]), (b"k", b""), (b"k", b"v"), (b"", &[0; 42])] {
                let (extras, mut packet) = (vec![0; len], Vec::new());
                let request = Frame::request(Opcode::OBSERVE).with_extras(&extras);
                let request = request.with_key(key).with_value(value).with_cas(Cas(5));
                request.encode(&mut packet).unwrap();
                let unexpected = DecodeError::UnexpectedOpcode(Opcode::OBSERVE.0);
                assert_eq!(read(&frame(&packet)), Err(unexpected), "{name}, extras {len}");
            }
        }
    }
}
