//! The collections manifest, and lookups of ids by name.

use bytes::BufMut;
use dcp_wire::Status;

use super::command::Command;
use super::failure::Failure;
use crate::bucket::Manifest;

impl Command<'_, '_> {
    pub(super) fn manifest(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let manifest = self.served()?.manifest().to_json();
        self.succeed(self.success().with_datatype(self.json()).with_value(manifest.as_bytes()))
    }

    pub(super) fn collection_id(&mut self) -> Result<(), Failure> {
        let path = self.path()?;
        let mut parts = path.split(|&byte| byte == b'.');
        let (Some(scope), Some(collection), None) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(Failure::Invalid("the path is scope.collection"));
        };
        let manifest = self.served()?.manifest();
        let scope = manifest.scope_named(scope).ok_or(Failure::Unknown(Status::UNKNOWN_SCOPE))?;
        let collection = scope
            .collection_named(collection)
            .ok_or(Failure::Unknown(Status::UNKNOWN_COLLECTION))?;
        self.send_id(&manifest, collection.id.0)
    }

    pub(super) fn scope_id(&mut self) -> Result<(), Failure> {
        let path = self.path()?;
        let scope = path.split(|&byte| byte == b'.').next().unwrap_or_default();
        let manifest = self.served()?.manifest();
        let scope = manifest.scope_named(scope).ok_or(Failure::Unknown(Status::UNKNOWN_SCOPE))?;
        self.send_id(&manifest, scope.id.0)
    }

    /// The requested path: in the value, or in the key for older clients.
    fn path(&self) -> Result<Vec<u8>, Failure> {
        if !self.frame.extras.is_empty() {
            return Err(Failure::Invalid("the request must not have extras"));
        }
        let path = if self.frame.value.is_empty() { self.frame.key } else { self.frame.value };
        Ok(path.to_vec())
    }

    fn send_id(&mut self, manifest: &Manifest, id: u32) -> Result<(), Failure> {
        let mut extras = [0; 12];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(manifest.uid().0);
        cursor.put_u32(id);
        self.succeed(self.success().with_extras(&extras))
    }
}
