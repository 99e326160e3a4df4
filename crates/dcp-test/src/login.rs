//! The server's side of connection set-up, with optional refusals.

use dcp_wire::sasl::{BearerMessage, Mechanism, PlainMessage, ScramCredentials, ScramServer};
use dcp_wire::{Feature, Frame, Opcode, Status};

use crate::canary;
pub use crate::canary::{ITERATIONS, PASSWORD, SALT};
use crate::packet::{Packet, encoded};

/// The only user.
pub const USERNAME: &str = "user";
/// The cluster map of bucket `default`.
pub const CONFIG: &[u8] =
    br#"{"rev":3,"revEpoch":1,"name":"default","uuid":"ab","nodeLocator":"vbucket",
    "nodesExt":[{"services":{"kv":11210},"thisNode":true}],
    "vBucketServerMap":{"serverList":["$HOST:11210"],"numReplicas":0,"vBucketMap":[[0],[0]]}}"#;
const GLOBAL: &[u8] = br#"{"rev":3,"nodesExt":[{"services":{"kv":11210},"thisNode":true}]}"#;
const MANIFEST: &[u8] = br#"{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[]}]}"#;

/// Answers a connecting client, successfully by default; [`PASSWORD`] is also the only token. From the first one on, whatever the process
/// logs is searched for the password.
#[derive(Clone, Debug)]
pub struct Login {
    /// The SASL mechanisms to list.
    pub mechanisms: &'static [u8],
    /// The features to grant; `None` grants all requested ones.
    pub features: Option<Vec<Feature>>,
    /// What is stored for SCRAM; `None` derives it from [`PASSWORD`] at each login, in 4,096 rounds.
    pub credentials: Option<ScramCredentials>,
    /// Answers that replace the usual ones.
    pub instead: Vec<(Opcode, Status, &'static [u8])>,
    /// Requests received.
    pub seen: Vec<Packet>,
}

impl Default for Login {
    fn default() -> Self {
        canary::watch();
        Self {
            mechanisms: b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN",
            features: None,
            credentials: None,
            instead: Vec::new(),
            seen: Vec::new(),
        }
    }
}

impl Login {
    /// Gives this answer to `opcode`, and the usual ones otherwise.
    #[must_use]
    pub fn answering(opcode: Opcode, status: Status, value: &'static [u8]) -> Self {
        Self { instead: vec![(opcode, status, value)], ..Self::default() }
    }

    /// Whether a request with `opcode` was received.
    #[must_use]
    pub fn was_asked(&self, opcode: Opcode) -> bool {
        self.seen.iter().any(|seen| seen.opcode() == opcode)
    }

    /// The answer to a request, encoded.
    ///
    /// # Panics
    /// If a client does not send such a request during set-up.
    pub fn answer(&mut self, request: &Packet) -> Vec<u8> {
        let frame = request.frame();
        let opcode = frame.header.opcode;
        let instead = self.instead.iter().find(|(refused, ..)| *refused == opcode);
        let (status, value) = match instead {
            Some(&(_, status, value)) => (status, value.to_vec()),
            None => self.usual(&frame),
        };
        self.seen.push(request.clone());
        let answer = Frame::response(opcode, status).with_opaque(frame.header.opaque);
        encoded(&answer.with_value(&value))
    }

    fn usual(&self, frame: &Frame<'_>) -> (Status, Vec<u8>) {
        let ok = |value: &[u8]| (Status::SUCCESS, value.to_vec());
        match frame.header.opcode {
            Opcode::HELLO => match &self.features {
                Some(some) => ok(&some.iter().flat_map(|f| f.0.to_be_bytes()).collect::<Vec<_>>()),
                None => ok(frame.value),
            },
            Opcode::SASL_LIST_MECHS => ok(self.mechanisms),
            Opcode::SASL_AUTH if frame.key == b"PLAIN" => {
                let message = PlainMessage::decode(frame.value).expect("a message of PLAIN");
                let is_right = message.matches(USERNAME, PASSWORD);
                (if is_right { Status::SUCCESS } else { Status::AUTH_ERROR }, Vec::new())
            }
            Opcode::SASL_AUTH if frame.key == b"OAUTHBEARER" => {
                let message = BearerMessage::decode(frame.value).expect("a message with a token");
                let is_right = message.authzid.is_empty() && message.token == PASSWORD;
                (if is_right { Status::SUCCESS } else { Status::AUTH_ERROR }, Vec::new())
            }
            Opcode::SASL_AUTH => (Status::AUTH_CONTINUE, self.scram(frame).1),
            Opcode::SASL_STEP => {
                let first = self.seen.iter().rfind(|seen| seen.opcode() == Opcode::SASL_AUTH);
                let first = first.expect("it comes after SASL_AUTH");
                match self.scram(&first.frame()).0.verify(frame.value) {
                    Ok(last) => (Status::SUCCESS, last),
                    Err(_) => (Status::AUTH_ERROR, Vec::new()),
                }
            }
            Opcode::GET_CLUSTER_CONFIG => {
                ok(if self.was_asked(Opcode::SELECT_BUCKET) { CONFIG } else { GLOBAL })
            }
            Opcode::GET_COLLECTIONS_MANIFEST => ok(MANIFEST),
            Opcode::SELECT_BUCKET | Opcode::DCP_OPEN | Opcode::DCP_CONTROL => ok(b""),
            other => panic!("unexpected {other}"),
        }
    }

    /// The SCRAM exchange that SASL_AUTH begins, and its challenge. Both are deterministic.
    fn scram(&self, auth: &Frame<'_>) -> (ScramServer, Vec<u8>) {
        let mechanism = Mechanism::from_name(auth.key).expect("a mechanism it lists");
        let stored = self.credentials.clone().unwrap_or_else(|| {
            let derived = ScramCredentials::derive(mechanism, PASSWORD, SALT, ITERATIONS);
            derived.expect("a mechanism of SCRAM")
        });
        let mut server = ScramServer::read(auth.value).expect("a first message");
        let challenge = server.challenge(stored, "serverNonce");
        (server, challenge.expect("a nonce"))
    }
}
