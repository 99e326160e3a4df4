//! DNS service records: one name for all nodes of a cluster.
//!
//! A name server's answer is not authenticated: unless [`SrvTargets::Any`] is set, the nodes must
//! be in the domain of the requested name, or a forged answer could send a password to any host
//! with a certificate.

use std::pin::pin;
use std::time::Duration;

use dcp_proto::topology::Address;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ProtocolConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::system_conf::read_system_conf;
use thiserror::Error;
use tokio::time::sleep;

use crate::SrvTargets;

/// Most nodes used from one answer.
const MAX_SERVICES: usize = 64;

/// Why a service name resolved to no nodes.
#[derive(Debug, Error)]
pub(crate) enum SrvError {
    #[error("the DNS lookup failed")]
    Dns(#[from] NetError),
    #[error("the name lists no nodes")]
    Empty,
    /// All listed nodes are outside the domain.
    #[error(
        "DNS lists {} for {service}, outside its domain, as a forged answer could: if this is \
         correct, accept SRV targets of any domain, or name these hosts in the connection string",
        .targets.join(", ")
    )]
    Elsewhere { service: String, targets: Vec<String> },
}

/// How long name servers may take to answer over UDP before they are asked over TCP as well: some
/// networks drop one and not the other.
const TCP_AFTER: Duration = Duration::from_secs(1);

/// Resolvers of the same name servers. They keep no answers: a cluster whose nodes have all gone is
/// found where its name leads now.
pub(crate) struct Resolvers {
    /// Over UDP, and over TCP for answers that are too long for a datagram.
    usual: TokioResolver,
    over_tcp: TokioResolver,
}

impl Resolvers {
    /// With the system's configuration: `/etc/resolv.conf` with its search domains.
    pub(crate) fn of_system() -> Result<Self, SrvError> {
        let (config, options) = read_system_conf()?;
        Self::new(config, options)
    }

    fn new(config: ResolverConfig, mut options: ResolverOpts) -> Result<Self, SrvError> {
        options.cache_size = 0;
        let mut tcp_only = config.clone();
        for server in &mut tcp_only.name_servers {
            server.connections.retain(|connection| connection.protocol == ProtocolConfig::Tcp);
        }
        let build = |config| {
            let provider = TokioRuntimeProvider::default();
            TokioResolver::builder_with_config(config, provider)
                .with_options(options.clone())
                .build()
        };
        Ok(Self { usual: build(config)?, over_tcp: build(tcp_only)? })
    }

    async fn srv_lookup(&self, service: &str) -> Result<Lookup, NetError> {
        let mut usual = pin!(self.usual.srv_lookup(service));
        let mut over_tcp = pin!(async {
            sleep(TCP_AFTER).await;
            self.over_tcp.srv_lookup(service).await
        });
        let mut has_failed = false;
        loop {
            tokio::select! {
                biased;
                answered = &mut usual => return match answered {
                    Err(error) if !is_answer(&error) && !has_failed => {
                        over_tcp.await.map_err(|_| error)
                    }
                    answered => answered,
                },
                answered = &mut over_tcp, if !has_failed => match answered {
                    Err(error) if !is_answer(&error) => has_failed = true,
                    answered => return answered,
                },
            }
        }
    }
}

/// Whether a name server has answered, if only that there is no such record.
const fn is_answer(error: &NetError) -> bool {
    matches!(error, NetError::Dns(_))
}

/// The nodes listed under `service`, by priority. Their domain is that of the name that was found,
/// which is `service` or `service` within a search domain.
pub(crate) async fn lookup(
    resolvers: &Resolvers,
    service: &str,
    wanted: SrvTargets,
) -> Result<Vec<Address>, SrvError> {
    let found = resolvers.srv_lookup(service).await?;
    let name = found.query().name().to_ascii();
    let records = found.answers().iter().filter_map(|record| match &record.data {
        RData::SRV(record) => Some(record),
        _ => None,
    });
    let mut records: Vec<&SRV> = records.take(MAX_SERVICES).collect();
    records.sort_by_key(|record| (record.priority, std::cmp::Reverse(record.weight)));
    // A service name begins with two more labels: `_couchbases._tcp`.
    let host = name.splitn(3, '.').nth(2).unwrap_or_default();
    let mut nodes: Vec<_> = records.into_iter().filter_map(node).collect();
    let elsewhere = nodes.iter().filter(|node| !is_in_domain(&node.host, host));
    let targets: Vec<_> = elsewhere.map(ToString::to_string).collect();
    if !targets.is_empty() {
        match wanted {
            SrvTargets::Any => {
                tracing::warn!(name: "srv_outside_accepted", service, ?targets, "DNS lists nodes outside the domain: accepted");
            }
            SrvTargets::SameDomain => {
                nodes.retain(|node| is_in_domain(&node.host, host));
                if nodes.is_empty() {
                    return Err(SrvError::Elsewhere { service: service.to_owned(), targets });
                }
                tracing::warn!(
                    name: "srv_outside_refused",
                    service,
                    ?targets,
                    "DNS lists nodes outside the domain: refused, as SRV targets of any domain are \
                     not accepted"
                );
            }
        }
    }
    if nodes.is_empty() { Err(SrvError::Empty) } else { Ok(nodes) }
}

