//! What a planner plans for.

use std::time::Duration;

use dcp_proto::checkpoint::StoredFilter;
use dcp_proto::topology::Manifest;
use dcp_wire::Vbid;

use crate::{Error, Filter, filter};

/// What a [`Planner`](super::Planner) plans for.
#[derive(Clone, Debug)]
pub struct PlannerOptions {
    /// vBuckets to read; `None` all.
    pub vbuckets: Option<Vec<Vbid>>,
    /// Which documents to read.
    pub filter: Filter,
    /// Whether what is read has documents of scope `_system` and records of transactions.
    pub system_documents: bool,
    /// Longest time the cluster may be away, once the nodes have answered for the first time. Until
    /// then it is the connect timeout, so that what is misspelt fails at once.
    pub patience: Duration,
}

impl Default for PlannerOptions {
    /// Everything, and five minutes: a failover may take two.
    fn default() -> Self {
        let patience = Duration::from_secs(300);
        Self { vbuckets: None, filter: Filter::All, system_documents: false, patience }
    }
}

impl PlannerOptions {
    /// The filter by ids, by a manifest.
    pub(super) fn resolve(&self, manifest: &Manifest) -> Result<StoredFilter, Error> {
        filter::resolve(&self.filter, self.system_documents, manifest)
    }
}
