//! The requests of a bootstrap.

use dcp_wire::message::{Control, Open, OpenFlags, encode_features};
use dcp_wire::sasl::{Mechanism, ScramClient, encode_bearer, encode_plain};
use dcp_wire::{Datatype, EncodeError, Feature, Frame, Opaque, Opcode};

use super::config::{Auth, BootstrapError, DcpOpen};
use super::{Bootstrap, Step};
use crate::consumer::noop;

/// Longest HELLO key, as clients agree on.
const MAX_AGENT_LEN: usize = 200;

/// Longest connection id the server keeps.
const MAX_CONNECTION_ID_LEN: usize = 33;

impl Bootstrap {
    pub(super) fn send(&mut self, step: Step, frame: Frame<'_>) -> Result<(), BootstrapError> {
        let opaque = self.issue(step);
        // Of all keys, only this one may be longer than a packet allows.
        let what = if step == Step::SelectBucket { "the bucket name" } else { "a request" };
        frame
            .with_opaque(opaque)
            .encode(&mut *self.out)
            .map_err(|_: EncodeError| BootstrapError::TooLong { what })
    }

    fn issue(&mut self, step: Step) -> Opaque {
        let opaque = Opaque(self.next_opaque);
        self.next_opaque = self.next_opaque.saturating_add(1);
        self.pending.push((opaque, step));
        opaque
    }

    pub(super) fn send_hello(&mut self) -> Result<(), BootstrapError> {
        let agent = agent_json(&self.config.agent, &self.config.connection_id);
        let features = encode_features(self.config.features.iter().copied());
        let hello = Frame::request(Opcode::HELLO);
        self.send(Step::Hello, hello.with_key(agent.as_bytes()).with_value(&features))
    }

    pub(super) fn send_authenticate(&mut self, mechanism: Mechanism) -> Result<(), BootstrapError> {
        let request = Frame::request(Opcode::SASL_AUTH).with_key(mechanism.name().as_bytes());
        let message = match &self.config.auth {
            Auth::Certificate => return self.send_configure(),
            Auth::Token(token) => encode_bearer(token.as_str())?,
            Auth::Password { username, password, .. } if mechanism == Mechanism::Plain => {
                encode_plain(username, password)?
            }
            Auth::Password { username, password, nonce, .. } => {
                let scram = ScramClient::new(mechanism, username, password, nonce)?
                    .with_salted(self.config.salted.clone());
                let message = scram.first_message();
                self.scram = Some(scram);
                return self.send(Step::Authenticate, request.with_value(&message));
            }
        };
        self.send(Step::Authenticate, request.with_value(&message))?;
        self.send_configure()
    }

    pub(super) fn send_configure(&mut self) -> Result<(), BootstrapError> {
        let bucket = self.config.bucket.take();
        if let Some(bucket) = &bucket {
            let select = Frame::request(Opcode::SELECT_BUCKET).with_key(bucket.as_bytes());
            self.send(Step::SelectBucket, select)?;
        }
        self.config.bucket = bucket;
        self.send(Step::ClusterConfig, Frame::request(Opcode::GET_CLUSTER_CONFIG))?;
        let collections = self.features.contains(&Feature::COLLECTIONS);
        if self.config.manifest && collections && self.config.bucket.is_some() {
            self.send(Step::Manifest, Frame::request(Opcode::GET_COLLECTIONS_MANIFEST))?;
        }
        Ok(())
    }

    pub(super) fn send_open(&mut self, dcp: &DcpOpen) -> Result<(), BootstrapError> {
        let mut flags = dcp.flags | OpenFlags::PRODUCER;
        if !self.features.contains(&Feature::SUBDOC_CREATE_AS_DELETED) {
            // Servers before 6.6 refuse a flag that they do not know.
            flags.remove(OpenFlags::INCLUDE_DELETED_USER_XATTRS);
        }
        if !self.features.contains(&Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL) {
            flags.remove(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL);
        }
        let open = Open { flags, name: dcp.name.as_bytes(), value: &[], datatype: Datatype::RAW };
        let opaque = self.issue(Step::Open);
        open.encode(opaque, &mut *self.out)
            .map_err(|_| BootstrapError::TooLong { what: "the connection name" })?;
        for (index, setting) in dcp.controls.iter().enumerate() {
            match setting.needs {
                Some(feature) if !self.features.contains(&feature) => {
                    if setting.required {
                        return Err(BootstrapError::FeatureMissing(feature));
                    }
                    continue;
                }
                _ => {}
            }
            let control = Control { key: setting.key.as_bytes(), value: setting.value.as_bytes() };
            let opaque = self.issue(Step::Control(index));
            control
                .encode(opaque, &mut *self.out)
                .map_err(|_| BootstrapError::TooLong { what: setting.key })?;
        }
        Ok(())
    }

    pub(super) fn answer(&mut self, noop: &Frame<'_>) -> Result<(), BootstrapError> {
        noop::answer_to(noop)?
            .encode(&mut *self.out)
            .map_err(|_| BootstrapError::TooLong { what: "an answer" })
    }
}

/// The HELLO key, `{"a":agent,"i":id}`, cut to the length that servers accept.
fn agent_json(agent: &str, connection_id: &str) -> String {
    let id = cut(connection_id, MAX_CONNECTION_ID_LEN);
    let mut agent = cut(agent, MAX_AGENT_LEN);
    loop {
        let json = serde_json::json!({ "a": agent, "i": id }).to_string();
        if json.len() <= MAX_AGENT_LEN || agent.is_empty() {
            return json;
        }
        // Characters that JSON escapes make it longer.
        agent = cut(agent, agent.len().saturating_sub(1));
    }
}

/// The longest prefix of `text` that has at most `len` bytes.
fn cut(text: &str, len: usize) -> &str {
    let boundary = (0..=len.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    boundary.and_then(|at| text.get(..at)).unwrap_or_default()
}
