//! What tests do to a vBucket that no client and no operator can order one by one.

use dcp_proto::producer::{Item, ItemKind, VBucketState};
use dcp_wire::message::{SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno, Vbuuid};

use super::clock::Now;
use super::collections::FLATBUFFERS;
use super::vbucket::VBucket;

/// A system event to be given the next seqno.
#[derive(Clone, Debug)]
pub(crate) struct StagedEvent {
    pub(crate) id: SystemEventId,
    pub(crate) manifest_uid: ManifestUid,
    pub(crate) scope_id: ScopeId,
    /// The collection, if the event concerns one.
    pub(crate) collection_id: Option<CollectionId>,
    pub(crate) name: String,
    pub(crate) max_ttl: Option<u32>,
}

impl VBucket {
    /// Makes the active copy a replica and active again, on the branch `vbuuid`. Servers before
    /// 7.0 go on with the same checkpoint then (`keeps_checkpoint`).
    pub(crate) fn stage_promotion(&mut self, vbuuid: Vbuuid, keeps_checkpoint: bool) {
        self.state = VBucketState::Replica;
        let held = std::mem::replace(&mut self.settings.holds_persistence, true);
        if keeps_checkpoint {
            self.become_active(Some(vbuuid));
        } else {
            self.promote(Some(vbuuid));
        }
        self.settings.holds_persistence = held;
    }

    /// Purges tombstones up to `to` from the disk while memory keeps what it has.
    pub(crate) fn stage_purge(&mut self, to: Seqno) {
        self.persist();
        let memory = std::mem::replace(
            &mut self.checkpoints,
            super::checkpoint_log::CheckpointLog::after(self.high_seqno),
        );
        self.purge(to);
        self.checkpoints = memory;
    }

    /// Appends a system event.
    pub(crate) fn stage_event(&mut self, now: Now, event: &StagedEvent) {
        let cas = self.next_cas(now);
        let payload = SystemEventPayload {
            manifest_uid: event.manifest_uid,
            scope_id: event.scope_id,
            collection_id: event.collection_id,
            name: event.name.as_bytes(),
            max_ttl: event.max_ttl,
            history: false,
            flush_uid: ManifestUid(0),
        };
        let (id, scope_id) = (event.id, event.scope_id);
        self.append(Item {
            kind: ItemKind::SystemEvent { id, version: FLATBUFFERS, scope_id },
            seqno: Seqno::ZERO,
            rev_seqno: RevSeqno(1),
            cas,
            collection_id: event.collection_id.unwrap_or(CollectionId::DEFAULT),
            key: event.name.clone().into(),
            value: payload.to_flatbuffers(id).into(),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            delete_time: 0,
        });
    }
}
