//! The consumer against recordings of real servers, played over loopback.

mod facts;
mod not_played;
mod play;
mod recorded;

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_consumer::{Client, Start};
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::StreamFilter;
use dcp_proto::{FailoverLog, Position, Snapshot};
use dcp_test::scripted_server::ScriptedServer;
use dcp_test::traces::{self, EventKind, Scenario};
use dcp_wire::{Header, Opcode, Seqno, Status, Vbid};
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

use self::facts::{Compared, compare};
use self::play::{
    ANSWER_TIMEOUT, by_vbucket, client, options, play_connection, play_request, take,
};
use self::recorded::{Recorded, recorded};
use crate::rows::{Item, Row, Rows};

/// One of the counts.
type Count = fn(&Compared) -> usize;

/// Recordings that are played at once.
const AT_ONCE: usize = 16;

/// Whether the streams can be had at once, as they were: from the beginning, accepted, one per
/// vBucket, with the same filter.
fn is_ordinary(streams: &[Recorded]) -> bool {
    let mut vbids = BTreeSet::new();
    streams.iter().all(|stream| {
        stream.is_ordinary()
            && vbids.insert(stream.vbid)
            && stream.asked.value == streams[0].asked.value
            && stream.asked.flags == streams[0].asked.flags
    })
}

/// Plays all of a recording that this consumer could have asked for.
async fn play(scenario: Arc<Scenario>) -> Compared {
    let all = recorded(&scenario).streams;
    let mut delivered = Vec::new();
    for conn in scenario.connections() {
        let streams: Vec<_> = all.iter().filter(|stream| stream.conn == conn).cloned().collect();
        if streams.is_empty() {
            continue;
        }
        if is_ordinary(&streams) {
            delivered.extend(play_connection(&scenario, &streams).await);
            continue;
        }
        for stream in streams.iter().filter(|stream| stream.why_not_played().is_none()) {
            delivered.extend(play_request(&scenario, &all, stream).await);
        }
    }
    let not_played = all.iter().filter(|stream| stream.why_not_played().is_some()).count();
    Compared { not_played, ..compare(&scenario, &delivered) }
}

