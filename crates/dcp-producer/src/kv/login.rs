//! SASL: who is on the other side.

use std::sync::Arc;

use dcp_wire::sasl::{Mechanism, PlainMessage, SaslError, ScramServer};
use dcp_wire::{Opcode, Status};
use serde_json::json;

use super::Credentials;
use super::command::Command;
use super::failure::Failure;

/// How far a connection's authentication has come.
#[derive(Debug)]
pub(crate) struct Login {
    credentials: Arc<Credentials>,
    state: State,
}

#[derive(Debug)]
enum State {
    Anonymous,
    Challenged(Mechanism, Box<ScramServer>),
    Done,
    /// By a client certificate, which SASL cannot change.
    Certified,
}

/// What a client is told.
enum Answer {
    Challenge(Vec<u8>),
    Done(Vec<u8>),
}

impl Login {
    pub(super) fn new(credentials: Arc<Credentials>) -> Self {
        Self { credentials, state: State::Anonymous }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done | State::Certified)
    }

    /// The client's certificate is the user's.
    pub(super) fn certify(&mut self) {
        self.state = State::Certified;
    }

    pub(super) fn is_certified(&self) -> bool {
        matches!(self.state, State::Certified)
    }

    /// Begins anew, whoever the client was before.
    fn begin(&mut self, mechanism: Mechanism, message: &[u8]) -> Result<Answer, SaslError> {
        self.state = State::Anonymous;
        if mechanism == Mechanism::Plain {
            if !self.credentials.accepts(&PlainMessage::decode(message)?) {
                return Err(SaslError::ClientProof);
            }
            self.state = State::Done;
            return Ok(Answer::Done(Vec::new()));
        }
        let mut server = ScramServer::read(message)?;
        let credentials = self.credentials.scram(mechanism, server.username())?;
        let nonce = format!("{:032x}", self.credentials.chance.number());
        let challenge = server.challenge(credentials, &nonce)?;
        self.state = State::Challenged(mechanism, Box::new(server));
        Ok(Answer::Challenge(challenge))
    }

    fn step(&mut self, mechanism: Mechanism, message: &[u8]) -> Result<Answer, SaslError> {
        match std::mem::replace(&mut self.state, State::Anonymous) {
            State::Challenged(begun, server) if begun == mechanism => {
                let proof = server.verify(message)?;
                self.state = State::Done;
                Ok(Answer::Done(proof))
            }
            _ => Err(SaslError::OutOfOrder),
        }
    }
}

impl Command<'_, '_> {
    pub(super) fn list_mechanisms(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let names: Vec<_> = Mechanism::ALL.iter().map(|mechanism| mechanism.name()).collect();
        self.succeed(self.success().with_value(names.join(" ").as_bytes()))
    }

    /// Clients are not told why, but by what the reason can be found in the log.
    fn refuse_login(&mut self, error: SaslError) -> Result<(), Failure> {
        let reference = format!("{:032x}", self.session.login.credentials.chance.number());
        tracing::debug!(%error, reference, "authentication failed");
        let body = json!({"error": {"ref": reference}}).to_string();
        let response = self.response(Status::AUTH_ERROR).with_datatype(self.json());
        self.succeed(response.with_value(body.as_bytes()))
    }

    pub(super) fn authenticate(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, true)?;
        let message = self.frame.value;
        let login = &mut self.session.login;
        let answer = match Mechanism::from_name(self.frame.key) {
            None => Err(SaslError::NoMechanism),
            Some(mechanism) if self.frame.header.opcode == Opcode::SASL_AUTH => {
                login.begin(mechanism, message)
            }
            Some(mechanism) => login.step(mechanism, message),
        };
        match answer {
            Ok(Answer::Challenge(challenge)) => {
                self.succeed(self.response(Status::AUTH_CONTINUE).with_value(&challenge))
            }
            Ok(Answer::Done(proof)) => self.succeed(self.success().with_value(&proof)),
            Err(SaslError::Malformed(_)) => Err(Failure::Invalid("malformed SASL message")),
            Err(error) => self.refuse_login(error),
        }
    }
}
