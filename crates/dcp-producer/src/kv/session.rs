//! One connection's state outside DCP, and the way of a request through it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_proto::producer::ServerVersion;
use dcp_wire::message::ConfigVersion;
use dcp_wire::{Frame, Opcode, Status};
use tokio_util::sync::CancellationToken;

use super::Credentials;
use super::command::Command;
use super::failure::Failure;
use super::hello::Features;
use super::login::Login;
use crate::bucket::Now;
use crate::cluster::Cluster;

/// What is to be done after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Go on with the next one.
    Continue,
    /// Close the connection once the answers are written.
    Close,
    /// Nothing was done: give the same request again in a moment, and no other before it.
    Later,
    /// Nothing was done: the request belongs to DCP.
    Dcp,
}

/// One connection's state outside DCP.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) cluster: Arc<Cluster>,
    pub(super) node: usize,
    pub(super) features: Features,
    pub(super) login: Login,
    /// What ends the connection with its bucket; `None` while it has selected none.
    pub(super) bucket: Option<CancellationToken>,
    /// Newest map this connection was sent with NOT_MY_VBUCKET.
    pub(super) map_sent: Option<ConfigVersion>,
    /// Since when a request is given again and again.
    pub(super) waiting_since: Option<Instant>,
    /// How long that may last.
    pub(super) persistence_timeout: Duration,
    /// Whose ways the connection has.
    pub(super) version: ServerVersion,
}

impl Session {
    pub(crate) fn new(cluster: Arc<Cluster>, node: usize, credentials: Arc<Credentials>) -> Self {
        Self {
            version: cluster.dcp_config().server_version,
            cluster,
            node,
            features: Features::default(),
            login: Login::new(credentials),
            bucket: None,
            map_sent: None,
            waiting_since: None,
            persistence_timeout: Duration::ZERO,
        }
    }

    /// As [`new`](Self::new) for a client whose certificate is the user's.
    pub(crate) fn certified(
        cluster: Arc<Cluster>,
        node: usize,
        credentials: Arc<Credentials>,
    ) -> Self {
        let mut session = Self::new(cluster, node, credentials);
        session.login.certify();
        session
    }

    /// The same, which keeps clients waiting for persistence that long.
    pub(crate) fn with_persistence_timeout(self, timeout: Duration) -> Self {
        Self { persistence_timeout: timeout, ..self }
    }

    /// Whether a request is to be given again.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting_since.is_some()
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    pub(crate) fn node(&self) -> usize {
        self.node
    }

    pub(crate) fn features(&self) -> &Features {
        &self.features
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.login.is_done()
    }

    pub(crate) fn has_bucket(&self) -> bool {
        self.bucket.is_some()
    }

    /// What ends the connection with its bucket, if it has selected one.
    pub(crate) fn bucket_life(&self) -> Option<&CancellationToken> {
        self.bucket.as_ref()
    }

    /// Answers one request. `dcp_open` tells whether the connection has become a DCP one.
    pub(crate) fn handle(
        &mut self,
        now: Now,
        frame: &Frame<'_>,
        dcp_open: bool,
        out: &mut BytesMut,
    ) -> Flow {
        if frame.header.magic.is_response() {
            // Answers to pushed cluster maps say nothing.
            let dcp = frame.header.opcode.is_dcp() && dcp_open;
            return if dcp { Flow::Dcp } else { Flow::Continue };
        }
        // HELLO may ask for how long it took itself.
        let traced = self.features.tracing || frame.header.opcode == Opcode::HELLO;
        let started = traced.then(Instant::now);
        let result = match self.admit(frame, dcp_open) {
            Ok(()) if frame.header.opcode.is_dcp() => return Flow::Dcp,
            Ok(()) if frame.header.opcode == Opcode::QUIT => Err(Failure::Close),
            Ok(()) => Command::new(self, frame, now, started, out).run(),
            Err(failure) => Err(failure),
        };
        let failure = match result {
            Ok(()) => return Flow::Continue,
            Err(Failure::Later) => return Flow::Later,
            Err(failure) => failure,
        };
        match Command::new(self, frame, now, started, out).refuse(failure) {
            Ok(()) => Flow::Continue,
            Err(_) => Flow::Close,
        }
    }

    /// Whether the connection has come far enough for the request.
    fn admit(&self, frame: &Frame<'_>, dcp_open: bool) -> Result<(), Failure> {
        let opcode = frame.header.opcode;
        if frame.header.magic.is_alt() && !self.features.alt_requests && !opcode.is_dcp() {
            return Err(Failure::Invalid("framing extras were not negotiated"));
        }
        match opcode {
            Opcode::HELLO | Opcode::GET_ERROR_MAP | Opcode::QUIT => Ok(()),
            Opcode::SASL_LIST_MECHS
            | Opcode::SASL_AUTH
            | Opcode::SASL_STEP
            | Opcode::SELECT_BUCKET
                if dcp_open =>
            {
                Err(Status::NOT_SUPPORTED.into())
            }
            Opcode::SASL_LIST_MECHS | Opcode::SASL_AUTH | Opcode::SASL_STEP
                if self.login.is_certified() =>
            {
                Err(Status::NOT_SUPPORTED.into())
            }
            Opcode::SASL_LIST_MECHS | Opcode::SASL_AUTH | Opcode::SASL_STEP => Ok(()),
            _ if !self.is_authenticated() => Err(Status::EACCESS.into()),
            Opcode::SELECT_BUCKET
            | Opcode::GET_CLUSTER_CONFIG
            | Opcode::NOOP
            | Opcode::VERSION
            | Opcode::STAT => Ok(()),
            _ if opcode.is_dcp() => Ok(()),
            _ if self.bucket.is_none() && Command::knows(opcode) => Err(Status::NO_BUCKET.into()),
            _ => Ok(()),
        }
    }
}
