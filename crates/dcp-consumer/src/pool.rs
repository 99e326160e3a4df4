//! The connection pool: idle connections for the next stream.
//!
//! Each has a task, which answers the server's noops, passes on the cluster maps that it pushes,
//! notices when the connection is lost, and closes it after the idle time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::topology::Address;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use crate::connection::NodeConnection;
use crate::opening::Opening;

/// Most pooled connections: usually one per node and kind, more if streams ran concurrently.
const MOST: usize = 32;

/// Longest time for a task to hand over its connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Receiver of a pooled connection.
type Taker = oneshot::Sender<NodeConnection>;

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

    /// Adds a connection without open streams or outstanding messages. `on_map` is given the cluster
    /// maps that its node pushes.
    pub(crate) fn put(
        &self,
        connection: NodeConnection,
        opening: Option<Opening>,
        on_map: impl FnMut(&Address, &[u8]) + Send + 'static,
    ) {
        if !self.is_on() {
            return;
        }
        let mut entries = self.entries();
        let Some(entries) = &mut *entries else { return };
        let (task, wanted) = oneshot::channel();
        let entry = Entry { address: connection.address.clone(), opening, task };
        tokio::spawn(hold(connection, wanted, Instant::now() + self.idle_time, on_map));
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
    ) -> Option<NodeConnection> {
        loop {
            let entry = {
                let mut entries = self.entries();
                let entries = entries.as_mut()?;
                let at = entries.iter().rposition(|entry| entry.fits(address, opening))?;
                entries.remove(at)
            };
            let (taker, connection) = oneshot::channel();
            // A connection whose task has ended was closed meanwhile.
            if entry.task.send(taker).is_ok()
                && let Ok(Ok(connection)) = timeout(ANSWER_TIMEOUT, connection).await
            {
                return Some(connection);
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

/// Keeps a pooled connection alive until it is taken, `until` is reached or it is lost.
async fn hold(
    mut connection: NodeConnection,
    wanted: oneshot::Receiver<Taker>,
    until: Instant,
    on_map: impl FnMut(&Address, &[u8]),
) {
    tokio::select! {
        biased;
        taker = wanted => {
            // A peer that does not even read an answer to its noop may be dead.
            if let Ok(taker) = taker && connection.is_idle() {
                // If the receiver has stopped waiting, the connection is closed.
                let _ = taker.send(connection);
            }
        }
        () = sleep_until(until) => {}
        Err(lost) = connection.keep_alive(on_map) => {
            tracing::debug!(node = %connection.address, %lost, "a pooled connection is closed");
        }
    }
}
