//! Notifies event loops that there is something to read.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::task::Wake;
use std::time::Duration;

use pyo3::prelude::*;

use super::Process;
use crate::shared::{Shared, Turn};

/// Maximum time that the interpreter's shutdown waits for the thread.
const END: Duration = Duration::from_secs(2);

/// A single call into Python for a reader that waits in an event loop.
///
/// It is a waker that may be woken on any thread, under any lock: the process's [`Notifier`] makes
/// the call.
#[derive(Debug)]
pub(crate) struct Call {
    callback: Mutex<Option<Py<PyAny>>>,
    process: &'static Process,
    /// The reader that waits for its turn of a stream.
    reader: Option<(Weak<Shared>, Turn)>,
}

impl Call {
    pub(crate) fn new(
        process: &'static Process,
        callback: Py<PyAny>,
        stream: &Arc<Shared>,
        turn: Turn,
    ) -> Arc<Self> {
        let callback = Mutex::new(Some(callback));
        Arc::new(Self { callback, process, reader: Some((Arc::downgrade(stream), turn)) })
    }

    /// For a wait without a turn.
    pub(crate) fn once(process: &'static Process, callback: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self { callback: Mutex::new(Some(callback)), process, reader: None })
    }

    /// Takes the callback, to cancel the call or to make it.
    pub(crate) fn take(&self) -> Option<Py<PyAny>> {
        self.callback.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Call {
    fn make(&self, py: Python<'_>) {
        let Some(callback) = self.take() else { return };
        if callback.call0(py).is_err() {
            // The event loop is closed: this reader will not return, and others wait for their
            // turn.
            py.detach(|| {
                let _guard = self.process.enter();
                if let Some((stream, turn)) = &self.reader
                    && let Some(stream) = stream.upgrade()
                {
                    stream.leave(*turn);
                }
            });
        }
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        if let Some(queue) = self.process.notifier.queue.get() {
            // Fails only during the interpreter's shutdown, when there are no waiters left.
            let _sent = queue.send(Some(Arc::clone(&self)));
        }
    }
}

/// The thread that makes the calls. Each only schedules a callback in an event loop, which is
/// quick.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    queue: OnceLock<Sender<Option<Arc<Call>>>>,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl Notifier {
    pub(crate) fn start(&'static self) -> io::Result<()> {
        let (queue, calls) = mpsc::channel();
        let _first = self.queue.set(queue);
        let thread = std::thread::Builder::new().name("dcp_rs-notify".to_owned());
        thread.spawn(move || {
            Python::try_attach(|py| make(py, calls));
            *self.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
            self.ended.notify_all();
        })?;
        Ok(())
    }

    pub(crate) fn end(&self) {
        let is_running = self.queue.get().is_some_and(|queue| queue.send(None).is_ok());
        if is_running {
            let has_ended = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.ended.wait_timeout_while(has_ended, END, |has_ended| !*has_ended));
        }
    }
}

/// Makes calls until the end marker.
fn make(py: Python<'_>, mut calls: Receiver<Option<Arc<Call>>>) {
    loop {
        let (receiver, call) = py.detach(move || {
            let call = calls.recv();
            (calls, call)
        });
        calls = receiver;
        let Ok(Some(call)) = call else { return };
        call.make(py);
    }
}
