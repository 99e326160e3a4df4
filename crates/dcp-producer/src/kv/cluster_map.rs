//! SELECT_BUCKET and GET_CLUSTER_CONFIG.

use dcp_wire::{Reader, Status};

use super::command::Command;
use super::failure::Failure;
use crate::cluster::MapVersion;

/// Name that unbinds a connection from its bucket.
const NO_BUCKET_NAME: &[u8] = b"@no bucket@";

impl Command<'_, '_> {
    pub(super) fn select_bucket(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        self.session.bucket_selected = if self.frame.key == NO_BUCKET_NAME {
            false
        } else if self.frame.key == self.session.cluster.bucket_name.as_bytes() {
            true
        } else {
            return Err(Status::KEY_ENOENT.into());
        };
        self.succeed(self.success())
    }

    pub(super) fn cluster_config(&mut self) -> Result<(), Failure> {
        self.expect_key_value(false, false)?;
        let known = self.known_version()?;
        let map = self.session.cluster.map();
        if known.is_some_and(|known| known >= map.version) {
            return self.succeed(self.success());
        }
        let view = map.view(self.session.node).ok_or(Status::KEY_ENOENT)?;
        let config = if self.session.bucket_selected {
            self.session.map_sent = Some(map.version);
            &view.bucket
        } else {
            &view.global
        };
        self.succeed(self.success().with_datatype(self.json()).with_value(config))
    }

    /// The version the client has, if it says and may say so.
    fn known_version(&self) -> Result<Option<MapVersion>, Failure> {
        if self.frame.extras.is_empty() {
            return Ok(None);
        }
        let mut reader = Reader::new(self.frame.extras, "known version");
        let [epoch, rev] = [reader.u64()?, reader.u64()?].map(u64::cast_signed);
        reader.finish()?;
        let known = MapVersion { epoch, rev };
        Ok(self.session.features.known_map_version.then_some(known))
    }
}
