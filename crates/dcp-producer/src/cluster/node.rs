//! A node on the network: its addresses, whether it runs, and its connections.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// TLS addresses of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TlsAddresses {
    pub(crate) kv: SocketAddr,
    pub(crate) mgmt: SocketAddr,
}

/// A node's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kv: SocketAddr,
    pub(crate) mgmt: SocketAddr,
    /// With TLS, if the cluster supports it.
    pub(crate) tls: Option<TlsAddresses>,
}

/// Whether a node runs, and how its connections end when it stops.
#[derive(Debug)]
pub(crate) struct NodePower {
    is_on: watch::Sender<bool>,
    ports: watch::Sender<Ports>,
    /// Ends the connections of the current run of the node.
    run: Mutex<CancellationToken>,
    /// Ends everything.
    stop: CancellationToken,
}

/// The ports of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ports {
    all: usize,
    /// Ports that accept connections.
    open: usize,
}

impl NodePower {
    /// A node that runs, until everything stops.
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            is_on: watch::Sender::new(true),
            ports: watch::Sender::default(),
            run: Mutex::new(stop.child_token()),
            stop,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        *self.is_on.borrow()
    }

    /// Follows whether the node runs.
    pub(crate) fn follow(&self) -> watch::Receiver<bool> {
        self.is_on.subscribe()
    }

    /// Counts a new port, which is open.
    pub(crate) fn add_port(&self) {
        self.ports.send_modify(|ports| {
            ports.all += 1;
            ports.open += 1;
        });
    }

    /// Notes that a port was opened or closed.
    pub(crate) fn note_port(&self, is_open: bool) {
        self.ports.send_modify(|ports| {
            ports.open = if is_open { ports.open + 1 } else { ports.open.saturating_sub(1) };
        });
    }

    /// Waits until all ports are open.
    pub(crate) async fn ports_open(&self) {
        // The sender lives as long as `self`.
        drop(self.ports.subscribe().wait_for(|ports| ports.open == ports.all).await);
    }

    /// Waits until all ports are closed.
    pub(crate) async fn ports_closed(&self) {
        drop(self.ports.subscribe().wait_for(|ports| ports.open == 0).await);
    }

    /// Token that ends the connections of the current run of the node.
    pub(crate) fn run(&self) -> CancellationToken {
        self.run.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends all connections and refuses new ones.
    pub(crate) fn switch_off(&self) {
        self.is_on.send_replace(false);
        self.run().cancel();
    }

    /// Takes connections again.
    pub(crate) fn switch_on(&self) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = self.stop.child_token();
        self.is_on.send_replace(true);
    }
}
