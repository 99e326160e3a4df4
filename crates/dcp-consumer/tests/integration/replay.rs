//! The consumer against recordings of real servers, played over loopback.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_consumer::{ChangeStream, Client, ConnectOptions, Credentials, Start, StreamOptions};
use dcp_proto::checkpoint::{Checkpoint, FilterHash};
use dcp_proto::{FailoverLog, Op, Position, Snapshot};
use dcp_test::scripted_server::ScriptedServer;
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{Deletion, Expiration, Message, Mutation, Request, StreamRequest};
use dcp_wire::{
    CollectionId, DocKey, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, StreamId,
    Vbid,
};
use tokio::time::timeout;

use crate::rows::{Item, Row, Rows};

/// How long anything recorded may take to arrive.
const PATIENCE: Duration = Duration::from_secs(20);

/// A recorded stream, taken out of its connection.
#[derive(Debug, Default)]
struct Recorded {
    conn: u32,
    vbid: Vbid,
    start: Seqno,
    end: Seqno,
    status: Option<Status>,
    log: Vec<u8>,
    rows: Vec<Row>,
    /// Opcodes of its messages.
    opcodes: BTreeSet<u8>,
    stream_id: Option<StreamId>,
}

/// Reads the streams out of a recording, with this test's own bookkeeping.
fn recorded(scenario: &Scenario) -> Vec<Recorded> {
    let mut streams: Vec<(Opaque, Recorded)> = Vec::new();
    let mut collections = BTreeMap::new();
    for event in &scenario.events {
        let (EventKind::ClientPacket(bytes) | EventKind::ServerPacket(bytes)) = &event.kind else {
            continue;
        };
        let from_client = matches!(event.kind, EventKind::ClientPacket(_));
        // Some recordings send garbage on purpose.
        let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN) else { continue };
        let header = frame.header;
        if header.opcode == Opcode::HELLO && !from_client {
            let collections_on =
                frame.value.chunks(2).any(|b| b == Feature::COLLECTIONS.0.to_be_bytes());
            collections.insert(event.conn, collections_on);
        }
        if from_client {
            if let Ok(request) = StreamRequest::decode(&frame) {
                let recorded = Recorded {
                    conn: event.conn,
                    vbid: request.vbid,
                    start: request.start_seqno,
                    end: request.end_seqno,
                    ..Recorded::default()
                };
                streams.push((request.opaque, recorded));
            }
            continue;
        }
        let collections = collections.get(&event.conn).copied().unwrap_or_default();
        let stream = streams
            .iter_mut()
            .rev()
            .find(|(opaque, stream)| *opaque == header.opaque && stream.conn == event.conn);
        let Some((_, stream)) = stream else { continue };
        if header.magic.is_response() {
            if header.opcode == Opcode::DCP_STREAM_REQ {
                stream.status = Some(header.status());
                stream.log = frame.value.to_vec();
            }
            continue;
        }
        stream.opcodes.insert(header.opcode.0);
        stream.stream_id = stream.stream_id.or(frame.stream_id().unwrap());
        stream.rows.extend(row(&frame, stream.vbid, collections));
    }
    streams.into_iter().map(|(_, stream)| stream).collect()
}

/// The row a recorded packet makes.
fn row(frame: &Frame<'_>, vbid: Vbid, collections: bool) -> Option<Row> {
    let Ok(Message::Request(request)) = Message::decode(frame) else { return None };
    let split = |key: &[u8]| {
        if !collections {
            return (CollectionId::DEFAULT, key.to_vec());
        }
        let key = DocKey::decode(key).unwrap();
        (key.collection_id, key.key.to_vec())
    };
    let tombstone = |op, seqno, (collection_id, key), value: &[u8], delete_time| Row {
        op,
        vbid,
        seqno,
        collection_id,
        key,
        value: value.to_vec(),
        datatype: frame.header.datatype,
        cas: frame.header.cas,
        flags: 0,
        expiry: 0,
        delete_time,
    };
    match request {
        Request::Mutation(Mutation { seqno, key, value, flags, expiry, .. }) => {
            Some(Row { flags, expiry, ..tombstone(Op::Mutation, seqno, split(key), value, 0) })
        }
        Request::Deletion(Deletion { seqno, key, value, delete_time, .. }) => {
            let delete_time = delete_time.unwrap_or_default();
            Some(tombstone(Op::Deletion, seqno, split(key), value, delete_time))
        }
        Request::Expiration(Expiration { seqno, key, value, delete_time, .. }) => {
            Some(tombstone(Op::Expiration, seqno, split(key), value, delete_time))
        }
        _ => None,
    }
}

