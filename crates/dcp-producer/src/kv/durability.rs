//! Durable writes of clients: prepared, and answered once the copies have decided.

use std::time::{Duration, Instant};

use dcp_wire::Status;
use dcp_wire::message::DurabilityLevel;

use super::command::Command;
use super::failure::Failure;
use super::session::DurableWrite;
use crate::bucket::{Durability, Outcome, Written};

/// How long a durable write may take if the client does not say.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl Command<'_, '_> {
    /// Durability requirements in the framing extras: a level, and a timeout in milliseconds.
    pub(super) fn durability(&self, payload: &[u8]) -> Result<Durability, Failure> {
        let (level, timeout) = match *payload {
            [level] => (level, DEFAULT_TIMEOUT),
            [level, high, low] => {
                (level, Duration::from_millis(u16::from_be_bytes([high, low]).into()))
            }
            _ => return Err(Failure::Invalid("malformed durability requirements")),
        };
        let level = DurabilityLevel(level);
        let bucket = &self.session.cluster.bucket;
        match level {
            _ if self.session.version.is_legacy() => Err(Status::NOT_SUPPORTED.into()),
            DurabilityLevel::MAJORITY => Ok(()),
            DurabilityLevel::MAJORITY_AND_PERSIST_ON_ACTIVE
            | DurabilityLevel::PERSIST_TO_MAJORITY
                if !bucket.is_ephemeral() =>
            {
                Ok(())
            }
            _ => Err(Failure::Status(Status::DURABILITY_INVALID_LEVEL)),
        }?;
        if !bucket.can_be_durable(self.vbid()) {
            return Err(Status::DURABILITY_IMPOSSIBLE.into());
        }
        Ok(Durability { level, deadline: Some(self.now.after(timeout)) })
    }

    /// Answers a durable write, or checks it again later. While it is undecided, the connection
    /// waits, since answers are sent in order.
    pub(super) fn await_durable(&mut self, write: DurableWrite) -> Result<(), Failure> {
        let Written { vbuuid, seqno, cas } = write.written;
        // Accessing it lets the copies decide.
        let found = self
            .with_vbucket(|vbucket| (vbucket.vbuuid() == vbuuid).then(|| vbucket.outcome(seqno)));
        self.session.waiting_since.get_or_insert_with(Instant::now);
        let outcome = match found {
            Ok(Some(outcome)) => outcome,
            // The copy is no longer the active one, which alone knows the outcome.
            Ok(None) | Err(Failure::NotMyVbucket) => Outcome::Aborted,
            Err(failure) => return Err(failure),
        };
        if outcome == Outcome::Outstanding {
            self.session.durable_write = Some(write);
            return Err(Failure::Later);
        }
        self.session.waiting_since = None;
        match outcome {
            // Servers report the seqno of the prepare.
            Outcome::Committed => {
                self.answer_write(write.status, Written { vbuuid, seqno, cas }, &write.value)
            }
            _ => Err(Status::SYNC_WRITE_AMBIGUOUS.into()),
        }
    }
}
