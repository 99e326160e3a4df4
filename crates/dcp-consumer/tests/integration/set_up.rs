//! Every request of a set-up, refused with every status: what follows is what the table says.
//!
//! The cluster is in memory and time is simulated, so that waiting takes no time.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcp_consumer::{
    ChangeStream, Client, ConnectOptions, Credentials, Dial, Dialing, Error, ErrorKind, Start,
    StreamOptions, Transport,
};
use dcp_producer::{Producer, ProducerOptions, WriteOptions, parse_rules};
use dcp_proto::consumer::{Reaction, Step};
use dcp_proto::topology::Address;
use dcp_test::with;
use dcp_wire::{Opcode, Seqno, Status, Vbid};
use tokio::time::{Instant, timeout};

use crate::rows::{Item, Rows};

/// The requests that set up a connection.
const CONNECT: [Opcode; 7] = [
    Opcode::HELLO,
    Opcode::SASL_LIST_MECHS,
    Opcode::SASL_AUTH,
    Opcode::SASL_STEP,
    Opcode::SELECT_BUCKET,
    Opcode::GET_CLUSTER_CONFIG,
    Opcode::GET_COLLECTIONS_MANIFEST,
];

/// The requests that open DCP on it.
const OPEN: [Opcode; 2] = [Opcode::DCP_OPEN, Opcode::DCP_CONTROL];

/// What a server answers that is starting, busy or rebalancing.
const TEMPORARY: [Status; 11] = [
    Status::EWOULDTHROTTLE,
    Status::ECONFIG_ONLY,
    Status::NOT_INITIALIZED,
    Status::RATE_LIMITED_NETWORK_INGRESS,
    Status::RATE_LIMITED_NETWORK_EGRESS,
    Status::RATE_LIMITED_MAX_CONNECTIONS,
    Status::RATE_LIMITED_MAX_COMMANDS,
    Status::BUCKET_PAUSED,
    Status::ENOMEM,
    Status::EBUSY,
    Status::ETMPFAIL,
];

/// How long anything may take, in simulated time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a client waits for its first connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Dials a cluster in memory.
#[derive(Debug)]
struct Memory(Arc<Producer>);

impl Dial for Memory {
    fn dial(&self, address: &Address) -> Dialing {
        let address: io::Result<SocketAddr> = address.to_string().parse().map_err(io::Error::other);
        let stream = address.and_then(|address| self.0.dial(address));
        Box::pin(async move { Ok(Box::new(stream?) as Box<dyn Transport>) })
    }

    fn seed(&self) -> Option<u64> {
        Some(35)
    }
}

async fn cluster() -> Arc<Producer> {
    let mut options = ProducerOptions::default();
    options.in_memory = true;
    options.seed = Some(35);
    options.vbuckets = 1;
    let producer = Arc::new(Producer::start(options).await.unwrap());
    write(&producer, "before");
    producer
}

fn write(producer: &Producer, key: &str) {
    let value = Bytes::from_static(b"{}");
    producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    producer.persist();
}

async fn connect(producer: &Arc<Producer>) -> Result<Client, Error> {
    let options = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"))
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_dialer(Arc::new(Memory(Arc::clone(producer))));
    timeout(ANSWER_TIMEOUT, Client::connect(options)).await.expect("it hangs")
}

/// Refuses a request so many times, or always.
fn refuse(producer: &Producer, opcode: Opcode, status: Status, times: Option<usize>) {
    let nth = if times.is_some() { r#", "nth": 1"# } else { "" };
    let rule = format!(
        r#"{{"condition": {{"opcode": "{opcode}"{nth}}},
            "reaction": {{"answer": {{"status": {}}}}}}}"#,
        status.0
    );
    let rules = vec![rule; times.unwrap_or(1)].join(",");
    producer.set_faults(parse_rules(&format!("[{rules}]")).unwrap()).unwrap();
}

fn assert_refused(producer: &Producer, case: &str) {
    assert!(producer.fault_counts()[0] > 0, "{case}: nothing was asked");
}

/// Every request of a list with every refusal, and what both are called.
fn cases(requests: &[Opcode]) -> impl Iterator<Item = (Opcode, Status, String)> {
    assert!(TEMPORARY.iter().all(|status| Status::KNOWN.contains(status)));
    let refusals = Status::KNOWN.iter().filter(|status| !status.is_success());
    requests.iter().flat_map(move |&opcode| {
        refusals.clone().map(move |&status| (opcode, status, format!("{opcode} answered {status}")))
    })
}

