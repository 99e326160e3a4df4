//! High seqnos of single collections on a node.

use std::collections::BTreeMap;

use dcp_wire::message::{GetAllVbSeqnos, VbSeqnos, VbucketState};
use dcp_wire::{CollectionId, DecodeError, Frame, Opaque, Status};

use super::Connection;
use crate::consumer::{CollectionSeqnos, Event};

/// Set in the opaques of these requests; the numbers of requests for all high seqnos stay below it.
const COLLECTION: u32 = 1 << 31;

/// Requests for the seqnos of collections, until all of them are answered.
#[derive(Debug, Default)]
pub(super) struct CollectionRequests {
    /// Opaque of the last request.
    opaque: u32,
    waiting: BTreeMap<u32, CollectionId>,
    answered: Vec<CollectionSeqnos>,
}

impl CollectionRequests {
    /// Whether any of them is unanswered.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl Connection {
    /// Command: asks for the highest seqno of each of these collections in the node's active
    /// vBuckets; one [`Event::CollectionSeqnos`] follows once all are answered. Has no effect while
    /// an earlier request is unanswered, or on a connection without collections.
    pub fn request_collection_seqnos(&mut self, collections: &[CollectionId]) {
        if !self.config.collections || self.collection_requests.is_waiting() {
            return;
        }
        for &id in collections {
            let requests = &mut self.collection_requests;
            requests.opaque = requests.opaque.wrapping_add(1) | COLLECTION;
            let (opaque, state) = (requests.opaque, Some(Some(VbucketState::ACTIVE)));
            let request = GetAllVbSeqnos { state, collection_id: Some(id) };
            // Its size is fixed, so it always fits.
            if request.encode(Opaque(opaque), &mut self.transmit).is_ok() {
                requests.waiting.insert(opaque, id);
            }
        }
    }

    /// Handles the answer to such a request; `false` if `frame` is not one.
    pub(super) fn collection_answered(&mut self, frame: &Frame<'_>) -> Result<bool, DecodeError> {
        let opaque = frame.header.opaque.0;
        if opaque & COLLECTION == 0 {
            return Ok(false);
        }
        let requests = &mut self.collection_requests;
        let Some(collection) = requests.waiting.remove(&opaque) else {
            self.stats.stale_responses += 1;
            return Ok(true);
        };
        let seqnos = match frame.header.status() {
            // At most one per vBucket, however long the answer is.
            Status::SUCCESS => {
                let entries = VbSeqnos::decode(frame.value)?;
                let there = entries.filter(|(vbid, _)| vbid.index() < self.streams.len());
                Some(there.take(self.streams.len()).collect())
            }
            Status::UNKNOWN_COLLECTION => Some(Vec::new()),
            _ => None,
        };
        requests.answered.push(CollectionSeqnos { collection, seqnos });
        if requests.waiting.is_empty() {
            let answered = std::mem::take(&mut requests.answered);
            self.events.push_back(Event::CollectionSeqnos(answered));
        }
        Ok(true)
    }
}
