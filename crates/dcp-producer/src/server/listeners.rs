//! The ports of an embedded cluster.

use std::net::{IpAddr, SocketAddr};

use tokio::net::TcpListener;

use crate::cluster::{Node, TlsAddresses};
use crate::{Error, ProducerOptions};

/// The open ports of one node.
#[derive(Debug)]
pub(crate) struct NodeListeners {
    pub(crate) kv: TcpListener,
    /// HTTP.
    pub(crate) mgmt: TcpListener,
    pub(crate) tls: Option<TlsListeners>,
    pub(crate) addresses: Node,
}

/// The open ports of one node that speak TLS.
#[derive(Debug)]
pub(crate) struct TlsListeners {
    pub(crate) kv: TcpListener,
    /// HTTP.
    pub(crate) mgmt: TcpListener,
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
            nodes.push(NodeListeners::bind(options, index).await?);
        }
        Ok(Self { nodes })
    }

    /// Where the nodes listen.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        self.nodes.iter().map(|node| node.addresses).collect()
    }
}

impl NodeListeners {
    /// Opens the ports of the node that has this number.
    pub(crate) async fn bind(options: &ProducerOptions, index: usize) -> Result<Self, Error> {
        let port = |option, first| port(option, first, index, options.nodes);
        let (kv, kv_address) = listen(options.host, port("port", options.port)?).await?;
        let mgmt_port = port("management_port", options.management_port)?;
        let (mgmt, mgmt_address) = listen(options.host, mgmt_port).await?;
        let mut addresses = Node { kv: kv_address, mgmt: mgmt_address, tls: None };
        let mut tls = None;
        if options.tls.is_some() {
            let (kv, kv_address) =
                listen(options.host, port("tls_port", options.tls_port)?).await?;
            let (mgmt, mgmt_address) = listen(options.host, 0).await?;
            addresses.tls = Some(TlsAddresses { kv: kv_address, mgmt: mgmt_address });
            tls = Some(TlsListeners { kv, mgmt });
        }
        Ok(Self { kv, mgmt, tls, addresses })
    }
}

/// Port of a node when those of all follow on `first`; 0 for any.
fn port(option: &'static str, first: u16, index: usize, nodes: usize) -> Result<u16, Error> {
    if first == 0 {
        return Ok(0);
    }
    let offset = u16::try_from(index).unwrap_or(u16::MAX);
    first.checked_add(offset).ok_or_else(|| Error::InvalidOption {
        option,
        reason: format!("{nodes} nodes need as many ports up to 65535"),
    })
}

async fn listen(host: IpAddr, port: u16) -> Result<(TcpListener, SocketAddr), Error> {
    let address = SocketAddr::new(host, port);
    let failed = |source| Error::Listen { host: address.ip(), port: address.port(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    choose_congestion_control(&socket2::SockRef::from(&listener));
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Loopback has no congestion; an algorithm that paces by round-trip times costs throughput. Which
/// ones a process may choose is up to the system: its own stays if it refuses.
pub(super) fn choose_congestion_control(socket: &socket2::Socket) {
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_congestion(b"reno") {
        tracing::debug!(%error, "keeping the system's congestion control");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = socket;
}
