//! How long what fails is tried again: for as long as the stream is patient, however often that is.

use dcp_test::with;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dcp_consumer::{
    Chain, ChangeStream, Client, ConnectOptions, Credentials, CredentialsError, Dial, Dialing, End,
    Error, ErrorKind, ProvideCredentials, Start, StreamEvent, StreamOptions, Transport,
};
use dcp_producer::{Producer, WriteOptions, parse_rules};
use dcp_proto::topology::Address;
use dcp_proto::{BatchSink, Change, ChangeSink, Rollback, SinkError};
use dcp_wire::{Opcode, Seqno, Status, Vbid};
use tokio::io::duplex;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::embedded::{ANSWER_TIMEOUT, connect, options, producer, read_all, take, write};
use crate::rows::{Item, Rows};

/// Longer than a handful of attempts take.
const A_WHILE: Duration = Duration::from_secs(2);

fn connect_options(producer: &Producer) -> ConnectOptions {
    ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"))
}

fn refuse(producer: &Producer, opcode: &str, status: &str) {
    let rules = format!(
        r#"[{{"condition": {{"opcode": "{opcode}"}}, "reaction": {{"answer": {{"status": "{status}"}}}}}}]"#
    );
    producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
}

async fn restart(producer: &Producer) {
    producer.persist();
    producer.kill(0).unwrap();
    producer.restart(0, true).await.unwrap();
}

async fn endless(client: &Client, retry_timeout: Duration) -> ChangeStream<Vec<Item>> {
    let options = with(options(Start::Earliest, End::Never), |o| o.retry_timeout = retry_timeout);
    client.stream(options, Rows::default).await.unwrap()
}

async fn failure(stream: &mut ChangeStream<Vec<Item>>) -> Error {
    timeout(ANSWER_TIMEOUT, stream.next()).await.expect("it stalls").unwrap().unwrap_err()
}

#[tokio::test]
async fn node_that_refuses_for_a_while_after_a_restart_is_retried() {
    for (opcode, status) in [
        ("SELECT_BUCKET", "KEY_ENOENT"),
        ("SELECT_BUCKET", "EACCESS"),
        ("GET_CLUSTER_CONFIG", "KEY_ENOENT"),
        ("GET_CLUSTER_CONFIG", "EACCESS"),
        ("SASL_AUTH", "AUTH_ERROR"),
        ("DCP_OPEN", "EACCESS"),
        ("DCP_STREAM_REQ", "EACCESS"),
        ("DCP_STREAM_REQ", "KEY_ENOENT"),
    ] {
        let producer = producer(1, 2).await;
        write(&producer, 0..10);
        let mut stream = endless(&connect(&producer).await, ANSWER_TIMEOUT).await;
        take(&mut stream, 10).await;
        refuse(&producer, opcode, status);
        restart(&producer).await;
        let next = timeout(A_WHILE, stream.next()).await;
        assert!(next.is_err(), "{opcode} {status}: {next:?}");
        producer.set_faults(Vec::new()).unwrap();
        write(&producer, 10..20);
        take(&mut stream, 10).await;
    }
}

#[tokio::test]
async fn node_that_does_not_report_persistence_for_a_while_is_retried() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    producer.persist();
    let client = connect(&producer).await;
    let open = async |retry_timeout| {
        let options = options(Start::Earliest, End::Never);
        let options = with(options, |o| {
            o.persisted_only = true;
            o.retry_timeout = retry_timeout;
        });
        client.stream(options, Rows::default).await.unwrap()
    };
    let mut stream = open(ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    refuse(&producer, "OBSERVE_SEQNO", "EACCESS");
    write(&producer, 10..20);
    producer.persist();
    assert!(timeout(A_WHILE, stream.next()).await.is_err());
    // One that has never been told is refused at once.
    let error = failure(&mut open(ANSWER_TIMEOUT).await).await;
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    producer.set_faults(Vec::new()).unwrap();
    take(&mut stream, 10).await;

    let mut stream = open(Duration::from_secs(1)).await;
    take(&mut stream, 20).await;
    refuse(&producer, "OBSERVE_SEQNO", "EACCESS");
    write(&producer, 20..30);
    producer.persist();
    assert_eq!(failure(&mut stream).await.kind(), ErrorKind::AccessDenied);
}