/// What the kind of an error says about retries is what the error says.
#[track_caller]
fn assert_consistent(error: &Error, case: &str) {
    use ErrorKind as K;

    let waits = matches!(error.kind(), K::Connect | K::ConnectionLost | K::Timeout);
    let is_temporary = error.status().is_some_and(|status| TEMPORARY.contains(&status));
    assert_eq!(error.is_retryable(), waits || is_temporary, "{case}: {error:?}");
    assert!(!is_temporary || waits || error.kind() == K::Status, "{case}: {error:?}");
}

/// The refusals that end a stream at once, and with what; all others are waited for, or passed over.
///
/// A client that has opened DCP before (`was_open`) may read: nodes refuse what they know only later.
fn ends(opcode: Opcode, status: Status, was_open: bool) -> Option<ErrorKind> {
    match Reaction::to(Step::of(opcode).expect("a step of the consumer's"), status) {
        Reaction::Fail(failure) => Some(failure.into()),
        Reaction::RetryOnceGranted(failure) => (!was_open).then(|| failure.into()),
        _ => None,
    }
}

/// Asserts that a refusal led to what it should, and counts it.
#[track_caller]
fn assert_outcome(
    outcome: Result<(), Error>,
    wanted: Option<ErrorKind>,
    case: &str,
    (went_on, ended): &mut (usize, usize),
) {
    match (outcome, wanted) {
        (Ok(()), None) => *went_on += 1,
        (Err(error), Some(kind)) => {
            assert_eq!(error.kind(), kind, "{case}: {error:?}");
            assert!(!error.is_retryable(), "{case}: {error:?}");
            assert_consistent(&error, case);
            *ended += 1;
        }
        (outcome, wanted) => panic!("{case}: {outcome:?}, not {wanted:?}"),
    }
}

/// The next change of a stream.
async fn next(stream: &mut ChangeStream<Vec<Item>>, case: &str) -> Result<(), Error> {
    let next = timeout(ANSWER_TIMEOUT, stream.next()).await;
    next.unwrap_or_else(|_| panic!("{case}: it stalls")).unwrap().map(drop)
}

#[tokio::test(start_paused = true)]
async fn stream_that_runs_outlives_every_temporary_refusal_of_its_reconnect() {
    let requests = [&CONNECT[..], &OPEN, &[Opcode::DCP_STREAM_REQ, Opcode::OBSERVE_SEQNO]].concat();
    let mut counts = (0, 0);
    for (opcode, status, case) in cases(&requests) {
        let producer = cluster().await;
        let client = connect(&producer).await.unwrap();
        let options = with(StreamOptions::default(), |o| {
            o.persisted_only = opcode == Opcode::OBSERVE_SEQNO;
        });
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        next(&mut stream, &case).await.unwrap();
        refuse(&producer, opcode, status, Some(1));
        producer.kill(0).unwrap();
        producer.restart(0, true).await.unwrap();
        write(&producer, "after");
        let outcome = next(&mut stream, &case).await;
        assert_refused(&producer, &case);
        assert_outcome(outcome, ends(opcode, status, true), &case, &mut counts);
    }
    assert_eq!(counts.0 + counts.1, requests.len() * (Status::KNOWN.len() - 1));
}

#[tokio::test(start_paused = true)]
async fn stream_that_is_a_clients_first_outlives_every_temporary_refusal() {
    let read = [Opcode::GET_ALL_VB_SEQNOS, Opcode::DCP_GET_FAILOVER_LOG, Opcode::DCP_STREAM_REQ];
    let requests = [&CONNECT[..], &OPEN, &read].concat();
    let mut counts = (0, 0);
    for (opcode, status, case) in cases(&requests) {
        let producer = cluster().await;
        let client = connect(&producer).await.unwrap();
        // What fails on a connection that was just in use is asked again on a new one.
        let on_connection = [Opcode::GET_ALL_VB_SEQNOS, Opcode::DCP_GET_FAILOVER_LOG];
        let times = if on_connection.contains(&opcode) { 2 } else { 1 };
        refuse(&producer, opcode, status, Some(times));
        let options = with(StreamOptions::default(), |o| o.start = Start::Latest);
        let opened = timeout(ANSWER_TIMEOUT, client.stream(options, Rows::default)).await;
        let outcome = match opened.unwrap_or_else(|_| panic!("{case}: it stalls")) {
            Ok(mut stream) => {
                write(&producer, "after");
                next(&mut stream, &case).await
            }
            Err(error) => Err(error),
        };
        assert_refused(&producer, &case);
        assert_outcome(outcome, ends(opcode, status, false), &case, &mut counts);
    }
    assert_eq!(counts.0 + counts.1, requests.len() * (Status::KNOWN.len() - 1));
}

