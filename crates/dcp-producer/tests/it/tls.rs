use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{Error, NodeCertificate, Producer, ProducerOptions, TlsOptions, WriteOptions};
use dcp_proto::topology::BucketConfig;
use dcp_wire::message::{OpenFlags, StreamRequestFlags};
use dcp_wire::sasl::Mechanism;
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbuuid};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::http::{Configs, basic, exchange, request};
use super::raw_client::RawClient;
use super::{start, start_one};

/// Longest wait for something that must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A certificate authority made for one test.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, both as PEM.
struct Identity {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate for the names of a server, or for a client called `common_name`.
    fn sign(&self, names: &[&str], common_name: &str) -> Identity {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}

/// A producer that speaks TLS as `set` says.
async fn start_tls(set: impl FnOnce(&mut TlsOptions)) -> Producer {
    start(|options| {
        let mut tls = TlsOptions::default();
        set(&mut tls);
        options.tls = Some(tls);
    })
    .await
}

/// Shakes hands with a port, trusting `ca`.
async fn shake(
    url: &str,
    ca: &str,
    identity: Option<&Identity>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let address = url.split_once("://").unwrap().1.split(',').next().unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(Identity { certificate, key }) => {
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    socket.set_nodelay(true).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, socket).await
}

fn kv(producer: &Producer) -> String {
    producer.tls_connection_string().expect("TLS is spoken")
}

/// A client of the KV port that trusts the generated authority.
pub(super) async fn connect(producer: &Producer) -> RawClient {
    let ca = producer.ca_pem().expect("an authority was made");
    RawClient::over(shake(&kv(producer), ca, None).await.unwrap())
}

#[tokio::test]
async fn tls_allows_both_ways_to_authenticate() {
    let producer = start_tls(|_| {}).await;
    for mechanism in Mechanism::PASSWORD {
        let mut client = connect(&producer).await;
        client.hello(&[Feature::XERROR]).await;
        let offered = client.succeed(Frame::request(Opcode::SASL_LIST_MECHS)).await;
        let offered = String::from_utf8(offered.frame().value.to_vec()).unwrap();
        assert!(offered.split(' ').any(|name| name == mechanism.name()), "{offered}");
        if mechanism.reveals_password() {
            client.log_in("Administrator", "password").await;
        } else {
            client.log_in_with_scram(mechanism).await;
        }
        client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    }
}

#[tokio::test]
async fn map_names_the_tls_ports() {
    let producer = start(|options| {
        options.nodes = 2;
        options.tls = Some(TlsOptions::default());
    })
    .await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let map = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    BucketConfig::parse(map.frame().value, "127.0.0.1").unwrap();
    let map: serde_json::Value = serde_json::from_slice(map.frame().value).unwrap();
    let ports = |service: &str| {
        let nodes = map["nodesExt"].as_array().unwrap().iter();
        nodes.map(|node| format!("127.0.0.1:{}", node["services"][service])).collect::<Vec<_>>()
    };
    assert_eq!(kv(&producer), format!("couchbases://{}", ports("kvSSL").join(",")));
    let management: Vec<_> =
        ports("mgmtSSL").iter().map(|address| format!("https://{address}")).collect();
    assert_eq!(producer.tls_management_urls(), management);
}

#[tokio::test]
async fn map_names_no_tls_ports_without_tls() {
    let producer = start_one().await;
    assert_eq!((producer.tls_connection_string(), producer.ca_pem()), (None, None));
    assert!(producer.tls_management_urls().is_empty());
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let map = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    let map: serde_json::Value = serde_json::from_slice(map.frame().value).unwrap();
    assert_eq!(map["nodesExt"][0]["services"].as_object().unwrap().len(), 2);
}

#[tokio::test]
async fn stream_of_many_megabytes_arrives_whole_over_tls() {
    const DOCUMENTS: u64 = 2000;
    let producer = start_tls(|_| {}).await;
    let value = Bytes::from(vec![b'x'; 8 << 10]);
    for index in 0..DOCUMENTS {
        let key = format!("key {index}");
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    let mut client = connect(&producer).await;
    client.hello(&[Feature::XERROR]).await;
    client.log_in("Administrator", "password").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    let seqnos = producer.high_seqnos();
    let mut read = 0;
    for (vbid, high) in &seqnos {
        let (start, flags) = (Seqno(0), StreamRequestFlags::empty());
        let answer = client.request_stream(*vbid, start, *high, Vbuuid(0), flags).await;
        assert_eq!(answer.status(), Status::SUCCESS);
        loop {
            let packet = client.receive().await;
            match packet.opcode() {
                Opcode::DCP_MUTATION => {
                    assert_eq!(packet.frame().value, value);
                    read += 1;
                }
                Opcode::DCP_STREAM_END => break,
                _ => {}
            }
        }
    }
    assert_eq!(read, DOCUMENTS);
}

#[tokio::test]
async fn requests_of_many_megabytes_arrive_whole_over_tls() {
    let producer = start_tls(|_| {}).await;
    let mut client = connect(&producer).await;
    client.log_in("Administrator", "password").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    let value = vec![b'y'; 10 << 20];
    let vbid = producer.vbid_of(b"large");
    let set = Frame::request(Opcode::SET).with_key(b"large").with_vbid(vbid);
    client.succeed(set.with_extras(&[0; 8]).with_value(&value)).await;
    let get = Frame::request(Opcode::GET).with_key(b"large").with_vbid(vbid);
    assert_eq!(client.succeed(get).await.frame().value, value);
}

#[tokio::test]
async fn http_port_speaks_tls_too() {
    let producer = start_tls(|_| {}).await;
    let (url, ca) = (&producer.tls_management_urls()[0], producer.ca_pem().unwrap());
    let known = basic("Administrator", "password");
    let socket = shake(url, ca, None).await.unwrap();
    let whoami = exchange(socket, &request("GET", "/whoami", &known)).await.json();
    assert_eq!(whoami["id"], "Administrator");
    let socket = shake(url, ca, None).await.unwrap();
    assert_eq!(exchange(socket, &request("GET", "/whoami", "")).await.status, 401);
    let socket = shake(url, ca, None).await.unwrap();
    let mut configs = Configs::follow(socket, "/pools/default/bs/default").await;
    assert_eq!(configs.next().await.unwrap()["name"], "default");
}

#[tokio::test]
async fn tls_connects_only_clients_that_trust_the_authority() {
    let producer = start_tls(|_| {}).await;
    let other = start_tls(|_| {}).await;
    for url in [kv(&producer), producer.tls_management_urls()[0].clone()] {
        let refused = shake(&url, other.ca_pem().unwrap(), None).await.unwrap_err();
        assert!(refused.to_string().contains("certificate"), "{refused}");
        shake(&url, producer.ca_pem().unwrap(), None).await.unwrap();
    }
}

#[tokio::test]
async fn certificate_that_was_given_is_shown() {
    let authority = Authority::new();
    let Identity { certificate, key } = authority.sign(&["127.0.0.1"], "node");
    let producer =
        start_tls(|tls| tls.certificate = Some(NodeCertificate::new(certificate, key))).await;
    assert_eq!(producer.ca_pem(), None);
    let mut client = RawClient::over(shake(&kv(&producer), &authority.pem, None).await.unwrap());
    client.log_in("Administrator", "password").await;
}

#[tokio::test]
async fn client_certificate_takes_the_place_of_sasl() {
    let authority = Authority::new();
    let producer = start_tls(|tls| tls.client_ca = Some(authority.pem.clone())).await;
    let ca = producer.ca_pem().unwrap();
    let identity = authority.sign(&[], "Administrator");
    let mut client = RawClient::over(shake(&kv(&producer), ca, Some(&identity)).await.unwrap());
    client.hello(&[Feature::XERROR]).await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    for opcode in [Opcode::SASL_LIST_MECHS, Opcode::SASL_AUTH] {
        let sasl = Frame::request(opcode).with_key(b"PLAIN").with_value(b"\0nobody\0x");
        client.fail(sasl, Status::NOT_SUPPORTED).await;
    }
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    let url = &producer.tls_management_urls()[0];
    let socket = shake(url, ca, Some(&identity)).await.unwrap();
    let whoami = exchange(socket, &request("GET", "/whoami", "")).await.json();
    assert_eq!(whoami["id"], "Administrator");
    // Without one SASL is still there.
    let mut client = connect(&producer).await;
    client.hello(&[Feature::XERROR]).await;
    let select = Frame::request(Opcode::SELECT_BUCKET).with_key(b"default");
    client.fail(select, Status::EACCESS).await;
    client.log_in("Administrator", "password").await;
    client.succeed(select).await;
}

/// Whether a connection is of no use: with TLS 1.3 a client learns it was refused when it reads.
async fn is_refused(url: &str, ca: &str, identity: Option<&Identity>) -> bool {
    match shake(url, ca, identity).await {
        Err(_) => true,
        Ok(mut socket) => {
            let read = tokio::time::timeout(ANSWER_TIMEOUT, socket.read(&mut [0; 16])).await;
            matches!(read.expect("the connection is closed"), Ok(0) | Err(_))
        }
    }
}

#[tokio::test]
async fn certificates_of_others_and_for_others_are_refused() {
    let authority = Authority::new();
    let producer = start_tls(|tls| {
        tls.client_ca = Some(authority.pem.clone());
        tls.require_client_certificate = true;
    })
    .await;
    let ca = producer.ca_pem().unwrap();
    let stranger = Authority::new().sign(&[], "Administrator");
    let nobody = authority.sign(&[], "nobody");
    for url in [kv(&producer), producer.tls_management_urls()[0].clone()] {
        assert!(is_refused(&url, ca, None).await, "none");
        assert!(is_refused(&url, ca, Some(&stranger)).await, "of another authority");
        assert!(is_refused(&url, ca, Some(&nobody)).await, "for somebody unknown");
    }
    let identity = authority.sign(&[], "Administrator");
    let mut client = RawClient::over(shake(&kv(&producer), ca, Some(&identity)).await.unwrap());
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

/// Reads until the connection ends, in whichever way.
async fn expect_end(mut socket: impl AsyncRead + Unpin) {
    let mut rest = Vec::new();
    let read = socket.read_to_end(&mut rest);
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, read).await.expect("the connection is closed");
}

#[tokio::test]
async fn tls_handshake_garbage_harms_nobody_else() {
    let producer = start_tls(|_| {}).await;
    let mut bystander = connect(&producer).await;
    bystander.log_in("Administrator", "password").await;
    for url in [kv(&producer), producer.tls_management_urls()[0].clone()] {
        let address = url.split_once("://").unwrap().1;
        for garbage in [&[0x80; 4096][..], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff\x01"] {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let _ = socket.write_all(garbage).await;
            let _ = socket.shutdown().await;
            expect_end(&mut socket).await;
        }
        let ca = producer.ca_pem().unwrap();
        let mut inside = shake(&url, ca, None).await.unwrap();
        let _ = inside.write_all(&[0xff; 64]).await;
        expect_end(&mut inside).await;
        // A record that no key encrypted, after the handshake.
        let (mut below, _) = shake(&url, ca, None).await.unwrap().into_inner();
        let _ = below.write_all(b"\x17\x03\x03\x00\x20garbage garbage garbage garbage!").await;
        expect_end(&mut below).await;
    }
    bystander.succeed(Frame::request(Opcode::NOOP)).await;
    connect(&producer).await.log_in("Administrator", "password").await;
}

#[tokio::test]
async fn shutdown_does_not_wait_for_tls_handshakes_or_sessions() {
    let producer = start_tls(|_| {}).await;
    let mut client = connect(&producer).await;
    client.log_in("Administrator", "password").await;
    let address = kv(&producer);
    let _silent = TcpStream::connect(address.split_once("://").unwrap().1).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), producer.shutdown()).await.expect("it stops");
    client.expect_end().await;
}

