//! A network that delays, cuts and freezes connections as it is told.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use dcp_consumer::{Dial, Dialing, Transport};
use dcp_producer::Producer;
use dcp_proto::topology::Address;
use dcp_wire::{Header, Opcode};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex, split};
use tokio_util::sync::CancellationToken;

use crate::watchdog::Steps;

/// Between one consumer and one cluster.
#[derive(Debug)]
pub(crate) struct Network {
    producer: Arc<Producer>,
    links: Mutex<Vec<Weak<Link>>>,
    /// For every packet, in milliseconds at most.
    latency: AtomicU64,
    dialed: AtomicU64,
    seed: u64,
    pub(crate) steps: Steps,
}

/// One connection.
#[derive(Debug)]
struct Link {
    cut: CancellationToken,
    /// Bytes still let through to the client before the connection is cut.
    left: AtomicU64,
    /// Nothing arrives any more, and nobody is told.
    frozen: AtomicBool,
    /// A change that comes next comes twice, as from a server that is not right.
    repeat: AtomicBool,
}

impl Network {
    pub(crate) fn new(producer: Arc<Producer>, seed: u64) -> Arc<Self> {
        let (links, dialed, steps) = (Mutex::default(), AtomicU64::default(), Steps::default());
        Arc::new(Self { producer, links, latency: AtomicU64::new(2), dialed, seed, steps })
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

    /// Lets a change come twice.
    pub(crate) fn repeat(&self, rng: &mut StdRng) {
        if let Some(link) = self.any(rng) {
            link.repeat.store(true, Ordering::Relaxed);
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
            repeat: AtomicBool::new(false),
        });
        self.links.lock().unwrap().push(Arc::downgrade(&link));
        let ((from_node, to_node), (from_client, to_client)) = (split(node), split(far));
        let latency = self.latency.load(Ordering::Relaxed);
        let seed = self.seed ^ (number << 20);
        self.steps.take();
        let pump = |is_down, seed| Pump {
            link: Arc::clone(&link),
            is_down,
            latency,
            rng: StdRng::seed_from_u64(seed),
            steps: self.steps.clone(),
        };
        tokio::spawn(pump(true, seed).run(from_node, to_client));
        tokio::spawn(pump(false, !seed).run(from_client, to_node));
        Ok((Box::new(client), link))
    }
}

/// Carries bytes one way until the link is cut or an end is gone.
struct Pump {
    link: Arc<Link>,
    is_down: bool,
    latency: u64,
    rng: StdRng,
    steps: Steps,
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
    }

    async fn carry(
        &mut self,
        mut from: impl AsyncRead + Unpin,
        to: &mut (impl AsyncWrite + Unpin),
    ) {
        let mut buffer = vec![0; 16 * 1024];
        let mut packets = Packets::default();
        loop {
            // Packets of the network are not those of the protocol.
            let is_short = self.rng.random_bool(0.1);
            let size = if is_short { self.rng.random_range(1..64) } else { buffer.len() };
            let read = from.read(&mut buffer[..size]).await.unwrap_or(0);
            if read == 0 {
                return;
            }
            self.steps.take();
            let latency = self.rng.random_range(0..=self.latency);
            tokio::time::sleep(Duration::from_millis(latency)).await;
            if self.link.frozen.load(Ordering::Relaxed) {
                continue;
            }
            let len = if self.is_down { self.still_let_through(read) } else { read };
            if to.write_all(&buffer[..len]).await.is_err() || len < read {
                return;
            }
            if self.is_down {
                packets.follow(&buffer[..read]);
                if let Some(change) = packets.last_change()
                    && self.link.repeat.swap(false, Ordering::Relaxed)
                    && to.write_all(change).await.is_err()
                {
                    return;
                }
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

/// The protocol's packets among the bytes that come by.
#[derive(Default)]
struct Packets {
    /// Of the one under way.
    begun: Vec<u8>,
    last: Vec<u8>,
}

impl Packets {
    fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let wanted = Self::len_of(&self.begun).unwrap_or(Header::LEN);
            let (now, rest) = bytes.split_at(bytes.len().min(wanted - self.begun.len()));
            self.begun.extend_from_slice(now);
            bytes = rest;
            if Self::len_of(&self.begun) == Some(self.begun.len()) {
                self.last = std::mem::take(&mut self.begun);
            }
        }
    }

    /// Length of a packet whose header is there.
    fn len_of(packet: &[u8]) -> Option<usize> {
        let body = packet.get(8..12).filter(|_| packet.len() >= Header::LEN)?;
        let body = u32::from_be_bytes(body.try_into().expect("four bytes"));
        Some(Header::LEN + usize::try_from(body).expect("a length"))
    }

    /// The last packet, if it is a change and nothing of the next one has come.
    fn last_change(&self) -> Option<&[u8]> {
        let is_change = self.last.get(..2) == Some(&[0x80, Opcode::DCP_MUTATION.0]);
        (self.begun.is_empty() && is_change).then_some(&self.last)
    }
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
