use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dcp_consumer::connect::{Connected, Connector};
use dcp_consumer::{Client, ClientCertificate, ConnectOptions, Credentials, Error, ErrorKind, Pem};
use dcp_proto::consumer::DcpOpen;
use dcp_proto::topology::{Network, NetworkSelection};
use dcp_test::login::{Login, PASSWORD};
use dcp_wire::message::OpenFlags;
use dcp_wire::{Opcode, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::data_service::{DataService, options, serve};

fn plain(address: SocketAddr) -> ConnectOptions {
    options(format!("couchbase://{address}"))
}

async fn connect(options: ConnectOptions) -> Result<Connected, Error> {
    let connector = Connector::new(options)?;
    let address = connector.connection_string().addresses()[0].clone();
    let dcp = DcpOpen::new("test", OpenFlags::empty(), 1 << 20, 20);
    connector.connect(&address, Some(dcp)).await
}

/// The error, which holds no secret and came within the connect timeout.
async fn failure(options: ConnectOptions) -> Error {
    let (started, limit) = (Instant::now(), options.connect_timeout);
    let error = connect(options).await.unwrap_err();
    assert!(started.elapsed() < limit + Duration::from_secs(2), "took {:?}", started.elapsed());
    assert!(!format!("{error} {error:?}").contains(PASSWORD), "{error:?}");
    error
}

#[track_caller]
fn assert_error(error: &Error, kind: ErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.to_string().contains(says), "'{error}' does not say '{says}'");
}

#[tokio::test]
async fn connection_is_set_up_and_bytes_that_follow_are_kept() {
    let service = DataService { trailer: b"\x80then", ..DataService::default() };
    let connected = connect(plain(service.start().await)).await.unwrap();
    assert_eq!(&connected.leftover[..], b"\x80then");
    assert_eq!(connected.outcome.config.bucket().unwrap().num_vbuckets(), 2);
    assert!(connected.outcome.has_control("enable_noop"));
    assert!(!connected.socket.is_tls());
}

#[tokio::test]
async fn connect_reads_answers_that_come_byte_by_byte() {
    let service = DataService { dribbles: true, ..DataService::default() };
    assert!(connect(plain(service.start().await)).await.is_ok());
}

