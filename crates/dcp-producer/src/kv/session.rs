//! One connection's state outside DCP.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_producer_proto as proto;
use dcp_producer_proto::ServerVersion;
use dcp_wire::message::ConfigVersion;
use dcp_wire::{Opaque, Opcode, Status, Vbid};
use tokio_util::sync::CancellationToken;

use super::credentials::{Credentials, Login};
use crate::bucket::Written;
use crate::cluster::{Cluster, ServedBucket};
use crate::rights::Rights;

/// What a connection negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features {
    /// The features that also concern DCP.
    pub(crate) dcp: proto::Features,
    pub(crate) mutation_tokens: bool,
    pub(crate) xattr: bool,
    pub(crate) tracing: bool,
    pub(crate) alt_requests: bool,
    pub(crate) known_map_version: bool,
    pub(crate) dedupe_maps: bool,
    pub(crate) map_push: MapPush,
}

/// How a connection is notified of new cluster maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MapPush {
    /// It asks.
    #[default]
    Off,
    /// It is notified that there is one.
    Brief,
    /// It is sent the map.
    Full,
}

/// What to do after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Continue with the next one.
    Continue,
    /// Close the connection once the answers are written.
    Close,
    /// Nothing was done: pass the same request again in a moment, before any other.
    Later,
    /// Nothing was done: the request belongs to DCP.
    Dcp,
}

/// A prepared write, and the answer to its client once it is committed.
#[derive(Debug)]
pub(super) struct DurableWrite {
    pub(super) written: Written,
    pub(super) status: Status,
    pub(super) value: Vec<u8>,
}

/// A request whose answer waits for its durable write.
#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) opcode: Opcode,
    pub(super) opaque: Opaque,
    pub(super) vbid: Vbid,
    /// When it was begun, if the client requests the duration.
    pub(super) started: Option<Instant>,
    /// Whether the requests after it wait for it.
    pub(super) is_barrier: bool,
    pub(super) write: DurableWrite,
}

/// One connection's state outside DCP.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) cluster: Arc<Cluster>,
    pub(super) node: usize,
    pub(super) features: Features,
    pub(super) login: Login,
    /// Whether the connection is encrypted.
    pub(super) is_tls: bool,
    /// The selected bucket.
    pub(super) served: Option<Arc<ServedBucket>>,
    /// Newest map this connection was sent with NOT_MY_VBUCKET.
    pub(super) map_sent: Option<ConfigVersion>,
    /// Requests whose answers wait for their durable writes, in the order they came.
    pub(super) deferred: Vec<Deferred>,
    /// Since when a request is being retried.
    pub(super) waiting_since: Option<Instant>,
    /// How long it may be retried.
    pub(super) persistence_timeout: Duration,
    /// Server version whose behaviour the connection follows.
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
            is_tls: false,
            served: None,
            map_sent: None,
            deferred: Vec::new(),
            waiting_since: None,
            persistence_timeout: Duration::ZERO,
        }
    }

    /// Like [`new`](Self::new), over TLS.
    pub(crate) fn encrypted(
        cluster: Arc<Cluster>,
        node: usize,
        credentials: Arc<Credentials>,
    ) -> Self {
        Self { is_tls: true, ..Self::new(cluster, node, credentials) }
    }

    /// Like [`encrypted`](Self::encrypted), for a client with the user's certificate.
    pub(crate) fn certified(
        cluster: Arc<Cluster>,
        node: usize,
        credentials: Arc<Credentials>,
    ) -> Self {
        let mut session = Self::encrypted(cluster, node, credentials);
        session.login.certify();
        session
    }

    /// The same, with a timeout for clients that wait for persistence.
    pub(crate) fn with_persistence_timeout(self, timeout: Duration) -> Self {
        Self { persistence_timeout: timeout, ..self }
    }

    /// Whether a request is being retried, or its answer waits.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting_since.is_some() || self.is_deferring()
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

    /// The client's privileges.
    pub(crate) fn rights(&self) -> &Rights {
        self.login.rights()
    }

    /// The selected bucket.
    pub(crate) fn served(&self) -> Option<&Arc<ServedBucket>> {
        self.served.as_ref()
    }

    /// Token that ends the connection with its bucket, if it has selected one.
    pub(crate) fn bucket_life(&self) -> Option<&CancellationToken> {
        self.served().map(|served| served.life())
    }
}
