//! The network between clients and cluster: it delays, cuts, starves and freezes connections as it
//! is told, counts what flow control counts, and hashes every byte that passes.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use dcp_consumer::{Dial, Dialing, Transport};
use dcp_producer::Producer;
use dcp_proto::topology::Address;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex, split};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::packets::{Account, Packets};
use crate::trace;
use crate::watchdog::Steps;

/// Bytes that come one at a time before a link is itself again.
const STARVED_BYTES: u64 = 600;

/// Between all clients of a world and its cluster.
#[derive(Debug)]
pub(crate) struct Network {
    producer: Arc<Producer>,
    links: Mutex<Vec<Weak<Link>>>,
    /// For every packet of new connections, in milliseconds at most.
    latency: AtomicU64,
    dialed: AtomicU64,
    /// Until when connections are accepted and closed.
    closes_until: Mutex<Option<Instant>>,
    seed: u64,
    begin: Instant,
    events: Mutex<DefaultHasher>,
    /// What must not be, as the network has seen it.
    wrong: Mutex<Option<String>>,
    /// When the last connection of each client was over.
    over: Mutex<BTreeMap<u64, Instant>>,
    /// Length of the longest packet that came to a client.
    longest: AtomicU64,
    pub(crate) steps: Steps,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Link {
    number: u64,
    client: u64,
    pub(crate) cut: CancellationToken,
    /// Bytes still let through to the client before the connection is cut.
    left: AtomicU64,
    /// Nothing arrives any more, and nobody is told.
    frozen: AtomicBool,
    /// A change that comes next comes twice, as from a server that is not right.
    repeat: AtomicBool,
    /// Bytes that still come one at a time.
    starved: AtomicU64,
    /// In milliseconds, at most.
    latency: AtomicU64,
    account: Mutex<Account>,
}

impl Network {
    pub(crate) fn new(producer: Arc<Producer>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            producer,
            links: Mutex::default(),
            latency: AtomicU64::new(2),
            dialed: AtomicU64::default(),
            closes_until: Mutex::default(),
            seed,
            begin: Instant::now(),
            events: Mutex::default(),
            wrong: Mutex::default(),
            over: Mutex::default(),
            longest: AtomicU64::default(),
            steps: Steps::default(),
        })
    }

    /// Latency of new connections.
    pub(crate) fn set_latency(&self, millis: u64) {
        self.latency.store(millis, Ordering::Relaxed);
    }

    /// For a while connections are accepted and closed at once, as by a proxy whose node is gone.
    pub(crate) fn close_for(&self, lasts: Duration) {
        *self.closes_until.lock().unwrap() = Some(Instant::now() + lasts);
    }

    /// The end of all faults of the network.
    pub(crate) fn heal(&self) {
        *self.closes_until.lock().unwrap() = None;
        self.set_latency(2);
        for link in self.links() {
            link.starved.store(0, Ordering::Relaxed);
            link.latency.store(2, Ordering::Relaxed);
        }
    }

    /// Connections that are open.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        let mut links = self.all_links();
        links.retain(|link| !link.cut.is_cancelled());
        links
    }

    /// The same with those whose ends may not know yet that they are cut.
    fn all_links(&self) -> Vec<Arc<Link>> {
        let mut links = self.links.lock().unwrap();
        links.retain(|link| link.strong_count() > 0);
        links.iter().filter_map(Weak::upgrade).collect()
    }

    fn any(&self, rng: &mut StdRng) -> Option<Arc<Link>> {
        let links = self.links();
        if links.is_empty() {
            return None;
        }
        links.get(rng.random_range(0..links.len())).cloned()
    }

    /// Cuts a connection once `bytes` more have come through to the client.
    pub(crate) fn cut(&self, bytes: u64, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            match bytes {
                0 => link.cut.cancel(),
                _ => link.left.store(bytes, Ordering::Relaxed),
            }
        }
    }

    /// Cuts all connections.
    pub(crate) fn cut_all(&self) {
        self.links().iter().for_each(|link| link.cut.cancel());
    }

    /// Freezes a connection: it stays open, but nothing comes through.
    pub(crate) fn freeze(&self, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.frozen.store(true, Ordering::Relaxed);
        }
    }

    /// Lets a change come twice.
    pub(crate) fn repeat(&self, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.repeat.store(true, Ordering::Relaxed);
        }
    }

    /// Lets bytes come one at a time.
    pub(crate) fn starve(&self, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.starved.store(STARVED_BYTES, Ordering::Relaxed);
        }
    }

    /// Makes one connection slow.
    pub(crate) fn slow(&self, millis: u64, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.latency.store(millis, Ordering::Relaxed);
        }
    }

    /// Something happened: it counts towards the hash of the world.
    pub(crate) fn event(&self, what: &[u8]) {
        let mut events = self.events.lock().unwrap();
        events.write_u128(self.begin.elapsed().as_nanos());
        events.write(what);
    }

    /// The hash of everything that has happened.
    pub(crate) fn hash(&self) -> u64 {
        self.events.lock().unwrap().finish()
    }

    /// What must not have been.
    pub(crate) fn take_wrong(&self) -> Option<String> {
        self.wrong.lock().unwrap().take()
    }

    /// Bytes that a client was sent and has not acknowledged; all that flow control counts. On a
    /// frozen connection, which a client may keep for later, no acknowledgement comes through.
    pub(crate) fn outstanding(&self, client: u64) -> i64 {
        let links = self.links();
        let is_frozen = |link: &Link| link.frozen.load(Ordering::Relaxed);
        let of_client = links.iter().filter(|link| link.client == client && !is_frozen(link));
        of_client.map(|link| link.account.lock().unwrap().outstanding()).sum()
    }

    /// A client's connections are about to end, since its process does.
    pub(crate) fn note_end(&self, client: u64) {
        self.over.lock().unwrap().insert(client, Instant::now());
    }

    /// Whether a client has connections, nothing that flow control counts has moved on them for a
    /// while, and none was cut or is dead without a word.
    pub(crate) fn is_still(&self, client: u64, lasts: Duration) -> bool {
        let is_old = |at: Instant| at.elapsed() > lasts;
        let mut links = self.all_links();
        links.retain(|link| link.client == client);
        let mut of_client = links.iter();
        !links.is_empty()
            && self.over.lock().unwrap().get(&client).copied().is_none_or(is_old)
            && of_client.all(|link| {
                let moved = link.account.lock().unwrap().moved();
                let is_gone = link.cut.is_cancelled() || link.frozen.load(Ordering::Relaxed);
                !is_gone && moved.is_none_or(is_old)
            })
    }

    /// Length of the longest packet that has come to a client.
    pub(crate) fn longest(&self) -> u64 {
        self.longest.load(Ordering::Relaxed)
    }

    fn connect(
        self: &Arc<Self>,
        address: SocketAddr,
        client: u64,
    ) -> io::Result<Box<dyn Transport>> {
        let number = self.dialed.fetch_add(1, Ordering::Relaxed);
        let node = self.producer.dial(address)?;
        let (near, far) = duplex(16 * 1024);
        if self.closes_until.lock().unwrap().is_some_and(|until| until > Instant::now()) {
            return Ok(Box::new(near));
        }
        let link = Arc::new(Link {
            number,
            client,
            cut: CancellationToken::new(),
            left: AtomicU64::new(u64::MAX),
            frozen: AtomicBool::new(false),
            repeat: AtomicBool::new(false),
            starved: AtomicU64::new(0),
            latency: AtomicU64::new(self.latency.load(Ordering::Relaxed)),
            account: Mutex::default(),
        });
        self.links.lock().unwrap().push(Arc::downgrade(&link));
        let ((from_node, to_node), (from_client, to_client)) = (split(node), split(far));
        let seed = self.seed ^ (number << 20);
        self.steps.take();
        let pump = |is_down, seed| Pump {
            network: Arc::clone(self),
            link: Arc::clone(&link),
            is_down,
            packets: Packets::default(),
            rng: StdRng::seed_from_u64(seed),
        };
        tokio::spawn(pump(true, seed).run(from_node, to_client));
        tokio::spawn(pump(false, !seed).run(from_client, to_node));
        Ok(Box::new(near))
    }
}

