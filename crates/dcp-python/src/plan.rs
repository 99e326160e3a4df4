//! Plans of bounded reads.

use std::hash::{Hash, Hasher};

use dcp_proto::plan::{ReadPlan as EnginePlan, VbucketRange};
use pyo3::prelude::*;

use crate::classes::{Class, make};
use crate::error::Failure;

static RANGE: Class = Class::new("dcp_rs.plan", "Range");

/// What is read: a plan that can be sent elsewhere and run there.
#[pyclass(frozen, eq, module = "dcp_rs._dcp_rs")]
#[derive(Debug, PartialEq)]
pub(crate) struct ReadPlan(pub(crate) EnginePlan);

#[pymethods]
impl ReadPlan {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        Ok(Self(EnginePlan::from_json(text).map_err(Failure::from)?))
    }

    fn to_json(&self) -> String {
        self.0.to_json()
    }

    #[getter]
    fn bucket_uuid(&self) -> &str {
        self.0.bucket_uuid()
    }

    /// The node of the vBuckets when the read was planned.
    #[getter]
    fn node(&self) -> Option<&str> {
        self.0.node.as_deref()
    }

    /// What is read of each vBucket, ascending, as `dcp_rs.plan.Range`.
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let range = |range: VbucketRange| {
            make!(RANGE, py, {
                vbucket: range.vbid.0,
                vbuuid: range.vbuuid().0,
                from_seqno: range.start_seqno().0,
                to_seqno: range.to.0,
                epoch: range.epoch(),
                rolled_back: range.rolled_back,
            })
        };
        self.0.ranges().map(range).collect()
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.0.to_json().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        let from_json = slf.get_type().getattr("from_json")?;
        Ok((from_json, (slf.get().to_json(),)))
    }
}