#[tokio::test]
async fn http_port_is_recognised() {
    let address = serve(|mut stream| async move {
        let mut request = [0; 24];
        let _ = stream.read_exact(&mut request).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
    });
    let error = failure(plain(address.await)).await;
    assert_error(&error, ErrorKind::NotCouchbase, "HTTP");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn port_that_is_silent_times_out() {
    let address = serve(|stream| async move {
        let _open = stream;
        std::future::pending::<()>().await;
    });
    let options = plain(address.await).with_connect_timeout(Duration::from_millis(200));
    let error = failure(options).await;
    assert_error(&error, ErrorKind::Timeout, "the peer does not answer");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn connect_timeout_is_not_extended_by_a_flood_of_packets() {
    let address = serve(|mut stream| async move {
        let push = [&[0x82_u8, 0x01], &[0; 22][..]].concat().repeat(100);
        while stream.write_all(&push).await.is_ok() {}
    });
    let options = plain(address.await).with_connect_timeout(Duration::from_millis(300));
    assert_error(&failure(options).await, ErrorKind::Timeout, "did not finish");
}

#[tokio::test]
async fn port_that_closes_at_once_is_no_data_service() {
    let address = serve(|stream| async move { drop(stream) });
    let error = failure(plain(address.await)).await;
    assert_error(&error, ErrorKind::NotCouchbase, "without an answer");
}

#[tokio::test]
async fn connection_lost_during_set_up_is_retryable() {
    let service = DataService { closes_at: Some(Opcode::SASL_STEP), ..DataService::default() };
    let error = failure(plain(service.start().await)).await;
    assert_error(&error, ErrorKind::ConnectionLost, "during set-up");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn packet_of_an_announced_gigabyte_is_refused_unread() {
    let address = serve(|mut stream| async move {
        let mut header = [0; 24];
        (header[0], header[1]) = (0x81, 0x1f);
        header[8..12].fill(0xff);
        let _ = stream.write_all(&header).await;
        std::future::pending::<()>().await;
    });
    assert_error(&failure(plain(address.await)).await, ErrorKind::Protocol, "exceeds the limit");
}

#[tokio::test]
async fn connection_that_is_refused_names_its_address() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = failure(plain(address)).await;
    assert_error(&error, ErrorKind::Connect, &format!("connection to {address} refused"));
    assert!(error.is_retryable());
}

#[tokio::test]
async fn host_name_that_does_not_exist_is_reported() {
    // Too long for a label, so that no name server is asked.
    let host = format!("{}.invalid", "a".repeat(64));
    let error = failure(options(format!("couchbase://{host}"))).await;
    assert_error(&error, ErrorKind::Connect, "could not be resolved");
}

#[tokio::test]
async fn password_that_is_wrong_is_reported() {
    let address = DataService::default().start().await;
    let options = plain(address).with_credentials(Credentials::new("user", "guess"));
    let error = failure(options).await;
    assert_error(&error, ErrorKind::Authentication, "check user name and password");
    assert_eq!(error.status(), Some(Status::AUTH_ERROR));
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn password_is_never_sent_in_the_clear_to_a_server_that_asks_for_it() {
    let login = Login { mechanisms: b"PLAIN", ..Login::default() };
    let service = DataService { login, ..DataService::default() };
    let error = failure(plain(service.start().await)).await;
    assert_error(&error, ErrorKind::Authentication, "no usable SASL mechanism");
}

#[tokio::test]
async fn connect_steps_that_are_refused_have_their_own_errors() {
    for (opcode, status, kind, says) in [
        (Opcode::SELECT_BUCKET, Status::KEY_ENOENT, ErrorKind::BucketNotFound, "'default'"),
        (Opcode::SELECT_BUCKET, Status::EACCESS, ErrorKind::AccessDenied, "'default'"),
        (Opcode::DCP_OPEN, Status::EACCESS, ErrorKind::AccessDenied, "may not open DCP"),
        (Opcode::DCP_CONTROL, Status::EINVAL, ErrorKind::Unsupported, "enable_noop"),
        (Opcode::HELLO, Status::UNKNOWN_COMMAND, ErrorKind::Status, "HELLO"),
    ] {
        let address = DataService::refusing(opcode, status).start().await;
        let error = failure(plain(address)).await;
        assert_error(&error, kind, says);
        assert_eq!(error.status(), Some(status));
        assert!(!error.is_retryable(), "{error:?}");
    }
}

#[tokio::test]
async fn server_that_is_starting_is_retryable() {
    for (opcode, status, kind) in [
        (Opcode::GET_CLUSTER_CONFIG, Status::KEY_ENOENT, ErrorKind::Connect),
        (Opcode::SELECT_BUCKET, Status::ETMPFAIL, ErrorKind::Status),
        (Opcode::DCP_CONTROL, Status::ETMPFAIL, ErrorKind::Status),
    ] {
        let address = DataService::refusing(opcode, status).start().await;
        let error = failure(plain(address)).await;
        assert!(error.is_retryable() && error.kind() == kind, "{opcode}: {error:?}");
    }
}

#[tokio::test]
async fn node_that_is_down_is_replaced_by_another() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let down = listener.local_addr().unwrap();
    drop(listener);
    let silent = serve(|stream| async move {
        let _open = stream;
        std::future::pending::<()>().await;
    })
    .await;
    let up = DataService::default().start().await;
    let hosts = format!("couchbase://{down},{silent},{up}");
    let timeout = Duration::from_secs(2);
    let connector = Connector::new(options(hosts).with_connect_timeout(timeout)).unwrap();
    let connected = connector.connect_any().await.unwrap();
    assert_eq!(connected.address.port, up.port());
}

/// Seeds that are of no use: dead, silent, no Couchbase node, and in no cluster with the bucket.
async fn useless_seeds() -> Vec<SocketAddr> {
    // Another test may be given a port that was just let go of, and never this one.
    let dead = SocketAddr::from(([127, 0, 0, 1], 1));
    let silent = serve(|stream| async move {
        let _open = stream;
        std::future::pending::<()>().await;
    });
    let http = serve(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        let _ = stream.read(&mut [0; 1024]).await;
    });
    let no_bucket = DataService::refusing(Opcode::SELECT_BUCKET, Status::KEY_ENOENT).start();
    vec![dead, silent.await, http.await, no_bucket.await]
}

fn seeds(addresses: &[SocketAddr]) -> String {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    format!("couchbase://{}", addresses.join(","))
}

#[tokio::test]
async fn seed_that_works_is_used_whatever_the_others_are() {
    let mut addresses = useless_seeds().await;
    let good = DataService::default().start().await;
    addresses.push(good);
    let connector = Connector::new(options(seeds(&addresses))).unwrap();
    let begun = Instant::now();
    let connected = connector.connect_any().await.unwrap();
    assert_eq!(connected.address.port, good.port());
    assert!(begun.elapsed() < Duration::from_secs(2), "the silent one held it up");
}

#[tokio::test]
async fn seeds_that_fail_are_named_each_with_its_cause() {
    let addresses = useless_seeds().await;
    let options = options(seeds(&addresses)).with_connect_timeout(Duration::from_millis(500));
    let error = Connector::new(options).unwrap().connect_any().await.unwrap_err();
    // The cluster may be there again when the dead and the silent one are.
    assert!(error.is_retryable(), "{error:?}");
    let said = error.to_string();
    let causes = ["refused", "peer does not answer", "HTTP", "not found"];
    for (address, cause) in addresses.iter().zip(causes) {
        let of_it = said.split("; ").find(|part| part.contains(&address.to_string()));
        assert!(of_it.is_some_and(|part| part.contains(cause)), "{address} {cause}: {said}");
    }
}

#[tokio::test]
async fn node_without_an_address_on_the_network_is_named() {
    const MAP: &[u8] = br#"{"rev":3,"revEpoch":1,"name":"default","uuid":"ab",
        "nodeLocator":"vbucket","nodesExt":[
        {"hostname":"inside-1","services":{"kv":11210,"kvSSL":11207},
         "alternateAddresses":{"external":{"hostname":"outside-1"}}},
        {"hostname":"inside-2","services":{"kv":11210}}],
        "vBucketServerMap":{"serverList":["inside-1:11210","inside-2:11210"],"numReplicas":0,
        "vBucketMap":[[0],[1]]}}"#;
    let login = Login::answering(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS, MAP);
    let service = DataService { login, ..DataService::default() }.start().await;
    let with =
        |network| Client::connect(options(format!("couchbase://{service}?network={network}")));
    let error = with("external").await.unwrap_err();
    assert_error(&error, ErrorKind::Config, "inside-2");
    for part in ["'external'", "'default'", "alternate address"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let client = with("default").await.unwrap();
    assert_eq!(client.vbuckets_by_node().len(), 2);
}

#[tokio::test]
async fn password_that_is_wrong_is_not_tried_on_every_node() {
    let first = DataService::default().start().await;
    let second = serve(|_| async { panic!("the second node was asked as well") }).await;
    let options = options(format!("couchbase://{first},{second}"))
        .with_credentials(Credentials::new("user", "guess"));
    let error = Connector::new(options).unwrap().connect_any().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Authentication);
}

