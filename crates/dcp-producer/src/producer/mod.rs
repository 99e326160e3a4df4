//! The handle of an embedded cluster.

mod documents;
mod operations;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use dcp_producer_proto::ConnectionConfig;
use dcp_wire::message::FailoverEntry;
use dcp_wire::{Seqno, Vbid};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::chance::{Chance, Now};
use crate::cluster::{Cluster, Node};
use crate::fault::Faults;
use crate::server::{Listeners, MemoryStream, Servers};
use crate::store::Store;
use crate::tls::Tls;
use crate::{Error, ProducerOptions, Rule, RuleError};

/// An embedded cluster: it runs from [`start`](Self::start) until [`shutdown`](Self::shutdown) or
/// until it is dropped.
///
/// The document methods need no async runtime and may be called from any thread.
pub struct Producer {
    cluster: Arc<Cluster>,
    bucket_name: String,
    store: Option<Arc<Store>>,
    servers: Servers,
    ca_pem: Option<String>,
    faults: Arc<Faults>,
    tasks: TaskTracker,
    _stop: DropGuard,
    stop: CancellationToken,
}

impl fmt::Debug for Producer {
    /// Leaves the documents out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("connection_string", &self.connection_string())
            .field("bucket_name", &self.bucket_name())
            .field("bucket_uuid", &self.bucket_uuid())
            .finish_non_exhaustive()
    }
}

impl Producer {
    /// Starts a cluster; its tasks run on the current tokio runtime.
    ///
    /// # Errors
    /// [`Error::InvalidOption`], [`Error::DefaultPassword`], [`Error::Tls`], or [`Error::Listen`] if a
    /// port cannot be opened.
    pub async fn start(options: ProducerOptions) -> Result<Self, Error> {
        options.check()?;
        let tls = options.tls.as_ref().map(|tls| Tls::new(tls, options.host)).transpose()?;
        let store = options.data.as_ref().map(|path| Store::open(path, &options)).transpose()?;
        let listeners = Listeners::bind(&options).await?;
        let chance = Arc::new(Chance::new(options.seed));
        let store = store.map(Arc::new);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let cluster = Arc::new(Cluster::new(&options, &listeners.nodes(), chance, &stop));
        if let Some(store) = &store {
            store.load(&cluster)?;
        }
        let bucket_name = options.bucket.clone();
        let ca_pem = tls.as_ref().and_then(|tls| tls.ca_pem.clone());
        let faults = Arc::default();
        let servers =
            Servers::start(&cluster, store.clone(), &faults, options, tls, &tasks, &stop)?;
        for (node, listeners) in listeners.nodes.into_iter().enumerate() {
            servers.serve(node, listeners);
        }
        let guard = stop.clone().drop_guard();
        Ok(Self { cluster, bucket_name, store, servers, faults, ca_pem, tasks, _stop: guard, stop })
    }

    /// Connection string for clients, such as `couchbase://127.0.0.1:port`.
    #[must_use]
    pub fn connection_string(&self) -> String {
        let members = self.cluster.members();
        let nodes: Vec<_> = members.iter().map(|node| reachable(node.kv).to_string()).collect();
        format!("couchbase://{}", nodes.join(","))
    }

    /// Connection string for clients with TLS, such as `couchbases://127.0.0.1:port`; `None`
    /// without TLS.
    #[must_use]
    pub fn tls_connection_string(&self) -> Option<String> {
        let address = |node: &Node| node.tls.map(|tls| reachable(tls.kv).to_string());
        let nodes: Option<Vec<_>> = self.cluster.members().iter().map(address).collect();
        nodes.map(|nodes| format!("couchbases://{}", nodes.join(",")))
    }

    /// The CA certificate of the nodes, as PEM, for clients to trust; `None` without TLS, or if the
    /// nodes' certificate was given.
    #[must_use]
    pub fn ca_pem(&self) -> Option<&str> {
        self.ca_pem.as_deref()
    }

    /// URLs of the nodes' management ports with TLS, such as `https://127.0.0.1:port`; empty
    /// without TLS.
    #[must_use]
    pub fn tls_management_urls(&self) -> Vec<String> {
        let addresses = self.cluster.members().into_iter().filter_map(|node| node.tls);
        addresses.map(|tls| format!("https://{}", reachable(tls.mgmt))).collect()
    }

    /// URLs of the nodes' management ports, such as `http://127.0.0.1:port`.
    #[must_use]
    pub fn management_urls(&self) -> Vec<String> {
        let url = |node: &Node| format!("http://{}", reachable(node.mgmt));
        self.cluster.members().iter().map(url).collect()
    }