#[tokio::test(start_paused = true)]
async fn connect_waits_for_every_temporary_refusal_and_nothing_else() {
    for (opcode, status, case) in cases(&CONNECT) {
        let producer = cluster().await;
        refuse(&producer, opcode, status, Some(1));
        let begun = Instant::now();
        let connected = connect(&producer).await;
        assert_refused(&producer, &case);
        let waited = begun.elapsed() > Duration::from_millis(20);
        let error = connected.as_ref().err();
        let kind = error.map(Error::kind);
        match Reaction::to(Step::of(opcode).expect("a step of the consumer's"), status) {
            Reaction::Retry => assert_eq!((kind, waited), (None, true), "{case}"),
            Reaction::GoWithout => assert_eq!((kind, waited), (None, false), "{case}"),
            Reaction::Fail(failure)
            | Reaction::RetryOnceConnected(failure)
            | Reaction::RetryOnceGranted(failure) => {
                assert_eq!(kind, Some(failure.into()), "{case}: {error:?}");
            }
            // The exchange goes on, but the challenge is empty.
            Reaction::Use => assert_eq!(kind, Some(ErrorKind::Authentication), "{case}"),
            reaction => panic!("{case}: {reaction:?} is for streams"),
        }
        if let Some(error) = error {
            assert!(!error.is_retryable(), "{case}: {error:?}");
            assert_consistent(error, &case);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_that_stays_temporary_ends_with_its_status_at_the_timeout() {
    for opcode in [&CONNECT[..], &OPEN].concat() {
        let (status, case) = (Status::EBUSY, opcode.to_string());
        let producer = cluster().await;
        if CONNECT.contains(&opcode) {
            refuse(&producer, opcode, status, None);
            let begun = Instant::now();
            let error = connect(&producer).await.unwrap_err();
            assert_eq!((error.kind(), error.status()), (ErrorKind::Status, Some(status)), "{case}");
            assert_consistent(&error, &case);
            let waited = begun.elapsed();
            assert!(waited > CONNECT_TIMEOUT.mul_f64(0.9), "{case}: {waited:?}");
            assert!(waited <= CONNECT_TIMEOUT, "{case}: {waited:?}");
            producer.set_faults(Vec::new()).unwrap();
        }
        let client = connect(&producer).await.unwrap();
        let mut stream = client.stream(StreamOptions::default(), Rows::default).await.unwrap();
        next(&mut stream, &case).await.unwrap();
        refuse(&producer, opcode, status, None);
        let begun = Instant::now();
        producer.kill(0).unwrap();
        producer.restart(0, true).await.unwrap();
        let error = next(&mut stream, &case).await.unwrap_err();
        assert_eq!((error.kind(), error.status()), (ErrorKind::Timeout, Some(status)), "{case}");
        assert_consistent(&error, &case);
        assert!(begun.elapsed() >= StreamOptions::default().retry_timeout, "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn observe_outlives_every_refusal_that_the_table_does_not_end_it_for() {
    let requests = [
        Opcode::STAT,
        Opcode::GET_ALL_VB_SEQNOS,
        Opcode::DCP_GET_FAILOVER_LOG,
        Opcode::OBSERVE_SEQNO,
    ];
    let mut counts = (0, 0);
    for (opcode, status, case) in cases(&requests) {
        let producer = cluster().await;
        let mut observer = connect(&producer).await.unwrap().observer().unwrap();
        refuse(&producer, opcode, status, Some(2));
        let seen = timeout(ANSWER_TIMEOUT, observer.observe(&[Vbid(0)].into(), true)).await;
        let seen = seen.unwrap_or_else(|_| panic!("{case}: it stalls"));
        assert_refused(&producer, &case);
        let goes_without = opcode == Opcode::STAT
            && Reaction::to(Step::PurgeSeqnos, status) == Reaction::GoWithout;
        if let Ok(seen) = &seen {
            let seen = &seen[&Vbid(0)];
            let purge_seqno = (!goes_without).then_some(Seqno(0));
            assert_eq!((seen.high_seqno, seen.purge_seqno), (Seqno(1), purge_seqno), "{case}");
        }
        assert_outcome(seen.map(drop), ends(opcode, status, false), &case, &mut counts);
    }
    assert_eq!(counts.0 + counts.1, requests.len() * (Status::KNOWN.len() - 1));
}
