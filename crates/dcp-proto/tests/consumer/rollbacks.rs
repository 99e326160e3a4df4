//! The rows of rollbacks: a consumer that stands where a row says asks with what the row says, and
//! takes the row's answer.

use dcp_proto::consumer::{ConnectionConfig, EndCause, Event, StreamFilter, StreamPosition};
use dcp_proto::{History, Position, Rollback, Snapshot};
use dcp_test::conformance::{Outcome, note};
use dcp_test::harness::{Harness, Item, Request, VB, config, position};
use dcp_wire::message::{StreamEndReason, StreamRequestFlags};
use dcp_wire::{CollectionId, Seqno, Status};
use serde_json::Value;

use crate::script::{branch, entries};

const ROWS: &str = include_str!("../../../../tests/rows/rollback_requests.json");

/// The rows whose request no consumer makes from any position: its flags are others, its start lies
/// above that of an incomplete snapshot and not outside of it, and its end is not below its start.
const UNSENT: [&str; 10] =
    ["RB-16", "RB-17", "RB-31", "RB-33", "RB-45", "RB-68", "RB-76", "RB-77", "RB-78", "RB-79"];

#[test]
fn consumer_takes_the_answers_of_the_rollback_rows() {
    let rows: Vec<Value> = serde_json::from_str(ROWS).expect("rows");
    let rows = rows.iter().filter_map(|row| {
        let name = row["row"].as_str().filter(|name| name.starts_with("RB-"))?;
        Some((name, row))
    });
    let (mut failures, mut unsent) = (Vec::new(), Vec::new());
    for (name, row) in rows {
        match check(row) {
            Ok(()) => note("consumer", name, Outcome::Held),
            Err(why) if why == ANOTHER_REQUEST => unsent.push(name),
            Err(why) => failures.push(format!("{name}: {why}")),
        }
    }
    assert!(failures.is_empty(), "{} rows fail:\n{}", failures.len(), failures.join("\n"));
    assert_eq!(unsent, UNSENT);
}

const ANOTHER_REQUEST: &str = "no consumer asks for that";

/// Stands where a row says, asks, and takes the answer.
fn check(row: &Value) -> Result<(), String> {
    let at = standing_at(row);
    let mut server = Harness::new(config_of(row));
    let end = row["end"].as_u64().map_or(Seqno::MAX, Seqno);
    let asked = server.open_until(with_points_around(&at, row["to"].as_u64()), end);
    check_request(row, &at, &asked)?;
    match row["expect"].as_str() {
        Some("continue") => check_accepted(row, &mut server, &at, end),
        Some("rollback") => check_rolled_back(row, &mut server, &at),
        // Every row with this answer has a request that is not made.
        other => Err(format!("answer {other:?} to a consumer's request")),
    }
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_default()
}

fn standing_at(row: &Value) -> Position {
    let bound = |at: usize| row["snapshot"][at].as_u64().expect("a bound");
    let uuid = branch(row["uuid"].as_str().expect("a branch"));
    let mut at = position(number(row, "start"), (bound(0), bound(1)), &[(uuid, 0)]);
    at.failover_log = at.failover_log.filter(|_| uuid != 0);
    at.purge_seqno = Seqno(number(row, "client_purge"));
    at
}

fn config_of(row: &Value) -> ConnectionConfig {
    let is_filtered = row["collection_high"].is_u64();
    ConnectionConfig {
        collections: is_filtered || row["client_purge"].is_u64(),
        filter: match is_filtered {
            true => StreamFilter::Collections(vec![CollectionId(8)]),
            false => StreamFilter::All,
        },
        ignore_purged_tombstones: row["ignore_purged"] == true,
        ..config()
    }
}

/// The position with complete snapshots kept right below, at, and right above a seqno.
fn with_points_around(at: &Position, to: Option<u64>) -> StreamPosition {
    let mut history = History::default();
    for seqno in to.into_iter().flat_map(|to| to.saturating_sub(1)..=to.saturating_add(1)) {
        if seqno < at.seqno.0 {
            let snapshot = Snapshot { start: Seqno(seqno), end: Seqno(seqno) };
            history.push(&Position { seqno: Seqno(seqno), snapshot, ..at.clone() });
        }
    }
    StreamPosition::with_history(at.clone(), history)
}

