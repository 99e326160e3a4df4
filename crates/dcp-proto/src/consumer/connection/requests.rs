//! Requests outside of any stream, and which of them are unanswered.

use std::collections::BTreeMap;

use bytes::BytesMut;
use dcp_wire::message::{GetAllVbSeqnos, ObserveSeqno, VbucketState};
use dcp_wire::{CollectionId, EncodeError, Frame, Opaque, Opcode, Seqno, Vbid, Vbuuid};

use super::Connection;
use crate::consumer::CollectionSeqnos;

/// What a request asks for.
#[derive(Debug)]
pub(super) enum Asked {
    ClusterMap,
    CollectionSeqnos(CollectionId),
    FailoverLog(Vbid),
    HighSeqnos {
        number: u32,
    },
    Manifest,
    /// On this branch.
    ObservedSeqno(Vbid, Vbuuid),
    /// With the seqnos reported so far.
    PurgeSeqnos(BTreeMap<Vbid, Seqno>),
}

impl Asked {
    const fn opcode(&self) -> Opcode {
        match self {
            Self::ClusterMap => Opcode::GET_CLUSTER_CONFIG,
            Self::CollectionSeqnos(_) | Self::HighSeqnos { .. } => Opcode::GET_ALL_VB_SEQNOS,
            Self::FailoverLog(_) => Opcode::DCP_GET_FAILOVER_LOG,
            Self::Manifest => Opcode::GET_COLLECTIONS_MANIFEST,
            Self::ObservedSeqno(..) => Opcode::OBSERVE_SEQNO,
            Self::PurgeSeqnos(_) => Opcode::STAT,
        }
    }

    /// Appends the request to `out`.
    fn encode(&self, opaque: Opaque, out: &mut BytesMut) -> Result<(), EncodeError> {
        let frame = Frame::request(self.opcode()).with_opaque(opaque);
        // Of active vBuckets, or of a collection in them.
        let seqnos = |collection_id| {
            let state = Some(Some(VbucketState::ACTIVE));
            GetAllVbSeqnos { state, collection_id }
        };
        match *self {
            Self::ClusterMap | Self::Manifest => frame.encode(out),
            Self::CollectionSeqnos(id) => seqnos(Some(id)).encode(opaque, out),
            Self::FailoverLog(vbid) => frame.with_vbid(vbid).encode(out),
            Self::HighSeqnos { .. } => seqnos(None).encode(opaque, out),
            Self::ObservedSeqno(vbid, vbuuid) => ObserveSeqno { vbuuid }.encode(vbid, opaque, out),
            Self::PurgeSeqnos(_) => frame.with_key(b"vbucket-seqno").encode(out),
        }
    }
}

/// The requests of a connection outside of any stream.
#[derive(Debug, Default)]
pub(super) struct Requests {
    unanswered: BTreeMap<Opaque, Asked>,
    /// Number of requests for high seqnos, and whether the last one is still to be sent.
    high_seqnos: u32,
    has_unsent: bool,
    /// Answers about collections, until all requested ones are answered.
    pub(super) collections: Vec<CollectionSeqnos>,
}

impl Requests {
    /// Whether all are answered.
    pub(super) fn is_empty(&self) -> bool {
        self.unanswered.is_empty()
    }

    /// Takes the request with this opaque off the unanswered ones; `None` if there is none.
    pub(super) fn take(&mut self, opaque: Opaque, opcode: Opcode) -> Option<Asked> {
        let is_answered = self.unanswered.get(&opaque)?.opcode() == opcode;
        is_answered.then(|| self.unanswered.remove(&opaque)).flatten()
    }

    /// Keeps a request of which only a part was answered.
    pub(super) fn put_back(&mut self, opaque: Opaque, asked: Asked) {
        self.unanswered.insert(opaque, asked);
    }

    /// Whether the seqnos of a requested collection have not been answered.
    pub(super) fn awaits_collections(&self) -> bool {
        self.unanswered.values().any(|asked| matches!(asked, Asked::CollectionSeqnos(_)))
    }