/// Carries bytes one way until the link is cut or an end is gone.
struct Pump {
    network: Arc<Network>,
    link: Arc<Link>,
    is_down: bool,
    packets: Packets,
    rng: StdRng,
}

impl Pump {
    async fn run(mut self, from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
        let cut = self.link.cut.clone();
        cut.run_until_cancelled(self.carry(from, &mut to)).await;
        // What was under way when the client's end is dropped stays readable for the client.
        if self.is_down {
            let _ = to.shutdown().await;
        }
        cut.cancel();
        self.network.note_end(self.link.client);
    }

    async fn carry(
        &mut self,
        mut from: impl AsyncRead + Unpin,
        to: &mut (impl AsyncWrite + Unpin),
    ) {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let starved = self.link.starved.load(Ordering::Relaxed);
            // Packets of the network are not those of the protocol.
            let size = match self.rng.random_bool(0.1) {
                _ if starved > 0 => 1,
                true => self.rng.random_range(1..64),
                false => buffer.len(),
            };
            let read = from.read(&mut buffer[..size]).await.unwrap_or(0);
            if read == 0 {
                return;
            }
            self.network.steps.take();
            if starved > 0 {
                self.link.starved.store(starved - 1, Ordering::Relaxed);
            } else {
                let latency = self.link.latency.load(Ordering::Relaxed);
                sleep(Duration::from_millis(self.rng.random_range(0..=latency))).await;
            }
            if self.link.frozen.load(Ordering::Relaxed) {
                continue;
            }
            let len = if self.is_down { self.still_let_through(read) } else { read };
            if !self.deliver(&buffer[..len], to).await || len < read {
                return;
            }
        }
    }

    async fn deliver(&mut self, bytes: &[u8], to: &mut (impl AsyncWrite + Unpin)) -> bool {
        // Counted first: the other end may answer before this task runs again.
        self.count(bytes);
        self.network.event(&[self.link.number.to_be_bytes().as_slice(), bytes].concat());
        if to.write_all(bytes).await.is_err() {
            return false;
        }
        if self.is_down
            && let Some(change) = self.packets.last_change()
            && self.link.repeat.swap(false, Ordering::Relaxed)
        {
            let change = change.to_vec();
            self.count(&change);
            return to.write_all(&change).await.is_ok();
        }
        true
    }

    fn count(&mut self, bytes: &[u8]) {
        let mut account = self.link.account.lock().unwrap();
        for packet in self.packets.follow(bytes) {
            trace::packet(self.link.number, self.is_down, &packet);
            if self.is_down {
                self.network.longest.fetch_max(packet.len() as u64, Ordering::Relaxed);
            }
            if let Err(wrong) = account.count(self.is_down, &packet) {
                let wrong = format!("on connection {}: {wrong}", self.link.number);
                self.network.wrong.lock().unwrap().get_or_insert(wrong);
            }
        }
    }

    /// How many of the bytes read reach the client.
    fn still_let_through(&self, read: usize) -> usize {
        let left = self.link.left.load(Ordering::Relaxed);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(read);
        if left != u64::MAX {
            self.link.left.store(left - len as u64, Ordering::Relaxed);
        }
        len
    }
}

/// What one client dials with.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) network: Arc<Network>,
    /// Who dials.
    pub(crate) client: u64,
    pub(crate) seed: u64,
}

impl Dial for Dialer {
    fn dial(&self, address: &Address) -> Dialing {
        let (network, client) = (Arc::clone(&self.network), self.client);
        let address: SocketAddr =
            format!("{}:{}", address.host, address.port).parse().expect("an IP address");
        Box::pin(async move {
            let number = network.dialed.load(Ordering::Relaxed);
            sleep(Duration::from_millis(1 + number % 3)).await;
            network.connect(address, client)
        })
    }

    fn seed(&self) -> Option<u64> {
        Some(self.seed)
    }
}