#[tokio::test]
async fn refusal_beyond_the_retry_timeout_ends_the_stream_with_its_cause() {
    for (opcode, status, kind, says) in [
        ("SASL_AUTH", "AUTH_ERROR", ErrorKind::Authentication, "check user name and password"),
        ("SELECT_BUCKET", "KEY_ENOENT", ErrorKind::BucketNotFound, "'default' not found"),
        ("DCP_STREAM_REQ", "EACCESS", ErrorKind::AccessDenied, "data_dcp_reader"),
    ] {
        let producer = producer(1, 2).await;
        write(&producer, 0..10);
        let mut stream = endless(&connect(&producer).await, Duration::from_secs(1)).await;
        take(&mut stream, 10).await;
        refuse(&producer, opcode, status);
        let begun = Instant::now();
        restart(&producer).await;
        let error = failure(&mut stream).await;
        assert!(begun.elapsed() >= Duration::from_secs(1));
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.vbid().is_some(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("vb:") && text.contains(" 1.") && text.contains(says), "{text}");
    }
}

#[tokio::test]
async fn user_without_the_right_fails_at_once() {
    let producer = producer(1, 2).await;
    let client = connect(&producer).await;
    let begun = Instant::now();
    refuse(&producer, "DCP_OPEN", "EACCESS");
    let error = client.stream(StreamOptions::default(), Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error:?}");
    refuse(&producer, "DCP_STREAM_REQ", "EACCESS");
    let error = failure(&mut endless(&client, ANSWER_TIMEOUT).await).await;
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error:?}");
    refuse(&producer, "GET_ALL_VB_SEQNOS", "EACCESS");
    let error = client.high_seqnos().await.unwrap_err();
    assert_eq!(error.status(), Some(Status::EACCESS));
    assert!(begun.elapsed() < A_WHILE, "{:?}", begun.elapsed());
}

/// A way to the nodes that may be shut in several ways.
#[derive(Debug, Default)]
struct Way {
    /// Connections are accepted and closed at once, as by a proxy whose node is away.
    closes: AtomicBool,
    /// Connections from now on that take bytes and never say anything.
    hangs: AtomicUsize,
    /// The ends of those.
    hung: Mutex<Vec<tokio::io::DuplexStream>>,
}

#[derive(Debug)]
struct Dialer(Arc<Way>);

impl Dial for Dialer {
    fn dial(&self, address: &Address) -> Dialing {
        let (way, address) = (Arc::clone(&self.0), address.to_string());
        Box::pin(async move {
            if way.closes.load(Ordering::Relaxed) {
                return Ok(Box::new(duplex(64).0) as Box<dyn Transport>);
            }
            let take = |left: usize| left.checked_sub(1);
            if way.hangs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                let (near, far) = duplex(1 << 16);
                way.hung.lock().unwrap().push(far);
                return Ok(Box::new(near) as Box<dyn Transport>);
            }
            let stream: io::Result<TcpStream> = TcpStream::connect(address).await;
            Ok(Box::new(stream?) as Box<dyn Transport>)
        })
    }
}

#[tokio::test]
async fn proxy_that_accepts_and_closes_is_retried() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let way = Arc::new(Way::default());
    let connection = connect_options(&producer).with_dialer(Arc::new(Dialer(Arc::clone(&way))));
    let client = Client::connect(connection).await.unwrap();
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    way.closes.store(true, Ordering::Relaxed);
    restart(&producer).await;
    let next = timeout(A_WHILE, stream.next()).await;
    assert!(next.is_err(), "{next:?}");

    // One that is opened meanwhile waits as well.
    let other = tokio::spawn(async move {
        let options =
            with(options(Start::Earliest, End::Now), |o| o.retry_timeout = ANSWER_TIMEOUT);
        client.stream(options, Rows::default).await
    });
    sleep(A_WHILE).await;
    assert!(!other.is_finished());
    way.closes.store(false, Ordering::Relaxed);
    write(&producer, 10..20);
    take(&mut stream, 10).await;
    let mut other = timeout(ANSWER_TIMEOUT, other).await.unwrap().unwrap().unwrap();
    assert_eq!(read_all(&mut other).await.len(), 20);
}

