//! One bucket: its map, its manifest, and connections to its nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::OnRollback;
use dcp_proto::consumer::{
    BootstrapOutcome, ClusterConfig, Connection, ConnectionConfig, Delivery, Event, Reaction, Step,
    StreamFilter,
};
use dcp_proto::topology::{Address, BucketConfig, Manifest, Network};
use dcp_wire::message::Control;
use dcp_wire::{Feature, MAX_BODY_LEN, Opcode, Seqno, Vbid};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::connect::{Connected, Connector};
use crate::connection::NodeConnection;
use crate::first_load::FirstLoad;
use crate::opening::Opening;
use crate::pool::Pool;
use crate::{Chain, ConnectOptions, Error, ErrorKind};

/// How long a pooled connection may take to prove that it is alive before a new one is made.
const ALIVE_WITHIN: Duration = Duration::from_secs(1);

/// How long to wait for a node's map before the next node is asked as well.
const NEXT_AFTER: Duration = Duration::from_millis(250);

/// One bucket: its map, its manifest, and connections to its nodes.
#[derive(Debug)]
pub(crate) struct Bucket {
    connector: Connector,
    name: String,
    uuid: String,
    num_vbuckets: u16,
    network: Network,
    state: Mutex<State>,
    /// Whether another bucket has the name now.
    replaced: AtomicBool,
    /// Whether some node has opened a DCP connection, so the user has the privilege.
    has_opened_dcp: AtomicBool,
    /// Whether it was logged that a first load waited for the nodes.
    has_logged_waits: Arc<AtomicBool>,
    /// The highest seqno ever observed for each vBucket.
    highest: Mutex<BTreeMap<Vbid, Seqno>>,
    /// Connections that are not used by a stream.
    pool: Pool,
}

#[derive(Debug)]
struct State {
    config: Arc<BucketConfig>,
    manifest: Arc<Manifest>,
}

