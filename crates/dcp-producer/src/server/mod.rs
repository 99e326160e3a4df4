//! Sockets: one task per connection, and the tasks that go with a node.

mod listeners;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use listeners::Listeners;

use crate::cluster::Cluster;
use crate::{Error, ProducerOptions};

/// Starts everything that runs by itself; it ends when `stop` is cancelled.
pub(crate) fn spawn(
    listeners: Listeners,
    cluster: &Arc<Cluster>,
    options: &ProducerOptions,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let _ = (listeners, cluster, options, tasks, stop);
    Ok(())
}
