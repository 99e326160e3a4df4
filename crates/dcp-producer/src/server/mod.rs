//! Sockets: one task per connection, and the tasks that go with a node.

mod connection;
mod dcp_names;
mod flusher;
mod listeners;
mod push;

use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use connection::Connection;
use dcp_names::DcpNames;
pub(crate) use listeners::Listeners;

use crate::cluster::Cluster;
use crate::kv::{Credentials, Session};
use crate::{Error, ProducerOptions};

/// What the connections of one node share.
struct NodeServer {
    cluster: Arc<Cluster>,
    node: usize,
    credentials: Arc<Credentials>,
    names: Arc<DcpNames>,
    /// One permit per connection.
    permits: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Starts everything that runs by itself; it ends when `stop` is cancelled.
pub(crate) fn spawn(
    listeners: Listeners,
    cluster: &Arc<Cluster>,
    options: &ProducerOptions,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let credentials = Arc::new(Credentials::new(&options.username, &options.password)?);
    for (node, listeners) in listeners.nodes.into_iter().enumerate() {
        let server = NodeServer {
            cluster: Arc::clone(cluster),
            node,
            credentials: Arc::clone(&credentials),
            names: Arc::default(),
            permits: Arc::new(Semaphore::new(options.max_connections)),
            tasks: tasks.clone(),
            stop: stop.clone(),
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(serve(listeners.kv, server)));
        tasks.spawn(stop.clone().run_until_cancelled_owned(turn_away(listeners.mgmt)));
    }
    let flusher = flusher::run(Arc::clone(cluster), options.persist_delay);
    tasks.spawn(stop.clone().run_until_cancelled_owned(flusher));
    Ok(())
}

/// Accepts a node's connections.
async fn serve(listener: TcpListener, server: NodeServer) {
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                // Usually too many open files: closing ones make room.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                continue;
            }
        };
        server.admit(socket);
    }
}

impl NodeServer {
    /// Serves a connection in a task of its own, or closes it if there are too many.
    fn admit(&self, socket: TcpStream) {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            tracing::warn!("too many connections: closing a new one");
            return;
        };
        // Answers are small and awaited one by one.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "a connection died before it was served");
            return;
        }
        let session =
            Session::new(Arc::clone(&self.cluster), self.node, Arc::clone(&self.credentials));
        let connection = Connection::new(socket, session, Arc::clone(&self.names), &self.stop);
        self.tasks.spawn(async move {
            connection.run().await;
            drop(permit);
        });
    }
}

/// Closes connections to a port that the cluster map must name but where nothing is served.
async fn turn_away(listener: TcpListener) {
    loop {
        if let Err(error) = listener.accept().await {
            tracing::debug!(%error, "cannot accept a connection to the management port");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}