async fn client(server: &ScriptedServer) -> Client {
    let options = ConnectOptions::new(server.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("someone", "password"));
    Client::connect(options).await.unwrap()
}

fn options(vbids: Vec<Vbid>, start: Start) -> StreamOptions {
    let mut options = StreamOptions { start, vbuckets: Some(vbids), ..StreamOptions::default() };
    options.system_documents = true;
    options.batch.linger = Duration::from_millis(5);
    options
}

/// Takes items until there are `expected`, and then shows that no more come at once.
async fn take(stream: &mut ChangeStream<Vec<Item>>, expected: usize) -> Vec<Item> {
    let mut items = Vec::new();
    while items.len() < expected {
        match timeout(PATIENCE, stream.next()).await {
            Ok(Some(Ok(delivered))) => items.extend(delivered.batch),
            other => panic!("{other:?} after {} of {expected} items", items.len()),
        }
    }
    if let Ok(Some(more)) = timeout(Duration::from_millis(20), stream.next()).await {
        panic!("more than the {expected} recorded: {more:?}");
    }
    items
}

/// Rows in the order of their vBuckets; within a vBucket as they came.
fn by_vbucket(items: Vec<Item>) -> BTreeMap<Vbid, Vec<Row>> {
    let mut rows = BTreeMap::<_, Vec<Row>>::new();
    for item in items {
        let Item::Row(row) = item else { panic!("unexpected {item:?}") };
        rows.entry(row.vbid).or_default().push(row);
    }
    rows
}

/// Whether this consumer could have had that conversation: streams from the beginning, accepted,
/// one per vBucket, without what only replicas or several streams per vBucket get.
fn is_ordinary(streams: &[Recorded]) -> bool {
    let mut vbids = BTreeSet::new();
    let replication =
        [Opcode::DCP_PREPARE, Opcode::DCP_COMMIT, Opcode::DCP_ABORT].map(|opcode| opcode.0);
    !streams.is_empty()
        && streams.iter().all(|stream| {
            vbids.insert(stream.vbid)
                && stream.start == Seqno::ZERO
                && stream.status == Some(Status::SUCCESS)
                && stream.stream_id.is_none()
                && !stream.opcodes.iter().any(|opcode| replication.contains(opcode))
        })
}

#[tokio::test]
async fn every_ordinary_recording_is_delivered_as_it_was_sent() {
    let mut played = BTreeSet::new();
    for scenario in Scenario::load_all().unwrap() {
        for conn in scenario.connections() {
            let streams: Vec<_> =
                recorded(&scenario).into_iter().filter(|stream| stream.conn == conn).collect();
            if !is_ordinary(&streams) {
                continue;
            }
            replay(&scenario, conn, &streams).await;
            played.insert(scenario.name.clone());
        }
    }
    for name in [
        "6.0.5-memory-fresh",
        "6.0.5-disk-to-memory-handover",
        "6.0.5-multi-vb",
        "8.0.2-memory-fresh",
        "8.0.2-collections-disk-all",
        "8.0.2-collections-disk-c8a-9",
        "8.0.2-disk-backfill-v2.0",
        "8.0.2-disk-backfill-v2.2",
        "8.0.2-oso-advanced",
        "8.0.2-oso-advanced-c9",
        "8.0.2-seqno-advanced-filter",
        "8.0.2-resume-mid-snapshot-memory",
        "8.0.2-noop",
    ] {
        assert!(played.contains(name), "{name} was not played: {played:?}");
    }
    assert!(played.len() > 100, "{} recordings were played", played.len());
}

async fn replay(scenario: &Scenario, conn: u32, streams: &[Recorded]) {
    let name = &scenario.name;
    let server = ScriptedServer::start_connection(scenario, conn).await.unwrap();
    let client = client(&server).await;
    let vbids: Vec<Vbid> = streams.iter().map(|stream| stream.vbid).collect();
    let mut stream = client.stream(options(vbids, Start::Earliest), Rows::default).await.unwrap();
    let expected: usize = streams.iter().map(|stream| stream.rows.len()).sum();
    let mut rows = by_vbucket(take(&mut stream, expected).await);
    for recorded in streams {
        let vbid = recorded.vbid;
        let rows = rows.remove(&vbid).unwrap_or_default();
        assert_eq!(rows, recorded.rows, "{name} connection {conn} {vbid}");
        if let Some(last) = recorded.rows.iter().map(|row| row.seqno).max() {
            let checkpoint = stream.checkpoint();
            let position = checkpoint.position(vbid).unwrap();
            assert!(position.seqno >= last, "{name}: {position:?} after seqno {last}");
            let log = FailoverLog::decode(&recorded.log).unwrap();
            assert_eq!(position.failover_log, Some(log), "{name} {vbid}");
        }
    }
    drop(stream);
    let report = server.finish().await;
    assert_eq!(report.problems, Vec::<String>::new(), "{name}");
}

