//! Sockets: one task per connection, and the tasks that go with a node.

mod connection;
mod dcp_names;
mod faulty;
mod flusher;
mod handshake;
mod listeners;
mod push;
mod socket;

use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use connection::Connection;
use dcp_names::DcpNames;
use handshake::Shaken;
pub(crate) use listeners::Listeners;
use listeners::NodeListeners;
use socket::Socket;

use crate::cluster::Cluster;
use crate::fault::Faults;
use crate::http::Management;
use crate::kv::{Credentials, Session};
use crate::tls::Tls;
use crate::{Error, ProducerOptions};

/// What the connections of one node share.
struct NodeServer {
    cluster: Arc<Cluster>,
    node: usize,
    credentials: Arc<Credentials>,
    management: Arc<Management>,
    names: Arc<DcpNames>,
    faults: Arc<Faults>,
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
    faults: &Arc<Faults>,
    options: &ProducerOptions,
    tls: Option<&Tls>,
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
            faults: Arc::clone(faults),
            permits: Arc::new(Semaphore::new(options.max_connections)),
            http_permits: Arc::new(Semaphore::new(options.max_connections)),
            tasks: tasks.clone(),
            stop: stop.clone(),
        };
        Arc::new(server).listen(listeners, tls.map(|tls| &tls.acceptor));
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
    /// Accepts connections on all ports of the node.
    fn listen(self: Arc<Self>, listeners: NodeListeners, tls: Option<&TlsAcceptor>) {
        self.accept(listeners.kv, None, Self::admit);
        self.accept(listeners.mgmt, None, Self::admit_http);
        if let (Some(listeners), Some(tls)) = (listeners.tls, tls) {
            self.accept(listeners.kv, Some(tls), Self::admit);
            self.accept(listeners.mgmt, Some(tls), Self::admit_http);
        }
    }

    fn accept(
        self: &Arc<Self>,
        listener: TcpListener,
        tls: Option<&TlsAcceptor>,
        admit: fn(&Arc<Self>, TcpStream, Option<TlsAcceptor>),
    ) {
        let (server, tls) = (Arc::clone(self), tls.cloned());
        let accepting = accept(listener, move |socket| admit(&server, socket, tls.clone()));
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(accepting));
    }

    /// Serves a connection in a task of its own, or closes it if there are too many.
    fn admit(self: &Arc<Self>, socket: TcpStream, tls: Option<TlsAcceptor>) {
        let Some(permit) = admit(&self.permits, &socket) else {
            return;
        };
        let server = Arc::clone(self);
        self.tasks.spawn(async move {
            match tls {
                None => server.serve(Socket::Plain(socket), Session::new).await,
                Some(tls) => {
                    if let Some(Shaken { stream, is_certified }) = server.shake(&tls, socket).await
                    {
                        let (socket, session) = stream.into_inner();
                        let open = if is_certified { Session::certified } else { Session::new };
                        server.serve(Socket::tls(socket, session), open).await;
                    }
                }
            }
            drop(permit);
        });
    }

    async fn serve(
        &self,
        socket: Socket,
        open: fn(Arc<Cluster>, usize, Arc<Credentials>) -> Session,
    ) {
        let session = open(Arc::clone(&self.cluster), self.node, Arc::clone(&self.credentials));
        let names = Arc::clone(&self.names);
        Connection::new(socket, session, names, &self.faults, &self.stop).run().await;
    }

    /// As [`admit`](Self::admit), for the management port.
    fn admit_http(self: &Arc<Self>, socket: TcpStream, tls: Option<TlsAcceptor>) {
        let Some(permit) = admit(&self.http_permits, &socket) else {
            return;
        };
        let server = Arc::clone(self);
        self.tasks.spawn(async move {
            let management = Arc::clone(&server.management);
            match tls {
                None => management.serve(socket, false).await,
                Some(tls) => {
                    if let Some(Shaken { stream, is_certified }) = server.shake(&tls, socket).await
                    {
                        management.serve(stream, is_certified).await;
                    }
                }
            }
            drop(permit);
        });
    }

    /// A client after its TLS handshake; `None` also if the cluster stops meanwhile.
    async fn shake(&self, tls: &TlsAcceptor, socket: TcpStream) -> Option<Shaken> {
        let shaking = handshake::shake(tls, socket, &self.credentials);
        self.stop.run_until_cancelled(shaking).await?
    }
}

/// Makes room for a connection; `None` if there is none or the connection is dead already.
fn admit(permits: &Arc<Semaphore>, socket: &TcpStream) -> Option<OwnedSemaphorePermit> {
    let Ok(permit) = Arc::clone(permits).try_acquire_owned() else {
        tracing::warn!("too many connections: closing a new one");
        return None;
    };
    // Answers are small and awaited one by one.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a connection died before it was served");
        return None;
    }
    Some(permit)
}
