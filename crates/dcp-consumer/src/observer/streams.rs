//! What a planner of streams asks besides.

use std::collections::{BTreeMap, BTreeSet};

use dcp_proto::Position;
use dcp_proto::consumer::StreamFilter;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::{Observer, REPLICA_PATIENCE};
use crate::Error;

impl Observer {
    /// Whether streams of what a filter names could go on from these positions; if not, the seqno
    /// that each is rolled back to.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers within the connect timeout.
    pub(crate) async fn resume(
        &mut self,
        positions: &BTreeMap<Vbid, Position>,
        filter: &StreamFilter,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let mut survey = self.survey();
        let verdicts = survey.resume(positions, filter).await;
        self.keep(survey);
        verdicts
    }

    /// Highest seqnos that any of these collections has in these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers within the connect timeout.
    pub(crate) async fn collection_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        collections: &[CollectionId],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let mut survey = self.survey();
        let seqnos = survey.collection_seqnos(vbids, collections).await;
        self.keep(survey);
        seqnos
    }

    /// Has the client learn the newest manifest that the nodes send in time.
    ///
    /// # Errors
    /// [`Error`] if the bucket is another one by now.
    pub(crate) async fn refresh_manifest(&mut self) -> Result<(), Error> {
        let mut survey = self.survey();
        let refreshed = survey.refresh_map(REPLICA_PATIENCE).await;
        self.keep(survey);
        refreshed
    }
}
