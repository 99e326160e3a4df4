//! The extension module of dcp_rs: `dcp_rs._dcp_rs`.
//!
//! A thin layer: every class wraps an engine object of another crate, every error becomes an
//! exception of `dcp_rs.exceptions`, and every wait goes through `runtime::wait`, which lets other
//! Python threads run and handles Ctrl-C. The public API is the Python package around it.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)
)]

mod arguments;
mod batch;
mod cells;
mod checkpoint;
mod classes;
mod client;
mod credentials;
mod decode;
mod documents;
mod error;
mod kafka;
mod options;
mod plan;
mod planner;
mod producer;
mod rollback;
mod runtime;
mod schema;
mod shared;
mod stream;
mod times;
mod unmatched;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _dcp_rs {
    #[pymodule_export]
    use super::batch::{ArrowBatch, ChangeBatch, by_collection};
    #[pymodule_export]
    use super::checkpoint::{Checkpoint, CheckpointLock};
    #[pymodule_export]
    use super::client::Client;
    #[pymodule_export]
    use super::decode::{decode, json_depth, wanted};
    #[pymodule_export]
    use super::documents::{DecodedDocuments, DocumentDecoder, Inference};
    #[pymodule_export]
    use super::kafka::{KafkaProducer, vbucket_of_key, vbuckets_of_keys};
    #[pymodule_export]
    use super::options::{check_batch, check_connection, check_stream, defaults};
    #[pymodule_export]
    use super::plan::ReadPlan;
    #[pymodule_export]
    use super::planner::{Planner, open_plan};
    #[pymodule_export]
    use super::producer::Producer;
    #[pymodule_export]
    use super::producer::options::check_limits;
    #[pymodule_export]
    use super::rollback::explain_rollback;
    #[pymodule_export]
    use super::runtime::pending::Pending;
    #[pymodule_export]
    use super::schema::{Schema, columns, masks};
    #[pymodule_export]
    use super::stream::{AsyncTurn, ChangeStream};
    use super::{PyModule, PyResult, runtime};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DEBUG_BUILD", cfg!(debug_assertions))?;
        runtime::logging::install();
        let end = wrap_pyfunction!(runtime::end, module)?;
        module.py().import("atexit")?.call_method1("register", (end,))?;
        Ok(())
    }
}