#[tokio::test]
async fn node_that_says_nothing_does_not_use_up_the_retry_timeout() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let way = Arc::new(Way::default());
    let connection = connect_options(&producer)
        .with_dialer(Arc::new(Dialer(Arc::clone(&way))))
        .with_connect_timeout(Duration::from_millis(500));
    let client = Client::connect(connection).await.unwrap();
    way.hangs.store(3, Ordering::Relaxed);
    let options = with(options(Start::Earliest, End::Now), |o| o.retry_timeout = ANSWER_TIMEOUT);
    let opened = timeout(ANSWER_TIMEOUT / 2, client.stream(options, Rows::default)).await;
    assert_eq!(read_all(&mut opened.expect("it hangs").unwrap()).await.len(), 10);
    // Nor the time there is for one question.
    way.hangs.store(1, Ordering::Relaxed);
    assert_eq!(client.high_seqnos().await.unwrap(), producer.high_seqnos());
}

#[tokio::test]
async fn retry_timeout_of_zero_tries_nothing_again() {
    let producer = producer(2, 4).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let begun = with(options(Start::Earliest, End::Now), |o| o.retry_timeout = Duration::ZERO);
    let mut stream = client.stream(begun.clone(), Rows::default).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 10);

    let mut stream = endless(&client, Duration::ZERO).await;
    take(&mut stream, 10).await;
    producer.kill(0).unwrap();
    let error = failure(&mut stream).await;
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("connection"), "{error}");

    let error = client.stream(begun, Rows::default).await.unwrap_err();
    assert!(Chain(&error).to_string().contains("refused"), "{error:?}");
}

/// Gives what it is told to.
#[derive(Default)]
struct Vault(Mutex<String>);

impl ProvideCredentials for Vault {
    fn credentials(&self) -> Result<Credentials, CredentialsError> {
        let password = self.0.lock().unwrap().clone();
        if password.is_empty() {
            return Err("the vault is sealed".into());
        }
        Ok(Credentials::new("Administrator", password))
    }
}

#[tokio::test]
async fn password_changed_while_a_stream_runs_is_used_at_the_next_connection() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let vault = Arc::new(Vault(Mutex::new("password".to_owned())));
    let mut options = connect_options(&producer);
    options.credentials = Some(dcp_consumer::CredentialsSource::Provider(vault.clone()));
    let client = Client::connect(options.clone()).await.unwrap();
    let mut stream = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut stream, 10).await;
    for wrong in ["old", ""] {
        wrong.clone_into(&mut vault.0.lock().unwrap());
        restart(&producer).await;
        assert!(timeout(A_WHILE, stream.next()).await.is_err());
        let error = Client::connect(options.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Authentication, "the first connection fails at once");
        assert_eq!(Chain(&error).to_string().contains("the vault is sealed"), wrong.is_empty());
        "password".clone_into(&mut vault.0.lock().unwrap());
        write(&producer, 0..10);
        take(&mut stream, 10).await;
    }
}

