//! What a planner plans for.

use std::time::Duration;

use dcp_wire::Vbid;

use crate::Filter;

/// What a [`Planner`](super::Planner) plans for.
#[derive(Clone, Debug)]
pub struct PlannerOptions {
    /// vBuckets to read; `None` all.
    pub vbuckets: Option<Vec<Vbid>>,
    /// Which documents to read.
    pub filter: Filter,
    /// Longest time the cluster may be away, once the nodes have answered for the first time. Until
    /// then it is the connect timeout, so that what is misspelt fails at once.
    pub patience: Duration,
}

impl Default for PlannerOptions {
    /// Everything, and five minutes: a failover may take two.
    fn default() -> Self {
        Self { vbuckets: None, filter: Filter::All, patience: Duration::from_secs(300) }
    }
}