    /// Name of the bucket that the cluster was started with, which the methods about documents,
    /// vBuckets and collections are about. Clients may create others.
    #[must_use]
    pub fn bucket_name(&self) -> &str {
        &self.bucket_name
    }

    /// Identity of the bucket: 32 hex digits, drawn when it is created; empty while it is dropped.
    #[must_use]
    pub fn bucket_uuid(&self) -> String {
        self.cluster.first().uuid()
    }

    /// Number of vBuckets.
    #[must_use]
    pub fn num_vbuckets(&self) -> u16 {
        self.cluster.first().bucket.vbucket_count()
    }

    /// The vBucket of a key.
    #[must_use]
    pub fn vbid_of(&self, key: &[u8]) -> Vbid {
        self.cluster.first().bucket.vbid_of(key)
    }

    /// Highest seqno of each vBucket.
    #[must_use]
    pub fn high_seqnos(&self) -> BTreeMap<Vbid, Seqno> {
        let first = self.cluster.first();
        let bucket = &first.bucket;
        let high = |vbid| Some((vbid, bucket.lock(vbid)?.high_seqno));
        bucket.vbids().filter_map(high).collect()
    }

    /// Failover log of each vBucket, newest entry first.
    #[must_use]
    pub fn failover_logs(&self) -> BTreeMap<Vbid, Vec<FailoverEntry>> {
        let first = self.cluster.first();
        let bucket = &first.bucket;
        let log = |vbid| Some((vbid, bucket.lock(vbid)?.failover.entries().to_vec()));
        bucket.vbids().filter_map(log).collect()
    }

    /// The present moment.
    fn now(&self) -> Now {
        self.cluster.chance().now()
    }

    fn no_vbucket(&self, vbid: Vbid) -> Error {
        let count = self.num_vbuckets();
        if vbid.0 < count {
            return Error::VbucketUnavailable { vbid };
        }
        Error::UnknownVbucket { vbid, count }
    }

    /// Connects to a node of a cluster without ports
    /// ([`in_memory`](ProducerOptions::in_memory)), by its address in the cluster map.
    ///
    /// # Errors
    /// [`ConnectionRefused`](std::io::ErrorKind::ConnectionRefused) if there is no such node or it
    /// is not running.
    pub fn dial(&self, address: SocketAddr) -> std::io::Result<MemoryStream> {
        self.servers.connect(address)
    }

    /// Configuration of DCP connections.
    #[must_use]
    pub fn dcp_config(&self) -> ConnectionConfig {
        self.cluster.dcp_config()
    }

    /// Changes the configuration of DCP connections, such as how long they may be silent or whether
    /// backfills are sent in key order; takes effect for new connections.
    pub fn set_dcp_config(&self, config: ConnectionConfig) {
        self.cluster.set_dcp_config(config);
    }

    /// Injects faults according to `rules`, from the next packet of each connection on. Replaces
    /// all previous rules, so an empty list ends all faults. Packets that were already written are
    /// not affected.
    ///
    /// Rules with [`Condition::between`](crate::Condition::between) are about replication, of every
    /// bucket. When one that closed or held up connections is gone, replicas receive what they
    /// missed, or roll back.
    ///
    /// # Errors
    /// [`RuleError`] if a rule contradicts itself or there are too many; the previous ones stay.
    pub fn set_faults(&self, rules: Vec<Rule>) -> Result<(), RuleError> {
        self.cluster.change_link_faults(|| {
            self.faults.set(rules)?;
            Ok(self.faults.of_links())
        })
    }

    /// The fault rules in force.
    #[must_use]
    pub fn faults(&self) -> Vec<Rule> {
        self.faults.rules()
    }

    /// How often each rule of [`faults`](Self::faults) reacted since it was set.
    #[must_use]
    pub fn fault_counts(&self) -> Vec<u64> {
        self.faults.counts()
    }

    /// Closes all connections and ports and waits until every task has ended; then everything is
    /// in the data folder, if there is one, and another cluster can open it. Shutting down twice
    /// is harmless.
    ///
    /// Without this, or if the folder cannot be written, which is logged, a data folder is in the
    /// state of a crash.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        let Some(store) = self.store.clone() else {
            return;
        };
        let cluster = Arc::clone(&self.cluster);
        let closing = tokio::task::spawn_blocking(move || store.close(&cluster));
        if let Ok(Err(error)) = closing.await {
            tracing::error!(name: "data_folder_not_closed", %error, "the data folder was not closed cleanly");
        }
    }
}

/// Address at which this machine reaches a port bound to `address`.
fn reachable(address: SocketAddr) -> SocketAddr {
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        host => host,
    };
    SocketAddr::new(host, address.port())
}
