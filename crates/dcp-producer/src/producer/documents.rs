//! Document operations of the owner of a cluster, without a client.

use bytes::Bytes;
use dcp_producer_proto::ItemKind;
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{CollectionId, DocKey};

use super::Producer;
use crate::bucket::{Condition, DocumentWrite, Durability, VBucket, Written};
use crate::{Document, DocumentError, MutationToken, WriteOptions};

impl Producer {
    /// Writes a document, whether it exists or not.
    ///
    /// # Errors
    /// [`DocumentError`]: the key or value is too long, the CAS differs, the collection does not
    /// exist, the value does not match its datatype, or the memory quota is used up.
    pub fn upsert(
        &self,
        key: &[u8],
        value: Bytes,
        options: WriteOptions,
    ) -> Result<MutationToken, DocumentError> {
        self.write(key, value, options, Condition::Any)
    }

    /// Writes a document that does not exist yet.
    ///
    /// # Errors
    /// [`DocumentError::Exists`], or as [`upsert`](Self::upsert).
    pub fn insert(
        &self,
        key: &[u8],
        value: Bytes,
        options: WriteOptions,
    ) -> Result<MutationToken, DocumentError> {
        self.write(key, value, options, Condition::Absent)
    }

    fn write(
        &self,
        key: &[u8],
        value: Bytes,
        options: WriteOptions,
        condition: Condition,
    ) -> Result<MutationToken, DocumentError> {
        let now = self.now();
        let datatype = match options.datatype {
            None => crate::value::detect(&value),
            Some(datatype) if crate::value::is_valid(&value, datatype) => datatype,
            Some(_) => return Err(DocumentError::InvalidValue),
        };
        let write = DocumentWrite {
            key: DocKey { collection_id: options.collection_id, key },
            value,
            datatype,
            flags: options.flags,
            expiry: now.absolute_expiry(options.expiry),
            cas: options.cas,
            condition,
            durability: None,
        };
        self.on_vbucket_of(key, |vbucket| vbucket.store(now, write))
    }

    /// Removes a document.
    ///
    /// # Errors
    /// [`DocumentError::NotFound`], or as [`upsert`](Self::upsert).
    pub fn remove(
        &self,
        key: &[u8],
        options: WriteOptions,
    ) -> Result<MutationToken, DocumentError> {
        self.bury(key, options, ItemKind::Deletion)
    }

    /// Expires a document as if its time had passed.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn expire(
        &self,
        key: &[u8],
        options: WriteOptions,
    ) -> Result<MutationToken, DocumentError> {
        self.bury(key, options, ItemKind::Expiration)
    }

    fn bury(
        &self,
        key: &[u8],
        options: WriteOptions,
        kind: ItemKind,
    ) -> Result<MutationToken, DocumentError> {
        let doc_key = DocKey { collection_id: options.collection_id, key };
        self.on_vbucket_of(key, |vbucket| {
            vbucket.remove(self.now(), doc_key, options.cas, kind, None)
        })
    }

    fn on_vbucket_of(
        &self,
        key: &[u8],
        op: impl FnOnce(&mut VBucket) -> Result<Written, DocumentError>,
    ) -> Result<MutationToken, DocumentError> {
        let vbid = self.vbid_of(key);
        let written = self.cluster.first().bucket.with(vbid, op);
        let written = written.unwrap_or(Err(DocumentError::Unavailable(vbid)))?;
        let Written { vbuuid, seqno, cas, .. } = written;
        Ok(MutationToken { vbid, vbuuid, seqno, cas })
    }

    /// The document, `None` if it does not exist. One whose time has passed is expired by this.
    #[must_use]
    pub fn get(&self, key: &[u8]) -> Option<Document> {
        self.get_from(CollectionId::DEFAULT, key)
    }

    /// Like [`get`](Self::get), from a collection.
    #[must_use]
    pub fn get_from(&self, collection_id: CollectionId, key: &[u8]) -> Option<Document> {
        let live = |vbucket: &mut VBucket| vbucket.live(self.now(), DocKey { collection_id, key });
        let item = self.cluster.first().bucket.with(self.vbid_of(key), live)??;
        Some(Document {
            value: item.value.clone(),
            datatype: item.datatype,
            cas: item.cas,
            seqno: item.seqno,
            rev_seqno: item.rev_seqno,
            flags: item.flags,
            expiry: item.expiry,
        })
    }

    /// Begins a durable write, which only replicas see until it is [committed](Self::commit);
    /// `None` for `value` removes the document.
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
        let (now, cas) = (self.now(), options.cas);
        let key_in = DocKey { collection_id: options.collection_id, key };
        let durability = Some(Durability { level, deadline: None });
        let Some(value) = value else {
            return self.on_vbucket_of(key, |vbucket| {
                vbucket.remove(now, key_in, cas, ItemKind::Deletion, durability)
            });
        };
        let write = DocumentWrite {
            key: key_in,
            datatype: options.datatype.unwrap_or_else(|| crate::value::detect(&value)),
            value,
            flags: options.flags,
            expiry: now.absolute_expiry(options.expiry),
            cas,
            condition: Condition::Any,
            durability,
        };
        self.on_vbucket_of(key, |vbucket| vbucket.store(now, write))
    }

    /// Commits the durable write of a document, which makes it visible. Writes of a vBucket are
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

    /// Aborts the durable write of a document.
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
}
