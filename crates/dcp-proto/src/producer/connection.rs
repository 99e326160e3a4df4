//! The producer's side of one DCP connection.

use std::time::Instant;

use bytes::BytesMut;
use dcp_wire::{Frame, Status, Vbid};

use super::settings::Settings;
use super::{BucketSource, ConnectionConfig, Disconnect, Features};

/// What one call of [`Connection::poll_transmit`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes appended.
    pub written: usize,
    /// Whether the budget, not a lack of data or of credit, ended the call: call again as soon as
    /// the bytes are written out.
    pub more: bool,
}

/// The DCP part of one server connection.
#[derive(Debug)]
pub struct Connection {
    config: ConnectionConfig,
    opened: Option<Settings>,
    name: Vec<u8>,
}

impl Connection {
    /// A connection that was accepted at `now` and has not been opened for DCP yet.
    #[must_use]
    pub fn new(config: ConnectionConfig, _now: Instant) -> Self {
        Self { config, opened: None, name: Vec::new() }
    }

    /// What the connection is configured with.
    #[must_use]
    pub const fn config(&self) -> &ConnectionConfig {
        &self.config
    }

    /// Name given by DCP_OPEN; `None` before. When a connection gets one, the caller closes the
    /// older connection of the same name.
    #[must_use]
    pub fn name(&self) -> Option<&[u8]> {
        self.opened.as_ref().map(|_| self.name.as_slice())
    }

    /// Notes that a packet arrived which is handled elsewhere: the connection is not idle.
    pub fn handle_received(&mut self, _now: Instant) {}

    /// Handles one DCP packet (opcodes 0x50 to 0x67, requests and responses); the answer, if there
    /// is one, is appended to `out` at once.
    ///
    /// `source` is the bucket the connection has selected, `None` without one.
    ///
    /// # Errors
    /// [`Disconnect`]: close the connection after writing what is in `out`.
    pub fn handle_frame<S: BucketSource>(
        &mut self,
        now: Instant,
        frame: &Frame<'_>,
        _source: Option<&S>,
        _features: Features,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        self.handle_received(now);
        let _ = Frame::response(frame.header.opcode, Status::UNKNOWN_COMMAND)
            .with_opaque(frame.header.opaque)
            .encode(out);
        Ok(())
    }

    /// Notes that the vBucket has new items, or another state, or is gone.
    pub fn notify(&mut self, _vbid: Vbid) {}

    /// Appends stream messages and noops to `out` until `budget` bytes are written, the
    /// flow-control window is used up, or there is nothing to send.
    pub fn poll_transmit<S: BucketSource>(
        &mut self,
        _now: Instant,
        _source: &S,
        _out: &mut BytesMut,
        _budget: usize,
    ) -> Transmit {
        Transmit::default()
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called; `None` never.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// Lets time pass: makes a due noop ready for
    /// [`poll_transmit`](Self::poll_transmit).
    ///
    /// # Errors
    /// [`Disconnect::Idle`] if nothing was received for too long.
    pub fn handle_timeout(&mut self, _now: Instant) -> Result<(), Disconnect> {
        Ok(())
    }

    /// Forgets all streams: the connection is closed.
    pub fn handle_closed(&mut self) {
        self.opened = None;
    }
}
