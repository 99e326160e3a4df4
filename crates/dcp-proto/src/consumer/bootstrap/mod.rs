//! The set-up of a connection as a state machine.

mod config;
mod requests;
mod responses;
#[cfg(test)]
mod tests;

pub use config::{
    Auth, BootstrapConfig, BootstrapError, BootstrapOutcome, ClusterConfig, ControlSetting,
    DcpOpen, ErrorContext,
};

use core::fmt;

use bytes::BytesMut;
use dcp_wire::message::OpenFlags;
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{Feature, Frame, Magic, Opaque, Opcode, Status};
use zeroize::{Zeroize, Zeroizing};

use crate::topology::{MAX_CONFIG_LEN, Manifest};

/// Longest body accepted during set-up: a configuration and its surroundings.
const MAX_BODY_LEN: usize = MAX_CONFIG_LEN + 1024;

/// Longest name of a DCP connection, as the server advises.
const MAX_NAME_LEN: usize = 200;

/// The purpose of a packet that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Hello,
    ListMechanisms,
    Authenticate,
    ProveIdentity,
    SelectBucket,
    ClusterConfig,
    Manifest,
    Open,
    /// Index into the requested controls.
    Control(usize),
}

impl Step {
    const fn opcode(self) -> Opcode {
        match self {
            Self::Hello => Opcode::HELLO,
            Self::ListMechanisms => Opcode::SASL_LIST_MECHS,
            Self::Authenticate => Opcode::SASL_AUTH,
            Self::ProveIdentity => Opcode::SASL_STEP,
            Self::SelectBucket => Opcode::SELECT_BUCKET,
            Self::ClusterConfig => Opcode::GET_CLUSTER_CONFIG,
            Self::Manifest => Opcode::GET_COLLECTIONS_MANIFEST,
            Self::Open => Opcode::DCP_OPEN,
            Self::Control(_) => Opcode::DCP_CONTROL,
        }
    }
}

/// What follows once all requests are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// HELLO and SASL_LIST_MECHS were sent.
    Negotiate,
    /// SASL is in progress, or complete with the bucket's requests sent after it.
    Configure,
    /// DCP_OPEN and its controls were sent.
    Open,
    Done,
    Failed(BootstrapError),
}

/// Sets up one connection: HELLO, SASL, SELECT_BUCKET, configuration, manifest, and DCP_OPEN with
/// its controls if requested (server page "BinaryProtocol").
///
/// ```text
///            HELLO, SASL_LIST_MECHS            SASL_AUTH
/// Negotiate ------------------------> Configure ------> SASL_STEP, SELECT_BUCKET,
///                                                       GET_CLUSTER_CONFIG, manifest
///                                         | all answered
///                                         v
///                             Open: DCP_OPEN, CONTROL x n ------> Done
/// ```
///
/// Packets that do not depend on each other's answers are sent together, so the set-up takes four
/// round trips. Answers are matched by opaque, in any order; the first error ends the bootstrap.
/// Requests from the server are handled as well: a pushed configuration replaces an older one, a
/// noop is answered.
pub struct Bootstrap {
    config: BootstrapConfig,
    phase: Phase,
    pending: Vec<(Opaque, Step)>,
    next_opaque: u32,
    /// May hold a password or a token, so it is erased.
    out: Zeroizing<Vec<u8>>,
    mechanism: Option<Mechanism>,
    scram: Option<ScramClient>,
    features: Vec<Feature>,
    cluster: Option<ClusterConfig>,
    manifest: Option<Manifest>,
    controls: Vec<&'static str>,
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap")
            .field("phase", &self.phase)
            .field("pending", &self.pending)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}

impl Bootstrap {
    /// Begins; the first packets are ready to be sent.
    ///
    /// # Errors
    /// [`BootstrapError::TooLong`] or [`BootstrapError::FeatureMissing`] if the configuration
    /// cannot work with any server.
    pub fn new(mut config: BootstrapConfig) -> Result<Self, BootstrapError> {
        if config.dcp.as_ref().is_some_and(|dcp| !(1..=MAX_NAME_LEN).contains(&dcp.name.len())) {
            return Err(BootstrapError::TooLong { what: "the connection name" });
        }
        if let Some(dcp) = &config.dcp {
            if dcp.flags.contains(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL) {
                config.features.push(Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL);
            }
            config.required_features.extend(&dcp.required_features);
        }
        let mut bootstrap = Self {
            phase: Phase::Negotiate,
            pending: Vec::new(),
            next_opaque: 1,
            out: Zeroizing::new(Vec::with_capacity(4096)),
            mechanism: None,
            scram: None,
            features: Vec::new(),
            cluster: None,
            manifest: None,
            controls: Vec::new(),
            config,
        };
        bootstrap.send_hello()?;
        if !matches!(bootstrap.config.auth, Auth::Certificate) {
            bootstrap.send(Step::ListMechanisms, Frame::request(Opcode::SASL_LIST_MECHS))?;
        }
        Ok(bootstrap)
    }

