//! The ports of an embedded cluster.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{SockRef, Socket};
use tokio::net::TcpListener;

use crate::cluster::{Node, TlsAddresses};
use crate::{Error, ProducerOptions};

/// The open ports of one node.
#[derive(Debug)]
pub(crate) struct NodeListeners {
    /// `None` for a node without ports.
    pub(crate) plain: Option<PortListeners>,
    /// Ports with TLS.
    pub(crate) tls: Option<PortListeners>,
    pub(crate) addresses: Node,
}

/// The open ports of one node, of one kind.
#[derive(Debug)]
pub(crate) struct PortListeners {
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

    /// Addresses of the nodes.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        self.nodes.iter().map(|node| node.addresses).collect()
    }
}

impl NodeListeners {
    /// Opens the ports of the node with this number.
    pub(crate) async fn bind(options: &ProducerOptions, index: usize) -> Result<Self, Error> {
        if options.in_memory {
            return Ok(Self::in_memory(options.host, index));
        }
        let port = |option, first| port(option, first, index, options.nodes);
        let (kv, kv_address) = listen(options, port("port", options.port)?).await?;
        let mgmt_port = port("management_port", options.management_port)?;
        let (mgmt, mgmt_address) = listen(options, mgmt_port).await?;
        let mut addresses = Node { kv: kv_address, mgmt: mgmt_address, tls: None };
        let mut tls = None;
        if options.tls.is_some() {
            let (kv, kv_address) = listen(options, port("tls_port", options.tls_port)?).await?;
            let (mgmt, mgmt_address) = listen(options, 0).await?;
            addresses.tls = Some(TlsAddresses { kv: kv_address, mgmt: mgmt_address });
            tls = Some(PortListeners { kv, mgmt });
        }
        Ok(Self { plain: Some(PortListeners { kv, mgmt }), tls, addresses })
    }

    /// A node without ports. Its addresses only identify it.
    fn in_memory(host: IpAddr, index: usize) -> Self {
        let offset = u16::try_from(index).unwrap_or(u16::MAX);
        let address = |first: u16| SocketAddr::new(host, first.saturating_add(offset));
        let addresses = Node { kv: address(11_210), mgmt: address(8_091), tls: None };
        Self { plain: None, tls: None, addresses }
    }
}

/// Port of a node if the nodes have consecutive ports from `first` on; 0 for any.
fn port(option: &'static str, first: u16, index: usize, nodes: usize) -> Result<u16, Error> {
    if first == 0 {
        return Ok(0);
    }
    let offset = u16::try_from(index).unwrap_or(u16::MAX);
    first.checked_add(offset).ok_or_else(|| Error::InvalidOption {
        option,
        reason: format!("{nodes} nodes need {nodes} consecutive ports up to 65535"),
    })
}

async fn listen(options: &ProducerOptions, port: u16) -> Result<(TcpListener, SocketAddr), Error> {
    let address = SocketAddr::new(options.host, port);
    let failed = |source| Error::Listen { host: address.ip(), port: address.port(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    choose_congestion_control(&SockRef::from(&listener), options).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Loopback has no congestion; an algorithm with pacing costs throughput. The system decides which
/// ones a process may choose: if it refuses and none was configured, the default stays.
fn choose_congestion_control(socket: &Socket, options: &ProducerOptions) -> io::Result<()> {
    if let Some(name) = &options.congestion_control {
        return set_congestion_control(socket, name.as_bytes());
    }
    if let Err(error) = set_congestion_control(socket, b"reno") {
        tracing::debug!(%error, "keeping the system's congestion control");
    }
    Ok(())
}

#[cfg(target_os = "linux")]
pub(super) fn set_congestion_control(socket: &Socket, name: &[u8]) -> io::Result<()> {
    if name.is_empty() { Ok(()) } else { socket.set_tcp_congestion(name) }
}

/// The congestion control in force.
#[cfg(target_os = "linux")]
pub(super) fn congestion_control(listener: &TcpListener) -> Vec<u8> {
    let mut name = SockRef::from(listener).tcp_congestion().unwrap_or_default();
    name.retain(|byte| *byte != 0);
    name
}

#[cfg(not(target_os = "linux"))]
pub(super) fn set_congestion_control(_: &Socket, name: &[u8]) -> io::Result<()> {
    if name.is_empty() { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

#[cfg(not(target_os = "linux"))]
pub(super) const fn congestion_control(_: &TcpListener) -> Vec<u8> {
    Vec::new()
}
