//! The state of a process: the runtime of the engine's tasks, and the threads that call into Python
//! for it. Also the functions with which Python waits for the engine.

mod log_queue;
pub(crate) mod logging;
pub(crate) mod notify;
pub(crate) mod pending;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tokio::runtime::{Builder, EnterGuard, Runtime};
use tokio::task::JoinHandle;

use self::logging::Log;
use self::notify::Notifier;
use crate::error::{Failure, Kind};

/// Interval between checks for signals: half of the 100 ms in which Ctrl-C must be handled.
const TICK: Duration = Duration::from_millis(50);

/// The state of one process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    runtime: Runtime,
    pub(crate) log: Log,
    pub(crate) notifier: Notifier,
    /// The state of a forked child, whose memory begins as a copy of this process.
    next: OnceLock<&'static Self>,
}

/// The state of the first process; those of its descendants are linked to it.
///
/// A list that only grows and is never locked: a fork copies a held lock as it is, but not the
/// thread that holds it. The parent's threads do not exist in a child either, so a child creates
/// its own state and never drops the parent's, because that would wait for those threads.
static FIRST: OnceLock<&'static Process> = OnceLock::new();

impl Process {
    /// The state of this process, if created. Takes no lock, so any thread may call it.
    pub(crate) fn own() -> Option<&'static Self> {
        let pid = std::process::id();
        let mut slot = &FIRST;
        while let Some(&process) = slot.get() {
            if process.pid == pid {
                return Some(process);
            }
            slot = &process.next;
        }
        None
    }

    /// Enters the runtime on this thread: dropping some values ends tasks, which requires a
    /// runtime.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Spawns a future, which runs to completion even if the handle is dropped.
    pub(crate) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.runtime.spawn(future)
    }

    fn start(py: Python<'_>) -> PyResult<&'static Self> {
        let failed = |error| {
            Failure::new(Kind::Dcp, format!("the runtime's threads cannot be started: {error}"))
        };
        let mut threads = Builder::new_multi_thread();
        let runtime = threads.enable_all().thread_name("dcp_rs").build().map_err(failed)?;
        let process = Box::leak(Box::new(Self {
            pid: std::process::id(),
            runtime,
            log: Log::new(py)?,
            notifier: Notifier::default(),
            next: OnceLock::new(),
        }));
        let process: &'static Self = process;
        let mut slot = &FIRST;
        while slot.set(process).is_err() {
            // Another thread may have been faster; then this state remains unused.
            if let Some(own) = Self::own() {
                return Ok(own);
            }
            slot = slot.get().map_or(slot, |process| &process.next);
        }
        process.log.start().and_then(|()| process.notifier.start()).map_err(failed)?;
        Ok(process)
    }
}

/// The state of this process, created on first use.
pub(crate) fn current(py: Python<'_>) -> PyResult<&'static Process> {
    Process::own().map_or_else(|| Process::start(py), Ok)
}

/// Ends the threads that call into Python, which must not outlive the interpreter.
#[pyfunction]
pub(crate) fn end(py: Python<'_>) {
    if let Some(process) = Process::own() {
        py.detach(|| {
            process.notifier.end();
            process.log.end();
        });
    }
}

/// Waits for the future of `start` like [`block_on`], for calls that are not made for each batch:
/// log records are filtered by the current levels and have reached `logging` by the time the call
/// returns or raises.
///
/// # Errors
/// Like [`block_on`].
pub(crate) fn wait<F>(py: Python<'_>, start: impl FnOnce() -> F + Send) -> PyResult<F::Output>
where
    F: Future,
    F::Output: Send,
{
    let process = current(py)?;
    process.log.look_at_levels(py)?;
    let output = block_on(py, start);
    process.log.flush(py);
    output
}

/// Waits briefly for `logging` to receive the records so far.
pub(crate) fn flush_log(py: Python<'_>) {
    if let Some(process) = Process::own() {
        process.log.flush(py);
    }
}

/// Waits, detached from Python, for the future of `start`, and checks for signals in between.
///
/// The future is polled once per tick even if it has not been woken, so that timeouts need no timer
/// of the runtime, which would wake one of its threads twice.
///
/// # Errors
/// The exception of a signal handler, usually `KeyboardInterrupt`; the future is dropped then.
pub(crate) fn block_on<F>(py: Python<'_>, start: impl FnOnce() -> F + Send) -> PyResult<F::Output>
where
    F: Future,
    F::Output: Send,
{
    block_on_by(py, TICK, start)
}

/// [`block_on`] with another tick length.
fn block_on_by<F>(
    py: Python<'_>,
    tick: Duration,
    start: impl FnOnce() -> F + Send,
) -> PyResult<F::Output>
where
    F: Future,
    F::Output: Send,
{
    let process = current(py)?;
    py.detach(|| {
        let _guard = process.enter();
        let waker = Waker::from(Arc::new(Sleeper(thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(start());
        let mut look = Instant::now() + tick;
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return Ok(output);
            }
            let now = Instant::now();
            if now >= look {
                let Some(checked) = Python::try_attach(|py| py.check_signals()) else { linger() };
                checked?;
                look = now + tick;
            }
            thread::park_timeout(look.saturating_duration_since(now));
        }
    })
}

/// Waits for the end of the process: a daemon thread must not return to an interpreter that has shut
/// down, whose state is gone.
fn linger() -> ! {
    loop {
        thread::park();
    }
}

/// The waiting thread.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits like [`block_on`], for one tick or `most` if that is less; `None` if it takes longer.
///
/// # Errors
/// Like [`block_on`].
pub(crate) fn wait_a_tick<F>(
    py: Python<'_>,
    most: Duration,
    start: impl FnOnce() -> F + Send,
) -> PyResult<Option<F::Output>>
where
    F: Future,
    F::Output: Send,
{
    let tick = TICK.min(most);
    block_on_by(py, tick, || async {
        // The future is created slightly after the tick begins and polled at its end.
        let over = Instant::now() + tick / 2;
        let mut future = pin!(start());
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if Instant::now() >= over => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    })
}

/// A value with background tasks, usable only in the process that created it.
///
/// In a forked child, using it is an error and dropping it does nothing: its tasks do not exist
/// there, and its locks may have been copied while held.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    process: &'static Process,
    what: &'static str,
    value: Option<T>,
}

impl<T> ProcessBound<T> {
    /// Binds `value`, called `what` in messages, to this process.
    pub(crate) fn new(py: Python<'_>, what: &'static str, value: T) -> PyResult<Self> {
        Ok(Self { process: current(py)?, what, value: Some(value) })
    }

    pub(crate) fn get(&self) -> PyResult<&T> {
        self.own().ok_or_else(|| {
            Failure::new(
                Kind::ForkedProcess,
                format!(
                    "this {} was made in process {}, before a fork: make a new one in this process",
                    self.what, self.process.pid
                ),
            )
            .into()
        })
    }

    /// The value, if this process created it.
    pub(crate) fn own(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.process.pid == std::process::id())
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.own().is_some() {
            let _guard = self.process.enter();
            drop(self.value.take());
        } else {
            std::mem::forget(self.value.take());
        }
    }
}
