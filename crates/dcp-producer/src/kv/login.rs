//! SASL authentication.

use dcp_wire::sasl::{Mechanism, SaslError};
use dcp_wire::{Opcode, Status};
use serde_json::json;

use super::command::Command;
use super::credentials::Answer;
use super::failure::Failure;

impl Command<'_, '_> {
    pub(super) fn list_mechanisms(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let names: Vec<_> = Mechanism::PASSWORD.iter().map(|mechanism| mechanism.name()).collect();
        self.succeed(self.success().with_value(names.join(" ").as_bytes()))
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
