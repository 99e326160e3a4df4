//! The set-up of a connection as one machine: HELLO, SASL, SELECT_BUCKET, configuration, DCP_OPEN
//! and controls.

use bytes::BytesMut;
use dcp_wire::Frame;

use super::bootstrap_config::{BootstrapConfig, BootstrapError, BootstrapOutcome};

/// Sets up one connection.
#[derive(Debug)]
pub struct Bootstrap {
    _config: BootstrapConfig,
}

impl Bootstrap {
    /// Begins; the first packets are ready to be sent.
    ///
    /// # Errors
    /// [`BootstrapError::TooLong`] or [`BootstrapError::Sasl`] if the configuration cannot be sent.
    pub fn new(config: BootstrapConfig) -> Result<Self, BootstrapError> {
        Ok(Self { _config: config })
    }

    /// Input: bytes that arrived. Whole packets are taken off the front until the bootstrap is
    /// done; what follows stays for whoever goes on with the connection.
    ///
    /// # Errors
    /// [`BootstrapError`]; the connection is of no use then.
    pub fn handle_bytes(&mut self, _input: &mut BytesMut) -> Result<(), BootstrapError> {
        Ok(())
    }

    /// Input: one packet.
    ///
    /// # Errors
    /// [`BootstrapError`]; the connection is of no use then.
    pub fn handle_frame(&mut self, _frame: &Frame<'_>) -> Result<(), BootstrapError> {
        Ok(())
    }

    /// Output: moves the bytes to send to the end of `out`; false if there are none.
    pub fn poll_transmit(&mut self, _out: &mut BytesMut) -> bool {
        false
    }

    /// Whether every step is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        false
    }

    /// The result, once done; later calls give `None`.
    pub fn take_outcome(&mut self) -> Option<BootstrapOutcome> {
        None
    }
}
