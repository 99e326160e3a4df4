//! Engine calls that an event loop awaits.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use pyo3::prelude::*;
use tokio::task::AbortHandle;

use super::notify::Call;
use super::{ProcessBound, current};
use crate::error::{Failure, Kind};

/// Converts a call's result for Python. Dropping it instead drops the result, including its
/// connections.
type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// State of a call.
enum Outcome {
    Running,
    There(Finish),
    /// The caller no longer waits.
    Gone,
}

struct Running {
    outcome: Arc<Mutex<Outcome>>,
    task: AbortHandle,
}

impl Running {
    fn replace(&self, outcome: Outcome) -> Outcome {
        replace(&self.outcome, outcome)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
        // The task drops a result that arrives later.
        drop(self.replace(Outcome::Gone));
    }
}

/// An engine call that runs while the event loop continues.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
pub(crate) struct Pending {
    running: ProcessBound<Running>,
}

impl Pending {
    /// Starts a call; `notify` is called once, from another thread, when its result is ready for
    /// [`take`](Self::take).
    pub(crate) fn start<T, E>(
        py: Python<'_>,
        notify: Py<PyAny>,
        future: impl Future<Output = Result<T, E>> + Send + 'static,
        make: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Self>
    where
        T: Send + 'static,
        E: Into<Failure> + Send + 'static,
    {
        let process = current(py)?;
        process.log.look_at_levels(py)?;
        let outcome = Arc::new(Mutex::new(Outcome::Running));
        let waker = Waker::from(Call::once(process, notify));
        let slot = Arc::clone(&outcome);
        let task = process.runtime.spawn(async move {
            let result = future.await;
            let finish: Finish = Box::new(move |py| make(py, result.map_err(Into::into)?));
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if matches!(*slot, Outcome::Gone) {
                return;
            }
            *slot = Outcome::There(finish);
            drop(slot);
            waker.wake();
        });
        let running = Running { outcome, task: task.abort_handle() };
        Ok(Self { running: ProcessBound::new(py, "call", running)? })
    }
}

#[pymethods]
impl Pending {
    /// The result, if ready.
    fn take(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.running.get()?.replace(Outcome::Gone) {
            Outcome::There(finish) => finish(py),
            Outcome::Running | Outcome::Gone => {
                Err(Failure::new(Kind::Closed, "the call was cancelled").into())
            }
        }
    }

    /// Cancels the call and drops its result.
    fn cancel(&self, py: Python<'_>) {
        let Some(running) = self.running.own() else { return };
        py.detach(|| {
            let _guard = self.running.process.enter();
            running.task.abort();
            drop(running.replace(Outcome::Gone));
        });
    }
}

fn replace(slot: &Mutex<Outcome>, outcome: Outcome) -> Outcome {
    std::mem::replace(&mut *slot.lock().unwrap_or_else(PoisonError::into_inner), outcome)
}
