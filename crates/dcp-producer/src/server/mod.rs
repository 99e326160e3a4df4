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
use crate::http::Management;
use crate::kv::{Credentials, Session};
use crate::{Error, ProducerOptions};

/// What the connections of one node share.
struct NodeServer {
    cluster: Arc<Cluster>,
    node: usize,
    credentials: Arc<Credentials>,
    management: Arc<Management>,
    names: Arc<DcpNames>,
    /// One permit per connection.
    permits: Arc<Semaphore>,
    /// One permit per connection to the management ports.
    http_permits: Arc<Semaphore>,
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
        let management =
            Management::new(Arc::clone(cluster), node, Arc::clone(&credentials), stop.clone());
        let server = NodeServer {
            management: Arc::new(management),
            cluster: Arc::clone(cluster),
            node,
            credentials: Arc::clone(&credentials),
            names: Arc::default(),
            permits: Arc::new(Semaphore::new(options.max_connections)),
            http_permits: Arc::new(Semaphore::new(options.max_connections)),
            tasks: tasks.clone(),
            stop: stop.clone(),
        };
        let server = Arc::new(server);
        let (kv, mgmt) = (Arc::clone(&server), server);
        let kv = accept(listeners.kv, move |socket| kv.admit(socket));
        let mgmt = accept(listeners.mgmt, move |socket| mgmt.admit_http(socket));
        tasks.spawn(stop.clone().run_until_cancelled_owned(kv));
        tasks.spawn(stop.clone().run_until_cancelled_owned(mgmt));
    }
    let flusher = flusher::run(Arc::clone(cluster), options.persist_delay);
    tasks.spawn(stop.clone().run_until_cancelled_owned(flusher));
    Ok(())
}

/// Accepts connections and hands each to `admit`.
async fn accept(listener: TcpListener, admit: impl Fn(TcpStream)) {
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
        admit(socket);
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

    /// As [`admit`](Self::admit), for the management port.
    fn admit_http(&self, socket: TcpStream) {
        let Ok(permit) = Arc::clone(&self.http_permits).try_acquire_owned() else {
            tracing::warn!("too many management connections: closing a new one");
            return;
        };
        let management = Arc::clone(&self.management);
        self.tasks.spawn(async move {
            management.serve(socket, false).await;
            drop(permit);
        });
    }
}
