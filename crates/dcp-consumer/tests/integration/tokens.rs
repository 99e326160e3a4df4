//! Tokens that expire, against the embedded cluster over TLS.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dcp_consumer::connect::Connector;
use dcp_consumer::{
    Chain, Client, ClientCertificate, ConnectOptions, Credentials, CredentialsError,
    CredentialsSource, End, Error, ErrorKind, Mechanism, Pem, ProvideToken, Start, StreamOptions,
    TlsOptions,
};
use dcp_producer::Producer;
use dcp_proto::consumer::Token;
use dcp_test::tokens::{KEY, issue, signed};
use dcp_test::with;
use dcp_wire::Status;
use tokio::time::{sleep, timeout};

use crate::embedded::{ANSWER_TIMEOUT, cluster_options, options, write};
use crate::rows::Rows;

async fn producer() -> Producer {
    let options = with(cluster_options(), |options| {
        (options.nodes, options.vbuckets) = (2, 4);
        options.tls = Some(dcp_producer::TlsOptions::default());
        options.token_key = Some(KEY.to_vec());
    });
    Producer::start(options).await.unwrap()
}

fn connect_options(producer: &Producer, source: CredentialsSource) -> ConnectOptions {
    let ca = producer.ca_pem().unwrap().as_bytes().to_vec();
    let tls = with(TlsOptions::default(), |tls| tls.ca = Some(Pem::Text(ca.into())));
    ConnectOptions::new(producer.tls_connection_string().unwrap())
        .with_bucket("default")
        .with_credentials(source)
        .with_tls(tls)
}

fn fixed(text: &str) -> CredentialsSource {
    CredentialsSource::Token(Token::new(text.to_owned()).unwrap())
}

/// Issues tokens that are valid for seconds.
#[derive(Default)]
struct Issuer(AtomicU32);

impl ProvideToken for Issuer {
    fn token(&self) -> Result<String, CredentialsError> {
        // Every third time it is down.
        if self.0.fetch_add(1, Ordering::Relaxed) % 3 == 2 {
            return Err("the issuer is down".into());
        }
        Ok(issue("reader", 5))
    }
}

/// Reads what is written meanwhile for `time`; nothing may be lost, and no connection.
async fn stream_through(producer: &Producer, source: CredentialsSource, time: Duration) {
    let client = Client::connect(connect_options(producer, source)).await.unwrap();
    let often = with(options(Start::Earliest, End::Never), |options| {
        options.noop_interval = Duration::from_secs(1);
        // A few batches fill it.
        options.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
    });
    let mut stream = client.stream(often, Rows::default).await.unwrap();
    let (begun, mut written, mut rows) = (Instant::now(), 0, 0);
    while begun.elapsed() < time || rows < written {
        if begun.elapsed() < time {
            write(producer, written..written + 200);
            written += 200;
        }
        let next = timeout(ANSWER_TIMEOUT, stream.next()).await;
        let next = next.unwrap_or_else(|_| panic!("{rows} of {written}: {:?}", stream.stats()));
        rows += next.unwrap().unwrap().rows as u32;
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(rows, written, "each row once");
    let stats = stream.stats();
    assert_eq!(stats.reconnects, 0, "{:?}", stream.take_events());
    assert!(stats.connection.noops > 2 && stats.connection.acks > 2, "{stats:?}");
}

#[tokio::test]
async fn tk_08_token_is_renewed_while_a_stream_runs_without_a_row_or_a_connection_lost() {
    let producer = producer().await;
    let issuer = Arc::new(Issuer::default());
    let source = CredentialsSource::TokenProvider(Arc::clone(&issuer) as _);
    stream_through(&producer, source, Duration::from_secs(12)).await;
    let asked = issuer.0.load(Ordering::Relaxed);
    assert!(asked > 6, "asked {asked} times for tokens of five seconds");
}

#[tokio::test]
async fn token_file_that_is_replaced_is_read_in_time() {
    let producer = producer().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, issue("reader", 5) + "\n").unwrap();
    let source = CredentialsSource::TokenFile(path.clone());
    let replace = async {
        for _ in 0..9 {
            sleep(Duration::from_secs(1)).await;
            std::fs::write(&path, issue("reader", 5) + "\n").unwrap();
        }
    };
    tokio::join!(stream_through(&producer, source, Duration::from_secs(8)), replace);
}

