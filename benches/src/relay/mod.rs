//! A relay in front of an embedded producer with one node, which sends again from memory what the
//! producer sent once, so that clients are not measured by how fast the producer is.
//!
//! It passes on everything but streams: each is recorded, and when the same is asked for again on
//! the same terms (features, open flags, settings and request) it comes from memory, byte for byte
//! but for the opaques, which are the new request's. Streams come one after the other in the order
//! of their requests, each of which is answered when it is its turn. Both sides' windows are kept to.
//! The bucket must not change meanwhile: this is a tool of the benchmarks and of nothing else.

mod connection;
mod outbox;
mod ports;
mod recordings;
mod writes;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use self::connection::{Connection, report};
use self::ports::Ports;
use self::recordings::Store;
pub use self::writes::Writes;
use crate::Error;
use crate::listening::listen;

/// A relay of the ports of one node.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    management: SocketAddr,
    congestion_control: String,
    store: Arc<Store>,
}

/// What a relay was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relayed {
    /// Streams that the producer sent.
    pub forwarded: u64,
    /// Streams that came from memory.
    pub from_memory: u64,
    /// Bytes that are kept.
    pub bytes: usize,
}

impl Relay {
    /// Listens on two loopback ports and relays to the node's port for KV and that for its
    /// management until the process ends, and writes streams that come from memory as `writes` says.
    ///
    /// # Errors
    /// If the system refuses a port or the congestion control, or chooses ports with other numbers
    /// of digits than the node has.
    pub fn start(
        kv: SocketAddr,
        management: SocketAddr,
        congestion_control: Option<&str>,
        writes: Writes,
    ) -> Result<Self, Error> {
        let (kv_listener, congestion_control) = listen(congestion_control)?;
        let (management_listener, _) = listen(None)?;
        let address = kv_listener.local_addr()?;
        let own_management = management_listener.local_addr()?;
        let pairs = [(kv.port(), address.port()), (management.port(), own_management.port())];
        let ports = Arc::new(Ports::new(&pairs).ok_or("the ports differ in length")?);
        let store = Arc::new(Store::default());
        let (kept, here) = (Arc::clone(&store), Arc::clone(&ports));
        accept(kv_listener, move |client| {
            Connection::serve(client, kv, Arc::clone(&kept), Arc::clone(&here), writes)
        })?;
        accept(management_listener, move |client| relay_text(client, management, &ports))?;
        Ok(Self { address, management: own_management, congestion_control, store })
    }

    /// Where it listens for KV.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens for management.
    #[must_use]
    pub const fn management(&self) -> SocketAddr {
        self.management
    }

    /// The congestion control in force on its connections.
    #[must_use]
    pub fn congestion_control(&self) -> &str {
        &self.congestion_control
    }

    /// What it was asked for until now.
    #[must_use]
    pub fn relayed(&self) -> Relayed {
        let (forwarded, from_memory) = self.store.counts();
        Relayed { forwarded, from_memory, bytes: self.store.bytes() }
    }
}

/// Serves each client in a thread of its own.
fn accept(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> Result<(), Error> + Send + Sync + 'static,
) -> Result<(), Error> {
    let serve = Arc::new(serve);
    thread::Builder::new().name("relay".to_owned()).spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || report(serve(client)));
        }
    })?;
    Ok(())
}

/// Relays text, in which the node's ports become the relay's.
fn relay_text(client: TcpStream, server: SocketAddr, ports: &Ports) -> Result<(), Error> {
    let server = TcpStream::connect(server)?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        // That a peer is gone ends both directions.
        let _ = std::io::copy(&mut requests, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let result = copy_text(&server, &client, ports);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
    result
}

fn copy_text(mut from: &TcpStream, mut to: &TcpStream, ports: &Ports) -> Result<(), Error> {
    let mut text = Vec::new();
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let len = from.read(&mut chunk)?;
        text.extend_from_slice(&chunk[..len]);
        let held = if len == 0 { 0 } else { ports.undecided(&text) };
        let now = text.len() - held;
        ports.lead_here(&mut text[..now]);
        to.write_all(&text[..now])?;
        text.drain(..now);
        if len == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use dcp_producer::{Producer, ProducerOptions, WriteOptions};
    use tokio::runtime::Builder;

    use super::*;
    use crate::drain::{Target, drain};

    fn address(url: &str) -> SocketAddr {
        url.split("://").nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn what_was_drained_once_comes_from_memory_through_any_window() {
        for writes in [Writes::Large, Writes::LikeANode] {
            drain_again_and_again(writes);
        }
    }

    fn drain_again_and_again(writes: Writes) {
        let mut options = ProducerOptions::default();
        options.vbuckets = 4;
        let (username, password) = (options.username.clone(), options.password.clone());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let producer = runtime.block_on(Producer::start(options)).unwrap();
        for number in 0..2000 {
            let (key, value) = (format!("key-{number}"), Bytes::from(vec![b'1'; 300]));
            producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
        }
        producer.persist();
        let management = address(&producer.management_urls()[0]);
        let kv = address(&producer.connection_string());
        let relay = Relay::start(kv, management, None, writes).unwrap();
        let target = |buffer_size| Target {
            address: relay.address(),
            bucket: producer.bucket_name().to_owned(),
            username: username.clone(),
            password: password.clone(),
            ends: producer.high_seqnos().into_iter().collect(),
            buffer_size,
            passes: 1,
            nap: Duration::ZERO,
        };
        let first = drain(&target(64 << 10)).unwrap();
        assert_eq!(first.changes, 2000);
        assert_eq!((relay.relayed().forwarded, relay.relayed().from_memory), (4, 0));
        for (number, buffer_size) in [(1, 64 << 10), (2, 5000), (3, 8 << 20)] {
            let again = drain(&target(buffer_size)).unwrap();
            assert_eq!((again.changes, again.bytes), (first.changes, first.bytes));
            let relayed = relay.relayed();
            assert_eq!((relayed.forwarded, relayed.from_memory), (4, 4 * number));
        }
        assert!(relay.relayed().bytes as u64 > first.bytes, "with the answers");
        let mut text = String::new();
        let mut client = TcpStream::connect(relay.management()).unwrap();
        client.write_all(b"GET /pools HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        client.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 "), "{text}");
        runtime.block_on(producer.shutdown());
    }
}
