//! The ports of an embedded cluster.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use crate::cluster::Node;
use crate::{Error, ProducerOptions};

/// The open ports of one node.
#[derive(Debug)]
pub(crate) struct NodeListeners {
    pub(crate) kv: TcpListener,
    /// HTTP.
    pub(crate) mgmt: TcpListener,
    addresses: Node,
}

/// The open ports of all nodes.
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) nodes: Vec<NodeListeners>,
}

impl Listeners {
    pub(crate) async fn bind(options: &ProducerOptions) -> Result<Self, Error> {
        let mut nodes = Vec::with_capacity(options.nodes);
        for index in 0..options.nodes {
            let port = kv_port(options, index)?;
            let (kv, kv_address) = listen(SocketAddr::new(options.host, port)).await?;
            let (mgmt, mgmt_address) = listen(SocketAddr::new(options.host, 0)).await?;
            let addresses = Node { kv: kv_address, mgmt: mgmt_address };
            nodes.push(NodeListeners { kv, mgmt, addresses });
        }
        Ok(Self { nodes })
    }

    /// Where the nodes listen.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        self.nodes.iter().map(|node| node.addresses).collect()
    }
}

fn kv_port(options: &ProducerOptions, index: usize) -> Result<u16, Error> {
    if options.port == 0 {
        return Ok(0);
    }
    let offset = u16::try_from(index).unwrap_or(u16::MAX);
    options.port.checked_add(offset).ok_or_else(|| Error::InvalidOption {
        option: "port",
        reason: format!("{} nodes need as many ports up to 65535", options.nodes),
    })
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let failed = |source| Error::Listen { host: address.ip(), port: address.port(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    // Loopback has no congestion; an algorithm that paces by round-trip times costs throughput.
    // Which ones a process may choose is up to the system: keep its own if it refuses.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket2::SockRef::from(&listener).set_tcp_congestion(b"reno") {
        tracing::debug!(%error, "keeping the system's congestion control");
    }
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}
