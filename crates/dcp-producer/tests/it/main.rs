//! The embedded producer as clients see it: raw sockets and packets.

mod authentication;
mod auxiliary;
mod buckets;
mod cluster_map;
mod collections;
mod data_folder;
mod documents;
mod durability;
mod durable_recordings;
mod failures;
mod fault_conditions;
mod fault_rules;
mod faults;
mod http;
mod limits;
mod links;
mod neighbours;
mod raw_client;
mod replay;
mod replica_reads;
mod replication;
mod seqnos;
mod streams;
mod tls;
mod tokens;

use dcp_producer::{Producer, ProducerOptions};

/// A cluster with the options that `set` changes.
async fn start(set: impl FnOnce(&mut ProducerOptions)) -> Producer {
    let mut options = ProducerOptions::default();
    options.vbuckets = 4;
    set(&mut options);
    Producer::start(options).await.expect("loopback ports are there")
}

/// One node, four vBuckets.
async fn start_one() -> Producer {
    start(|_| {}).await
}

/// Expects a port to refuse connections; it may take one that it closes at once meanwhile.
async fn refuses(address: &str) {
    let refused = async {
        while tokio::net::TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let limit = std::time::Duration::from_secs(10);
    tokio::time::timeout(limit, refused).await.expect("the port stays open");
}
