//! The configuration of the cluster as a whole, sent to connections without a bucket.

use super::bucket_config::{Revision, revision};
use super::config_json::ConfigJson;
use super::{InvalidConfig, Node};

/// The nodes of the cluster, without any bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalConfig {
    revision: Revision,
    nodes: Vec<Node>,
}

impl GlobalConfig {
    /// Reads the answer to GET_CLUSTER_CONFIG on a connection without a bucket.
    ///
    /// `connected_host` is the host that sent the configuration.
    ///
    /// # Errors
    /// [`InvalidConfig`] if a member is missing or wrong.
    pub fn parse(json: &[u8], connected_host: &str) -> Result<Self, InvalidConfig> {
        let json = ConfigJson::parse(json)?;
        let revision = revision(&json)?;
        if json.nodes_ext.0.is_empty() {
            return Err(InvalidConfig::Missing("nodesExt"));
        }
        let nodes = json.nodes_ext.0.into_iter().map(|node| node.into_node(connected_host));
        Ok(Self { revision, nodes: nodes.collect::<Result<_, _>>()? })
    }

    /// Version of the configuration.
    #[must_use]
    pub const fn revision(&self) -> Revision {
        self.revision
    }

    /// All nodes, including those without the data service.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
}
