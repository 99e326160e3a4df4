//! One bucket: its map, its manifest, and connections to its nodes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::consumer::{BootstrapOutcome, ClusterConfig};
use dcp_proto::topology::{Address, BucketConfig, Manifest, Network};
use dcp_wire::{Opcode, Seqno, Status, Vbid};
use rand::rngs::StdRng;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::connect::{Connected, Connector};
use crate::opening::Opening;
use crate::pool::Pool;
use crate::{Chain, ConnectOptions, Error, ErrorKind, requests};

/// Longest time in which a pooled connection has to show that it is alive; a new one is made
/// otherwise.
const ALIVE_WITHIN: Duration = Duration::from_secs(1);

/// How long a node is waited for that is asked for the map before the next one is asked too.
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
    /// Another bucket has taken the name.
    replaced: AtomicBool,
    /// Some node has opened a DCP connection: the user may do that.
    has_opened_dcp: AtomicBool,
    /// The highest seqno each vBucket was ever seen to have.
    highest: Mutex<BTreeMap<Vbid, Seqno>>,
    /// Connections that no stream uses.
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
            let message = "no bucket is named: write couchbase://host/bucket, or pass a bucket";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let Connected { outcome, address, .. } = connector.connect_any().await?;
        let BootstrapOutcome { config, manifest, .. } = outcome;
        let ClusterConfig::Bucket(config) = config else {
            return Err(Error::new(ErrorKind::Protocol, "the server sent no bucket configuration"));
        };
        let network = connector.network().network(config.nodes(), &address);
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

    /// Where what is made for the bucket gets its random numbers from.
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

    /// Takes a map if it is newer.
    pub(crate) fn apply(&self, config: BucketConfig) {
        if config.uuid() != self.uuid || config.num_vbuckets() != self.num_vbuckets {
            // An old node may still show what was there before.
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

    /// Where the node listens on which a vBucket is active; `None` while there is none.
    pub(crate) fn address_of(&self, config: &BucketConfig, vbid: Vbid) -> Option<Address> {
        self.address_of_node(config, config.active(vbid)?)
    }

    /// Where a node listens, by its position in the map.
    pub(crate) fn address_of_node(&self, config: &BucketConfig, node: usize) -> Option<Address> {
        config.nodes().get(node)?.data_address(self.network, self.connector.is_tls())
    }

    /// Where the nodes listen that have a copy of a vBucket, the active one's first; `None` for a
    /// node without an address. Copies that no node has are left out.
    pub(crate) fn copies_of(&self, config: &BucketConfig, vbid: Vbid) -> Vec<Option<Address>> {
        let nodes = std::iter::once(config.active(vbid)).chain(config.replicas(vbid)).flatten();
        nodes.map(|node| self.address_of_node(config, node)).collect()
    }

    /// The vBuckets by the node they are active on; those without one under `None`.
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

    /// Whether a failure may pass by itself. The bucket was opened by this client, so that a node
    /// which does not know it, or refuses the user, may be starting, or not have heard of a new
    /// password yet.
    pub(crate) fn may_pass(&self, error: &Error) -> bool {
        if self.check_identity().is_err() {
            return false;
        }
        // What the server has never granted to this client, it refuses on purpose.
        let was_granted = self.has_opened_dcp.load(Ordering::Relaxed);
        match (error.kind(), error.opcode()) {
            (ErrorKind::Config | ErrorKind::Closed | ErrorKind::Checkpoint, _) => false,
            // A setting that earlier streams may have done without.
            (ErrorKind::Unsupported, Some(Opcode::DCP_CONTROL)) => false,
            (ErrorKind::Unsupported, _)
            | (ErrorKind::AccessDenied, Some(Opcode::DCP_OPEN))
            | (ErrorKind::Status, Some(Opcode::HELLO | Opcode::DCP_OPEN)) => was_granted,
            // A question that the user may not ask, or the server does not know.
            (ErrorKind::Status, opcode) if opcode != Some(Opcode::GET_CLUSTER_CONFIG) => !matches!(
                error.status(),
                Some(
                    Status::EACCESS
                        | Status::EINVAL
                        | Status::NOT_SUPPORTED
                        | Status::UNKNOWN_COMMAND
                )
            ),
            _ => true,
        }
    }

    /// A connection within `limit`, with DCP opened or for questions only: a pooled one, or a new
    /// one.
    pub(crate) async fn connect_to(
        &self,
        address: &Address,
        opening: Option<&Opening>,
        limit: Duration,
    ) -> Result<Connected, Error> {
        let begun = Instant::now();
        let pooled = timeout(limit / 2, self.take_pooled(address, opening)).await;
        if let Ok(Some(connected)) = pooled {
            return Ok(connected);
        }
        let left = limit.saturating_sub(begun.elapsed());
        let request = opening.map(|opening| opening.request(self.randomness()));
        let connected = self.connector.connect_in(left, address, request).await?;
        if opening.is_some() {
            self.has_opened_dcp.store(true, Ordering::Relaxed);
        }
        self.learn(&connected.outcome)?;
        Ok(connected)
    }

    /// The connections that no stream uses.
    pub(crate) const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A pooled connection that is alive. As a new one would, it brings the map and the
    /// manifest of its node.
    async fn take_pooled(&self, address: &Address, opening: Option<&Opening>) -> Option<Connected> {
        loop {
            let mut connected = self.pool.take(address, opening).await?;
            match timeout(ALIVE_WITHIN, self.refresh(&mut connected)).await {
                Ok(Ok(())) => return Some(connected),
                Ok(Err(error)) => {
                    tracing::debug!(%address, error = %Chain(&error), "a pooled connection is gone");
                }
                Err(_) => tracing::debug!(%address, "a pooled connection does not answer"),
            }
        }
    }

    /// Learns map and manifest over a connection.
    pub(crate) async fn refresh(&self, connected: &mut Connected) -> Result<(), Error> {
        let Connected { socket, leftover, outcome, address } = connected;
        let map = requests::cluster_map(socket, leftover).await?;
        let map = BucketConfig::parse(&map, &address.host).map_err(|error| {
            Error::new(ErrorKind::Protocol, "a cluster map cannot be used").with_source(error)
        })?;
        self.apply(map);
        if outcome.manifest.is_some()
            && let Some(manifest) = requests::manifest(socket, leftover).await?
        {
            self.learn_manifest(manifest);
        }
        self.check_identity()
    }

    /// Learns the newest map from the first node that answers: of those of the map, where none holds
    /// up the others, or of those of the connection string.
    pub(crate) async fn fetch_map(self: &Arc<Self>) -> Result<(), Error> {
        let limit = self.connect_timeout();
        let all = (0..self.num_vbuckets).map(Vbid);
        let mut addresses = self.by_address(all).into_keys().flatten();
        let mut attempts = JoinSet::new();
        loop {
            if let Some(address) = addresses.next() {
                let bucket = Arc::clone(self);
                attempts.spawn(async move {
                    let connected = bucket.connect_to(&address, None, limit).await;
                    if let Err(error) = &connected {
                        tracing::debug!(%address, error = %Chain(error), "a node gives no map");
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
        let connected = self.connector.connect_any().await?;
        self.learn(&connected.outcome)
    }

    fn learn(&self, outcome: &BootstrapOutcome) -> Result<(), Error> {
        if let Some(config) = outcome.config.bucket() {
            self.apply(config.clone());
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

    /// vBuckets were seen to have these seqnos.
    pub(crate) fn saw(&self, seqnos: &BTreeMap<Vbid, Seqno>) {
        let mut highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        for (&vbid, &seqno) in seqnos {
            let known = highest.entry(vbid).or_default();
            *known = seqno.max(*known);
        }
    }

    /// Whether a vBucket was ever seen to have a seqno. It may have lost it since.
    pub(crate) fn has_seen(&self, vbid: Vbid, seqno: Seqno) -> bool {
        let highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        highest.get(&vbid).is_some_and(|highest| *highest >= seqno)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
