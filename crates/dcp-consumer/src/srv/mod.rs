//! DNS service records: one name for all nodes of a cluster.
//!
//! The standard library asks for addresses only, so the few messages needed are spoken here. A
//! name server's word is not proof of anything: the nodes it lists must lie in the domain of the
//! name asked for, or a forged answer could send a password to any host that has a certificate.

mod message;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dcp_proto::topology::Address;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use message::{Answer, InvalidMessage, Service};

/// How long one name server may take over one question.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest answer without TCP, in bytes.
const MAX_DATAGRAM: usize = 4096;

/// Most name servers asked, as the system's own resolver does.
const MAX_NAME_SERVERS: usize = 3;

/// Why a service name gave no nodes.
#[derive(Debug, Error)]
pub(crate) enum SrvError {
    #[error("no name server is configured")]
    NoNameServer,
    #[error("no name server answered")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Message(#[from] InvalidMessage),
    #[error("the name lists no nodes in its own domain")]
    Empty,
}

/// The system's name servers; none where it does not keep them in `/etc/resolv.conf`.
pub(crate) fn name_servers() -> Vec<SocketAddr> {
    parse_resolv_conf(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
}

fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let mut servers: Vec<_> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|address| address.trim().parse::<IpAddr>().ok())
        .map(|address| SocketAddr::new(address, 53))
        .collect();
    servers.truncate(MAX_NAME_SERVERS);
    servers
}

/// The nodes listed under `service`, most wanted first; all lie in the domain of `host`.
pub(crate) async fn lookup(
    servers: &[SocketAddr],
    service: &str,
    host: &str,
) -> Result<Vec<Address>, SrvError> {
    let mut last = SrvError::NoNameServer;
    for &server in servers {
        match timeout(PATIENCE, ask(server, service)).await {
            Ok(Ok(services)) => return nodes(services, host),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::from(io::ErrorKind::TimedOut).into(),
        }
    }
    Err(last)
}

fn nodes(mut services: Vec<Service>, host: &str) -> Result<Vec<Address>, SrvError> {
    services.retain(|service| is_in_domain(&service.target, host));
    services.sort_by_key(|service| (service.priority, std::cmp::Reverse(service.weight)));
    if services.is_empty() {
        return Err(SrvError::Empty);
    }
    Ok(services.into_iter().map(|service| Address::new(service.target, service.port)).collect())
}

/// Whether `target` lies in the domain that `host` lies in. A name of two parts is a domain
/// itself: what lies beside it belongs to others.
fn is_in_domain(target: &str, host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let domain = match host.split_once('.') {
        Some((_, domain)) if domain.contains('.') => domain,
        _ => host.as_str(),
    };
    let target = target.to_ascii_lowercase();
    target == host
        || target.strip_suffix(domain).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

async fn ask(server: SocketAddr, service: &str) -> Result<Vec<Service>, SrvError> {
    let id = StdRng::from_os_rng().random();
    let question = message::question(id, service)?;
    let any = match server {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    // Connected, so that only the server's own datagrams arrive.
    socket.connect(server).await?;
    socket.send(&question).await?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        let len = socket.recv(&mut buffer).await?;
        match message::answer(buffer.get(..len).unwrap_or_default(), id, service) {
            Ok(Answer::Services(services)) => return Ok(services),
            Ok(Answer::Truncated) => return ask_tcp(server, id, service, &question).await,
            // Somebody guesses: the real answer may still come.
            Err(InvalidMessage::NotOurs) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn ask_tcp(
    server: SocketAddr,
    id: u16,
    service: &str,
    question: &[u8],
) -> Result<Vec<Service>, SrvError> {
    let mut stream = TcpStream::connect(server).await?;
    let len = u16::try_from(question.len()).map_err(|_| InvalidMessage::Name)?;
    stream.write_all(&[&len.to_be_bytes(), question].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    match message::answer(&answer, id, service)? {
        Answer::Services(services) => Ok(services),
        Answer::Truncated => Err(InvalidMessage::Malformed.into()),
    }
}

#[cfg(test)]
mod tests;
