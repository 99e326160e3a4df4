//! The output that streams write to.

use std::time::Instant;

use bytes::BytesMut;
use dcp_wire::{EncodeError, Header};

use super::message_format::Scratch;
use super::window::Window;

/// The part of a connection that streams write to: its output, its flow-control window, and how
/// much may be written now.
#[derive(Debug)]
pub(super) struct Output<'a> {
    out: &'a mut BytesMut,
    window: &'a mut Window,
    scratch: &'a mut Scratch,
    /// Length of the output at which the next message has to wait.
    limit: usize,
    /// Messages that may still be written.
    messages: usize,
    now: Instant,
}

impl<'a> Output<'a> {
    pub(super) const fn new(
        out: &'a mut BytesMut,
        window: &'a mut Window,
        scratch: &'a mut Scratch,
        (limit, messages): (usize, usize),
        now: Instant,
    ) -> Self {
        Self { out, window, scratch, limit, messages, now }
    }

    /// How many messages may still be written.
    pub(super) const fn messages(&self) -> usize {
        self.messages
    }

    /// The present moment.
    pub(super) const fn now(&self) -> Instant {
        self.now
    }

    /// Whether another message may be written. Its size does not matter, so the limit is
    /// overshot by up to one message.
    pub(super) fn may_send(&self) -> bool {
        self.out.len() < self.limit && self.messages > 0 && self.window.is_open()
    }

    /// Writes one message and counts it.
    pub(super) fn send<E: From<EncodeError>>(
        &mut self,
        write: impl FnOnce(&mut BytesMut, &mut Scratch) -> Result<(), E>,
    ) -> Result<(), E> {
        let before = self.out.len();
        write(self.out, self.scratch)?;
        let header = self.out.get(before..).and_then(<[u8]>::first_chunk);
        if let Some(Ok(header)) = header.map(Header::decode) {
            self.window.sent(&header);
        }
        self.messages = self.messages.saturating_sub(1);
        Ok(())
    }
}
