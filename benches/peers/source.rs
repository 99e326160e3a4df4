//! The sources that every client reads.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use dcp_benches::Error;
use dcp_benches::frames::{Shape, json_object, json_value};
use dcp_benches::listening::may_choose;
use dcp_benches::relay::{NodePorts, Relay};
use dcp_benches::sender::{self, Sender};
use dcp_benches::writes::{Priority, Writes};
use dcp_producer::{Producer, ProducerOptions, TlsOptions, WriteOptions};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

/// Contents of a source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holds {
    pub(crate) documents: u64,
    pub(crate) value_len: usize,
    pub(crate) vbuckets: u16,
    pub(crate) nodes: usize,
}

/// An embedded producer filled with persisted documents; runs until standard input ends.
pub(crate) fn embedded(holds: Holds) -> Result<(), Error> {
    let full = Full::start(holds, |_| json_value(holds.value_len))?;
    offer(&full.job)?;
    full.shut_down();
    Ok(())
}

/// The same behind a relay that replays a stream from memory when it is requested again. Prints
/// their numbers at the end.
pub(crate) fn recorded(holds: Holds) -> Result<(), Error> {
    let full = Full::start(holds, |_| json_value(holds.value_len))?;
    relayed(full, Writes::Large)
}

/// The same, with the write pattern of a node at a priority.
pub(crate) fn node(holds: Holds, priority: Priority) -> Result<(), Error> {
    let full = Full::start(holds, |_| json_value(holds.value_len))?;
    relayed(full, Writes::LikeANode(priority))
}

/// The same with documents that have fields.
pub(crate) fn objects(holds: Holds) -> Result<(), Error> {
    let full = Full::start(holds, |number| json_object(number, holds.value_len))?;
    relayed(full, Writes::LikeANode(Priority::Medium))
}

fn relayed(mut full: Full, writes: Writes) -> Result<(), Error> {
    let congestion_control = may_choose("reno").then_some("reno");
    let relay = Relay::start(&full.nodes()?, congestion_control, writes)?;
    let listed = |of: fn(&NodePorts) -> Option<SocketAddr>| -> Vec<String> {
        relay.nodes().iter().filter_map(of).map(|address| address.to_string()).collect()
    };
    let (kv, tls) = (listed(|node| Some(node.kv)), listed(|node| node.kv_tls));
    full.job["connection_string"] = json!(format!("couchbase://{}", kv.join(",")));
    full.job["tls_connection_string"] = json!(format!("couchbases://{}", tls.join(",")));
    full.job["ca_pem"] = json!(relay.ca_pem());
    full.job["management"] =
        relay.nodes().iter().map(|node| format!("http://{}", node.management)).collect();
    full.job["nodes"] = json!(kv);
    full.job["congestion_control"] = json!(relay.congestion_control());
    offer(&full.job)?;
    let relayed = relay.relayed();
    let told = json!({
        "forwarded": relayed.forwarded,
        "from_memory": relayed.from_memory,
        "bytes": relayed.bytes,
    });
    writeln!(std::io::stdout(), "{told}")?;
    full.shut_down();
    Ok(())
}

/// An embedded producer filled with documents, and the job to read it.
struct Full {
    runtime: Runtime,
    producer: Producer,
    job: Value,
}

impl Full {
    fn start(holds: Holds, value: impl Fn(u64) -> Vec<u8>) -> Result<Self, Error> {
        let mut options = ProducerOptions::default();
        (options.vbuckets, options.nodes) = (holds.vbuckets, holds.nodes);
        options.tls = Some(TlsOptions::default());
        options.memory_quota_bytes = usize::MAX;
        let (username, password) = (options.username.clone(), options.password.clone());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let producer = runtime.block_on(Producer::start(options))?;
        for number in 0..holds.documents {
            let key = format!("key-{number:015}");
            producer.upsert(key.as_bytes(), Bytes::from(value(number)), WriteOptions::default())?;
        }
        producer.persist();
        let connection_string = producer.connection_string();
        let nodes: Vec<_> =
            connection_string.trim_start_matches("couchbase://").split(',').collect();
        let high_seqnos: BTreeMap<_, _> =
            producer.high_seqnos().into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0)).collect();
        let job = json!({
            "connection_string": &connection_string,
            "nodes": nodes,
            "management": producer.management_urls(),
            "bucket": producer.bucket_name(),
            "username": username,
            "password": password,
            "documents": holds.documents,
            "high_seqnos": high_seqnos,
        });
        Ok(Self { runtime, producer, job })
    }

    /// The ports of its nodes.
    fn nodes(&self) -> Result<Vec<NodePorts>, Error> {
        let addresses = |connection_string: &str| -> Result<Vec<SocketAddr>, Error> {
            let (_, hosts) = connection_string.split_once("://").ok_or("no connection string")?;
            Ok(hosts.split(',').map(str::parse).collect::<Result<_, _>>()?)
        };
        let kv = addresses(&self.producer.connection_string())?;
        let tls = addresses(&self.producer.tls_connection_string().ok_or("no TLS")?)?;
        let urls = self.producer.management_urls();
        std::iter::zip(kv, tls)
            .zip(urls)
            .map(|((kv, tls), url)| {
                let management = url.trim_start_matches("http://").parse()?;
                Ok(NodePorts { kv, kv_tls: Some(tls), management })
            })
            .collect()
    }

    fn shut_down(self) {
        self.runtime.block_on(self.producer.shutdown());
    }
}

/// A sender of ready-made frames, faster than any client; runs until standard input ends.
pub(crate) fn ready(passes: u64, value_len: usize, vbuckets: u16) -> Result<(), Error> {
    frames(passes, value_len, vbuckets, Writes::Large)
}

/// The same with the write pattern of a node, for more changes than fit into memory.
pub(crate) fn steady(passes: u64, value_len: usize, vbuckets: u16) -> Result<(), Error> {
    frames(passes, value_len, vbuckets, Writes::LikeANode(Priority::Medium))
}

fn frames(passes: u64, value_len: usize, vbuckets: u16, writes: Writes) -> Result<(), Error> {
    let congestion_control = may_choose("reno").then_some("reno");
    let shape = Shape { value_len, vbuckets, pass_bytes: 1024 * 1024 };
    offer_sender(&Sender::start(shape, passes, writes, congestion_control)?)
}

/// A sender of one mutation of 256 B per interval in microseconds, each with its send time in the
/// value; runs until standard input ends.
pub(crate) fn paced(passes: u64, microseconds: usize, vbuckets: u16) -> Result<(), Error> {
    let shape = Shape { value_len: 256, vbuckets, pass_bytes: 0 };
    offer_sender(&Sender::paced(shape, passes, Duration::from_micros(microseconds as u64))?)
}

fn offer_sender(sender: &Sender) -> Result<(), Error> {
    offer(&json!({
        "connection_string": sender.connection_string(),
        "nodes": [sender.address().to_string()],
        "bucket": sender::BUCKET,
        "username": sender::USERNAME,
        "password": sender::PASSWORD,
        "documents": sender.rows(),
        "congestion_control": sender.congestion_control(),
    }))
}

/// Prints the job for the clients and waits until all of them have finished.
fn offer(job: &Value) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{job}")?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
