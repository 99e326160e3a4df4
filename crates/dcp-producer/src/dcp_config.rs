//! What a cluster decides on the DCP connections of its clients.

use dcp_proto::producer::ConnectionConfig;

use crate::Producer;

impl Producer {
    /// What connections are served with.
    #[must_use]
    pub fn dcp_config(&self) -> ConnectionConfig {
        self.cluster.dcp_config()
    }

    /// Changes what connections are served with, such as how long they may be silent or whether
    /// backfills come in the order of the keys; takes effect for connections made from now on.
    pub fn set_dcp_config(&self, config: ConnectionConfig) {
        self.cluster.set_dcp_config(config);
    }
}
