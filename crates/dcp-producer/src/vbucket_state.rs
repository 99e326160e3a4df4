//! Durable writes, vBucket states and privileges: what the holder of a cluster decides.

use bytes::Bytes;
use dcp_proto::producer::{Privilege, VBucketState};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{CollectionId, DocKey, Vbid};

use crate::bucket::{Condition, Copies, DocumentWrite};
use crate::{DocumentError, Error, MutationToken, Producer, WriteOptions};

impl Producer {
    /// Begins a durable write, which nobody but replicas sees until it is
    /// [committed](Self::commit); `None` for `value` removes the document.
    ///
    /// # Errors
    /// [`DocumentError::SyncWriteInProgress`] if the document has one already,
    /// [`DocumentError::NotFound`] if there is nothing to remove, or as [`upsert`](Self::upsert).
    pub fn prepare(
        &self,
        key: &[u8],
        value: Option<Bytes>,
        options: WriteOptions,
        level: DurabilityLevel,
    ) -> Result<MutationToken, DocumentError> {
        let now = self.now();
        let doc_key = DocKey { collection_id: options.collection_id, key };
        let write = value.map(|value| DocumentWrite {
            key: doc_key,
            datatype: options.datatype.unwrap_or_else(|| crate::value::detect(&value)),
            value,
            flags: options.flags,
            expiry: now.absolute_expiry(options.expiry),
            cas: options.cas,
            condition: Condition::Any,
        });
        self.on_vbucket_of(key, |vbucket| vbucket.prepare(now, doc_key, write, level))
    }

    /// Makes the durable write of a document what everybody sees. Writes of a vBucket are
    /// completed in the order in which they were prepared.
    ///
    /// # Errors
    /// [`DocumentError::NotPrepared`] if it is not the next one of its vBucket.
    pub fn commit(
        &self,
        key: &[u8],
        collection_id: CollectionId,
    ) -> Result<MutationToken, DocumentError> {
        let doc_key = DocKey { collection_id, key };
        self.on_vbucket_of(key, |vbucket| vbucket.complete(doc_key, true))
    }

    /// Gives the durable write of a document up.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn abort(
        &self,
        key: &[u8],
        collection_id: CollectionId,
    ) -> Result<MutationToken, DocumentError> {
        let doc_key = DocKey { collection_id, key };
        self.on_vbucket_of(key, |vbucket| vbucket.complete(doc_key, false))
    }

    /// Changes the state of the active copy of a vBucket, as a cluster manager does in mid-move:
    /// its streams end with "state changed", and it takes writes only while it is active. Making
    /// it active again is also the way back after a client took it over. A replica that becomes
    /// active begins a new history branch, where it has persisted all of its history.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::VbucketUnavailable`].
    pub fn set_vbucket_state(&self, vbid: Vbid, state: VBucketState) -> Result<(), Error> {
        let vbuuid = self.cluster.bucket.chance().vbuuid();
        // Servers before 7.0 go on with the checkpoint they had as a replica.
        let keeps_checkpoint = self.cluster.dcp_config().server_version.is_legacy();
        let set = |copies: &mut Copies| copies.set_state(state, vbuuid, keeps_checkpoint);
        let set = self.cluster.bucket.rearrange(vbid, set);
        if set == Some(true) { Ok(()) } else { Err(self.no_vbucket(vbid)) }
    }

    /// Takes a privilege from the user, from now on: requests that need it are refused, streams
    /// that need it end with "lost privileges" in the place of their next snapshot.
    pub fn revoke(&self, privilege: Privilege) {
        self.cluster.change_privileges(|revoked| revoked.push(privilege));
    }

    /// Gives a privilege back.
    pub fn grant(&self, privilege: Privilege) {
        self.cluster.change_privileges(|revoked| revoked.retain(|&other| other != privilege));
    }
}
