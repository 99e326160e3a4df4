//! The pool: connections that no stream uses at the moment, ready for the next one.
//!
//! Each has a task, which answers the server's noops, notices when the server closes it, and
//! closes it when nobody wanted it for long enough.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::topology::Address;
use tokio::io::AsyncReadExt;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use crate::connect::Connected;
use crate::opening::Opening;
use crate::requests;

/// Most pooled connections: one per node and kind is the rule, more where streams ran side by side.
const MOST: usize = 32;

/// Longest time for a task to hand its connection over: it may be writing to a peer that is gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Who gets a connection.
type Taker = oneshot::Sender<Connected>;

/// A connection, by the task that has it.
#[derive(Debug)]
struct Entry {
    address: Address,
    /// As DCP was opened; `None`: it was not.
    opening: Option<Opening>,
    task: oneshot::Sender<Taker>,
}

impl Entry {
    fn fits(&self, address: &Address, opening: Option<&Opening>) -> bool {
        self.address == *address && self.opening.as_ref() == opening
    }
}

/// Pooled connections. When it is dropped, they are closed.
#[derive(Debug)]
pub(crate) struct Pool {
    /// How long one stays that nobody wants; none are pooled if it is zero.
    idle_time: Duration,
    /// `None` once the client is closed.
    entries: Mutex<Option<Vec<Entry>>>,
}

impl Pool {
    pub(crate) const fn new(idle_time: Duration) -> Self {
        Self { idle_time, entries: Mutex::new(Some(Vec::new())) }
    }

    /// Whether any are pooled.
    pub(crate) const fn is_on(&self) -> bool {
        !self.idle_time.is_zero()
    }

    /// Takes in a connection on which nothing is open or on its way.
    pub(crate) fn put(&self, connected: Connected, opening: Option<Opening>) {
        if !self.is_on() {
            return;
        }
        let mut entries = self.entries();
        let Some(entries) = &mut *entries else { return };
        let (task, wanted) = oneshot::channel();
        let entry = Entry { address: connected.address.clone(), opening, task };
        tokio::spawn(hold(connected, wanted, Instant::now() + self.idle_time));
        entries.retain(|entry| !entry.task.is_closed());
        if entries.len() >= MOST {
            entries.remove(0);
        }
        entries.push(entry);
    }

    /// A connection to a node that was opened so; the one used last.
    pub(crate) async fn take(
        &self,
        address: &Address,
        opening: Option<&Opening>,
    ) -> Option<Connected> {
        loop {
            let entry = {
                let mut entries = self.entries();
                let entries = entries.as_mut()?;
                let at = entries.iter().rposition(|entry| entry.fits(address, opening))?;
                entries.remove(at)
            };
            let (taker, connected) = oneshot::channel();
            // One whose task is over was closed meanwhile.
            if entry.task.send(taker).is_ok()
                && let Ok(Ok(connected)) = timeout(PATIENCE, connected).await
            {
                return Some(connected);
            }
        }
    }

    /// Closes them all, and takes in no others.
    pub(crate) fn close(&self) {
        *self.entries() = None;
    }

    fn entries(&self) -> MutexGuard<'_, Option<Vec<Entry>>> {
        // Nothing panics while it is held.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a pooled connection alive until it is wanted, `until` has come or the server closes it.
async fn hold(mut connected: Connected, mut wanted: oneshot::Receiver<Taker>, until: Instant) {
    loop {
        let Connected { socket, leftover, .. } = &mut connected;
        tokio::select! {
            biased;
            taker = &mut wanted => {
                if let Ok(taker) = taker {
                    // A taker that is gone has given up waiting: then it is closed.
                    let _ = taker.send(connected);
                }
                return;
            }
            () = sleep_until(until) => return,
            read = socket.read_buf(leftover) => match read {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            },
        }
        let answered = tokio::select! {
            biased;
            answered = requests::answer_noops(socket, leftover) => answered,
            // Its server reads nothing: whoever wants it, or it no more, does not wait for that.
            _ = &mut wanted => return,
            () = sleep_until(until) => return,
        };
        if let Err(error) = answered {
            let address = &connected.address;
            tracing::debug!(%address, %error, "a pooled connection is closed");
            return;
        }
    }
}
