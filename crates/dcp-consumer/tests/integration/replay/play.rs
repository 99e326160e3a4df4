//! Recorded streams, played to the consumer.

use dcp_test::with;
use std::collections::BTreeMap;
use std::time::Duration;

use dcp_consumer::{
    ChangeStream, Client, ConnectOptions, Credentials, End, ErrorKind, Filter, Start, StreamEvent,
    StreamOptions,
};
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::{PositionUpdate, StreamFilter};
use dcp_proto::{FailoverLog, History, Position, Rollback, Snapshot};
use dcp_test::scripted_server::{Asked, ScriptedServer};
use dcp_test::traces::Scenario;
use dcp_wire::message::{FailoverEntry, StreamEndReason, StreamRequestFlags};
use dcp_wire::{Seqno, Status, Vbid, Vbuuid};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::facts::Delivered;
use super::recorded::Recorded;
use crate::rows::{Item, Row, Rows};

/// How long anything recorded may take to arrive.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait before looking again.
const STEP: Duration = Duration::from_millis(2);

/// How long nothing must come for nothing more to be expected.
const QUIET: Duration = Duration::from_millis(20);

pub(super) async fn client(server: &ScriptedServer) -> Client {
    let options = ConnectOptions::new(server.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("someone", "password"));
    Client::connect(options).await.unwrap()
}

pub(super) fn options(vbids: Vec<Vbid>, start: Start) -> StreamOptions {
    let mut options = with(StreamOptions::default(), |o| {
        o.start = start;
        o.vbuckets = Some(vbids);
    });
    options.system_documents = true;
    options.batch.linger = Duration::from_millis(5);
    options
}

/// Takes items until there are `expected`, and then shows that no more come at once.
pub(super) async fn take(stream: &mut ChangeStream<Vec<Item>>, expected: usize) -> Vec<Item> {
    let mut items = Vec::new();
    while items.len() < expected {
        match timeout(ANSWER_TIMEOUT, stream.next()).await {
            Ok(Some(Ok(delivered))) => items.extend(delivered.batch),
            other => panic!("{other:?} after {} of {expected} items", items.len()),
        }
    }
    match timeout(QUIET, stream.next()).await {
        Err(_) | Ok(None) => items,
        // Everything that was asked for was dropped.
        Ok(Some(Err(error))) if error.kind() == ErrorKind::StreamEnded => items,
        Ok(Some(more)) => panic!("more than the {expected} recorded: {more:?}"),
    }
}

/// Rows in the order of their vBuckets; within a vBucket as they came.
pub(super) fn by_vbucket(items: Vec<Item>) -> BTreeMap<Vbid, Vec<Row>> {
    let mut rows = BTreeMap::<_, Vec<Row>>::new();
    for item in items {
        let Item::Row(row) = item else { panic!("unexpected {item:?}") };
        rows.entry(row.vbid).or_default().push(row);
    }
    rows
}

/// Plays a whole connection: streams from the beginning, accepted, one per vBucket.
pub(super) async fn play_connection(scenario: &Scenario, streams: &[Recorded]) -> Vec<Delivered> {
    let first = &streams[0];
    let name = format!("{} connection {}", scenario.name, first.conn);
    let (scenario, filter) = askable(scenario, &first.asked);
    let server = ScriptedServer::start_connection(&scenario, first.conn).await.unwrap();
    let client = client(&server).await;
    let vbids: Vec<Vbid> = streams.iter().map(|stream| stream.vbid).collect();
    let mut options = options(vbids, Start::Earliest);
    options.filter = filter.unwrap_or_default();
    options.end = end(streams);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let expected: usize = streams.iter().map(|stream| stream.rows.len()).sum();
    let mut rows = by_vbucket(take(&mut stream, expected).await);
    let mut delivered = Vec::new();
    for recorded in streams {
        let rows = rows.remove(&recorded.vbid).unwrap_or_default();
        check_rows(&name, recorded, &rows, &stream.checkpoint());
        delivered.push(Delivered { recorded: recorded.clone(), rows });
    }
    let complete = streams.iter().filter(|stream| stream.is_finite()).count();
    until(&name, || stream.stats().complete >= complete).await;
    drop(stream);
    let report = server.finish().await;
    assert_eq!(report.problems, Vec::<String>::new(), "{name}");
    for recorded in streams {
        let mut asked = report.asked.iter();
        let asked = asked.find(|asked| asked.vbid == recorded.vbid).unwrap();
        check_asked(&name, recorded, asked);
    }
    delivered
}