async fn refusal(tls: TlsOptions) -> String {
    let mut options = ProducerOptions::default();
    options.tls = Some(tls);
    let error = Producer::start(options).await.expect_err("the option is impossible");
    assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
    error.to_string()
}

#[tokio::test]
async fn certificates_that_are_unusable_are_refused_by_option() {
    let authority = Authority::new();
    let (one, other) = (authority.sign(&["a"], "a"), authority.sign(&["b"], "b"));
    let certificate = |chain: &str, key: &str| {
        let mut tls = TlsOptions::default();
        tls.certificate = Some(NodeCertificate::new(chain, key));
        tls
    };
    for tls in [
        certificate("", &one.key),
        certificate(&one.certificate, "no key"),
        certificate(&one.certificate, &other.key),
    ] {
        assert!(!format!("{tls:?}").contains("PRIVATE"));
        let error = refusal(tls).await;
        assert!(error.contains("tls.certificate"), "{error}");
        assert!(!error.contains("PRIVATE"), "{error}");
    }
    let mut tls = TlsOptions::default();
    tls.client_ca = Some("no certificate".to_owned());
    assert!(refusal(tls).await.contains("tls.client_ca"));
    let mut tls = TlsOptions::default();
    tls.require_client_certificate = true;
    assert!(refusal(tls).await.contains("client_ca"));
}

#[tokio::test]
async fn ports_can_be_chosen() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let producer = start(|options| {
        options.tls = Some(TlsOptions::default());
        options.tls_port = free;
    })
    .await;
    assert_eq!(kv(&producer), format!("couchbases://127.0.0.1:{free}"));
}