    /// Whether every step is done.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Input: bytes that arrived. Whole packets are taken off the front until the bootstrap is
    /// done; the rest stays for the next user of the connection.
    ///
    /// # Errors
    /// [`BootstrapError`]; the connection cannot be used then.
    pub fn handle_bytes(&mut self, input: &mut BytesMut) -> Result<(), BootstrapError> {
        while !self.is_done() {
            let len = match Frame::parse(input, MAX_BODY_LEN) {
                Ok(None) => return Ok(()),
                Ok(Some((frame, len))) => {
                    self.handle_frame(&frame)?;
                    len
                }
                Err(error) => return Err(self.fail(error.into())),
            };
            bytes::Buf::advance(input, len);
        }
        Ok(())
    }

    /// Input: one packet.
    ///
    /// # Errors
    /// [`BootstrapError`]; the connection cannot be used then, and later calls return the same
    /// error.
    pub fn handle_frame(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        if let Phase::Failed(error) = &self.phase {
            return Err(error.clone());
        }
        let handled = match frame.header.magic {
            Magic::CLIENT_RESPONSE | Magic::ALT_CLIENT_RESPONSE => self.handle_response(frame),
            Magic::SERVER_REQUEST => {
                self.handle_push(frame);
                Ok(())
            }
            Magic::CLIENT_REQUEST if frame.header.opcode == Opcode::DCP_NOOP => self.answer(frame),
            _ => Err(BootstrapError::Unexpected { opcode: frame.header.opcode }),
        };
        handled.and_then(|()| self.advance()).map_err(|error| self.fail(error))
    }

    /// Output: appends the bytes to send to `out`; false if there are none.
    ///
    /// They may hold a password or a token: erase them once sent.
    pub fn poll_transmit(&mut self, out: &mut BytesMut) -> bool {
        if self.out.is_empty() {
            return false;
        }
        out.extend_from_slice(&self.out);
        self.out.zeroize();
        true
    }

    /// The outcome once the bootstrap is done; `None` before that, and after it has been taken.
    pub fn take_outcome(&mut self) -> Option<BootstrapOutcome> {
        if !self.is_done() {
            return None;
        }
        Some(BootstrapOutcome {
            features: core::mem::take(&mut self.features),
            config: self.cluster.take()?,
            manifest: self.manifest.take(),
            controls: core::mem::take(&mut self.controls),
        })
    }

    fn fail(&mut self, error: BootstrapError) -> BootstrapError {
        self.phase = Phase::Failed(error.clone());
        self.pending.clear();
        self.scram = None;
        self.out.zeroize();
        error
    }

    fn handle_response(&mut self, frame: &Frame<'_>) -> Result<(), BootstrapError> {
        let opaque = frame.header.opaque;
        let opcode = frame.header.opcode;
        let Some(at) = self.pending.iter().position(|&(sent, _)| sent == opaque) else {
            if (1..self.next_opaque).contains(&opaque.0) {
                tracing::debug!(%opcode, "a response came twice during connection set-up");
                return Ok(());
            }
            return Err(BootstrapError::Unexpected { opcode });
        };
        let (_, step) = self.pending.remove(at);
        if opcode != step.opcode() {
            return Err(BootstrapError::Unexpected { opcode });
        }
        let is_stale = step != Step::Authenticate && frame.header.status() == Status::AUTH_STALE;
        if is_stale && matches!(self.config.auth, Auth::Token(_)) {
            return Err(BootstrapError::TokenStale);
        }
        match step {
            Step::Hello => self.on_hello(frame),
            Step::ListMechanisms => self.on_mechanisms(frame),
            Step::Authenticate => self.on_authenticate(frame),
            Step::ProveIdentity => self.on_authenticate_step(frame),
            Step::SelectBucket => self.on_select_bucket(frame),
            Step::ClusterConfig => self.on_cluster_config(frame),
            Step::Manifest => self.on_manifest(frame),
            Step::Open => match frame.header.status() {
                Status::SUCCESS => Ok(()),
                Status::EACCESS => Err(BootstrapError::DcpAccess),
                _ => Err(responses::refused(frame)),
            },
            Step::Control(index) => self.on_control(index, frame),
        }
    }

    /// Starts the next phase once everything is answered.
    fn advance(&mut self) -> Result<(), BootstrapError> {
        if !self.pending.is_empty() {
            return Ok(());
        }
        match self.phase {
            Phase::Negotiate => {
                self.phase = Phase::Configure;
                match self.mechanism {
                    Some(mechanism) => self.send_authenticate(mechanism),
                    None => self.send_configure(),
                }
            }
            Phase::Configure => match self.config.dcp.take() {
                Some(dcp) => {
                    self.phase = Phase::Open;
                    let sent = self.send_open(&dcp);
                    self.config.dcp = Some(dcp);
                    sent
                }
                None => {
                    self.phase = Phase::Done;
                    Ok(())
                }
            },
            Phase::Open => {
                self.phase = Phase::Done;
                Ok(())
            }
            Phase::Done | Phase::Failed(_) => Ok(()),
        }
    }
}