/// Plays one stream request and what the consumer does about the answer; `all` are those of the
/// recording.
pub(super) async fn play_request(
    scenario: &Scenario,
    all: &[Recorded],
    recorded: &Recorded,
) -> Option<Delivered> {
    let name = format!("{} connection {} {:?}", scenario.name, recorded.conn, recorded.asked);
    let (scenario, filter) = askable(scenario, &recorded.asked);
    let server = ScriptedServer::start_request(&scenario, recorded.conn, recorded.number).await;
    let server = server.unwrap();
    let client = client(&server).await;
    let mut options = options(vec![recorded.vbid], start(&client, recorded));
    options.filter = filter.unwrap_or_default();
    options.end = end(core::slice::from_ref(recorded));
    let stream = client.stream(options, Rows::default).await;
    if is_ahead(all, recorded) {
        assert_eq!(stream.unwrap_err().kind(), ErrorKind::Checkpoint, "{name}");
        assert_eq!(server.finish().await.asked, [], "{name}");
        return None;
    }
    let mut stream = stream.unwrap();
    let mut delivered = None;
    if let Some(status) = recorded.status.filter(|_| is_final(recorded)) {
        let error = match timeout(ANSWER_TIMEOUT, stream.next()).await {
            Ok(Some(Err(error))) => error,
            other => panic!("{name}: {other:?} after {status}"),
        };
        let is_denied = status == Status::EACCESS;
        let kind = if is_denied { ErrorKind::AccessDenied } else { ErrorKind::Status };
        assert_eq!((error.kind(), error.status()), (kind, Some(status)), "{name}");
        assert_eq!(error.vbid(), Some(recorded.vbid), "{name}");
        assert_eq!(stream.stats().failed, 1, "{name}");
    } else {
        let rows = play_on(&name, &server, &mut stream, all, recorded).await;
        check_reaction(&name, &stream, recorded).await;
        if recorded.status == Some(Status::SUCCESS) {
            check_rows(&name, recorded, &rows, &stream.checkpoint());
            delivered = Some(Delivered { recorded: recorded.clone(), rows });
        }
    }
    let report = server.finish().await;
    assert_eq!(report.problems, Vec::<String>::new(), "{name}");
    check_asked(&name, recorded, &report.asked[0]);
    if asks_again(recorded) {
        check_asked_again(&name, recorded, &report.asked[1]);
    }
    delivered
}

/// Takes everything that comes of the streams that are played, and checks it; returns the rows.
async fn play_on(
    name: &str,
    server: &ScriptedServer,
    stream: &mut ChangeStream<Vec<Item>>,
    all: &[Recorded],
    recorded: &Recorded,
) -> Vec<Row> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut items = Vec::new();
    loop {
        let report = server.report();
        let played = report.played.iter().map(|played| {
            all.iter().find(|stream| (stream.conn, stream.number) == *played).unwrap()
        });
        let expected: Vec<Item> = played.flat_map(items_of).collect();
        let requests = if asks_again(recorded) { 2 } else { 1 };
        let is_over = report.asked.len() >= requests && items.len() >= expected.len();
        let next = timeout(if is_over { QUIET } else { STEP }, stream.next()).await;
        match next {
            Ok(Some(Ok(delivered))) => items.extend(delivered.batch),
            Ok(Some(Err(error))) if is_drop(recorded) => {
                assert_eq!(error.kind(), ErrorKind::StreamEnded, "{name}");
            }
            Ok(Some(Err(error))) => panic!("{name}: {error:?}"),
            Ok(None) | Err(_) if is_over && server.report().played == report.played => {
                assert_eq!(items, expected, "{name}");
                let rows = items.into_iter().filter_map(|item| match item {
                    Item::Row(row) => Some(row),
                    Item::Rollback(_) => None,
                });
                return rows.collect();
            }
            Ok(None) | Err(_) => {
                let so_far = format!("{} of {} items, {report:?}", items.len(), expected.len());
                assert!(Instant::now() < deadline, "{name}: {so_far}");
            }
        }
    }
}

/// Whether the stream is over because everything it asked for was dropped.
fn is_drop(recorded: &Recorded) -> bool {
    recorded.end == Some(StreamEndReason::FILTER_EMPTY)
}

/// What the application is given of a recorded stream.
fn items_of(recorded: &Recorded) -> Vec<Item> {
    let Some(to) = recorded.rollback_to.filter(|_| recorded.is_rolled_back()) else {
        return recorded.rows.iter().cloned().map(Item::Row).collect();
    };
    let asked = &recorded.asked;
    vec![Item::Rollback(Rollback {
        vbid: recorded.vbid,
        seqno: to,
        from_seqno: asked.start_seqno,
        old_vbuuid: asked.vbuuid,
        new_vbuuid: if to == Seqno::ZERO { Vbuuid(0) } else { asked.vbuuid },
        epoch: 1,
    })]
}

