//! A relay in front of an embedded producer's nodes, which replays from memory what the producer
//! sent once, so that clients are not limited by the producer's speed.
//!
//! It forwards everything but streams. Each stream is recorded, and when it is requested again with
//! the same parameters (features, open flags, settings and request), it is replayed from memory,
//! byte for byte except for the opaques, which are those of the new request. Streams are sent one
//! after the other in the order of their requests, each of which is answered in its turn. Flow
//! control of both sides is respected. The bucket must not change meanwhile: this tool is for the
//! benchmarks only.

mod connection;
mod outbox;
mod ports;
mod recordings;
mod socket;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use self::connection::{Connection, report};
use self::ports::Ports;
use self::recordings::Store;
use self::socket::{Socket, Tls};
use crate::Error;
use crate::listening::listen;
use crate::writes::Writes;

/// Ports of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePorts {
    /// KV port.
    pub kv: SocketAddr,
    /// KV port over TLS, if enabled.
    pub kv_tls: Option<SocketAddr>,
    /// Management port.
    pub management: SocketAddr,
}

/// A relay of a cluster's ports.
#[derive(Debug)]
pub struct Relay {
    nodes: Vec<NodePorts>,
    congestion_control: String,
    ca_pem: String,
    store: Arc<Store>,
}

/// Statistics of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relayed {
    /// Streams sent by the producer.
    pub forwarded: u64,
    /// Streams sent from memory.
    pub from_memory: u64,
    /// Bytes stored.
    pub bytes: usize,
}

impl Relay {
    /// Listens on one loopback port per port of the nodes, and relays until the process ends.
    /// Streams from memory are written according to `writes`. TLS is terminated here: connections
    /// to nodes are plain.
    ///
    /// # Errors
    /// If the system refuses a port or the congestion control, or chooses a port with a different
    /// number of digits than the node's.
    pub fn start(
        nodes: &[NodePorts],
        congestion_control: Option<&str>,
        writes: Writes,
    ) -> Result<Self, Error> {
        let (tls, ca_pem) = Tls::new()?;
        let mut in_force = String::new();
        let (mut own, mut pairs, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
        for node in nodes {
            let (kv, name) = listen(congestion_control)?;
            in_force = name;
            let kv_tls = node.kv_tls.map(|_| listen(congestion_control)).transpose()?;
            let (management, _) = listen(None)?;
            let here = NodePorts {
                kv: kv.local_addr()?,
                kv_tls: kv_tls.as_ref().map(|(listener, _)| listener.local_addr()).transpose()?,
                management: management.local_addr()?,
            };
            pairs.extend([(node.kv, here.kv), (node.management, here.management)]);
            pairs.extend(node.kv_tls.zip(here.kv_tls));
            own.push(here);
            listeners.push((*node, kv, kv_tls, management));
        }
        let pairs: Vec<_> = pairs.iter().map(|(theirs, own)| (theirs.port(), own.port())).collect();
        let ports = Arc::new(Ports::new(&pairs).ok_or("the ports differ in length")?);
        let store = Arc::new(Store::default());
        for (node, kv, kv_tls, management) in listeners {
            let relayed = |tls: Option<Tls>| {
                let (kept, here) = (Arc::clone(&store), Arc::clone(&ports));
                move |client| {
                    let client = Socket::new(client, tls.as_ref())?;
                    Connection::serve(client, node.kv, Arc::clone(&kept), Arc::clone(&here), writes)
                }
            };
            accept(kv, relayed(None))?;
            if let Some((listener, _)) = kv_tls {
                accept(listener, relayed(Some(tls.clone())))?;
            }
            let here = Arc::clone(&ports);
            accept(management, move |client| relay_text(client, node.management, &here))?;
        }
        Ok(Self { nodes: own, congestion_control: in_force, ca_pem, store })
    }

    /// The relay's ports by node.
    #[must_use]
    pub fn nodes(&self) -> &[NodePorts] {
        &self.nodes
    }

    /// The CA certificate for TLS, as PEM.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// The congestion control of its connections.
    #[must_use]
    pub fn congestion_control(&self) -> &str {
        &self.congestion_control
    }

    /// Statistics so far.
    #[must_use]
    pub fn relayed(&self) -> Relayed {
        let (forwarded, from_memory) = self.store.counts();
        Relayed { forwarded, from_memory, bytes: self.store.bytes() }
    }
}

/// Serves each client in its own thread.
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

/// Relays text, replacing the node's ports with the relay's.
fn relay_text(client: TcpStream, server: SocketAddr, ports: &Ports) -> Result<(), Error> {
    let server = TcpStream::connect(server)?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        // A closed peer ends both directions.
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
    use crate::writes::Priority;

    fn address(url: &str) -> SocketAddr {
        url.split("://").nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn what_was_drained_once_comes_from_memory_through_any_window() {
        for writes in [Writes::Large, Writes::LikeANode(Priority::High)] {
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
        let node = NodePorts {
            kv: address(&producer.connection_string()),
            kv_tls: None,
            management: address(&producer.management_urls()[0]),
        };
        let relay = Relay::start(&[node], None, writes).unwrap();
        let target = |buffer_size| Target {
            address: relay.nodes()[0].kv,
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
        let mut client = TcpStream::connect(relay.nodes()[0].management).unwrap();
        client.write_all(b"GET /pools HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        client.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 "), "{text}");
        runtime.block_on(producer.shutdown());
    }
}
