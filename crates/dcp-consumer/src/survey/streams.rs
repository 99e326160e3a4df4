//! What is asked of all nodes where streams are planned but not opened.

use std::collections::{BTreeMap, BTreeSet};

use dcp_proto::Position;
use dcp_proto::consumer::StreamFilter;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::{Question, Survey};
use crate::connect::Connected;
use crate::{Error, probe};

struct Resumption {
    positions: BTreeMap<Vbid, Position>,
    filter: StreamFilter,
}

impl Question for Resumption {
    /// Where the server rolls back to, if it does.
    type Answer = Option<Seqno>;

    async fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let asked = |&vbid: &Vbid| Some((vbid, self.positions.get(&vbid)?));
        let asked: Vec<_> = vbids.iter().filter_map(asked).collect();
        let filter =
            if connected.outcome.manifest.is_some() { &self.filter } else { &StreamFilter::All };
        probe::resume(&mut connected.socket, &mut connected.leftover, &asked, filter).await
    }
}

struct CollectionSeqnos {
    collections: Vec<CollectionId>,
}

impl Question for CollectionSeqnos {
    type Answer = Seqno;

    async fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let Connected { socket, leftover, .. } = connected;
        let seqnos = probe::collection_seqnos(socket, leftover, &self.collections).await?;
        // The node knows no seqno of a collection that a vBucket has nothing of.
        Ok(vbids
            .iter()
            .map(|vbid| (*vbid, seqnos.get(vbid).copied().unwrap_or_default()))
            .collect())
    }
}

impl Survey {
    /// Whether streams could go on from these positions; if not, where they are rolled back to.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn resume(
        &mut self,
        positions: &BTreeMap<Vbid, Position>,
        filter: &StreamFilter,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let vbids = positions.keys().copied().collect();
        let (positions, filter) = (positions.clone(), filter.clone());
        self.ask(&vbids, Resumption { positions, filter }).await
    }

    /// Highest seqnos that any of these collections has in these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn collection_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        collections: &[CollectionId],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let collections = collections.to_vec();
        self.ask(vbids, CollectionSeqnos { collections }).await
    }
}