    /// Notes that everything was sent.
    pub(super) const fn sent(&mut self) {
        self.has_unsent = false;
    }
}

impl Connection {
    /// Command: requests the cluster map; [`Event::ClusterMap`](crate::consumer::Event::ClusterMap) follows, unless it is empty.
    pub fn request_cluster_map(&mut self) {
        self.ask(Asked::ClusterMap);
    }

    /// Command: requests the collections manifest; [`Event::Manifest`](crate::consumer::Event::Manifest) follows.
    pub fn request_manifest(&mut self) {
        self.ask(Asked::Manifest);
    }

    /// Command: requests the highest seqnos of the node's active vBuckets; [`Event::HighSeqnos`](crate::consumer::Event::HighSeqnos)
    /// follows.
    pub fn request_high_seqnos(&mut self) {
        // The number distinguishes the answer from those to earlier requests.
        let number = self.requests.high_seqnos.wrapping_add(1);
        (self.requests.high_seqnos, self.requests.has_unsent) = (number, true);
        self.ask(Asked::HighSeqnos { number });
    }

    /// The number of a request for high seqnos that the server receives after everything it has
    /// sent so far: the pending one, or a new one.
    pub(super) fn next_high_seqnos(&mut self) -> u32 {
        if !self.requests.has_unsent {
            self.request_high_seqnos();
        }
        self.requests.high_seqnos
    }

    /// Command: requests the highest seqno of each of these collections in the node's active
    /// vBuckets; one [`Event::CollectionSeqnos`](crate::consumer::Event::CollectionSeqnos) follows once all are answered. Has no effect while
    /// an earlier request is unanswered, or on a connection without collections.
    pub fn request_collection_seqnos(&mut self, collections: &[CollectionId]) {
        if !self.config.collections || self.requests.awaits_collections() {
            return;
        }
        for &id in collections {
            self.ask(Asked::CollectionSeqnos(id));
        }
    }

    /// Command: requests the failover logs of vBuckets, on a connection with DCP opened; an
    /// [`Event::FailoverLog`](crate::consumer::Event::FailoverLog) follows for each that is active on the node.
    pub fn request_failover_logs(&mut self, vbids: &[Vbid]) {
        for &vbid in vbids {
            self.ask(Asked::FailoverLog(vbid));
        }
    }

    /// Command: requests seqnos in memory and on disk of the node's copies of vBuckets, each with
    /// the branch on which it was last observed; an [`Event::ObservedSeqno`](crate::consumer::Event::ObservedSeqno) follows for each that
    /// has a copy on the node.
    pub fn request_observed_seqnos(&mut self, branches: &[(Vbid, Vbuuid)]) {
        for &(vbid, vbuuid) in branches {
            self.ask(Asked::ObservedSeqno(vbid, vbuuid));
        }
    }

    /// Command: requests the purge seqnos of the node's copies of vBuckets;
    /// [`Event::PurgeSeqnos`](crate::consumer::Event::PurgeSeqnos) follows.
    pub fn request_purge_seqnos(&mut self) {
        self.ask(Asked::PurgeSeqnos(BTreeMap::new()));
    }

    /// Sends a request.
    fn ask(&mut self, asked: Asked) {
        let opaque = match asked {
            Asked::FailoverLog(vbid) | Asked::ObservedSeqno(vbid, _) => self.opaques.vbucket(vbid),
            _ => self.opaques.connection(),
        };
        self.ask_with(opaque, asked);
    }

    /// Sends the unanswered request with this opaque again, if there is one.
    pub(super) fn ask_again(&mut self, opaque: Opaque, opcode: Opcode) {
        if let Some(asked) = self.requests.take(opaque, opcode) {
            self.ask_with(opaque, asked);
        }
    }

    fn ask_with(&mut self, opaque: Opaque, asked: Asked) {
        let encoded = asked.encode(opaque, &mut self.transmit);
        debug_assert!(encoded.is_ok(), "a packet of small parts fits");
        self.requests.unanswered.insert(opaque, asked);
    }
}
