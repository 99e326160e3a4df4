//! One bucket: its map, its manifest, and connections to its nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_proto::consumer::{BootstrapOutcome, ClusterConfig};
use dcp_proto::topology::{Address, BucketConfig, Manifest, Network};
use dcp_wire::{Opcode, Seqno, Status, Vbid};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::connect::{Connected, Connector};
use crate::opening::Opening;
use crate::pool::Pool;
use crate::{Chain, ConnectOptions, Error, ErrorKind, requests};

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
            let message = "no bucket is named: write couchbase://host/bucket, or pass a bucket";
            return Err(Error::new(ErrorKind::Config, message));
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

    /// Whether a failure may be temporary. The client has opened this bucket before, so a node that
    /// does not know it, or refuses the user, may be starting, or may not have a new password yet.
    pub(crate) fn may_pass(&self, error: &Error) -> bool {
        if self.check_identity().is_err() {
            return false;
        }
        // The server refuses on purpose what it has never granted to this client.
        let was_granted = self.has_opened_dcp.load(Ordering::Relaxed);
        match (error.kind(), error.opcode()) {
            (ErrorKind::Config | ErrorKind::Closed | ErrorKind::Checkpoint, _) => false,
            // A setting that earlier streams may not have needed.
            (ErrorKind::Unsupported, Some(Opcode::DCP_CONTROL)) => false,
            (ErrorKind::Unsupported, _)
            | (ErrorKind::AccessDenied, Some(Opcode::DCP_OPEN))
            | (ErrorKind::Status, Some(Opcode::HELLO | Opcode::DCP_OPEN)) => was_granted,
            // A request that the user may not make, or that the server does not know.
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

    /// A connection within `limit`, with or without DCP opened: a pooled one, or a new one.
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
        self.learn(&connected)?;
        Ok(connected)
    }

    /// The connections that are not used by a stream.
    pub(crate) const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A pooled connection that is alive. Like a new one, it provides the map and the manifest of
    /// its node.
    async fn take_pooled(&self, address: &Address, opening: Option<&Opening>) -> Option<Connected> {
        loop {
            let mut connected = self.pool.take(address, opening).await?;
            match timeout(ALIVE_WITHIN, self.refresh(&mut connected)).await {
                Ok(Ok(())) => return Some(connected),
                Ok(Err(error)) => {
                    tracing::debug!(%address, error = %Chain(&error), "a pooled connection failed");
                }
                Err(_) => tracing::debug!(%address, "a pooled connection does not answer"),
            }
        }
    }

    /// Fetches the map and the manifest over a connection.
    pub(crate) async fn refresh(&self, connected: &mut Connected) -> Result<(), Error> {
        let Connected { socket, leftover, outcome, address } = connected;
        let map = requests::cluster_map(socket, leftover).await?;
        let map = BucketConfig::parse(&map, &address.host).map_err(|error| {
            Error::new(ErrorKind::Protocol, "a cluster map cannot be used").with_source(error)
        })?;
        self.adopt(map, address)?;
        if outcome.manifest.is_some()
            && let Some(manifest) = requests::manifest(socket, leftover).await?
        {
            self.learn_manifest(manifest);
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
                        tracing::debug!(%address, error = %Chain(error), "a node sent no map");
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
    let message = match network {
        _ if is_tls && is_there(network, false) => format!(
            "node {name} has no TLS port for the data service in the cluster map: enable TLS \
             there, or use couchbase://"
        ),
        Network::External => format!(
            "node {name} has no address on the network 'external': give it an alternate address \
             (couchbase-cli setting-alternate-address), or use network=\"default\""
        ),
        Network::Default => format!(
            "node {name} has no port for the data service on the network 'default': use \
             network=\"external\" if it has an alternate address"
        ),
    };
    Some(Error::new(ErrorKind::Config, message))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dcp_test::login::{Login, PASSWORD, USERNAME};
    use dcp_test::peer::Peer;
    use dcp_wire::message::encode_vb_seqnos;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::task::AbortHandle;

    use super::*;
    use crate::observe::Nodes;
    use crate::{ConnectOptions, Credentials};

    /// A node whose map is of this version and has the vBuckets on `port`; ends when aborted.
    async fn node(epoch: i64, rev: i64, port: u16) -> (SocketAddr, AbortHandle) {
        node_of("ab", epoch, rev, port).await
    }

    /// The same for the bucket with this UUID.
    async fn node_of(uuid: &str, epoch: i64, rev: i64, port: u16) -> (SocketAddr, AbortHandle) {
        let map = format!(
            r#"{{"rev":{rev},"revEpoch":{epoch},"name":"default","uuid":"{uuid}","nodesExt":[],
            "vBucketServerMap":{{"serverList":["127.0.0.1:{port}"],"vBucketMap":[[0],[0]]}}}}"#
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        (listener.local_addr().unwrap(), serve(listener, map, None))
    }

    /// Serves a map, and the high seqno of a vBucket if the node has it, until aborted.
    fn serve(listener: TcpListener, map: String, high_seqno: Option<(Vbid, Seqno)>) -> AbortHandle {
        let map: &'static [u8] = Vec::leak(map.into_bytes());
        let mut seqnos = Vec::new();
        encode_vb_seqnos(high_seqno, &mut seqnos);
        let seqnos: &'static [u8] = seqnos.leak();
        let serving = tokio::spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                clients.spawn(async move {
                    let mut peer = Peer::new(stream);
                    let mut login =
                        Login::answering(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS, map);
                    login.instead.push((Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS, seqnos));
                    while let Some(request) = peer.next().await {
                        let answer = login.answer(&request);
                        if peer.io.write_all(&answer).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        serving.abort_handle()
    }

    const LIMIT: Duration = Duration::from_secs(5);

    fn address(at: SocketAddr) -> Address {
        Address::new(at.ip().to_string(), at.port())
    }

    async fn open(seeds: &str) -> Bucket {
        open_within(seeds, LIMIT).await
    }

    async fn open_within(seeds: &str, limit: Duration) -> Bucket {
        let options = ConnectOptions::new(format!("couchbase://{seeds}"))
            .with_bucket("default")
            .with_credentials(Credentials::new(USERNAME, PASSWORD))
            .with_connect_timeout(limit);
        Bucket::connect(Connector::new(options).unwrap()).await.unwrap()
    }

    fn rev(bucket: &Bucket) -> (i64, i64) {
        let config = bucket.config();
        (config.revision().epoch, config.revision().rev)
    }

    #[tokio::test]
    async fn the_older_map_of_an_isolated_node_is_never_believed() {
        // The vBuckets are where nobody listens, so that the seeds are asked for another map.
        let (isolated, _isolated) = node(1, 900, 1).await;
        let (current, current_serves) = node(2, 3, 1).await;
        let bucket = open(&format!("{current},{isolated}")).await;
        assert_eq!(rev(&bucket), (2, 3));
        bucket.connect_to(&address(isolated), None, LIMIT).await.unwrap();
        assert_eq!(rev(&bucket), (2, 3), "a larger rev of an older epoch");

        let bucket = Arc::new(bucket);
        current_serves.abort();
        bucket.fetch_map().await.unwrap();
        assert_eq!(rev(&bucket), (2, 3), "after everything was lost, from the other seed");

        let (newer, _newer) = node(3, 1, 1).await;
        bucket.connect_to(&address(newer), None, LIMIT).await.unwrap();
        assert_eq!(rev(&bucket), (3, 1), "a newer one is");
    }

    /// A bucket whose first vBucket was on a node that has given it up and was then cut off from its
    /// cluster. The node has the lower address and an old map; the other one has the vBucket, with
    /// seqno 7, and the current map.
    async fn cut_off() -> (Arc<Bucket>, [AbortHandle; 2]) {
        let bind = || TcpListener::bind("127.0.0.1:0");
        let mut nodes = [bind().await.unwrap(), bind().await.unwrap()];
        nodes.sort_by_key(|node| node.local_addr().unwrap().port());
        let [isolated, current] = nodes;
        let [first, second] = [&isolated, &current].map(|node| node.local_addr().unwrap());
        let map = |rev, active| {
            format!(
                r#"{{"rev":{rev},"name":"default","uuid":"ab","nodesExt":[],"vBucketServerMap":
                {{"serverList":["{first}","{second}"],"vBucketMap":[[{active}],[1]]}}}}"#
            )
        };
        let isolated = serve(isolated, map(1, 0), None);
        let bucket = open_within(&first.to_string(), Duration::from_secs(60)).await;
        let current = serve(current, map(2, 1), Some((Vbid(0), Seqno(7))));
        (Arc::new(bucket), [isolated, current])
    }

    #[tokio::test]
    async fn a_node_that_is_cut_off_is_not_the_only_one_asked_though_it_is_the_first() {
        let (bucket, _nodes) = cut_off().await;
        for _ in 0..64 {
            bucket.fetch_map().await.unwrap();
            if rev(&bucket) == (0, 2) {
                return;
            }
        }
        panic!("only the first is asked");
    }

    #[tokio::test]
    async fn a_vbucket_is_looked_for_beyond_the_only_node_that_is_asked() {
        let (bucket, _nodes) = cut_off().await;
        let mut nodes = Nodes::new(bucket, None);
        let high = nodes.high_seqnos(&[Vbid(0)].into()).await.unwrap();
        assert_eq!(high, [(Vbid(0), Seqno(7))].into());
    }

    #[tokio::test]
    async fn connections_may_take_and_be_kept_for_ever() {
        let (at, _serves) = node(1, 1, 1).await;
        let options = ConnectOptions::new(format!("couchbase://{at}"))
            .with_bucket("default")
            .with_credentials(Credentials::new(USERNAME, PASSWORD))
            .with_connect_timeout(Duration::MAX)
            .with_keep_connections(Duration::MAX);
        let bucket = Bucket::connect(Connector::new(options).unwrap()).await.unwrap();
        let address = address(at);
        let limit = bucket.connect_timeout();
        let connected = bucket.connect_to(&address, None, limit).await.unwrap();
        bucket.pool().put(connected, None);
        assert!(bucket.pool().take(&address, None).await.is_some());
    }

    #[tokio::test]
    async fn the_map_of_a_bucket_of_another_name_says_nothing_of_this_one() {
        let (known, _known) = node(1, 3, 1).await;
        let bucket = open(&known.to_string()).await;
        for uuid in ["cd", "ab"] {
            let map = format!(
                r#"{{"rev":900,"revEpoch":1,"name":"other","uuid":"{uuid}","nodesExt":[],
                "vBucketServerMap":{{"serverList":["127.0.0.1:1"],"vBucketMap":[[0],[0]]}}}}"#
            );
            bucket.apply(BucketConfig::parse(map.as_bytes(), "127.0.0.1").unwrap());
            assert_eq!(rev(&bucket), (1, 3), "uuid {uuid}");
            bucket.check_identity().unwrap();
        }
    }

    #[tokio::test]
    async fn a_node_with_another_bucket_of_the_name_is_not_used_however_old_its_map_is() {
        let (known, _known) = node_of("ab", 1, 900, 1).await;
        let bucket = open(&known.to_string()).await;
        // Of a cluster that was set up again at the old addresses, or of a node that lags.
        let (other, _other) = node_of("cd", 1, 3, 1).await;
        let error = bucket.connect_to(&address(other), None, LIMIT).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BucketNotFound);
        for part in [&other.to_string(), "'default'", "cd", "ab"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(bucket.may_pass(&error), "the node may only lag");
        bucket.check_identity().unwrap();
        let (newer, _newer) = node_of("cd", 1, 901, 1).await;
        let error = bucket.connect_to(&address(newer), None, LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("was recreated") && !bucket.may_pass(&error));
    }
}
