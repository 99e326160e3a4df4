//! The driver's side of bounded reads that follow each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_consumer::{Client as EngineClient, Observation, Observer};
use dcp_proto::checkpoint::StoredFilter;
use dcp_proto::micro_batch::{
    Limits, Located, Observed, Offset, Offsets, OnRollback, Range, pack, plan_end, plan_ranges,
};
use dcp_proto::topology::Manifest;
use dcp_wire::{Seqno, Vbid};
use pyo3::prelude::*;

use crate::client::Client;
use crate::error::Failure;
use crate::options::filter;
use crate::runtime::{ProcessBound, wait};
use crate::schema::one_of;

/// vBucket, vbuuid, from, to, epoch, whether it was rolled back.
type RangeTuple = (u16, u64, u64, u64, u32, bool);

/// How far a batch may go.
#[derive(FromPyObject)]
pub(crate) struct PlanArgs {
    max_rows: Option<u64>,
    until: Option<String>,
    on_rollback: String,
    persisted_only: bool,
    allow_data_loss: bool,
}

impl PlanArgs {
    fn into_limits(self) -> PyResult<Limits> {
        let on_rollback = match self.on_rollback.as_str() {
            "emit" => OnRollback::Emit,
            "fail" => OnRollback::Fail,
            "resync" => OnRollback::Resync,
            _ => return Err(one_of("on_rollback", &["emit", "fail", "resync"]).into()),
        };
        let until = self.until.as_deref().map(Offsets::from_json);
        Ok(Limits {
            max_seqnos: self.max_rows,
            until: until.transpose().map_err(Failure::from)?,
            persisted_only: self.persisted_only,
            on_rollback,
            allow_data_loss: self.allow_data_loss,
        })
    }
}

/// Looks at a bucket and plans batches.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Planner {
    client: ProcessBound<EngineClient>,
    observer: ProcessBound<tokio::sync::Mutex<Observer>>,
    is_ephemeral: bool,
    /// What is read, and the manifest that it was looked up in.
    filter: StoredFilter,
    manifest: Arc<Manifest>,
    /// Never locked across a wait.
    seen: Mutex<Seen>,
}

/// What the last look showed.
#[derive(Debug, Default)]
struct Seen {
    vbuckets: BTreeMap<Vbid, Observation>,
    /// Offsets that a batch was planned from, so that all before is read, and the high seqno then.
    read: BTreeMap<Vbid, (Offset, Seqno)>,
}

impl Seen {
    fn observed(&self, start: &Offsets) -> BTreeMap<Vbid, Observed> {
        let observed = |(&vbid, seen): (&Vbid, &Observation)| {
            let read = self.read.get(&vbid).filter(|(offset, _)| *offset == start.get(vbid));
            let observed = Observed {
                high: seen.high_seqno,
                persisted: seen.persisted_seqno,
                purge: seen.purge_seqno.unwrap_or(Seqno::ZERO),
                log: seen.log.clone(),
                high_after_read: read.map(|(_, high)| *high),
            };
            (vbid, observed)
        };
        self.vbuckets.iter().map(observed).collect()
    }

    /// Notes what is known to be read by now: a batch is planned after the one before has run.
    fn note_read(&mut self, start: &Offsets) {
        for (&vbid, seen) in &self.vbuckets {
            let offset = start.get(vbid);
            let is_noted = self.read.get(&vbid).is_some_and(|(known, _)| *known == offset);
            if offset.vbuuid == seen.log.newest().vbuuid && !is_noted {
                self.read.insert(vbid, (offset, seen.high_seqno));
            }
        }
    }
}

#[pymethods]
impl Planner {
    #[new]
    fn new(
        py: Python<'_>,
        client: &Client,
        scope: Option<String>,
        collections: Option<Vec<String>>,
        system_documents: bool,
    ) -> PyResult<Self> {
        let client = client.engine()?.clone();
        let observer = client.observer().map_err(Failure::from)?;
        let names = filter(scope, collections)?;
        let look_up = || client.stored_filter(&names, system_documents);
        Ok(Self {
            is_ephemeral: observer.is_ephemeral(),
            filter: wait(py, look_up)?.map_err(Failure::from)?,
            manifest: client.manifest(),
            client: ProcessBound::new(py, "planner", client)?,
            observer: ProcessBound::new(py, "planner", tokio::sync::Mutex::new(observer))?,
            seen: Mutex::default(),
        })
    }

    #[getter]
    fn is_ephemeral(&self) -> bool {
        self.is_ephemeral
    }