/// Checks what came of a stream, and where the consumer stands then.
fn check_rows(name: &str, recorded: &Recorded, rows: &[Row], checkpoint: &Checkpoint) {
    assert_eq!(rows, recorded.rows, "{name} {}", recorded.vbid);
    let Some(last) = rows.iter().map(|row| row.seqno).max() else { return };
    let position = checkpoint.position(recorded.vbid).unwrap();
    assert!(position.seqno >= last, "{name}: {position:?} after seqno {last}");
    let log = FailoverLog::decode(&recorded.log).unwrap();
    assert_eq!(position.failover_log, Some(log), "{name}");
}

/// Checks what the consumer does about an answer or an end, besides what it delivers.
async fn check_reaction(name: &str, stream: &ChangeStream<Vec<Item>>, recorded: &Recorded) {
    if recorded.is_finite() || is_drop(recorded) {
        return until(name, || stream.stats().complete == 1).await;
    }
    until(name, || stream.stats().streaming == 1).await;
    let events = stream.take_events();
    let ended = events.iter().any(|event| matches!(event, StreamEvent::Ended { .. }));
    let waited = events.iter().any(|event| matches!(event, StreamEvent::BackingOff { .. }));
    let rolled_back = events.iter().any(|event| matches!(event, StreamEvent::RolledBack(_)));
    let is_refused = recorded.status != Some(Status::SUCCESS);
    let at_once = recorded.is_rolled_back() || recorded.status == Some(Status::KEY_EEXISTS);
    if is_refused {
        assert_eq!((ended, waited), (!at_once, !at_once), "{name}: {events:?}");
    }
    assert_eq!(rolled_back, recorded.is_rolled_back(), "{name}: {events:?}");
}

/// Waits until something holds.
async fn until(name: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{name}: it did not come to be");
        sleep(STEP).await;
    }
}

/// Checks that the consumer asked as the recorded client did, as far as it can.
fn check_asked(name: &str, recorded: &Recorded, asked: &Asked) {
    let mut expected = recorded.asked.clone();
    if expected.flags.contains(StreamRequestFlags::TO_LATEST) {
        // It asks for the newest seqno first, and then up to there.
        expected.end_seqno = asked.end_seqno;
    }
    as_this_consumer(&mut expected);
    assert!(asked.is_same_range(&expected), "{name}: asked {asked:?}");
    assert_eq!(asked.flags, StreamRequestFlags::ACTIVE_VB_ONLY, "{name}");
    if members(&expected).is_some() {
        assert_eq!(asked.filter(), expected.filter(), "{name}");
    }
}

/// Checks where the consumer asks to go on after an answer that did not let it.
fn check_asked_again(name: &str, recorded: &Recorded, asked: &Asked) {
    let first = &recorded.asked;
    let mut expected = Asked { end_seqno: asked.end_seqno, ..first.clone() };
    if let Some(to) = recorded.rollback_to.filter(|_| recorded.is_rolled_back()) {
        let vbuuid = if to == Seqno::ZERO { Vbuuid(0) } else { first.vbuuid };
        expected = Asked { start_seqno: to, snapshot: (to, to), vbuuid, ..expected };
    }
    as_this_consumer(&mut expected);
    assert!(asked.is_same_range(&expected), "{name}: asked again {asked:?}");
}

/// Words a request as this consumer does.
fn as_this_consumer(request: &mut Asked) {
    let start = request.start_seqno;
    if start == Seqno::ZERO {
        request.vbuuid = Vbuuid(0);
    }
    if start == request.snapshot.1 {
        // A snapshot that is complete needs no beginning.
        request.snapshot.0 = start;
    } else if start == request.snapshot.0 && start > Seqno::ZERO {
        // It has an item of the snapshot.
        request.snapshot.0 = Seqno(start.0 - 1);
    }
}

/// Whether a refusal is for good: what was asked for is wrong.
fn is_final(recorded: &Recorded) -> bool {
    let are_final = [
        Status::EINVAL,
        Status::ERANGE,
        Status::DCP_STREAMID_INVALID,
        Status::EACCESS,
        Status::KEY_ENOENT,
        Status::UNKNOWN_COMMAND,
        Status::NOT_SUPPORTED,
    ];
    !recorded.is_rolled_back() && recorded.status.is_some_and(|status| are_final.contains(&status))
}

/// Whether the consumer asks again.
fn asks_again(recorded: &Recorded) -> bool {
    recorded.status.is_some_and(|status| !status.is_success()) && !is_final(recorded)
}