/// The node of a record, if it is one.
fn node(record: &SRV) -> Option<Address> {
    let target = record.target.to_ascii();
    let target = target.trim_end_matches('.');
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    // The root as a target means that there is no such service.
    let is_node = record.port != 0 && !target.is_empty() && target.bytes().all(is_plain);
    is_node.then(|| Address::new(target, record.port))
}

/// Whether `target` is in the domain of `host`. A name with two labels is a domain itself: its
/// siblings belong to others.
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

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hickory_resolver::config::{ConnectionConfig, NameServerConfig};
    use hickory_resolver::proto::op::{Message, ResponseCode};
    use hickory_resolver::proto::rr::{Name, Record};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, UdpSocket};

    use super::*;

    const SERVICE: &str = "_couchbases._tcp.cb.example.com";

    type Listed = &'static [(u16, u16, u16, &'static str)];

    /// The answer to `question`: these records, as priority, weight, port and target.
    fn answer(question: &[u8], listed: Listed) -> Message {
        let question = Message::from_vec(question).unwrap();
        let query = question.queries[0].clone();
        let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
        for &(priority, weight, port, target) in listed {
            let target = Name::from_ascii(target).unwrap();
            let data = RData::SRV(SRV::new(priority, weight, port, target));
            answer.add_answer(Record::from_rdata(query.name().clone(), 60, data));
        }
        answer.add_query(query);
        answer
    }

    /// A name server that answers each datagram with what `answer` makes of it.
    async fn name_server(answer: impl Fn(&[u8]) -> Vec<Message> + Send + 'static) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
                for answer in answer(&buffer[..len]) {
                    socket.send_to(&answer.to_vec().unwrap(), from).await.unwrap();
                }
            }
        });
        address
    }

    async fn listing(listed: Listed) -> SocketAddr {
        name_server(move |question| vec![answer(question, listed)]).await
    }

    /// A resolver of this name server alone, with a search domain.
    fn resolver_of(server: SocketAddr) -> Resolvers {
        let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut config| {
            config.port = server.port();
            config
        });
        let server =
            NameServerConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), true, connections.to_vec());
        let search = vec![Name::from_ascii("kv.svc.example.com.").unwrap()];
        let config = ResolverConfig::from_parts(None, search, vec![server]);
        let mut options = ResolverOpts::default();
        (options.timeout, options.attempts) = (Duration::from_millis(300), 1);
        Resolvers::new(config, options).unwrap()
    }

    async fn nodes(server: SocketAddr) -> Result<Vec<String>, SrvError> {
        nodes_of(server, SrvTargets::SameDomain).await
    }

    async fn nodes_of(server: SocketAddr, wanted: SrvTargets) -> Result<Vec<String>, SrvError> {
        let nodes = lookup(&resolver_of(server), SERVICE, wanted).await?;
        Ok(nodes.iter().map(ToString::to_string).collect())
    }

    #[tokio::test]
    async fn srv_nodes_come_in_the_order_of_the_records() {
        let server = listing(&[
            (2, 0, 11207, "n3.example.com."),
            (1, 5, 11207, "n2.example.com."),
            (1, 9, 21207, "n1.example.com."),
        ]);
        let nodes = nodes(server.await).await.unwrap();
        assert_eq!(nodes, ["n1.example.com:21207", "n2.example.com:11207", "n3.example.com:11207"]);
    }

    #[tokio::test]
    async fn srv_nodes_of_another_domain_are_refused_unless_allowed() {
        let server = listing(&[(1, 1, 11207, "evil.org."), (1, 0, 11207, "n1.example.com.")]).await;
        assert_eq!(nodes(server).await.unwrap(), ["n1.example.com:11207"]);
        let all = nodes_of(server, SrvTargets::Any).await.unwrap();
        assert_eq!(all, ["evil.org:11207", "n1.example.com:11207"]);

        let error = nodes(listing(&[(1, 1, 11207, "evil.org.")]).await).await.unwrap_err();
        let says = error.to_string();
        for part in ["evil.org:11207", SERVICE, "accept SRV targets of any domain"] {
            assert!(says.contains(part), "{says}");
        }
        for no_node in [(1, 1, 0, "n1.example.com."), (1, 1, 1, ".")] {
            let listed: Listed = Box::leak(Box::new([no_node]));
            let error = nodes_of(listing(listed).await, SrvTargets::Any).await.unwrap_err();
            assert!(matches!(error, SrvError::Empty), "{no_node:?}: {error:?}");
        }
    }

    #[tokio::test]
    async fn srv_finds_a_short_name_and_its_nodes_in_the_search_domain() {
        let server = name_server(|question| {
            let asked = Message::from_vec(question).unwrap().queries[0].name().to_ascii();
            if asked == "_couchbase._tcp.cb.kv.svc.example.com." {
                return vec![answer(question, &[(1, 1, 11210, "cb-0.kv.svc.example.com.")])];
            }
            let mut answer = answer(question, &[]);
            answer.metadata.response_code = ResponseCode::NXDomain;
            vec![answer]
        });
        let resolver = resolver_of(server.await);
        let nodes = lookup(&resolver, "_couchbase._tcp.cb", SrvTargets::SameDomain).await.unwrap();
        assert_eq!(nodes, [Address::new("cb-0.kv.svc.example.com", 11210)]);
    }

    #[test]
    fn srv_domain_is_what_a_host_shares_with_its_neighbours() {
        for (target, host, expected) in [
            ("n1.x.cloud.example.com", "cb.x.cloud.example.com", true),
            ("N1.X.cloud.example.com", "cb.x.cloud.example.com.", true),
            ("n1.y.cloud.example.com", "cb.x.cloud.example.com", false),
            ("cb.example.com", "cb.example.com", true),
            ("notexample.com", "cb.example.com", false),
            (".example.com", "cb.example.com", false),
            ("n1.example.com", "example.com", true),
            ("other.com", "example.com", false),
            ("n1.local", "local", true),
            ("n1", "cb", false),
        ] {
            assert_eq!(is_in_domain(target, host), expected, "{target} by {host}");
        }
    }

    #[tokio::test]
    async fn srv_answer_is_not_hidden_by_a_forged_datagram() {
        let server = name_server(|question| {
            let right = answer(question, &[(1, 1, 11207, "n1.example.com.")]);
            let mut forged = answer(question, &[(1, 1, 11207, "n9.example.com.")]);
            forged.metadata.id ^= 1;
            vec![forged, right]
        });
        assert_eq!(nodes(server.await).await.unwrap(), ["n1.example.com:11207"]);
    }

    #[tokio::test]
    async fn sv_04_srv_answer_too_long_for_a_datagram_comes_by_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let socket = UdpSocket::bind(address).await.unwrap();
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            let (len, from) = socket.recv_from(&mut buffer).await.unwrap();
            let mut truncated = answer(&buffer[..len], &[]);
            truncated.metadata.truncation = true;
            socket.send_to(&truncated.to_vec().unwrap(), from).await.unwrap();
            answer_over_tcp(&listener, &[(1, 1, 11207, "n1.example.com.")]).await;
        });
        assert_eq!(nodes(address).await.unwrap(), ["n1.example.com:11207"]);
    }

    /// Answers one question over TCP.
    async fn answer_over_tcp(listener: &TcpListener, listed: Listed) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut question = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut question).await.unwrap();
        let answer = answer(&question, listed).to_vec().unwrap();
        stream.write_u16(u16::try_from(answer.len()).unwrap()).await.unwrap();
        stream.write_all(&answer).await.unwrap();
    }

    #[tokio::test]
    async fn sv_04_srv_nodes_come_over_tcp_where_datagrams_are_dropped_or_refused() {
        for is_dropped in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let silent = UdpSocket::bind(address).await.unwrap();
            let _silent = is_dropped.then_some(silent);
            tokio::spawn(async move {
                answer_over_tcp(&listener, &[(1, 1, 11207, "n1.example.com.")]).await;
            });
            assert_eq!(nodes(address).await.unwrap(), ["n1.example.com:11207"], "{is_dropped}");
        }
    }

    #[tokio::test]
    async fn sv_05_srv_records_that_change_are_followed_whatever_their_time_to_live() {
        const RECORDS: [Listed; 2] =
            [&[(1, 1, 11207, "old.example.com.")], &[(1, 1, 11207, "new.example.com.")]];
        let now = Arc::new(AtomicUsize::new(0));
        let served = Arc::clone(&now);
        let server = name_server(move |question| {
            vec![answer(question, RECORDS[served.load(Ordering::Relaxed)])]
        });
        let resolvers = resolver_of(server.await);
        for (at, host) in ["old.example.com", "new.example.com"].into_iter().enumerate() {
            now.store(at, Ordering::Relaxed);
            let nodes = lookup(&resolvers, SERVICE, SrvTargets::SameDomain).await.unwrap();
            assert_eq!(nodes, [Address::new(host, 11207)]);
        }
    }

    #[tokio::test]
    async fn srv_lookup_without_records_or_without_an_answer_is_an_error() {
        let unknown = name_server(|question| {
            let mut answer = answer(question, &[]);
            answer.metadata.response_code = ResponseCode::NXDomain;
            vec![answer]
        });
        let silent = name_server(|_| Vec::new());
        for server in [unknown.await, silent.await] {
            let error = nodes(server).await.unwrap_err();
            assert!(matches!(error, SrvError::Dns(_)), "{error:?}");
        }
    }
}
