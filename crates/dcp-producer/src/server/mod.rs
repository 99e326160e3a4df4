//! Sockets: one task per connection, and the tasks of each node.

mod connection;
mod dcp_names;
mod faulty;
mod flusher;
mod handshake;
mod listeners;
mod memory;
mod port;
mod socket;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use connection::{Connection, TimeLimits};
use dcp_names::DcpNames;
use flusher::Flusher;
use handshake::Shaken;
pub(crate) use listeners::{Listeners, NodeListeners};
pub use memory::MemoryStream;
use port::Port;
use socket::Socket;

use crate::cluster::{Cluster, NodePower};
use crate::fault::Faults;
use crate::http::Management;
use crate::kv::{Credentials, Session};
use crate::store::Store;
use crate::tls::Tls;
use crate::{Error, ProducerOptions};

/// State shared by the connections of one node.
struct NodeServer {
    cluster: Arc<Cluster>,
    node: usize,
    power: Arc<NodePower>,
    credentials: Arc<Credentials>,
    management: Management,
    names: Arc<DcpNames>,
    faults: Arc<Faults>,
    limits: TimeLimits,
    persistence_timeout: Duration,
    /// One permit per connection.
    permits: Arc<Semaphore>,
    /// One permit per connection to the management ports.
    http_permits: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// State shared by the nodes of a cluster, also used to start more.
pub(crate) struct Servers {
    cluster: Arc<Cluster>,
    credentials: Arc<Credentials>,
    faults: Arc<Faults>,
    options: ProducerOptions,
    tls: Option<Tls>,
    /// Nodes without ports, to which connections are made with `connect`.
    in_memory: Mutex<Vec<(SocketAddr, Arc<NodeServer>)>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Servers {
    /// Starts the tasks that do not belong to a node; everything ends when `stop` is cancelled.
    pub(crate) fn start(
        cluster: &Arc<Cluster>,
        store: Option<Arc<Store>>,
        faults: &Arc<Faults>,
        options: ProducerOptions,
        tls: Option<Tls>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Self, Error> {
        // A cluster without ports needs no protection: the minimum that clients accept.
        let rounds =
            if options.in_memory { dcp_wire::sasl::MIN_ITERATIONS } else { Credentials::ROUNDS };
        let chance = Arc::clone(cluster.chance());
        let credentials = Credentials::new(&options.username, &options.password, rounds, chance)?;
        let credentials = credentials.with_readers(&options.users)?;
        let credentials = Arc::new(credentials.with_token_key(options.token_key.as_deref()));
        let flusher = Flusher { cluster: Arc::clone(cluster), store, delay: options.persist_delay };
        let flushing = flusher.run(tasks.clone(), stop.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(flushing));
        Ok(Self {
            cluster: Arc::clone(cluster),
            credentials,
            faults: Arc::clone(faults),
            // The system chooses the ports of nodes that are added later.
            options: ProducerOptions { port: 0, management_port: 0, tls_port: 0, ..options },
            tls,
            in_memory: Mutex::default(),
            tasks: tasks.clone(),
            stop: stop.clone(),
        })
    }

    /// Changes the password of clients, which must be valid.
    pub(crate) fn set_password(&self, password: &str) -> Result<(), Error> {
        ProducerOptions { password: password.to_owned(), ..self.options.clone() }.check()?;
        self.credentials.set_password(password)
    }

    /// Opens the ports of one more node.
    pub(crate) async fn bind(&self) -> Result<NodeListeners, Error> {
        NodeListeners::bind(&self.options, self.cluster.nodes().len()).await
    }

    /// Serves the ports of a node that is already part of the cluster.
    pub(crate) fn serve(&self, node: usize, listeners: NodeListeners) {
        let Some(power) = self.cluster.power(node) else {
            return;
        };
        let (cluster, credentials) = (Arc::clone(&self.cluster), Arc::clone(&self.credentials));
        let management = Management::new(cluster, node, credentials, power.run());
        let server = NodeServer {
            cluster: Arc::clone(&self.cluster),
            node,
            power,
            credentials: Arc::clone(&self.credentials),
            management,
            names: Arc::default(),
            faults: Arc::clone(&self.faults),
            limits: TimeLimits {
                authentication: self.options.authentication_timeout,
                idle: self.options.idle_timeout,
            },
            persistence_timeout: self.options.persistence_timeout,
            permits: Arc::new(Semaphore::new(self.options.max_connections)),
            http_permits: Arc::new(Semaphore::new(self.options.max_connections)),
            tasks: self.tasks.clone(),
            stop: self.stop.clone(),
        };
        let (server, address) = (Arc::new(server), listeners.addresses.kv);
        if listeners.plain.is_none() {
            let mut in_memory = self.in_memory.lock().unwrap_or_else(PoisonError::into_inner);
            in_memory.push((address, Arc::clone(&server)));
        }
        server.listen(listeners, self.tls.as_ref().map(|tls| &tls.acceptor));
    }

    /// Connects to a node without ports.
    pub(crate) fn connect(&self, address: SocketAddr) -> io::Result<MemoryStream> {
        let in_memory = self.in_memory.lock().unwrap_or_else(PoisonError::into_inner);
        let server = in_memory.iter().find(|(at, _)| *at == address).map(|(_, server)| server);
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        server.filter(|server| server.power.is_on()).ok_or_else(refused)?.connect()
    }
}

/// Accepts connections and passes each to `admit`.
async fn accept(mut port: Port, admit: impl Fn(TcpStream)) {
    loop {
        match port.accept().await {
            Ok(socket) => admit(socket),
            Err(error) => {
                // Usually too many open files: closing connections free some.
                tracing::warn!(name: "connection_not_accepted", %error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

impl NodeServer {
    /// Accepts connections on all ports of the node.
    fn listen(self: Arc<Self>, listeners: NodeListeners, tls: Option<&TlsAcceptor>) {
        let at = listeners.addresses;
        if let Some(plain) = listeners.plain {
            self.accept(at.kv, plain.kv, None, Self::admit);
            self.accept(at.mgmt, plain.mgmt, None, Self::admit_http);
        }
        if let (Some(listeners), Some(at), Some(tls)) = (listeners.tls, at.tls, tls) {
            self.accept(at.kv, listeners.kv, Some(tls), Self::admit);
            self.accept(at.mgmt, listeners.mgmt, Some(tls), Self::admit_http);
        }
    }

    fn accept(
        self: &Arc<Self>,
        address: SocketAddr,
        listener: TcpListener,
        tls: Option<&TlsAcceptor>,
        admit: fn(&Arc<Self>, TcpStream, Option<TlsAcceptor>),
    ) {
        let (server, tls) = (Arc::clone(self), tls.cloned());
        let port = Port::new(address, listener, Arc::clone(&self.power));
        let accepting = accept(port, move |socket| admit(&server, socket, tls.clone()));
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(accepting));
    }

    /// Serves a connection in a new task, or closes it if there are too many.
    fn admit(self: &Arc<Self>, socket: TcpStream, tls: Option<TlsAcceptor>) {
        let Some(permit) = admit(&self.permits, &socket) else {
            return;
        };
        // Ends with the node's current run, or with the cluster.
        let (server, run) = (Arc::clone(self), self.power.run());
        self.tasks.spawn(async move {
            server.serve_kv(socket, tls, &run).await;
            drop(permit);
        });
    }

    /// Like [`admit`](Self::admit), for a connection without a socket.
    fn connect(self: &Arc<Self>) -> io::Result<MemoryStream> {
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        let permit = permit.map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))?;
        let (client, socket) = memory::pair();
        let (server, run) = (Arc::clone(self), self.power.run());
        self.tasks.spawn(async move {
            server.serve(Socket::Memory(socket), Session::new, &run).await;
            drop(permit);
        });
        Ok(client)
    }

    async fn serve_kv(&self, socket: TcpStream, tls: Option<TlsAcceptor>, run: &CancellationToken) {
        match tls {
            None => self.serve(Socket::Plain(socket), Session::new, run).await,
            Some(tls) => {
                if let Some(Shaken { stream, is_certified }) = self.shake(&tls, socket).await {
                    let (socket, session) = stream.into_inner();
                    let open = if is_certified { Session::certified } else { Session::encrypted };
                    self.serve(Socket::tls(socket, session), open, run).await;
                }
            }
        }
    }

    async fn serve(
        &self,
        socket: Socket,
        open: fn(Arc<Cluster>, usize, Arc<Credentials>) -> Session,
        run: &CancellationToken,
    ) {
        let session = open(Arc::clone(&self.cluster), self.node, Arc::clone(&self.credentials))
            .with_persistence_timeout(self.persistence_timeout);
        let names = Arc::clone(&self.names);
        Connection::new(socket, session, names, &self.faults, self.limits, run).run().await;
    }

    /// Like [`admit`](Self::admit), for the management port.
    fn admit_http(self: &Arc<Self>, socket: TcpStream, tls: Option<TlsAcceptor>) {
        let Some(permit) = admit(&self.http_permits, &socket) else {
            return;
        };
        let (server, run) = (Arc::clone(self), self.power.run());
        self.tasks.spawn(async move {
            server.serve_http(socket, tls, run).await;
            drop(permit);
        });
    }

    async fn serve_http(
        &self,
        socket: TcpStream,
        tls: Option<TlsAcceptor>,
        run: CancellationToken,
    ) {
        let management = Arc::new(self.management.during(run));
        match tls {
            None => management.serve(socket, false).await,
            Some(tls) => {
                if let Some(Shaken { stream, is_certified }) = self.shake(&tls, socket).await {
                    management.serve(stream, is_certified).await;
                }
            }
        }
    }

    /// A client after its TLS handshake; `None` also if the cluster stops meanwhile.
    async fn shake(&self, tls: &TlsAcceptor, socket: TcpStream) -> Option<Shaken> {
        let shaking = handshake::shake(tls, socket, &self.credentials);
        self.stop.run_until_cancelled(shaking).await?
    }
}

/// Acquires a permit for a connection; `None` if there is none left or the connection is already
/// dead.
fn admit(permits: &Arc<Semaphore>, socket: &TcpStream) -> Option<OwnedSemaphorePermit> {
    let Ok(permit) = Arc::clone(permits).try_acquire_owned() else {
        tracing::warn!(name: "too_many_connections", "too many connections: closing a new one");
        return None;
    };
    // Answers are small, and clients wait for each.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a connection was lost before it was served");
        return None;
    }
    Some(permit)
}