async fn refused(producer: &Producer, text: &str) -> Error {
    let error = Client::connect(connect_options(producer, fixed(text))).await.unwrap_err();
    let shown = format!("{} {error:?}", Chain(&error));
    assert!(!shown.contains(text), "{shown}");
    error
}

#[tokio::test]
async fn tk_04_token_that_is_refused_is_named_and_not_shown() {
    let producer = producer().await;
    let expired = refused(&producer, &issue("reader", -35)).await;
    assert_eq!(
        (expired.kind(), expired.status()),
        (ErrorKind::Authentication, Some(Status::AUTH_ERROR))
    );
    let text = expired.to_string();
    assert!(text.contains("refuses the token") && text.contains("which expired 3"), "{text}");
    let claims = format!(r#"{{"sub":"reader","exp":{}}}"#, dcp_test::tokens::at(60));
    for wrong in [
        signed(b"the key of another issuer, never-shown", &claims),
        issue("nobody", 60),
        "of-no-form".to_owned(),
    ] {
        let error = refused(&producer, &wrong).await;
        assert_eq!(error.kind(), ErrorKind::Authentication);
        assert!(error.to_string().contains("trusts its issuer"), "{error}");
    }
}

#[tokio::test]
async fn tk_10_token_that_is_not_valid_yet_is_told_apart() {
    let producer = producer().await;
    let (from, until) = (dcp_test::tokens::at(60), dcp_test::tokens::at(120));
    let claims = format!(r#"{{"sub":"reader","nbf":{from},"exp":{until}}}"#);
    let error = refused(&producer, &signed(KEY, &claims)).await;
    assert_eq!(
        (error.kind(), error.status()),
        (ErrorKind::Authentication, Some(Status::AUTH_STALE))
    );
    assert!(error.to_string().contains("not valid yet"), "{error}");
}

#[tokio::test]
async fn tk_02_token_is_not_sent_to_a_server_that_accepts_none() {
    let options = with(cluster_options(), |options| {
        options.tls = Some(dcp_producer::TlsOptions::default());
    });
    let producer = Producer::start(options).await.unwrap();
    let error = refused(&producer, &issue("reader", 60)).await;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("8.1"), "{error}");
}

#[test]
fn token_options_that_contradict_others_are_refused_before_anything_is_sent() {
    let certificate = || {
        let pem = || Pem::Text(b"none".to_vec().into());
        Some(ClientCertificate { chain: pem(), key: pem(), key_password: None })
    };
    let file = || CredentialsSource::TokenFile("token".into());
    let wrong = |scheme: &str, source: CredentialsSource, change: &dyn Fn(&mut ConnectOptions)| {
        let mut options = ConnectOptions::new(format!("{scheme}://h")).with_credentials(source);
        change(&mut options);
        let error = Connector::new(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        error.options()
    };
    let mechanisms =
        |o: &mut ConnectOptions| o.sasl_mechanisms = Some(vec![Mechanism::OAuthBearer]);
    let certified = |o: &mut ConnectOptions| o.tls.client_certificate = certificate();
    assert_eq!(wrong("couchbase", fixed("x"), &|_| {}), ["token"]);
    assert_eq!(wrong("couchbase", file(), &|_| {}), ["token_file"]);
    assert_eq!(wrong("couchbases", fixed("x"), &mechanisms), ["sasl_mechanisms", "token"]);
    assert_eq!(wrong("couchbases", file(), &mechanisms), ["sasl_mechanisms", "token_file"]);
    assert_eq!(wrong("couchbases", fixed("x"), &certified), ["token", "tls_certificate"]);
    let password = Credentials::new("user", "password").into();
    assert_eq!(wrong("couchbases", password, &mechanisms), ["sasl_mechanisms"]);
    let options = ConnectOptions::new("couchbases://h").with_credentials(fixed("not-shown"));
    assert!(!format!("{options:?}").contains("not-shown"));
}