fn same<T: PartialEq + core::fmt::Debug>(what: &str, got: T, wanted: T) -> Result<(), String> {
    if got == wanted { Ok(()) } else { Err(format!("{what}: {got:?}, want {wanted:?}")) }
}

/// Whether the request is the row's. A complete snapshot is asked with as its end alone, and from
/// the beginning no branch is named: producers answer both alike.
fn check_request(row: &Value, at: &Position, asked: &Request) -> Result<(), String> {
    let (start, from, to) = (at.seqno.0, at.snapshot.start.0, at.snapshot.end.0);
    let end = row["end"].as_u64().unwrap_or(u64::MAX);
    let flags = ["strict", "disk_only"].iter().any(|flag| row[*flag] == true);
    let is_outside = start < from || start > to || (from == start && start < to && start > 0);
    if flags || is_outside || asked.end != end {
        return Err(ANOTHER_REQUEST.to_owned());
    }
    let snapshot = if start == to { (start, start) } else { (from, to) };
    let uuid = branch(row["uuid"].as_str().expect("a branch"));
    same("asks for", (asked.start, asked.snapshot), (start, snapshot))?;
    same("on branch", asked.vbuuid, if start == 0 { 0 } else { uuid })?;
    let mut flags = StreamRequestFlags::ACTIVE_VB_ONLY;
    flags.set(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES, row["ignore_purged"] == true);
    same("with flags", asked.flags, flags)?;
    let value = match (row["collection_high"].is_u64(), number(row, "client_purge")) {
        (true, _) => r#"{"collections":["8"]}"#.to_owned(),
        (_, 0) => String::new(),
        (_, purge) => format!(r#"{{"purge_seqno":"{purge}"}}"#),
    };
    same("with filter", &asked.value, &value)
}

/// The stream goes on where it stood, on the branches that the answer names.
fn check_accepted(
    row: &Value,
    server: &mut Harness,
    at: &Position,
    end: Seqno,
) -> Result<(), String> {
    let table = entries(row.get("table"));
    server.accept(&table);
    let start = at.seqno.0;
    if end == at.seqno {
        server.end(StreamEndReason::OK).play();
        let ends = server.events();
        let is_complete =
            |event| matches!(event, &Event::StreamEnded { cause: EndCause::Complete, .. });
        return same("ends", (ends.len(), ends.iter().all(is_complete)), (1, true));
    }
    let next = start + 1;
    server.say(&format!("MARK [{}-{next}] 0x5", at.snapshot.start));
    // With collections a key begins with the id of its collection.
    server.say(&format!("MUT {next} \u{8}key")).play();
    same("delivers", server.seqnos(), vec![next])?;
    let newest_below = table.iter().find(|(_, seqno)| *seqno < next).or(table.last());
    let wanted = newest_below.map(|&(uuid, _)| uuid);
    same("on", server.sink.documents.first().map(|row| row.vbuuid), wanted)?;
    let stands = server.moved().map(|position| (position.seqno.0, position.vbuuid().0));
    same("stands at", stands, wanted.map(|uuid| (next, uuid)))
}

/// The stream is asked for again at the newest complete snapshot that the server still has, which
/// is told with where it was; or, from the beginning, is refused.
fn check_rolled_back(row: &Value, server: &mut Harness, at: &Position) -> Result<(), String> {
    let to = number(row, "to");
    server.answer(Status::ROLLBACK, &to.to_be_bytes()).play();
    let uuid = at.vbuuid();
    let on = if to == 0 { 0 } else { uuid.0 };
    let told = Rollback {
        vbid: VB,
        seqno: Seqno(to),
        from_seqno: at.seqno,
        old_vbuuid: uuid,
        new_vbuuid: dcp_wire::Vbuuid(on),
        epoch: 1,
    };
    same("tells", &server.sink.items[..], &[Item::Rollback(told)])?;
    same("reports", server.events(), vec![Event::RolledBack(told)])?;
    // An end may have been lost with the rest: the server is asked first how much it has.
    let again = match row["end"].is_u64() {
        true => server.requested_up_to(number(row, "high")),
        false => server.requested(),
    };
    same("asks again for", (again.start, again.snapshot, again.vbuuid), (to, (to, to), on))?;
    let stands = server.moved().map(|position| (position.seqno.0, position.epoch));
    same("stands at", stands, Some((to, 1)))
}
