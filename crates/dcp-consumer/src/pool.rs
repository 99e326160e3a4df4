//! The connection pool: idle connections for the next stream.
//!
//! Each has a task, which answers the server's noops, notices when the server closes it, and closes
//! it after the idle time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::topology::Address;
use tokio::io::AsyncReadExt;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use crate::connect::Connected;
use crate::opening::Opening;
use crate::requests;

/// Most pooled connections: usually one per node and kind, more if streams ran concurrently.
const MOST: usize = 32;

/// Longest time for a task to hand over its connection: it may be writing to a dead peer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Receiver of a pooled connection.
type Taker = oneshot::Sender<Connected>;

/// A pooled connection, owned by its task.
#[derive(Debug)]
struct Entry {
    address: Address,
    /// How DCP was opened; `None` if it was not.
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
    /// How long an idle connection stays; none are pooled if it is zero.
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

    /// Adds a connection without open streams or outstanding messages.
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
            // A connection whose task has ended was closed meanwhile.
            if entry.task.send(taker).is_ok()
                && let Ok(Ok(connected)) = timeout(PATIENCE, connected).await
            {
                return Some(connected);
            }
        }
    }

    /// Closes all connections, and accepts no others.
    pub(crate) fn close(&self) {
        *self.entries() = None;
    }

    fn entries(&self) -> MutexGuard<'_, Option<Vec<Entry>>> {
        // Nothing panics while the lock is held.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a pooled connection alive until it is taken, `until` is reached or the server closes it.
async fn hold(mut connected: Connected, mut wanted: oneshot::Receiver<Taker>, until: Instant) {
    loop {
        let Connected { socket, leftover, .. } = &mut connected;
        tokio::select! {
            biased;
            taker = &mut wanted => {
                if let Ok(taker) = taker {
                    // If the receiver has stopped waiting, the connection is closed.
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
            // The server reads nothing: do not wait for it if the connection is taken or closed.
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
