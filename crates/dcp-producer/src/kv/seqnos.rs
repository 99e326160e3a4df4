//! Where vBuckets stand: seqnos, history branches, persistence.

use bytes::BufMut;
use dcp_proto::producer::{VBucketSource, VBucketState};
use dcp_wire::{CollectionId, Reader, Seqno, Status, Vbuuid};

use super::command::Command;
use super::failure::Failure;

impl Command<'_, '_> {
    pub(super) fn all_seqnos(&mut self) -> Result<(), Failure> {
        self.expect_key_value(false, false)?;
        let mut reader = Reader::new(self.frame.extras, "extras");
        let state = if reader.is_empty() { 0 } else { reader.u32()? };
        let collection = if reader.is_empty() { None } else { Some(CollectionId(reader.u32()?)) };
        reader.finish()?;
        if state > 4 {
            return Err(Failure::Invalid("there is no such vBucket state"));
        }
        let collections = self.session.features.collections;
        if collection.is_some() && !collections {
            return Err(Failure::Invalid("collections were not negotiated"));
        }
        // Clients without collections see the default collection only.
        let collection = collection.or((!collections).then_some(CollectionId::DEFAULT));
        let (cluster, node) = (&self.session.cluster, self.session.node);
        if let Some(id) = collection
            && !crate::cluster::has_collection(id)
        {
            return Err(Failure::Unknown(Status::UNKNOWN_COLLECTION));
        }
        let map = cluster.map();
        let mut value = Vec::new();
        for vbid in cluster.bucket.vbids().filter(|&vbid| map.owns(node, vbid)) {
            let Some(vbucket) = cluster.bucket.lock(vbid) else {
                continue;
            };
            let wanted = match vbucket.state() {
                VBucketState::Active => matches!(state, 0 | 1),
                VBucketState::Replica => matches!(state, 0 | 2),
                VBucketState::Pending => matches!(state, 0 | 3),
                VBucketState::Dead => state == 4,
            };
            let seqno = match collection {
                None => Some(vbucket.high_seqno()),
                Some(id) => vbucket.collection_high_seqno(id),
            };
            if let Some(seqno) = seqno.filter(|_| wanted) {
                value.put_u16(vbid.0);
                value.put_u64(seqno.0);
            }
        }
        self.succeed(self.success().with_value(&value))
    }

    pub(super) fn observe_seqno(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, true)?;
        let uuid = <[u8; 8]>::try_from(self.frame.value)
            .map_err(|_| Failure::Invalid("the value is a vBucket uuid"))?;
        let (vbid, asked) = (self.vbid(), Vbuuid(u64::from_be_bytes(uuid)));
        let value = self.with_vbucket(|vbucket| {
            let current = vbucket.vbuuid();
            let last = vbucket.failover.upper_bound(asked, vbucket.high_seqno)?;
            let mut value = Vec::with_capacity(43);
            value.put_u8(u8::from(asked != current));
            value.put_u16(vbid.0);
            value.put_u64(current.0);
            value.put_u64(vbucket.persisted_seqno.0);
            value.put_u64(vbucket.high_seqno.0);
            if asked != current {
                value.put_u64(asked.0);
                value.put_u64(last.0);
            }
            Some(value)
        })?;
        let value = value.ok_or(Status::KEY_ENOENT)?;
        self.succeed(self.success().with_value(&value))
    }

    pub(super) fn failover_log(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let mut value = Vec::new();
        self.with_vbucket(|vbucket| vbucket.failover.encode(&mut value))?;
        self.succeed(self.success().with_value(&value))
    }

    /// Waiting for a seqno to be persisted hurries the flusher: it is done at once.
    pub(super) fn seqno_persistence(&mut self) -> Result<(), Failure> {
        self.expect_key_value(false, false)?;
        let seqno = Seqno(u64::from_be_bytes(self.extras()?));
        let reached = self.with_vbucket(|vbucket| {
            vbucket.persist();
            vbucket.persisted_seqno >= seqno
        })?;
        if !reached {
            return Err(Status::ETMPFAIL.into());
        }
        self.succeed(self.success())
    }
}
