//! Requests of a connection that are underway at the same time.
//!
//! A durable write is answered once it is decided. Until then the requests after it wait, unless the
//! connection negotiated unordered execution.

use bytes::BytesMut;
use dcp_wire::framing_extras::FrameInfo;
use dcp_wire::{Frame, Opcode};

use super::command::Command;
use super::session::{Deferred, DurableWrite, Flow, Session};
use crate::bucket::Outcome;
use crate::chance::Now;

/// Requests of a connection that may be underway at once, as in servers.
const MAX_UNDERWAY: usize = 32;

impl Command<'_, '_> {
    /// Puts off the answer until the durable write is decided.
    pub(super) fn defer(&mut self, write: DurableWrite) {
        let header = &self.frame.header;
        let deferred = Deferred {
            opcode: header.opcode,
            opaque: header.opaque,
            vbid: header.vbid(),
            started: self.started,
            is_barrier: !self.session.may_reorder(self.frame),
            write,
        };
        self.session.deferred.push(deferred);
    }
}

impl Session {
    /// Whether answers wait for durable writes.
    pub(crate) fn is_deferring(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Whether a request may be handled before the earlier ones are answered.
    pub(super) fn may_begin(&self, frame: &Frame<'_>) -> bool {
        self.deferred.last().is_none_or(|last| {
            !last.is_barrier && self.deferred.len() < MAX_UNDERWAY && self.may_reorder(frame)
        })
    }

    /// Whether a request and its neighbours may be answered in any order.
    fn may_reorder(&self, frame: &Frame<'_>) -> bool {
        const BARRIER: u16 = 0;
        let mut infos = frame.frame_infos();
        let is_barrier = |info| matches!(info, Ok(FrameInfo { id: BARRIER, .. }) | Err(_));
        self.features.dcp.unordered_execution
            && is_reorderable(frame.header.opcode)
            && !infos.any(is_barrier)
    }

    /// Answers the requests whose durable writes are decided.
    pub(crate) fn answer_deferred(&mut self, now: Now, out: &mut BytesMut) -> Flow {
        for deferred in std::mem::take(&mut self.deferred) {
            let request = Frame::request(deferred.opcode)
                .with_opaque(deferred.opaque)
                .with_vbid(deferred.vbid);
            let mut command = Command::new(self, &request, now, deferred.started, out);
            let answered = match command.outcome(&deferred.write) {
                Ok(Outcome::Outstanding) => {
                    self.deferred.push(deferred);
                    continue;
                }
                Ok(decided) => command.answer_durable(decided, &deferred.write),
                Err(failure) => Err(failure),
            };
            if let Err(failure) = answered
                && command.refuse(failure).is_err()
            {
                return Flow::Close;
            }
        }
        Flow::Continue
    }
}

/// Whether servers answer such requests in any order. The others wait for those before them, and
/// those after them wait.
const fn is_reorderable(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::GET
            | Opcode::SET
            | Opcode::ADD
            | Opcode::REPLACE
            | Opcode::DELETE
            | Opcode::INCREMENT
            | Opcode::DECREMENT
            | Opcode::APPEND
            | Opcode::PREPEND
            | Opcode::TOUCH
            | Opcode::GET_AND_TOUCH
            | Opcode::GET_ALL_VB_SEQNOS
            | Opcode::GET_REPLICA
            | Opcode::GET_LOCKED
            | Opcode::UNLOCK
            | Opcode::GET_CLUSTER_CONFIG
            | Opcode::SUBDOC_GET
            | Opcode::SUBDOC_EXISTS
            | Opcode::SUBDOC_GET_COUNT
            | Opcode::SUBDOC_DICT_ADD
            | Opcode::SUBDOC_DICT_UPSERT
            | Opcode::SUBDOC_DELETE
            | Opcode::SUBDOC_REPLACE
            | Opcode::SUBDOC_ARRAY_PUSH_LAST
            | Opcode::SUBDOC_ARRAY_PUSH_FIRST
            | Opcode::SUBDOC_ARRAY_INSERT
            | Opcode::SUBDOC_ARRAY_ADD_UNIQUE
            | Opcode::SUBDOC_COUNTER
            | Opcode::SUBDOC_MULTI_LOOKUP
            | Opcode::SUBDOC_MULTI_MUTATION
    )
}
