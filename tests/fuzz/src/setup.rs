//! The set-up of a client's connection, by a hostile server.

use bytes::BytesMut;
use dcp_meter::Meter;
use dcp_proto::consumer::{Auth, Bootstrap, BootstrapConfig, DcpOpen};
use dcp_wire::message::OpenFlags;
use dcp_wire::sasl::Mechanism;
use dcp_wire::{Frame, MAX_BODY_LEN, Magic, Opaque, Opcode, Status};
use zeroize::Zeroizing;

use crate::assert_bounded;
use crate::bytes_in::BytesIn;

const BUCKET: &[u8] =
    br#"{"rev":3,"revEpoch":1,"name":"default","uuid":"ab","nodeLocator":"vbucket",
    "nodesExt":[{"services":{"kv":11210},"thisNode":true}],
    "vBucketServerMap":{"serverList":["$HOST:11210"],"numReplicas":0,"vBucketMap":[[0],[0]]}}"#;
const GLOBAL: &[u8] = br#"{"rev":3,"nodesExt":[{"services":{"kv":11210},"thisNode":true}]}"#;
const MANIFEST: &[u8] = br#"{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[]}]}"#;

/// A request of the client that was not answered yet.
type Asked = (Opcode, Opaque);

/// Whatever a server answers: the set-up ends well, with what was asked for, or with an error that
/// stays; it asks nothing twice and takes no more memory than what it was sent needs.
pub fn setup(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    let how = bytes.u8();
    let config = config(how);
    let bucket = config.bucket.clone();
    let (features, wants_dcp) = (config.features.clone(), config.dcp.is_some());
    let mut client = Bootstrap::new(config).expect("a set-up that servers can carry out");
    let mut asked = Vec::new();
    let (mut wire, mut received) = (BytesMut::with_capacity(1 << 16), 0);
    let mut failed = false;
    let meter = Meter::start();
    while !client.is_done() {
        take_requests(&mut client, &mut asked);
        if bytes.is_empty() {
            break;
        }
        let before = wire.len();
        answer(&mut bytes, &mut asked, bucket.is_some(), &mut wire);
        received += wire.len() - before;
        if let Err(error) = client.handle_bytes(&mut wire) {
            let more = Frame::request(Opcode::DCP_NOOP);
            assert_eq!(client.handle_frame(&more).as_ref(), Err(&error), "an error stays");
            let mut out = BytesMut::new();
            assert!(!client.poll_transmit(&mut out), "nothing more is asked after an error");
            failed = true;
            break;
        }
    }
    assert_bounded(meter.most(), received);
    let Some(outcome) = client.take_outcome() else { return };
    assert!(!failed && client.take_outcome().is_none());
    assert!(outcome.features.iter().all(|feature| features.contains(feature)));
    assert_eq!(outcome.config.bucket().is_some(), bucket.is_some());
    assert!(wants_dcp || outcome.controls.is_empty());
}

fn config(how: u8) -> BootstrapConfig {
    let auth = if how & 1 == 0 {
        Auth::Certificate
    } else {
        Auth::Password {
            username: "user".to_owned(),
            password: Zeroizing::new("secret".to_owned()),
            nonce: "clientNonceOf24Characters".to_owned(),
            // The others take a thousand rounds; they have a target of their own.
            mechanisms: vec![Mechanism::Plain],
        }
    };
    let bucket = (how & 2 == 0).then(|| "default".to_owned());
    let mut config = BootstrapConfig::new(auth, bucket, "10.0.0.1");
    config.dcp = (how & 4 == 0).then(|| DcpOpen::new("name", OpenFlags::empty(), 1024, 20));
    config.manifest = how & 8 == 0;
    config
}

/// Takes what the client sends.
fn take_requests(client: &mut Bootstrap, asked: &mut Vec<Asked>) {
    let mut out = BytesMut::new();
    while client.poll_transmit(&mut out) {}
    let mut rest = &out[..];
    while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN).expect("a packet") {
        if frame.header.magic == Magic::CLIENT_REQUEST {
            let request = (frame.header.opcode, frame.header.opaque);
            assert!(!asked.contains(&request), "{request:?} twice");
            asked.push(request);
        }
        rest = &rest[used..];
    }
    assert!(rest.is_empty(), "whole packets only");
}

/// Puts the server's next packet on the wire.
fn answer(bytes: &mut BytesIn<'_>, asked: &mut Vec<Asked>, bucket: bool, wire: &mut BytesMut) {
    let how = bytes.u8();
    if how >= 0xf0 {
        // Anything at all.
        return wire.extend_from_slice(bytes.part());
    }
    let at = usize::from(how & 7).min(asked.len().saturating_sub(1));
    let known = if asked.is_empty() { (Opcode::NOOP, Opaque(0)) } else { asked[at] };
    let (opcode, opaque) = known;
    let usual = match opcode {
        Opcode::HELLO => {
            BootstrapConfig::FEATURES.iter().flat_map(|it| it.0.to_be_bytes()).collect()
        }
        Opcode::SASL_LIST_MECHS => b"SCRAM-SHA512 PLAIN".to_vec(),
        Opcode::GET_CLUSTER_CONFIG if bucket => BUCKET.to_vec(),
        Opcode::GET_CLUSTER_CONFIG => GLOBAL.to_vec(),
        Opcode::GET_COLLECTIONS_MANIFEST => MANIFEST.to_vec(),
        _ => Vec::new(),
    };
    let mut frame = Frame::response(opcode, Status::SUCCESS).with_opaque(opaque);
    let mut value = usual;
    match how >> 3 {
        // As it should be.
        0..16 => {}
        16..20 => value = bytes.part().to_vec(),
        20..23 => frame.header.vbid_or_status = bytes.u16(),
        23..25 => {
            let (at, byte) = (bytes.u16(), bytes.u8());
            let len = value.len().max(1);
            if let Some(place) = value.get_mut(usize::from(at) % len) {
                *place = byte;
            }
        }
        25 => frame.header.opaque = Opaque(bytes.u32()),
        26 => frame.header.opcode = Opcode(bytes.u8()),
        27 => {
            frame = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
            value = if bytes.u8() & 1 == 0 { BUCKET.to_vec() } else { bytes.part().to_vec() };
        }
        28 => frame = Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(bytes.u32())),
        _ => frame.header.magic = bytes.one_of(Magic::KNOWN),
    }
    if how >> 3 < 25 && !asked.is_empty() {
        asked.remove(at);
    }
    let (extras, key) = (bytes_if(bytes, how), frame.key);
    frame.with_extras(extras).with_key(key).with_value(&value).encode(wire).expect("small parts");
}

/// Extras, which answers seldom have.
fn bytes_if<'a>(bytes: &mut BytesIn<'a>, how: u8) -> &'a [u8] {
    if how >> 3 == 24 { bytes.part() } else { &[] }
}