#[tokio::test]
async fn packet_that_cannot_be_used_is_not_requested_for_ever() {
    let producer = producer(1, 2).await;
    write(&producer, 0..20);
    // The first seqno of the snapshots of one vBucket becomes 255.
    let rules = r#"[{"condition": {"opcode": "DCP_SNAPSHOT_MARKER", "vbucket": 1},
        "reaction": {"corrupt": {"offset": 31}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let mut stream = endless(&connect(&producer).await, ANSWER_TIMEOUT).await;
    let mut rows = 0;
    let error = loop {
        match timeout(ANSWER_TIMEOUT, stream.next()).await.expect("it is asked for again").unwrap()
        {
            Ok(delivered) => rows += delivered.rows,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::UnusablePacket, "{error:?}");
    assert_eq!((error.vbid(), error.seqno()), (Some(Vbid(1)), Some(Seqno(255))));
    assert_eq!(error.opcode(), Some(Opcode::DCP_SNAPSHOT_MARKER));
    assert!(error.to_string().contains("DCP_SNAPSHOT_MARKER with seqno 255"), "{error}");
    assert_eq!(stream.stats().reconnects, 2);
    assert_eq!(rows as u64, producer.high_seqnos()[&Vbid(0)].0, "the other's rows came before it");
    let lost = stream.take_events().into_iter().filter_map(|event| match event {
        StreamEvent::ConnectionLost { error, .. } => Some(error),
        _ => None,
    });
    let lost: Vec<String> = lost.collect();
    assert!(lost.iter().all(|text| text.contains("snapshot marker [255")), "{lost:?}");
}

#[tokio::test]
async fn sv_10_bytes_that_are_no_packet_are_not_requested_for_ever() {
    let producer = producer(1, 2).await;
    write(&producer, 0..20);
    // The first byte of the changes of one vBucket is none that a packet begins with.
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION", "vbucket": 1},
        "reaction": {"corrupt": {"offset": 0}}}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    let mut stream = endless(&connect(&producer).await, ANSWER_TIMEOUT).await;
    let begun = Instant::now();
    let error = loop {
        let next = timeout(ANSWER_TIMEOUT, stream.next()).await.expect("it is asked for again");
        if let Err(error) = next.unwrap() {
            break error;
        }
    };
    assert!(begun.elapsed() < A_WHILE * 5, "{:?}", begun.elapsed());
    assert_eq!((error.kind(), error.vbid()), (ErrorKind::UnusablePacket, None), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("sending bytes that are no packet") && text.contains("0x7f"), "{text}");
    assert!((2..6).contains(&stream.stats().reconnects), "{:?}", stream.stats());
}

/// Cannot take anything.
#[derive(Default)]
struct Panics;

impl ChangeSink for Panics {
    fn change(&mut self, _: &Change<'_>) -> Result<(), SinkError> {
        panic!("on purpose");
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl BatchSink for Panics {
    type Batch = ();

    fn rows(&self) -> usize {
        0
    }

    fn size_bytes(&self) -> usize {
        0
    }

    fn take_batch(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

#[tokio::test]
async fn task_that_panics_ends_its_stream_and_nothing_else() {
    let producer = producer(1, 2).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let mut other = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut other, 10).await;
    let mut stream = client.stream(options(Start::Earliest, End::Never), || Panics).await.unwrap();
    let next =
        timeout(ANSWER_TIMEOUT, stream.next()).await.expect("its vBuckets are in no one's hands");
    let error = next.unwrap().unwrap_err();
    assert!(Chain(&error).to_string().contains("panicked"), "{error:?}");
    write(&producer, 10..20);
    take(&mut other, 10).await;
    let mut new = endless(&client, ANSWER_TIMEOUT).await;
    take(&mut new, 20).await;
}

#[tokio::test]
async fn streams_that_wait_for_the_application_use_up_no_retry_timeout() {
    const DOCUMENTS: usize = 6;
    let producer = producer(1, 2).await;
    let value = bytes::Bytes::from(vec![b'v'; 1 << 20]);
    for key in 0..DOCUMENTS {
        let options = WriteOptions::default();
        producer.upsert(format!("large-{key}").as_bytes(), value.clone(), options).unwrap();
    }
    let mut stream = endless(&connect(&producer).await, Duration::from_secs(1)).await;
    let all = async {
        while stream.stats().buffered_bytes < (DOCUMENTS << 20) as u64 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, all).await.expect("all of it fits the window");
    restart(&producer).await;
    write(&producer, 0..10);
    sleep(A_WHILE).await;
    let stats = stream.stats();
    assert_eq!((stats.connections, stats.backing_off), (0, 2), "there is no room for more");
    let items = take(&mut stream, DOCUMENTS + 10).await;
    assert!(items.iter().all(|item| matches!(item, Item::Row(_))), "each once");
    assert_eq!(stream.stats().reconnects, 1);
}