#[test]
fn connect_options_that_are_wrong_are_refused_before_anything_is_sent() {
    let certificate = || {
        let pem = || Pem::Text(b"none".to_vec().into());
        Some(ClientCertificate { chain: pem(), key: pem(), key_password: None })
    };
    let with = |connection_string: &str, change: &dyn Fn(&mut ConnectOptions)| {
        let mut options = options(connection_string);
        change(&mut options);
        Connector::new(options).unwrap_err()
    };
    for (error, says) in [
        (with("localhost", &|_| {}), "couchbase://"),
        (with("couchbase://h:8091", &|_| {}), "cluster manager"),
        (with("couchbase://h/other", &|_| {}), "different buckets"),
        (with("couchbase://h?network=moon", &|_| {}), "network"),
        (with("couchbase://h", &|o| o.bucket = Some(String::new())), "empty"),
        (with("couchbase://h", &|o| o.credentials = None), "pass one and a password"),
        (with("couchbase://h", &|o| o.connect_timeout = Duration::ZERO), "timeout"),
        (with("couchbases://h", &|o| o.tls.client_certificate = certificate()), "not both"),
        (
            with("couchbase://h", &|o| {
                o.credentials = None;
                o.tls.client_certificate = certificate();
            }),
            "couchbases://",
        ),
        (with("couchbase://h", &|o| o.tls.ca = Some(Pem::File("ca.pem".into()))), "couchbases://"),
    ] {
        assert_error(&error, ErrorKind::Config, says);
    }
}

#[test]
fn connection_string_may_choose_bucket_and_network() {
    let options = ConnectOptions::new("couchbase://h/travel?network=external")
        .with_credentials(Credentials::new("user", PASSWORD));
    let connector = Connector::new(options).unwrap();
    assert_eq!(connector.bucket(), Some("travel"));
    assert_eq!(connector.network(), NetworkSelection::Fixed(Network::External));
}

#[test]
fn connect_options_do_not_show_the_password() {
    for connection_string in ["h", &format!("h?x={PASSWORD}"), &format!("user:{PASSWORD}@h")] {
        let options = options(format!("couchbase://{connection_string}"));
        let shown = format!("{options:?} {:?}", Connector::new(options.clone()));
        assert!(shown.contains("user") && !shown.contains(PASSWORD), "{shown}");
    }
}