#[tokio::test]
#[expect(clippy::print_stdout, reason = "a test over a folder tells how much it has seen")]
async fn recording_of_every_stream_is_delivered_as_it_was_sent() {
    let mut tasks = JoinSet::new();
    let (mut compared, mut wrong) = (Vec::new(), Vec::new());
    let mut done = |result: Result<Compared, JoinError>| match result {
        Ok(each) => compared.push(each),
        Err(panic) => wrong.push(panic.to_string()),
    };
    for scenario in Scenario::load_all().unwrap() {
        if tasks.len() >= AT_ONCE {
            tasks.join_next().await.into_iter().for_each(&mut done);
        }
        tasks.spawn(Box::pin(play(Arc::new(scenario))));
    }
    while let Some(result) = tasks.join_next().await {
        done(result);
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    let sum = |of: Count| compared.iter().map(of).sum::<usize>();
    println!("{} streams, {} not played", sum(|each| each.streams), sum(|each| each.not_played));
    // Facts that are no longer found would otherwise go unnoticed.
    if traces::is_own_folder() {
        let least: [(&str, Count, usize); 4] = [
            ("streams", |each| each.streams, 220),
            ("rows that facts name", |each| each.named_rows, 1361),
            ("operations", |each| each.operations, 1415),
            ("lists", |each| each.lists, 200),
        ];
        for (what, of, least) in least {
            assert!(sum(of) >= least, "only {} {what}", sum(of));
        }
        let others = sum(|each| each.other_rows);
        assert!(others <= 772, "{others} rows that no fact names");
    }
}

/// A recording whose server refuses every stream, with or without noops.
fn refusing(name: &str, status: Status, noop: bool) -> Scenario {
    let mut scenario = Scenario::load(name).unwrap();
    scenario.expected = serde_json::Value::Null;
    scenario.events.retain_mut(|event| {
        let (EventKind::ClientPacket(packet) | EventKind::ServerPacket(packet)) = &mut event.kind
        else {
            return true;
        };
        let opcode = Opcode(packet[1]);
        if (packet[0], opcode) == (0x81, Opcode::DCP_STREAM_REQ) {
            packet.truncate(Header::LEN);
            packet[6..8].copy_from_slice(&status.0.to_be_bytes());
            packet[8..12].fill(0);
        }
        let is_of_stream = matches!(
            opcode,
            Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_MUTATION | Opcode::DCP_SYSTEM_EVENT
        );
        !is_of_stream && (noop || opcode != Opcode::DCP_CONTROL)
    });
    scenario
}

#[tokio::test]
async fn recording_of_a_refused_setting_is_never_requested() {
    let name = "8.0.2-collections-memory-all";
    let played = |status, noop| async move {
        let compared = play(Arc::new(refusing(name, status, noop))).await;
        (compared.streams, compared.not_played)
    };
    assert_eq!(played(Status::NOT_SUPPORTED, false).await, (0, 1), "no noops");
    // With the settings of this consumer it is refused as well, and fails for good.
    for status in [Status::NOT_SUPPORTED, Status::EINVAL, Status::EACCESS, Status::UNKNOWN_COMMAND]
    {
        assert_eq!(played(status, true).await, (0, 0), "{status}");
    }
}

/// A checkpoint of one vBucket on the scripted server's bucket.
fn checkpoint(client: &Client, vbid: Vbid, position: Position) -> Checkpoint {
    Checkpoint::new(client.bucket_uuid(), StoredFilter::new(StreamFilter::All, true))
        .with_position(vbid, position)
}

#[tokio::test]
async fn stream_resumes_in_the_middle_of_a_snapshot() {
    for name in [
        "6.0.5-resume-mid-snapshot-disk",
        "6.0.5-resume-mid-snapshot-memory",
        "8.0.2-resume-mid-snapshot-disk",
        "8.0.2-resume-mid-snapshot-memory",
    ] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario).streams;
        let resumed = streams.iter().find(|stream| stream.asked.start_seqno == Seqno(5)).unwrap();
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
async fn rollback_of_a_lost_tail_comes_in_order_with_the_data() {
    for name in ["6.0.5-crash-rollback", "8.0.2-cluster-failover"] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario).streams;
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
        assert_eq!((rollback.vbid, rollback.seqno), (vbid, after.asked.start_seqno), "{name}");
        assert_eq!((rollback.from_seqno, rollback.epoch), (refused.asked.start_seqno, 1), "{name}");
        assert_eq!(rest, after.rows.iter().map(row).collect::<Vec<_>>(), "{name}");
        assert_eq!(stream.checkpoint().position(vbid).unwrap().epoch, 1, "{name}");
    }
}

#[tokio::test]
async fn stream_that_is_finite_delivers_to_the_end_of_its_last_snapshot() {
    for name in ["6.0.5-end-seqno", "8.0.2-end-seqno"] {
        let scenario = Scenario::load(name).unwrap();
        let streams = recorded(&scenario).streams;
        let recorded = &streams[0];
        assert_eq!(recorded.asked.end_seqno, Seqno(4), "{name}: the end lies inside a snapshot");
        let server = ScriptedServer::start(&scenario).await.unwrap();
        let client = client(&server).await;
        let mut options = options(vec![recorded.vbid], Start::Earliest);
        options.end = dcp_consumer::End::At([(recorded.vbid, recorded.asked.end_seqno)].into());
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        let mut rows = Vec::new();
        while let Some(delivered) = timeout(ANSWER_TIMEOUT, stream.next()).await.unwrap() {
            rows.extend(delivered.unwrap().batch);
        }
        assert_eq!(by_vbucket(rows)[&recorded.vbid], recorded.rows, "{name}");
        assert_eq!(stream.stats().complete, 1, "{name}");
        let position = stream.checkpoint().position(recorded.vbid).cloned().unwrap();
        assert_eq!((position.seqno, position.is_snapshot_complete()), (Seqno(6), true), "{name}");
    }
}
