//! Runs an embedded cluster until Enter or the end of standard input.
//!
//! `cargo run -p dcp-producer --example serve -- [nodes] [vBuckets]`

use std::error::Error;
use std::io::Write;

use dcp_producer::{Producer, ProducerOptions, TlsOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut options = ProducerOptions::default();
    if let Some(nodes) = arguments.next() {
        options.nodes = nodes.parse()?;
    }
    if let Some(vbuckets) = arguments.next() {
        options.vbuckets = vbuckets.parse()?;
    }
    options.tls = Some(TlsOptions::default());
    let (username, password) = (options.username.clone(), options.password.clone());
    let producer = Producer::start(options).await?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", producer.connection_string())?;
    writeln!(out, "bucket {} user {username} password {password}", producer.bucket_name())?;
    writeln!(out, "{}", producer.tls_connection_string().unwrap_or_default())?;
    writeln!(out, "{}", producer.management_urls().join(" "))?;
    // For the clients' trust stores.
    write!(out, "{}", producer.ca_pem().unwrap_or_default())?;
    out.flush()?;
    drop(out);
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
    producer.shutdown().await;
    Ok(())
}
