//! The engine's log records, in Python's `logging`.

use log::{Log, Metadata, Record};
use pyo3::prelude::*;

/// Hands records to Python, under the loggers `dcp_rs.consumer`, `dcp_rs.producer`, `dcp_rs.proto`.
struct PythonLog(pyo3_log::Logger);

/// Records are made on the engine's threads too; those below this never reach Python, whose
/// interpreter lock they would take for each.
const MAX_LEVEL: log::LevelFilter = log::LevelFilter::Debug;

/// Sends log records to Python from now on.
///
/// pyo3-log remembers for each logger which levels it takes, so a record nobody wants costs no
/// look into Python.
pub(crate) fn install(py: Python<'_>) -> PyResult<()> {
    let logger = pyo3_log::Logger::new(py, pyo3_log::Caching::LoggersAndLevels)?.filter(MAX_LEVEL);
    // A second import of the module, as in a sub-interpreter, keeps the first logger.
    if log::set_boxed_logger(Box::new(PythonLog(logger))).is_ok() {
        log::set_max_level(MAX_LEVEL);
    }
    Ok(())
}

impl Log for PythonLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("dcp_") && self.0.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        let Some(rest) = record.target().strip_prefix("dcp_") else {
            return;
        };
        let target = format!("dcp_rs::{rest}");
        // An interpreter that is shutting down takes no more records.
        let _logged = Python::try_attach(|_| {
            self.0.log(
                &Record::builder()
                    .metadata(record.metadata().clone())
                    .target(&target)
                    .args(*record.args())
                    .module_path(record.module_path())
                    .file(record.file())
                    .line(record.line())
                    .build(),
            );
        });
    }

    fn flush(&self) {}
}
