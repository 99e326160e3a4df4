//! A network that delays, cuts and freezes connections as it is told.

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
use tokio_util::sync::CancellationToken;

/// Between one consumer and one cluster.
#[derive(Debug)]
pub(crate) struct Network {
    producer: Arc<Producer>,
    links: Mutex<Vec<Weak<Link>>>,
    /// For every packet, in milliseconds at most.
    latency: AtomicU64,
    dialed: AtomicU64,
    seed: u64,
}

/// One connection.
#[derive(Debug)]
struct Link {
    cut: CancellationToken,
    /// Bytes still let through to the client before the connection is cut.
    left: AtomicU64,
    /// Nothing arrives any more, and nobody is told.
    frozen: AtomicBool,
}

impl Network {
    pub(crate) fn new(producer: Arc<Producer>, seed: u64) -> Arc<Self> {
        let (links, dialed) = (Mutex::default(), AtomicU64::default());
        Arc::new(Self { producer, links, latency: AtomicU64::new(2), dialed, seed })
    }

    pub(crate) fn set_latency(&self, millis: u64) {
        self.latency.store(millis, Ordering::Relaxed);
    }

    fn any(&self, rng: &mut StdRng) -> Option<Arc<Link>> {
        let mut links = self.links.lock().unwrap();
        links.retain(|link| link.upgrade().is_some_and(|link| !link.cut.is_cancelled()));
        if links.is_empty() {
            return None;
        }
        let index = rng.random_range(0..links.len());
        links[index].upgrade()
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

    /// Freezes a connection: it stays open, but nothing comes through.
    pub(crate) fn freeze(&self, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.frozen.store(true, Ordering::Relaxed);
        }
    }

    fn connect(
        &self,
        address: SocketAddr,
        number: u64,
    ) -> io::Result<(Box<dyn Transport>, Arc<Link>)> {
        let node = self.producer.dial(address)?;
        let (client, far) = duplex(16 * 1024);
        let link = Arc::new(Link {
            cut: CancellationToken::new(),
            left: AtomicU64::new(u64::MAX),
            frozen: AtomicBool::new(false),
        });
        self.links.lock().unwrap().push(Arc::downgrade(&link));
        let ((from_node, to_node), (from_client, to_client)) = (split(node), split(far));
        let latency = self.latency.load(Ordering::Relaxed);
        let seed = self.seed ^ (number << 20);
        let down = pump(from_node, to_client, Arc::clone(&link), true, latency, seed);
        let up = pump(from_client, to_node, Arc::clone(&link), false, latency, !seed);
        tokio::spawn(down);
        tokio::spawn(up);
        Ok((Box::new(client), link))
    }
}

/// Carries bytes one way until the link is cut or an end is gone.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    link: Arc<Link>,
    is_down: bool,
    latency: u64,
    seed: u64,
) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut buffer = vec![0; 16 * 1024];
    let carry = async {
        loop {
            // Packets of the network are not those of the protocol.
            let size = if rng.random_bool(0.1) { rng.random_range(1..64) } else { buffer.len() };
            let read = from.read(&mut buffer[..size]).await.unwrap_or(0);
            if read == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..=latency))).await;
            if link.frozen.load(Ordering::Relaxed) {
                continue;
            }
            let mut len = read;
            if is_down {
                let left = link.left.load(Ordering::Relaxed);
                len = usize::try_from(left).unwrap_or(usize::MAX).min(read);
                if left != u64::MAX {
                    link.left.store(left - len as u64, Ordering::Relaxed);
                }
            }
            if to.write_all(&buffer[..len]).await.is_err() || len < read {
                return;
            }
        }
    };
    link.cut.run_until_cancelled(carry).await;
    // What was under way when the client's end is dropped stays readable for the client.
    if is_down {
        let _ = to.shutdown().await;
    }
    link.cut.cancel();
}

/// What the consumer dials with.
#[derive(Debug)]
pub(crate) struct Dialer(pub(crate) Arc<Network>);

impl Dial for Dialer {
    fn dial(&self, address: &Address) -> Dialing {
        let network = Arc::clone(&self.0);
        let address: SocketAddr =
            format!("{}:{}", address.host, address.port).parse().expect("an IP address");
        Box::pin(async move {
            let number = network.dialed.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(1 + number % 3)).await;
            network.connect(address, number).map(|(client, _)| client)
        })
    }

    fn seed(&self) -> Option<u64> {
        Some(self.0.seed ^ self.0.dialed.load(Ordering::Relaxed))
    }
}
