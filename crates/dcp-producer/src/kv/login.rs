//! SASL authentication.

use dcp_wire::sasl::{Mechanism, SaslError};
use dcp_wire::{Opcode, Status};
use serde_json::json;

use super::command::Command;
use super::credentials::Answer;
use super::failure::Failure;
use super::session::Session;

impl Session {
    /// The mechanisms that are offered; a token only over TLS.
    pub(super) fn mechanisms(&self) -> impl Iterator<Item = Mechanism> + use<> {
        let takes_tokens = self.takes_tokens();
        let offered =
            move |mechanism: &Mechanism| *mechanism != Mechanism::OAuthBearer || takes_tokens;
        Mechanism::ALL.into_iter().filter(offered)
    }

    /// Whether clients may authenticate with tokens, also on a connection that is open for DCP.
    pub(super) fn takes_tokens(&self) -> bool {
        self.is_tls && self.login.credentials.has_token_key()
    }
}

impl Command<'_, '_> {
    pub(super) fn list_mechanisms(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let names = self.session.mechanisms().map(Mechanism::name).collect::<Vec<_>>().join(" ");
        self.succeed(self.success().with_value(names.as_bytes()))
    }

    /// Clients get no reason, only a reference to find it in the log.
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
        let name = self.frame.key;
        let mut mechanisms = self.session.mechanisms();
        let mechanism = mechanisms.find(|mechanism| mechanism.name().as_bytes() == name);
        let login = &mut self.session.login;
        let answer = match mechanism {
            None => Err(SaslError::NoMechanism),
            Some(mechanism) if self.frame.header.opcode == Opcode::SASL_AUTH => {
                login.begin(mechanism, message, self.now)
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