/// A checkpoint of one vBucket on the scripted server's bucket.
fn checkpoint(client: &Client, vbid: Vbid, position: Position) -> Checkpoint {
    Checkpoint::new(client.bucket_uuid(), FilterHash::of(["all"])).with_position(vbid, position)
}

#[tokio::test]
async fn a_stream_goes_on_in_the_middle_of_a_snapshot() {
    for name in [
        "6.0.5-resume-mid-snapshot-disk",
        "6.0.5-resume-mid-snapshot-memory",
        "8.0.2-resume-mid-snapshot-disk",
        "8.0.2-resume-mid-snapshot-memory",
    ] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario);
        let resumed = streams.iter().find(|stream| stream.start == Seqno(5)).unwrap();
        let last = resumed.rows.last().unwrap().seqno;
        let server = ScriptedServer::start_connection(&scenario, resumed.conn).await.unwrap();
        let client = client(&server).await;
        let position = Position {
            seqno: Seqno(5),
            snapshot: Snapshot { start: Seqno(0), end: last },
            failover_log: Some(FailoverLog::decode(&resumed.log).unwrap()),
            ..Position::EARLIEST
        };
        let start = Start::Checkpoint(checkpoint(&client, resumed.vbid, position));
        let mut stream =
            client.stream(options(vec![resumed.vbid], start), Rows::default).await.unwrap();
        let rows = by_vbucket(take(&mut stream, resumed.rows.len()).await);
        assert_eq!(rows[&resumed.vbid], resumed.rows, "{name}");
        assert_eq!(stream.checkpoint().position(resumed.vbid).unwrap().seqno, last, "{name}");
    }
}

#[tokio::test]
async fn a_lost_tail_is_rolled_back_in_order_with_the_data() {
    for name in ["6.0.5-crash-rollback", "8.0.2-cluster-failover"] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario);
        let [before, refused, after] = &streams[..] else { panic!("{name}: {streams:?}") };
        assert_eq!(refused.status, Some(Status::ROLLBACK), "{name}");
        let server = ScriptedServer::start(&scenario).await.unwrap();
        let client = client(&server).await;
        let vbid = before.vbid;
        let mut stream =
            client.stream(options(vec![vbid], Start::Earliest), Rows::default).await.unwrap();
        let expected = before.rows.len() + 1 + after.rows.len();
        let items = take(&mut stream, expected).await;
        let (first, rest) = items.split_at(before.rows.len());
        let row = |row: &Row| Item::Row(row.clone());
        assert_eq!(first, before.rows.iter().map(row).collect::<Vec<_>>(), "{name}");
        let [Item::Rollback(rollback), rest @ ..] = rest else { panic!("{name}: {rest:?}") };
        assert_eq!((rollback.vbid, rollback.seqno), (vbid, after.start), "{name}");
        assert_eq!((rollback.from_seqno, rollback.epoch), (refused.start, 1), "{name}");
        assert_eq!(rest, after.rows.iter().map(row).collect::<Vec<_>>(), "{name}");
        assert_eq!(stream.checkpoint().position(vbid).unwrap().epoch, 1, "{name}");
    }
}

#[tokio::test]
async fn a_finite_stream_delivers_to_the_end_of_the_snapshot_that_holds_its_end() {
    for name in ["6.0.5-end-seqno", "8.0.2-end-seqno"] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario);
        let recorded = &streams[0];
        assert_eq!(recorded.end, Seqno(4), "{name}: the end lies inside a snapshot");
        let server = ScriptedServer::start(&scenario).await.unwrap();
        let client = client(&server).await;
        let mut options = options(vec![recorded.vbid], Start::Earliest);
        options.end = dcp_consumer::End::At([(recorded.vbid, recorded.end)].into());
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        let mut rows = Vec::new();
        while let Some(delivered) = timeout(PATIENCE, stream.next()).await.unwrap() {
            rows.extend(delivered.unwrap().batch);
        }
        assert_eq!(by_vbucket(rows)[&recorded.vbid], recorded.rows, "{name}");
        assert_eq!(stream.stats().complete, 1, "{name}");
        let position = stream.checkpoint().position(recorded.vbid).cloned().unwrap();
        assert_eq!((position.seqno, position.is_snapshot_complete()), (Seqno(6), true), "{name}");
    }
}