    /// Looks at the vBuckets, at all if none are named; what is planned rests on the last look.
    fn observe(&self, py: Python<'_>, vbuckets: Option<Vec<u16>>, persisted: bool) -> PyResult<()> {
        let observer = self.observer.get()?;
        let vbids: BTreeSet<Vbid> = match vbuckets {
            Some(vbuckets) => vbuckets.into_iter().map(Vbid).collect(),
            None => (0..self.client.get()?.num_vbuckets()).map(Vbid).collect(),
        };
        let look = || async { observer.lock().await.observe(&vbids, persisted).await };
        self.seen().vbuckets = wait(py, look)?.map_err(Failure::from)?;
        Ok(())
    }

    /// The highest seqnos seen.
    fn high_seqnos(&self) -> BTreeMap<u16, u64> {
        let seen = self.seen();
        seen.vbuckets.iter().map(|(vbid, seen)| (vbid.0, seen.high_seqno.0)).collect()
    }

    /// Offsets before every first change.
    fn earliest(&self) -> PyResult<String> {
        Ok(self.nothing_read()?.to_json())
    }

    /// Offsets after what may be read now.
    fn latest(&self, options: PlanArgs) -> PyResult<String> {
        let start = self.nothing_read()?;
        let limits = Limits { max_seqnos: None, until: None, ..options.into_limits()? };
        let observed = self.seen().observed(&start);
        Ok(plan_end(&start, &observed, &limits).map_err(Failure::from)?.to_json())
    }

    /// Where to end the batch that begins at `start`.
    fn plan_end(&self, start: &str, options: PlanArgs) -> PyResult<String> {
        let (start, limits) = (self.parse(start)?, options.into_limits()?);
        if let Some(until) = &limits.until {
            let client = self.client.get()?;
            let checked = until.check(client.bucket_uuid(), client.num_vbuckets().into());
            checked.map_err(Failure::from)?;
        }
        let mut seen = self.seen();
        let end = plan_end(&start, &seen.observed(&start), &limits).map_err(Failure::from)?;
        seen.note_read(&start);
        Ok(end.to_json())
    }

    /// What to read for a batch, in at most `tasks` lists, each of one node.
    fn plan_tasks(
        &self,
        start: &str,
        end: &str,
        tasks: usize,
        options: PlanArgs,
    ) -> PyResult<Vec<(String, Vec<RangeTuple>)>> {
        let (start, end) = (self.parse(start)?, self.parse(end)?);
        let (observed, limits) = (self.seen().observed(&start), options.into_limits()?);
        let ranges = plan_ranges(&start, &end, &observed, &limits).map_err(Failure::from)?;
        let packed = pack(self.locate(ranges)?, tasks);
        Ok(packed.into_iter().filter_map(task).collect())
    }
}

impl Planner {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nothing_read(&self) -> PyResult<Offsets> {
        let client = self.client.get()?;
        Ok(Offsets::new(client.bucket_uuid(), self.filter.clone(), client.num_vbuckets()))
    }

    fn parse(&self, json: &str) -> PyResult<Offsets> {
        let offsets = Offsets::from_json(json).map_err(Failure::from)?;
        let client = self.client.get()?;
        let (uuid, num_vbuckets) = (client.bucket_uuid(), client.num_vbuckets().into());
        let ours = offsets.narrowed_to(uuid, num_vbuckets, &self.filter, &self.manifest);
        Ok(ours.map_err(Failure::from)?)
    }

    fn locate(&self, ranges: Vec<Range>) -> PyResult<Vec<Located>> {
        let mut nodes = BTreeMap::new();
        for (node, vbids) in self.client.get()?.vbuckets_by_node() {
            nodes.extend(vbids.into_iter().map(|vbid| (vbid, node.clone())));
        }
        // One that is on its way between two nodes is found by the task.
        let node = |vbid| nodes.get(&vbid).cloned().unwrap_or_default();
        let locate = |range: Range| Located { node: node(range.vbid), range };
        Ok(ranges.into_iter().map(locate).collect())
    }
}

fn task(located: Vec<Located>) -> Option<(String, Vec<RangeTuple>)> {
    let node = located.first()?.node.clone();
    let tuple = |Located { range, .. }: Located| {
        let Range { vbid, vbuuid, from, to, epoch, rolled_back } = range;
        (vbid.0, vbuuid.0, from.0, to.0, epoch, rolled_back)
    };
    Some((node, located.into_iter().map(tuple).collect()))
}
