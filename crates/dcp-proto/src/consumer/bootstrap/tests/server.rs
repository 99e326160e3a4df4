//! A server that answers as told where it matters and well otherwise.

use bytes::BytesMut;
use dcp_wire::message::OpenFlags;
use dcp_wire::sasl::{Mechanism, PlainMessage, ScramCredentials, ScramServer};
use dcp_wire::{Feature, Frame, Opaque, Opcode, Status};
use zeroize::Zeroizing;

use super::super::*;

pub(super) const CONFIG: &[u8] =
    br#"{"rev":3,"revEpoch":1,"name":"default","uuid":"ab","nodeLocator":"vbucket",
    "nodesExt":[{"services":{"kv":11210},"thisNode":true}],
    "vBucketServerMap":{"serverList":["$HOST:11210"],"numReplicas":0,"vBucketMap":[[0],[0]]}}"#;
const GLOBAL: &[u8] = br#"{"rev":3,"nodesExt":[{"services":{"kv":11210},"thisNode":true}]}"#;
const MANIFEST: &[u8] = br#"{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[]}]}"#;

/// A request as the server sees it.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) opcode: Opcode,
    pub(super) opaque: Opaque,
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
}

pub(super) fn drain(bootstrap: &mut Bootstrap) -> Vec<Request> {
    let mut out = BytesMut::new();
    while bootstrap.poll_transmit(&mut out) {}
    let mut requests = Vec::new();
    let mut rest = &out[..];
    while let Some((frame, len)) = Frame::parse(rest, MAX_BODY_LEN).unwrap() {
        requests.push(Request {
            opcode: frame.header.opcode,
            opaque: frame.header.opaque,
            key: frame.key.to_vec(),
            value: frame.value.to_vec(),
        });
        rest = &rest[len..];
    }
    assert!(rest.is_empty(), "whole packets only");
    requests
}

/// A server that answers as told where it matters and well otherwise.
pub(super) struct Server {
    pub(super) scram: Option<ScramServer>,
    pub(super) mechanisms: &'static [u8],
    pub(super) features: Vec<Feature>,
    /// Answers to give in place of the usual ones.
    pub(super) instead: Vec<(Opcode, Status, &'static [u8])>,
    pub(super) seen: Vec<Request>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            scram: None,
            mechanisms: b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN",
            features: BootstrapConfig::FEATURES.to_vec(),
            instead: Vec::new(),
            seen: Vec::new(),
        }
    }
}

impl Server {
    pub(super) fn answering(opcode: Opcode, status: Status, value: &'static [u8]) -> Self {
        Self { instead: vec![(opcode, status, value)], ..Self::default() }
    }

    pub(super) fn answer(&mut self, request: &Request) -> (Status, Vec<u8>) {
        self.seen.push(request.clone());
        let instead = self.instead.iter().find(|(opcode, ..)| *opcode == request.opcode);
        if let Some(&(_, status, value)) = instead {
            return (status, value.to_vec());
        }
        let ok = |value: &[u8]| (Status::SUCCESS, value.to_vec());
        match request.opcode {
            Opcode::HELLO => {
                ok(&self.features.iter().flat_map(|f| f.0.to_be_bytes()).collect::<Vec<_>>())
            }
            Opcode::SASL_LIST_MECHS => ok(self.mechanisms),
            Opcode::SASL_AUTH => self.authenticate(request),
            Opcode::SASL_STEP => match self.scram.take().unwrap().verify(&request.value) {
                Ok(last) => (Status::SUCCESS, last),
                Err(_) => (Status::AUTH_ERROR, Vec::new()),
            },
            Opcode::GET_CLUSTER_CONFIG => {
                let selected = self.seen.iter().any(|seen| seen.opcode == Opcode::SELECT_BUCKET);
                ok(if selected { CONFIG } else { GLOBAL })
            }
            Opcode::GET_COLLECTIONS_MANIFEST => ok(MANIFEST),
            Opcode::SELECT_BUCKET | Opcode::DCP_OPEN | Opcode::DCP_CONTROL => ok(b""),
            other => panic!("unexpected {other}"),
        }
    }

    fn authenticate(&mut self, request: &Request) -> (Status, Vec<u8>) {
        let mechanism = Mechanism::from_name(&request.key).unwrap();
        if mechanism == Mechanism::Plain {
            let right = PlainMessage::decode(&request.value).unwrap().matches("user", "secret");
            return (if right { Status::SUCCESS } else { Status::AUTH_ERROR }, Vec::new());
        }
        let credentials =
            ScramCredentials::derive(mechanism, "secret", b"0123456789abcdef", 4096).unwrap();
        let mut scram = ScramServer::read(&request.value).unwrap();
        let challenge = scram.challenge(credentials, "serverNonce").unwrap();
        self.scram = Some(scram);
        (Status::AUTH_CONTINUE, challenge)
    }

    /// Runs a bootstrap to its end; one list of requests per round trip.
    pub(super) fn run(
        &mut self,
        bootstrap: &mut Bootstrap,
    ) -> Result<Vec<Vec<Opcode>>, BootstrapError> {
        let mut rounds = Vec::new();
        while !bootstrap.is_done() {
            let requests = drain(bootstrap);
            assert!(!requests.is_empty(), "stuck: {bootstrap:?}");
            rounds.push(requests.iter().map(|request| request.opcode).collect());
            for request in requests {
                let (status, value) = self.answer(&request);
                respond(bootstrap, &request, status, &value)?;
            }
        }
        Ok(rounds)
    }
}

pub(super) fn respond(
    bootstrap: &mut Bootstrap,
    request: &Request,
    status: Status,
    value: &[u8],
) -> Result<(), BootstrapError> {
    let mut bytes = BytesMut::new();
    Frame::response(request.opcode, status)
        .with_opaque(request.opaque)
        .with_value(value)
        .encode(&mut bytes)
        .unwrap();
    bootstrap.handle_bytes(&mut bytes)
}

pub(super) fn config() -> BootstrapConfig {
    let auth = Auth::Password {
        username: "user".to_owned(),
        password: Zeroizing::new("secret".to_owned()),
        nonce: "clientNonceOf24Characters".to_owned(),
        mechanisms: Mechanism::SCRAM.to_vec(),
    };
    let mut config = BootstrapConfig::new(auth, Some("default".to_owned()), "10.0.0.1");
    config.dcp = Some(DcpOpen::new("name", OpenFlags::INCLUDE_DELETE_TIMES, 1024, 20));
    config
}
