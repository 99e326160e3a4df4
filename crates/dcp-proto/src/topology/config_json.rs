//! The JSON of a cluster configuration and its node list.

use serde::Deserialize;

use super::at_most::AtMost;
use super::node::{Endpoint, Node, Ports};
use super::{InvalidConfig, MAX_CONFIG_LEN, MAX_VBUCKETS};

/// Placeholder for the address that the configuration was requested from.
const HOST_PLACEHOLDER: &str = "$HOST";

/// Most nodes of a cluster; servers have a few dozen.
const MAX_NODES: usize = 1024;

/// Most copies of a vBucket: the active one and three replicas.
const MAX_COPIES: usize = 4;

/// Most capabilities of a bucket; servers have two dozen.
const MAX_CAPABILITIES: usize = 1024;

/// Longest name of a host in bytes. DNS allows 253; scope ids of IPv6 addresses are short.
const MAX_HOST_LEN: usize = 255;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConfigJson {
    pub(super) rev: Option<i64>,
    pub(super) rev_epoch: Option<i64>,
    pub(super) name: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) bucket_type: Option<String>,
    pub(super) storage_backend: Option<String>,
    pub(super) bucket_capabilities: Option<AtMost<String, MAX_CAPABILITIES>>,
    pub(super) node_locator: Option<String>,
    pub(super) collections_manifest_uid: Option<String>,
    #[serde(default)]
    pub(super) nodes_ext: AtMost<NodeJson, MAX_NODES>,
    #[serde(rename = "vBucketServerMap")]
    pub(super) vbucket_server_map: Option<ServerMapJson>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServerMapJson {
    #[serde(default)]
    pub(super) server_list: AtMost<String, MAX_NODES>,
    #[serde(rename = "vBucketMap", default)]
    pub(super) vbucket_map: AtMost<AtMost<i64, MAX_COPIES>, MAX_VBUCKETS>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeJson {
    #[serde(default)]
    services: PortsJson,
    hostname: Option<String>,
    #[serde(default)]
    alternate_addresses: AlternateJson,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PortsJson {
    kv: Option<u16>,
    #[serde(rename = "kvSSL")]
    kv_ssl: Option<u16>,
}

#[derive(Default, Deserialize)]
struct AlternateJson {
    external: Option<ExternalJson>,
}

#[derive(Deserialize)]
struct ExternalJson {
    hostname: Option<String>,
    ports: Option<PortsJson>,
}

impl From<PortsJson> for Ports {
    fn from(json: PortsJson) -> Self {
        Self { kv: offered(json.kv), kv_ssl: offered(json.kv_ssl) }
    }
}

/// A port, unless it is 0, which some servers send for "not offered".
pub(super) fn offered(port: Option<u16>) -> Option<u16> {
    port.filter(|&port| port != 0)
}

impl ConfigJson {
    pub(super) fn parse(json: &[u8]) -> Result<Self, InvalidConfig> {
        if json.len() > MAX_CONFIG_LEN {
            return Err(InvalidConfig::TooLarge { len: json.len() });
        }
        serde_json::from_slice(json)
            .map_err(|error| InvalidConfig::Json { line: error.line(), column: error.column() })
    }
}

impl NodeJson {
    /// The node, with `connected_host` as its name if the configuration leaves that out.
    ///
    /// # Errors
    /// [`InvalidConfig::Impossible`] if a name is too long.
    pub(super) fn into_node(self, connected_host: &str) -> Result<Node, InvalidConfig> {
        let ports = Ports::from(self.services);
        let hostname = resolve(self.hostname.as_deref(), connected_host)?;
        let external = self.alternate_addresses.external.map(|external| {
            Ok(Endpoint {
                hostname: resolve(external.hostname.as_deref(), connected_host)?,
                // Without a port list, the usual ports are forwarded unchanged.
                ports: external.ports.map_or(ports, Ports::from),
            })
        });
        let default = Endpoint { hostname, ports };
        Ok(Node { default, external: external.transpose()? })
    }
}

/// The name in a configuration, of limited length since it is stored for each node.
fn resolve(hostname: Option<&str>, connected_host: &str) -> Result<String, InvalidConfig> {
    let hostname = match hostname {
        None | Some("" | HOST_PLACEHOLDER) => connected_host,
        Some(hostname) if hostname.len() > MAX_HOST_LEN => {
            return Err(InvalidConfig::Impossible("host name"));
        }
        Some(hostname) => hostname,
    };
    Ok(hostname.trim_start_matches('[').trim_end_matches(']').to_owned())
}

/// Splits an entry of the server list; the port is the data service's.
pub(super) fn split_server(
    entry: &str,
    connected_host: &str,
) -> Result<(String, u16), InvalidConfig> {
    let wrong = InvalidConfig::Impossible("server list entry");
    let (host, port) = entry.rsplit_once(':').ok_or_else(|| wrong.clone())?;
    let port = port.parse().map_err(|_| wrong)?;
    Ok((resolve(Some(host), connected_host)?, port))
}