impl Bucket {
    /// Connects to the first node that answers and learns the bucket from it.
    pub(crate) async fn connect(connector: Connector) -> Result<Self, Error> {
        if connector.bucket().is_none() {
            let problem =
                "name one here or in the connection string, as in couchbase://host/bucket";
            return Err(Error::option(&["bucket"], problem));
        }
        let connected = connector.connect_any().await.map_err(|error| connector.explain(error))?;
        let Connected { outcome, address, .. } = connected;
        let BootstrapOutcome { config, manifest, .. } = outcome;
        let ClusterConfig::Bucket(config) = config else {
            return Err(Error::new(ErrorKind::Protocol, "the server sent no bucket configuration"));
        };
        let network = connector.network().network(config.nodes(), &address);
        if let Some(error) = without_address(&config, network, connector.is_tls(), None) {
            return Err(error);
        }
        Ok(Self {
            name: config.name().to_owned(),
            uuid: config.uuid().to_owned(),
            num_vbuckets: config.num_vbuckets(),
            network,
            state: Mutex::new(State {
                config: Arc::new(config),
                manifest: Arc::new(manifest.unwrap_or_default()),
            }),
            replaced: AtomicBool::new(false),
            has_opened_dcp: AtomicBool::new(false),
            has_logged_waits: Arc::default(),
            highest: Mutex::default(),
            pool: Pool::new(connector.options().keep_connections),
            connector,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn uuid(&self) -> &str {
        &self.uuid
    }

    pub(crate) const fn num_vbuckets(&self) -> u16 {
        self.num_vbuckets
    }

    /// A random number generator for users of the bucket.
    pub(crate) fn randomness(&self) -> StdRng {
        self.connector.randomness()
    }

    pub(crate) fn connect_options(&self) -> &ConnectOptions {
        self.connector.options()
    }

    /// Longest time to set up one connection.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connector.options().connect_timeout
    }

    /// The newest map known.
    pub(crate) fn config(&self) -> Arc<BucketConfig> {
        Arc::clone(&self.state().config)
    }

    /// The newest manifest known.
    pub(crate) fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(&self.state().manifest)
    }

    /// Whether a map is that of this bucket, not of another one, of the same name or not.
    fn is_own(&self, config: &BucketConfig) -> bool {
        config.name() == self.name
            && config.uuid() == self.uuid
            && config.num_vbuckets() == self.num_vbuckets
    }

    /// Applies a map if it is newer. One of a bucket of another name is ignored: a node may push the
    /// maps of all buckets.
    pub(crate) fn apply(&self, config: BucketConfig) {
        if config.name() != self.name {
            tracing::debug!(bucket = config.name(), "the cluster map of another bucket is ignored");
            return;
        }
        if !self.is_own(&config) {
            // A node that lags may still send the map of the previous bucket.
            if config.is_newer_than(&self.config()) {
                self.replaced.store(true, Ordering::Relaxed);
            }
            return;
        }
        let mut state = self.state();
        if config.is_newer_than(&state.config) {
            tracing::debug!(revision = ?config.revision(), "a newer cluster map");
            state.config = Arc::new(config);
        }
    }

    /// Applies a map that a node has sent.
    pub(crate) fn apply_json(&self, from: &Address, json: &[u8]) {
        match BucketConfig::parse(json, &from.host) {
            Ok(map) => self.apply(map),
            Err(error) => {
                tracing::warn!(name: "cluster_map_unusable", %from, %error, "a cluster map cannot be used");
            }
        }
    }

    /// Checks that the bucket is still the one that was connected to.
    ///
    /// # Errors
    /// [`ErrorKind::BucketNotFound`] if another bucket has its name.
    pub(crate) fn check_identity(&self) -> Result<(), Error> {
        if self.replaced.load(Ordering::Relaxed) {
            let message = format!(
                "bucket '{}' was recreated: connect again, and start without a checkpoint",
                self.name
            );
            return Err(Error::new(ErrorKind::BucketNotFound, message));
        }
        Ok(())
    }

    /// Adds to an error about missing privileges which user lacks them.
    pub(crate) fn explain(&self, error: Error) -> Error {
        self.connector.explain(error)
    }

    /// Address of the node on which a vBucket is active; `None` while there is none.
    pub(crate) fn address_of(&self, config: &BucketConfig, vbid: Vbid) -> Option<Address> {
        self.address_of_node(config, config.active(vbid)?)
    }

    /// Addresses of the nodes on which any vBucket is active.
    pub(crate) fn data_nodes(&self, config: &BucketConfig) -> BTreeSet<Address> {
        let vbids = (0..self.num_vbuckets).map(Vbid);
        vbids.filter_map(|vbid| self.address_of(config, vbid)).collect()
    }

    /// Address of a node, by its index in the map.
    pub(crate) fn address_of_node(&self, config: &BucketConfig, node: usize) -> Option<Address> {
        config.nodes().get(node)?.data_address(self.network, self.connector.is_tls())
    }

    /// Why a vBucket's active node has no address; `None` while there is no active node.
    pub(crate) fn why_no_address(&self, config: &BucketConfig, vbid: Vbid) -> Option<Error> {
        without_address(config, self.network, self.connector.is_tls(), config.active(vbid))
    }

    /// Addresses of the nodes with a copy of a vBucket, the active one first; `None` for a node
    /// without an address. Missing copies are left out.
    pub(crate) fn copies_of(&self, config: &BucketConfig, vbid: Vbid) -> Vec<Option<Address>> {
        let nodes = std::iter::once(config.active(vbid)).chain(config.replicas(vbid)).flatten();
        nodes.map(|node| self.address_of_node(config, node)).collect()
    }

    /// The vBuckets by the node on which they are active; those without one under `None`.
    pub(crate) fn by_address(
        &self,
        vbids: impl IntoIterator<Item = Vbid>,
    ) -> BTreeMap<Option<Address>, Vec<Vbid>> {
        let config = self.config();
        let mut by_address = BTreeMap::<_, Vec<Vbid>>::new();
        for vbid in vbids {
            by_address.entry(self.address_of(&config, vbid)).or_default().push(vbid);
        }
        by_address
    }

    /// A first load that begins.
    pub(crate) fn first_load(&self, now: Instant) -> FirstLoad {
        FirstLoad::new(now, Arc::clone(&self.has_logged_waits))
    }

    /// Whether a failure may be temporary. The client has opened this bucket before, so a node that
    /// does not know it, or refuses the user, may be starting, or may not have a new password yet.
    pub(crate) fn may_pass(&self, error: &Error) -> bool {
        if self.check_identity().is_err() {
            return false;
        }
        if error.is_retryable() {
            return true;
        }
        // The server refuses on purpose what it has never granted to this client.
        let was_granted = self.has_opened_dcp.load(Ordering::Relaxed);
        let refused = error.opcode().and_then(Step::of).zip(error.status());
        match (error.kind(), refused) {
            (_, Some((step, status))) => match Reaction::to(step, status) {
                Reaction::Fail(_) => false,
                // Whether a stream or an observation was granted, its task knows.
                Reaction::RetryOnceGranted(_) => {
                    was_granted && matches!(step, Step::Hello | Step::Open)
                }
                _ => true,
            },
            (ErrorKind::Config | ErrorKind::Closed | ErrorKind::Checkpoint, None) => false,
            (ErrorKind::Unsupported, None) => was_granted,
            (_, None) => true,
        }
    }

    /// A connection within `limit`, with or without DCP opened: a pooled one, or a new one.
    pub(crate) async fn connect_to(
        &self,
        address: &Address,
        opening: Option<&Opening>,
        limit: Duration,
    ) -> Result<NodeConnection, Error> {
        let begun = Instant::now();
        let pooled = timeout(limit / 2, self.take_pooled(address, opening)).await;
        if let Ok(Some(connection)) = pooled {
            return Ok(connection);
        }
        let remaining = limit.saturating_sub(begun.elapsed());
        let request = opening.map(|opening| opening.request(self.connector.connection_name()));
        let connected = self.connector.connect_in(remaining, address, request).await?;
        if let Some(opening) = opening {
            self.has_opened_dcp.store(true, Ordering::Relaxed);
            opening.log_refused(address, &connected.outcome);
        }
        self.learn(&connected)?;
        let config = self.connection_config(&connected.outcome, opening);
        let Connected { socket, leftover, address, token, .. } = connected;
        let connection = NodeConnection::new(address, socket, &leftover, config);
        Ok(match token {
            Some(token) => connection.with_token(&token, self.connector.clone()),
            None => connection,
        })
    }

    /// Configuration of a connection's machine. Until a stream has it, streams are opened only to
    /// see whether the server would roll them back: they end where they begin.
    fn connection_config(
        &self,
        outcome: &BootstrapOutcome,
        opening: Option<&Opening>,
    ) -> ConnectionConfig {
        ConnectionConfig {
            num_vbuckets: self.num_vbuckets,
            collections: outcome.has_feature(Feature::COLLECTIONS),
            window: opening.map_or(0, |opening| opening.buffer_size),
            noop_interval: opening.map(Opening::noop_interval),
            filter: StreamFilter::All,
            purge_seqno: outcome.has_control(Control::MAX_MARKER_VERSION),
            stream_end_on_close: outcome
                .has_control(Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM),
            ignore_purged_tombstones: false,
            on_rollback: OnRollback::Fail,
            delivery: Delivery { clamp: true, ..Delivery::default() },
            max_body_len: MAX_BODY_LEN,
        }
    }

    /// Makes requests over a connection and returns their answers. A cluster map that the node
    /// sends meanwhile is applied.
    pub(crate) async fn ask(
        &self,
        connection: &mut NodeConnection,
        request: impl FnOnce(&mut Connection),
    ) -> Result<Vec<Event>, Error> {
        let answers = connection.ask(request).await?;
        if let Some(map) = connection.take_map() {
            self.apply_json(&connection.address, &map);
        }
        Ok(answers)
    }

    /// The connections that are not used by a stream.
    pub(crate) const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Adds a connection without open streams to the pool.
    pub(crate) fn put_into_pool(
        self: &Arc<Self>,
        connection: NodeConnection,
        opening: Option<Opening>,
    ) {
        let bucket = Arc::downgrade(self);
        self.pool.put(connection, opening, move |from, map| {
            if let Some(bucket) = bucket.upgrade() {
                bucket.apply_json(from, map);
            }
        });
    }

    /// A pooled connection that is alive. Like a new one, it provides the map and the manifest of
    /// its node.
    async fn take_pooled(
        &self,
        address: &Address,
        opening: Option<&Opening>,
    ) -> Option<NodeConnection> {
        loop {
            let mut connection = self.pool.take(address, opening).await?;
            match timeout(ALIVE_WITHIN, self.refresh(&mut connection)).await {
                Ok(Ok(())) => return Some(connection),
                Ok(Err(error)) => {
                    tracing::debug!(node = %address, error = %Chain(&error), "a pooled connection failed");
                }
                Err(_) => tracing::debug!(node = %address, "a pooled connection does not answer"),
            }
        }
    }

    /// Fetches the map and the manifest over a connection.
    pub(crate) async fn refresh(&self, connection: &mut NodeConnection) -> Result<(), Error> {
        let has_manifest = connection.machine.config().collections;
        let answers = connection.ask(|machine| {
            machine.request_cluster_map();
            if has_manifest {
                machine.request_manifest();
            }
        });
        let answers = answers.await?;
        let map = connection.take_map().unwrap_or_default();
        let map = BucketConfig::parse(&map, &connection.address.host).map_err(|error| {
            Error::new(ErrorKind::Protocol, "a cluster map cannot be used").with_source(error)
        })?;
        self.adopt(map, &connection.address)?;
        for answer in answers {
            if let Event::Manifest(Some(json)) = answer {
                self.learn_manifest(Manifest::parse(&json).map_err(|error| {
                    let opcode = Opcode::GET_COLLECTIONS_MANIFEST;
                    let message = format!("the server's answer to {opcode} is invalid");
                    Error::new(ErrorKind::Protocol, message).with_source(error)
                })?);
            }
        }
        self.check_identity()
    }

    /// Fetches the newest map from the first node that answers: from the nodes of the map, asked
    /// concurrently and in random order, since one of them may be cut off from its cluster, or from
    /// those of the connection string.
    pub(crate) async fn fetch_map(self: &Arc<Self>) -> Result<(), Error> {
        let limit = self.connect_timeout();
        let mut addresses: Vec<_> = self.data_nodes(&self.config()).into_iter().collect();
        addresses.shuffle(&mut self.randomness());
        let mut addresses = addresses.into_iter();
        let mut attempts = JoinSet::new();
        loop {
            if let Some(address) = addresses.next() {
                let bucket = Arc::clone(self);
                attempts.spawn(async move {
                    let connected = bucket.connect_to(&address, None, limit).await;
                    if let Err(error) = &connected {
                        tracing::debug!(node = %address, error = %Chain(error), "a node sent no map");
                    }
                    connected.is_ok()
                });
            }
            match timeout(NEXT_AFTER, attempts.join_next()).await {
                Ok(Some(Ok(true))) => return self.check_identity(),
                Ok(None) => break,
                _ => {}
            }
        }
        self.check_identity()?;
        let connected = self.connector.connect_any_again().await?;
        self.learn(&connected)
    }

    /// Applies the map of a node that was connected to.
    ///
    /// # Errors
    /// [`ErrorKind::BucketNotFound`] if the node has another bucket of the name, whose changes must
    /// not be taken for those of this one. If its map is older, that may be temporary: the node
    /// lags, or its cluster was set up again, so that revisions start over.
    fn adopt(&self, config: BucketConfig, from: &Address) -> Result<(), Error> {
        let other = (!self.is_own(&config)).then(|| config.uuid().to_owned());
        self.apply(config);
        self.check_identity()?;
        let Some(other) = other else { return Ok(()) };
        let message = format!(
            "{from} has another bucket '{}' than the client was connected to (uuid {other}, not \
             {}): if the cluster was set up anew, connect again, and start without a checkpoint",
            self.name, self.uuid
        );
        Err(Error::new(ErrorKind::BucketNotFound, message))
    }

    fn learn(&self, connected: &Connected) -> Result<(), Error> {
        let Connected { outcome, address, .. } = connected;
        if let Some(config) = outcome.config.bucket() {
            self.adopt(config.clone(), address)?;
        }
        if let Some(manifest) = &outcome.manifest {
            self.learn_manifest(manifest.clone());
        }
        self.check_identity()
    }

    fn learn_manifest(&self, manifest: Manifest) {
        let mut state = self.state();
        if manifest.uid() > state.manifest.uid() {
            state.manifest = Arc::new(manifest);
        }
    }

    /// Notes observed seqnos of vBuckets.
    pub(crate) fn saw(&self, seqnos: &BTreeMap<Vbid, Seqno>) {
        let mut highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        for (&vbid, &seqno) in seqnos {
            let known = highest.entry(vbid).or_default();
            *known = seqno.max(*known);
        }
    }

    /// Whether a vBucket was ever observed to have a seqno, which it may have lost since.
    pub(crate) fn has_seen(&self, vbid: Vbid, seqno: Seqno) -> bool {
        let highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        highest.get(&vbid).is_some_and(|highest| *highest >= seqno)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error if a node has no address on the selected network.
fn without_address(
    config: &BucketConfig,
    network: Network,
    is_tls: bool,
    node: Option<usize>,
) -> Option<Error> {
    let mut nodes = config.nodes().iter().enumerate();
    let (_, node) = nodes.find(|&(index, candidate)| {
        let is_asked =
            node.map_or_else(|| config.active_on(index).next().is_some(), |n| n == index);
        is_asked && candidate.data_address(network, is_tls).is_none()
    })?;
    let name = node.hostname();
    let is_there = |network, is_tls| node.data_address(network, is_tls).is_some();
    Some(match network {
        _ if is_tls && is_there(network, false) => {
            let problem = format!(
                "node {name} has no TLS port for the data service in the cluster map: enable TLS \
                 there, or use couchbase://"
            );
            Error::option(&["connection_string"], problem)
        }
        Network::External => {
            let problem = format!(
                "node {name} has no address on 'external': give it an alternate address \
                 (couchbase-cli setting-alternate-address), or use 'default'"
            );
            Error::option(&["network"], problem).with_value("external")
        }
        Network::Default => {
            let problem = format!(
                "node {name} has no port for the data service on 'default': use 'external' if it \
                 has an alternate address"
            );
            Error::option(&["network"], problem).with_value("default")
        }
    })
}

#[cfg(test)]
mod tests;
