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
        let cluster = &self.session.cluster;
        // First, so that dropping the bucket meanwhile ends the connection.
        let life = cluster.bucket_life();
        let exists = cluster.map().bucket_uuid.is_some();
        self.session.bucket = if self.frame.key == NO_BUCKET_NAME {
            None
        } else if exists && self.frame.key == cluster.bucket_name().as_bytes() {
            if !self.session.rights().reads_something() {
                return Err(Failure::Denied("a role on the bucket"));
            }
            Some(life)
        } else {
            return Err(Status::KEY_ENOENT.into());
        };
        self.succeed(self.success())
    }

    pub(super) fn cluster_config(&mut self) -> Result<(), Failure> {
        let GetClusterConfig { known } = GetClusterConfig::decode(self.frame)?;
        // Only clients that negotiated it understand an empty answer.
        let known = known.filter(|_| self.session.features.known_map_version);
        let map = self.session.cluster.map();
        if known.is_some_and(|known| known >= map.version) {
            return self.succeed(self.success());
        }
        let view = map.view(self.session.node).ok_or(Status::KEY_ENOENT)?;
        let config = if self.session.bucket.is_some() {
            self.session.map_sent = Some(map.version);
            &view.bucket
        } else {
            &view.global
        };
        self.succeed(self.success().with_datatype(self.json()).with_value(config))
    }
}