/// Whether a position lies above what the server has, on the branch that is current there: the
/// consumer refuses it without asking for a stream.
fn is_ahead(all: &[Recorded], recorded: &Recorded) -> bool {
    let same = || all.iter().filter(|stream| stream.vbid == recorded.vbid);
    let newest = same().filter_map(|stream| Some(FailoverLog::decode(&stream.log).ok()?.newest()));
    let high = same().flat_map(|stream| &stream.rows).map(|row| row.seqno).max();
    recorded.asked.start_seqno > high.unwrap_or_default()
        && newest.into_iter().any(|newest| newest.vbuuid == recorded.asked.vbuuid)
}

/// Where the recorded client stood.
fn start(client: &Client, recorded: &Recorded) -> Start {
    let asked = &recorded.asked;
    if asked.start_seqno == Seqno::ZERO {
        return Start::Earliest;
    }
    let branch = FailoverEntry { vbuuid: asked.vbuuid, seqno: Seqno::ZERO };
    let failover_log = FailoverLog::new(vec![branch]).unwrap();
    let purge_seqno = members(asked).and_then(|members| members.purge_seqno);
    let position = Position {
        seqno: asked.start_seqno,
        snapshot: Snapshot { start: asked.snapshot.0, end: asked.snapshot.1 },
        failover_log: (asked.vbuuid != Vbuuid(0)).then_some(failover_log),
        purge_seqno: purge_seqno.unwrap_or_default(),
        ..Position::EARLIEST
    };
    // A client that had come there may have passed where it is sent back to.
    let mut history = History::default();
    if let Some(seqno) = recorded.rollback_to {
        let snapshot = Snapshot { start: seqno, end: seqno };
        history.push(&Position { seqno, snapshot, ..position.clone() });
    }
    let mut checkpoint =
        Checkpoint::new(client.bucket_uuid(), StoredFilter::new(StreamFilter::All, true));
    checkpoint.advance(PositionUpdate { vbid: recorded.vbid, position, history });
    Start::Checkpoint(checkpoint)
}

/// Where the recorded client wanted to end.
fn end(streams: &[Recorded]) -> End {
    if streams.iter().any(|stream| stream.asked.flags.contains(StreamRequestFlags::TO_LATEST)) {
        return End::Now;
    }
    if streams.iter().all(|stream| stream.asked.end_seqno == Seqno::MAX) {
        return End::Never;
    }
    End::At(streams.iter().map(|stream| (stream.vbid, stream.asked.end_seqno)).collect())
}

/// What this consumer can ask for in the value of a stream request.
#[derive(Debug, Default)]
struct Members {
    scope: Option<u32>,
    collections: Vec<u32>,
    purge_seqno: Option<Seqno>,
}

/// The members of a value; `None` for one that this consumer would not send.
fn members(asked: &Asked) -> Option<Members> {
    let hex = |id: &Value| u32::from_str_radix(id.as_str()?, 16).ok();
    let mut members = Members::default();
    let Value::Object(object) = asked.filter()? else { return None };
    for (name, value) in &object {
        match name.as_str() {
            "scope" => members.scope = Some(hex(value)?),
            "collections" => {
                members.collections = value.as_array()?.iter().map(hex).collect::<Option<_>>()?;
                (!members.collections.is_empty()).then_some(())?;
            }
            "purge_seqno" => members.purge_seqno = Some(Seqno(value.as_str()?.parse().ok()?)),
            _ => return None,
        }
    }
    (members.scope.is_none() || members.collections.is_empty()).then_some(members)
}

/// The filter of a request by names, `None` if this consumer cannot ask so; and the recording with
/// a manifest that has those names, since a client may know others than the server does.
fn askable(scenario: &Scenario, asked: &Asked) -> (Scenario, Option<Filter>) {
    let mut scenario = scenario.clone();
    let Some(Members { scope, mut collections, .. }) = members(asked) else {
        return (scenario, None);
    };
    if scope.is_none() && collections.is_empty() {
        return (scenario, Some(Filter::All));
    }
    collections.sort_unstable();
    let collection = |id: &u32| json!({"name": format!("c{id:x}"), "uid": format!("{id:x}")});
    let named: Vec<_> = collections.iter().map(collection).collect();
    let scopes = match scope {
        Some(id) => json!([{"name": "named", "uid": format!("{id:x}"), "collections": []}]),
        None => json!([{"name": "named", "uid": "ff0", "collections": named}]),
    };
    scenario.expected["manifest"] = json!({"uid": "1", "scopes": scopes});
    scenario.expected["manifests"] = Value::Null;
    let names = collections.iter().map(|id| format!("named.c{id:x}"));
    let filter = match scope {
        Some(_) => Filter::Scope("named".to_owned()),
        None => Filter::Collections(names.collect()),
    };
    (scenario, Some(filter))
}
