//! Durable writes of clients: prepared, and answered once the copies have decided.

use std::time::Duration;

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
        let bucket = &self.served()?.bucket;
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

    /// Answers a durable write, or defers the answer until it is decided.
    pub(super) fn await_durable(&mut self, write: DurableWrite) -> Result<(), Failure> {
        match self.outcome(&write)? {
            Outcome::Outstanding => {
                self.defer(write);
                Ok(())
            }
            decided => self.answer_durable(decided, &write),
        }
    }

    /// What became of a durable write; looking lets the copies decide.
    pub(super) fn outcome(&mut self, write: &DurableWrite) -> Result<Outcome, Failure> {
        let Written { vbuuid, seqno, .. } = write.written;
        let found = self
            .with_vbucket(|vbucket| (vbucket.vbuuid() == vbuuid).then(|| vbucket.outcome(seqno)));
        match found {
            Ok(Some(outcome)) => Ok(outcome),
            // The copy is no longer the active one, which alone knows the outcome.
            Ok(None) | Err(Failure::NotMyVbucket) => Ok(Outcome::Ambiguous),
            Err(failure) => Err(failure),
        }
    }

    /// Answers a durable write that is decided. Servers report the seqno of the prepare.
    pub(super) fn answer_durable(
        &mut self,
        outcome: Outcome,
        write: &DurableWrite,
    ) -> Result<(), Failure> {
        match outcome {
            Outcome::Committed => self.answer_write(write.status, write.written, &write.value),
            _ => Err(Status::SYNC_WRITE_AMBIGUOUS.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use bytes::{Bytes, BytesMut};
    use dcp_wire::{Cas, Datatype, Frame, Opcode, Vbid};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::ProducerOptions;
    use crate::bucket::{Condition, DocumentWrite};
    use crate::cluster::{Cluster, Node};
    use crate::kv::credentials::Credentials;
    use crate::kv::session::Session;

    const VB: Vbid = Vbid(0);

    /// A session with the active copy's node; the other node has the replica.
    fn session() -> Session {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let nodes = [Node { kv: address, mgmt: address, tls: None }; 2];
        let options = ProducerOptions { vbuckets: 1, replicas: 1, ..ProducerOptions::default() };
        let cluster = Cluster::new(&options, &nodes, Arc::default(), &CancellationToken::new());
        let credentials = Credentials::new("user", "word", 1, Arc::default()).unwrap();
        let served = cluster.first();
        let mut session = Session::new(Arc::new(cluster), 0, Arc::new(credentials));
        session.served = Some(served);
        session
    }

    /// It may be committed later, so the answer cannot be that it is impossible.
    #[test]
    fn durable_write_that_loses_its_replica_before_the_answer_waits() {
        let mut session = session();
        let served = session.cluster.first();
        let frame = Frame::request(Opcode::SET).with_key(b"key").with_framing_extras(&[0x11, 1]);
        let (mut out, now) = (BytesMut::new(), served.bucket.chance().now());
        let mut command = Command::new(&mut session, &frame, now, None, &mut out);
        let durability = command.options().unwrap().durability;
        served.bucket.with_copies(VB, |copies| copies.get_mut(1).unwrap().lag = u64::MAX);
        let write = DocumentWrite {
            key: command.key().unwrap(),
            value: Bytes::new(),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            cas: Cas(0),
            condition: Condition::Any,
            durability,
        };
        let written = command.with_vbucket(|vbucket| vbucket.store(now, write)).unwrap();
        served.bucket.with_copies(VB, |copies| copies.leave(1, served.bucket.chance().vbuuid()));
        command.send_written(written.unwrap()).unwrap();
        assert!(out.is_empty() && session.is_deferring());
    }
}
