//! SELECT_BUCKET and GET_CLUSTER_CONFIG.

use dcp_wire::Status;
use dcp_wire::message::GetClusterConfig;

use super::command::Command;
use super::failure::Failure;

/// Name that deselects the bucket of a connection.
const NO_BUCKET_NAME: &[u8] = b"@no bucket@";

impl Command<'_, '_> {
    pub(super) fn select_bucket(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        self.session.served = if self.frame.key == NO_BUCKET_NAME {
            None
        } else {
            let named = self.session.cluster.bucket_named(self.frame.key);
            let served = named.ok_or(Status::KEY_ENOENT)?;
            if !self.session.rights().reads_something() {
                return Err(Failure::Denied("a role on the bucket"));
            }
            Some(served)
        };
        // Another bucket's map may have the same version.
        self.session.map_sent = None;
        self.succeed(self.success())
    }

    pub(super) fn cluster_config(&mut self) -> Result<(), Failure> {
        let GetClusterConfig { known } = GetClusterConfig::decode(self.frame)?;
        // Only clients that negotiated it understand an empty answer.
        let known = known.filter(|_| self.session.features.known_map_version);
        let node = self.session.node;
        let (version, config, is_of_bucket) = match &self.session.served {
            Some(served) => {
                let map = served.map();
                (map.version, map.view(node).cloned(), true)
            }
            None => {
                let map = self.session.cluster.map();
                (map.version, map.view(node).cloned(), false)
            }
        };
        if known.is_some_and(|known| known >= version) {
            return self.succeed(self.success());
        }
        let config = config.ok_or(Status::KEY_ENOENT)?;
        if is_of_bucket {
            self.session.map_sent = Some(version);
        }
        self.succeed(self.success().with_datatype(self.json()).with_value(&config))
    }
}
