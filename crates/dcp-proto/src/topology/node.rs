//! Nodes and their addresses.

use core::fmt;
use core::net::IpAddr;

/// Where to connect: a host name or IP literal, and a port.
///
/// An IPv6 literal is stored without brackets and displayed with them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Host name or IP literal.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl Address {
    /// An address; brackets around an IPv6 literal are taken off.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        let host = host.into();
        match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(bare) => Self { host: bare.to_owned(), port },
            None => Self { host, port },
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The ports a node offers the data service on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ports {
    pub(super) kv: Option<u16>,
    pub(super) kv_ssl: Option<u16>,
}

/// A name and ports of a node on one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) hostname: String,
    pub(super) ports: Ports,
}

impl Endpoint {
    fn data(&self, tls: bool) -> Option<Address> {
        let port = if tls { self.ports.kv_ssl } else { self.ports.kv }?;
        Some(Address::new(self.hostname.as_str(), port))
    }

    fn is(&self, address: &Address) -> bool {
        self.hostname.eq_ignore_ascii_case(&address.host) && self.has_port(address.port)
    }

    /// Whether it is this one by its full name: within Kubernetes, nodes go by names that lack the
    /// domain, `cb-0.cb.default.svc`, and SRV records have the rest too, `.cluster.local`.
    fn is_in_full(&self, address: &Address) -> bool {
        let (name, full) = (self.hostname.as_bytes(), address.host.as_bytes());
        let is_name = name.contains(&b'.') && self.hostname.parse::<IpAddr>().is_err();
        let is_longer = full.get(name.len()) == Some(&b'.');
        let begins = full.get(..name.len()).is_some_and(|head| head.eq_ignore_ascii_case(name));
        is_name && is_longer && begins && self.has_port(address.port)
    }

    fn has_port(&self, port: u16) -> bool {
        [self.ports.kv, self.ports.kv_ssl].contains(&Some(port))
    }
}

/// Which of their two addresses of the nodes to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Network {
    /// The names that the nodes use among themselves.
    #[default]
    Default,
    /// The alternate addresses, for clients outside the nodes' own network.
    External,
}

/// How the [`Network`] is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NetworkSelection {
    /// By the address the first connection was made to.
    #[default]
    Auto,
    /// Always this one.
    Fixed(Network),
}

impl NetworkSelection {
    /// The network to use for `nodes`, the first connection having been made to `bootstrap`.
    ///
    /// `Auto` takes the network that contains exactly that address, the default one first, or the
    /// default one if that names a node without its domain. If neither does (a load balancer, a DNS
    /// alias), it takes the external one if any node has it: alternate addresses are meant for clients
    /// that connect by another name.
    #[must_use]
    pub fn network(self, nodes: &[Node], bootstrap: &Address) -> Network {
        if let Self::Fixed(network) = self {
            return network;
        }
        let external = || nodes.iter().filter_map(|node| node.external.as_ref());
        if nodes.iter().any(|node| node.default.is(bootstrap)) {
            Network::Default
        } else if external().any(|endpoint| endpoint.is(bootstrap)) {
            Network::External
        } else if nodes.iter().any(|node| node.default.is_in_full(bootstrap)) {
            Network::Default
        } else if external().next().is_some() {
            Network::External
        } else {
            Network::Default
        }
    }
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub(super) default: Endpoint,
    pub(super) external: Option<Endpoint>,
}

impl Node {
    /// Name of the node on its own network.
    #[must_use]
    pub fn hostname(&self) -> &str {
        &self.default.hostname
    }

    /// Where the data service listens; `None` if it is not offered on that network in that way.
    #[must_use]
    pub fn data_address(&self, network: Network, tls: bool) -> Option<Address> {
        self.endpoint(network)?.data(tls)
    }

    const fn endpoint(&self, network: Network) -> Option<&Endpoint> {
        match network {
            Network::Default => Some(&self.default),
            Network::External => self.external.as_ref(),
        }
    }
}
