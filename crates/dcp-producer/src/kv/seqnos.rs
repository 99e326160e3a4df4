//! Seqnos, history branches and persistence of vBuckets.

use std::time::Instant;

use dcp_producer_proto::{VBucketSource, VBucketState};
use dcp_wire::message::{
    GetAllVbSeqnos, ObserveSeqno, ObservedSeqno, SeqnoPersistence, VbucketState, encode_vb_seqnos,
};
use dcp_wire::{CollectionId, Status};

use super::command::Command;
use super::failure::Failure;

impl Command<'_, '_> {
    pub(super) fn all_seqnos(&mut self) -> Result<(), Failure> {
        let GetAllVbSeqnos { state, collection_id: collection } =
            GetAllVbSeqnos::decode(self.frame)?;
        let state = state.flatten();
        let collections = self.session.features.dcp.collections;
        if collection.is_some() && !collections {
            return Err(Failure::Invalid("collections were not negotiated"));
        }
        // Clients without collections see only the default collection.
        let collection = collection.or((!collections).then_some(CollectionId::DEFAULT));
        let (served, node) = (self.served()?, self.session.node);
        if let Some(id) = collection
            && !served.manifest().has_collection(id)
        {
            return Err(Failure::Unknown(Status::UNKNOWN_COLLECTION));
        }
        if let Some(id) = collection {
            self.check_readable(id)?;
        }
        let mut value = Vec::new();
        for vbid in served.bucket.vbids() {
            let Some(vbucket) = served.bucket.lock_on(node, vbid) else {
                continue;
            };
            let wanted = match state {
                None => vbucket.state() != VBucketState::Dead,
                Some(state) => wire_state(vbucket.state()) == state,
            };
            let seqno = match collection {
                None => Some(vbucket.told_high_seqno()),
                Some(id) => vbucket.collection_high_seqno(id),
            };
            if let Some(seqno) = seqno.filter(|_| wanted) {
                encode_vb_seqnos([(vbid, seqno)], &mut value);
            }
        }
        self.succeed(self.success().with_value(&value))
    }

    pub(super) fn observe_seqno(&mut self) -> Result<(), Failure> {
        let (vbid, asked) = (self.vbid(), ObserveSeqno::decode(self.frame)?.vbuuid);
        let observed = self.with_copy(|vbucket| {
            let current = vbucket.vbuuid();
            let last = vbucket.failover.upper_bound(asked, vbucket.high_seqno)?;
            Some(ObservedSeqno {
                vbid,
                vbuuid: current,
                persisted_seqno: vbucket.told_persisted_seqno(),
                current_seqno: vbucket.high_seqno,
                failover: (asked != current).then_some((asked, last)),
            })
        })?;
        let mut value = Vec::with_capacity(43);
        observed.ok_or(Status::KEY_ENOENT)?.encode(&mut value);
        self.succeed(self.success().with_value(&value))
    }

    pub(super) fn failover_log(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        let mut value = Vec::new();
        self.with_copy(|vbucket| vbucket.failover.encode(&mut value))?;
        self.succeed(self.success().with_value(&value))
    }

    /// Wakes the flusher to persist a seqno. If that is not enough, the connection waits, up to a
    /// timeout.
    pub(super) fn seqno_persistence(&mut self) -> Result<(), Failure> {
        let SeqnoPersistence { seqno } = SeqnoPersistence::decode(self.frame)?;
        let reached = self.with_copy(|vbucket| {
            vbucket.persist();
            vbucket.safe_seqno() >= seqno
        })?;
        let waiting_since = self.session.waiting_since.take();
        if !reached {
            let since = waiting_since.unwrap_or_else(Instant::now);
            if since.elapsed() >= self.session.persistence_timeout {
                return Err(Status::ETMPFAIL.into());
            }
            self.session.waiting_since = Some(since);
            return Err(Failure::Later);
        }
        self.succeed(self.success())
    }
}

/// A vBucket's state as the protocol numbers it.
const fn wire_state(state: VBucketState) -> VbucketState {
    match state {
        VBucketState::Active => VbucketState::ACTIVE,
        VBucketState::Replica => VbucketState::REPLICA,
        VBucketState::Pending => VbucketState::PENDING,
        VBucketState::Dead => VbucketState::DEAD,
    }
}
