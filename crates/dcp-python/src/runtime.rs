//! The runtime the engine's tasks run on, and the one way Python waits for them.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::error::{Failure, Kind};

/// How often a wait looks for signals: half of the 100 ms in which Ctrl-C is to be answered.
pub(crate) const TICK: Duration = Duration::from_millis(50);

struct ProcessRuntime {
    pid: u32,
    runtime: &'static Runtime,
}

/// The runtime of this process.
///
/// Locked by attached threads only and never across anything that could detach, so a fork, which
/// Python does attached, cannot copy it while it is locked.
static CURRENT: Mutex<Option<ProcessRuntime>> = Mutex::new(None);

/// The runtime of this process, started when it is first asked for.
///
/// The threads of a runtime do not follow a fork. A child starts its own; the parent's, of which
/// the child has only the memory, is left alone there: to drop it would wait for its threads.
pub(crate) fn current(_py: Python<'_>) -> PyResult<&'static Runtime> {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if let Some(process) = &*current
        && process.pid == pid
    {
        return Ok(process.runtime);
    }
    let runtime = Builder::new_multi_thread().enable_all().thread_name("dcp_rs").build().map_err(
        |error| {
            Failure::new(Kind::Dcp, format!("the runtime's threads cannot be started: {error}"))
        },
    )?;
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *current = Some(ProcessRuntime { pid, runtime });
    Ok(runtime)
}

/// Waits detached from Python for the future `start` makes, looking for signals in between.
///
/// The future is polled once a tick whether it has been woken or not, so that what is to end in
/// time needs no timer of the runtime: each of those would wake one of its threads twice.
///
/// # Errors
/// What a signal handler raised, `KeyboardInterrupt` first of all; the future is dropped then.
pub(crate) fn wait<F>(py: Python<'_>, start: impl FnOnce() -> F + Send) -> PyResult<F::Output>
where
    F: Future,
    F::Output: Send,
{
    let runtime = current(py)?;
    py.detach(|| {
        let _guard = runtime.enter();
        let waker = Waker::from(Arc::new(Sleeper(thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(start());
        let mut look = Instant::now() + TICK;
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return Ok(output);
            }
            let now = Instant::now();
            if now >= look {
                Python::attach(|py| py.check_signals())?;
                look = now + TICK;
            }
            thread::park_timeout(look.saturating_duration_since(now));
        }
    })
}

/// The thread that waits.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Is over the next time that [`wait`] polls it because a tick has passed.
pub(crate) fn tick() -> impl Future<Output = ()> {
    // It was made a little later than the tick began.
    let over = Instant::now() + TICK / 2;
    poll_fn(move |_| if Instant::now() >= over { Poll::Ready(()) } else { Poll::Pending })
}

/// A value with tasks behind it, usable only in the process that made it.
///
/// In a forked child it says so, and is forgotten instead of dropped: its tasks are not there, and
/// its locks may have been copied while held.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    pid: u32,
    runtime: &'static Runtime,
    what: &'static str,
    value: Option<T>,
}

impl<T> ProcessBound<T> {
    /// Binds `value`, which messages call `what`, to this process.
    pub(crate) fn new(py: Python<'_>, what: &'static str, value: T) -> PyResult<Self> {
        Ok(Self { pid: std::process::id(), runtime: current(py)?, what, value: Some(value) })
    }

    pub(crate) fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.is_own() => Ok(value),
            _ => Err(Failure::new(
                Kind::ForkedProcess,
                format!(
                    "this {} was made in process {}, before a fork: make a new one in this process",
                    self.what, self.pid
                ),
            )
            .into()),
        }
    }

    /// Whether this is the process that made the value.
    pub(crate) fn is_own(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // What is dropped may end tasks, which takes a runtime.
            let _guard = self.runtime.enter();
            drop(self.value.take());
        } else {
            std::mem::forget(self.value.take());
        }
    }
}
