//! Rows that are nothing but inputs and outcomes.

use bytes::BytesMut;
use dcp_producer_proto::rollback::{self, RollbackQuery, Verdict};
use dcp_producer_proto::{
    Connection, ConnectionConfig, FailoverTable, Features, ServerVersion, VBucketState,
};
use dcp_proto::Snapshot;
use dcp_test::conformance::{Outcome, note};
use dcp_wire::message::{Control, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde_json::Value;

use crate::client::{COLLECTIONS, Client, LEGACY, OPAQUE, Response, from_scratch, some_instant};
use dcp_test::bucket::{BRANCH, Bucket, VBucket, begin, doc, docs, end};

fn rows(text: &str) -> Vec<Value> {
    let rows: Vec<Value> = serde_json::from_str(text).expect("rows");
    assert!(!rows.is_empty());
    rows
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_default()
}

fn flag(row: &Value, name: &str) -> bool {
    row[name].as_bool().unwrap_or_default()
}

fn snapshot(row: &Value) -> (u64, u64) {
    let bound = |index: usize| row["snapshot"][index].as_u64().unwrap_or_default();
    (bound(0), bound(1))
}

fn status(name: &Value) -> Status {
    let name = name.as_str().expect("a status");
    *Status::KNOWN.iter().find(|status| status.name() == Some(name)).expect("a known status")
}

/// A version such as `[7, 6, 11]`.
pub(crate) fn version(value: &Value) -> Option<ServerVersion> {
    let part = |index: usize| value[index].as_u64().map(|part| part as u8);
    Some(ServerVersion { major: part(0)?, minor: part(1)?, patch: part(2)? })
}

/// Runs every row and reports all that fail at once.
fn run(rows: &[Value], check: impl Fn(&Value) -> Result<(), String>) {
    let failures: Vec<_> = rows
        .iter()
        .filter_map(|row| {
            let name = row["row"].as_str().expect("a name");
            let checked = check(row).map(|()| note("producer", name, Outcome::Held));
            checked.err().map(|why| format!("{name}: {why}"))
        })
        .collect();
    assert!(failures.is_empty(), "{} rows fail:\n{}", failures.len(), failures.join("\n"));
}

fn expect<T: PartialEq + core::fmt::Debug>(got: T, wanted: T) -> Result<(), String> {
    if got == wanted { Ok(()) } else { Err(format!("got {got:?}, want {wanted:?}")) }
}

/// The branch a row calls by name; names that are in no table are branches nobody has.
fn branch(name: &str) -> u64 {
    match name {
        "0" => 0,
        _ => name.bytes().fold(7, |hash, byte| hash << 8 | u64::from(byte)),
    }
}

fn entries(row: &Value) -> Vec<(u64, u64)> {
    let entry = |entry: &Value| (branch(entry[0].as_str().unwrap()), entry[1].as_u64().unwrap());
    row["table"].as_array().unwrap().iter().map(entry).collect()
}

fn table(row: &Value) -> FailoverTable {
    VBucket::new().with_table(&entries(row)).table
}

#[test]
fn rollback_decisions_follow_the_rows() {
    run(&rows(include_str!("../../../../tests/rows/rollback_decisions.json")), |row| {
        let (start, end) = snapshot(row);
        let verdict = rollback::decide(&RollbackQuery {
            table: &table(row),
            high_seqno: Seqno(number(row, "high")),
            purge_seqno: Seqno(number(row, "purge")),
            start_seqno: Seqno(number(row, "start")),
            vbuuid: Vbuuid(branch(row["uuid"].as_str().unwrap())),
            snapshot: Snapshot { start: Seqno(start), end: Seqno(end) },
            strict_vbuuid: flag(row, "strict"),
            client_purge_seqno: Seqno(number(row, "client_purge")),
            collection_high_seqno: row["collection_high"].as_u64().map(Seqno),
        });
        match (row["expect"].as_str(), verdict) {
            (Some("continue"), Verdict::Continue(_)) => Ok(()),
            (Some("rollback"), Verdict::Rollback { seqno, .. }) => {
                expect(seqno.0, number(row, "to"))
            }
            (_, other) => Err(other.to_string()),
        }
    });
}

#[test]
fn stream_requests_are_accepted_or_rolled_back_by_the_rows() {
    run(&rows(include_str!("../../../../tests/rows/rollback_requests.json")), |row| {
        let mut vbucket = VBucket::at(number(row, "high")).with_table(&entries(row));
        vbucket.purge = number(row, "purge");
        let mut value = Vec::new();
        if let Some(high) = row["collection_high"].as_u64() {
            vbucket = vbucket.with_collection(8, high);
            value = br#"{"collections":["8"]}"#.to_vec();
        } else {
            vbucket = vbucket.with_collection(0, number(row, "high"));
        }
        if let Some(purge) = row["client_purge"].as_u64() {
            value = format!(r#"{{"purge_seqno":"{purge}"}}"#).into_bytes();
        }
        let mut flags = StreamRequestFlags::empty();
        flags.set(StreamRequestFlags::STRICT_VBUUID, flag(row, "strict"));
        flags.set(StreamRequestFlags::DISK_ONLY, flag(row, "disk_only"));
        flags.set(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES, flag(row, "ignore_purged"));
        let (start, end) = snapshot(row);
        let request = StreamRequest {
            flags,
            start_seqno: Seqno(number(row, "start")),
            end_seqno: Seqno(row["end"].as_u64().unwrap_or(u64::MAX)),
            vbuuid: Vbuuid(branch(row["uuid"].as_str().unwrap())),
            snapshot_start: Seqno(start),
            snapshot_end: Seqno(end),
            value: &value,
            ..from_scratch()
        };
        let log_len = 16 * vbucket.table.entries().len();
        let features = if value.is_empty() { LEGACY } else { COLLECTIONS };
        let answer = Client::open(Bucket::with(vbucket), features).ask(&request);
        expect(answer.datatype, Datatype::RAW)?;
        match row["expect"].as_str() {
            Some("continue") => {
                expect((answer.status, answer.value.len()), (Status::SUCCESS, log_len))
            }
            Some("erange") => expect((answer.status, answer.value), (Status::ERANGE, vec![])),
            // Exactly the eight bytes of the seqno.
            Some("rollback") => {
                let seqno = number(row, "to").to_be_bytes().to_vec();
                expect((answer.status, answer.value), (Status::ROLLBACK, seqno))
            }
            other => Err(format!("no such outcome {other:?}")),
        }
    });
}

fn packet(frame: Frame<'_>) -> Vec<u8> {
    let mut packet = Vec::new();
    frame.encode(&mut packet).unwrap();
    packet
}

#[test]
fn connections_are_opened_by_the_rows() {
    run(&rows(include_str!("../../../../tests/rows/open.json")), |row| {
        let mut extras = number(row, "flags").to_be_bytes().to_vec();
        extras.resize(row["extras_len"].as_u64().unwrap_or(8) as usize, 0);
        let name = match row["name_len"].as_u64() {
            Some(len) => "n".repeat(len as usize),
            None => row["name"].as_str().unwrap().to_owned(),
        };
        let open = packet(
            Frame::request(Opcode::DCP_OPEN)
                .with_extras(&extras)
                .with_key(name.as_bytes())
                .with_datatype(Datatype(number(row, "datatype") as u8))
                .with_value(row["value"].as_str().unwrap_or_default().as_bytes()),
        );
        if flag(row, "no_bucket") {
            return open_without_bucket(&open, &row["expect"]);
        }
        let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
        if let Some(server_version) = version(&row["server"]) {
            let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
            client.connection = Connection::new(config);
        }
        if flag(row, "twice") {
            assert_eq!(client.status(&open), Status::SUCCESS);
        }
        let answer = client.exchange(&open).map_err(|error| error.to_string())?.unwrap();
        expect(answer.status, status(&row["expect"]))?;
        let named = client.connection.name().is_some();
        expect(named, answer.status == Status::SUCCESS || flag(row, "twice"))
    });
}

fn open_without_bucket(open: &[u8], wanted: &Value) -> Result<(), String> {
    let (frame, _) = Frame::parse(open, MAX_BODY_LEN).unwrap().unwrap();
    for xerror in [true, false] {
        let features = Features { xerror, ..Features::NONE };
        let mut connection = Connection::new(ConnectionConfig::default());
        let mut out = BytesMut::new();
        let now = some_instant();
        let outcome = connection.handle_frame(now, &frame, None::<&Bucket>, features, &mut out);
        if xerror {
            let (answer, _) = Frame::parse(&out, MAX_BODY_LEN).unwrap().unwrap();
            expect(answer.header.status(), status(wanted))?;
        } else {
            // Such a client does not know the status, so the connection is closed.
            expect((outcome.is_err(), out.is_empty()), (true, true))?;
        }
    }
    Ok(())
}

#[test]
fn controls_are_answered_by_the_rows() {
    run(&rows(include_str!("../../../../tests/rows/control.json")), |row| {
        let features = Features {
            collections: flag(row, "collections"),
            snappy: flag(row, "snappy"),
            ..LEGACY
        };
        let flags = OpenFlags::from_bits_retain(row["open"].as_u64().unwrap_or(1) as u32);
        let mut client = Client::new(Bucket::with(VBucket::new()), features);
        if let Some(server_version) = version(&row["server"]) {
            let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
            client.connection = Connection::new(config);
        }
        assert_eq!(client.send_open(flags), Status::SUCCESS);
        for control in row["controls"].as_array().unwrap() {
            let (key, value) = (control[0].as_str().unwrap(), control[1].as_str().unwrap());
            let got = client.control(key, value);
            expect((key, value, got), (key, value, status(&control[2])))?;
        }
        Ok(())
    });
}

#[test]
fn ct_31_a_control_before_the_connection_is_opened_is_invalid() {
    let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
    assert_eq!(client.control("enable_noop", "true"), Status::EINVAL);
}

/// vBucket 0 with two collections, vBucket 1 missing, one in every other state, one without a
/// default collection and one that is not all on disk.
fn bucket_of_many_states() -> Bucket {
    let first =
        VBucket::new().checkpoint(1, [begin(1, 8), begin(2, 9), doc(3, 0), doc(4, 9), doc(5, 8)]);
    let mut bucket = Bucket::with(first);
    for item in docs(6..=10) {
        bucket.vb().write(item);
    }
    bucket.scopes.insert(8, vec![8]);
    let one = || VBucket::new().checkpoint(1, docs(1..=1));
    for (vbid, state) in
        [(2, VBucketState::Dead), (3, VBucketState::Pending), (4, VBucketState::Replica)]
    {
        bucket.vbuckets.insert(vbid, VBucket { state, ..one() });
    }
    bucket.vbuckets.insert(5, VBucket::new().checkpoint(1, [end(1, 0)]));
    bucket.vbuckets.insert(6, VBucket { high: 100, persisted: 90, ..VBucket::at(90) });
    bucket
}

#[test]
fn stream_requests_are_checked_by_the_rows() {
    run(&rows(include_str!("../../../../tests/rows/stream_requests.json")), |row| {
        let features = Features {
            collections: flag(row, "collections"),
            xerror: !flag(row, "no_xerror"),
            ..LEGACY
        };
        let mut client = Client::new(bucket_of_many_states(), features);
        if !flag(row, "unopened") {
            let flags = row["open"].as_u64().unwrap_or(1);
            client.send_open(OpenFlags::from_bits_retain(flags as u32));
            if !flag(row, "no_noop") {
                client.control(Control::ENABLE_NOOP, "true");
            }
        }
        for control in row["controls"].as_array().into_iter().flatten() {
            let (key, value) = (control[0].as_str().unwrap(), control[1].as_str().unwrap());
            assert_eq!(client.control(key, value), Status::SUCCESS);
        }
        let request = request_packet(row, number(row, "start"));
        if flag(row, "repeat") {
            assert_eq!(client.status(&request), Status::SUCCESS);
        }
        let mut second = row.clone();
        if row["second_value"].is_string() {
            second["value"] = row["second_value"].clone();
        }
        let start = row["second_start"].as_u64().unwrap_or(number(row, "start"));
        let request = request_packet(&second, start);
        let answer = client.exchange(&request).map_err(|error| error.to_string())?.unwrap();
        expect(answer.status, status(&row["expect"]))?;
        expect(answer.opaque, OPAQUE)?;
        check_body(row, &answer)
    });
}

fn request_packet(row: &Value, start: u64) -> Vec<u8> {
    let (snapshot_start, snapshot_end) =
        if row["snapshot"].is_null() { (start, start) } else { snapshot(row) };
    let mut extras = Vec::new();
    extras.extend_from_slice(&(number(row, "flags") << 32).to_be_bytes());
    for seqno in [
        start,
        row["end"].as_u64().unwrap_or(u64::MAX),
        row["vbuuid"].as_u64().unwrap_or(BRANCH.0),
        snapshot_start,
        snapshot_end,
    ] {
        extras.extend_from_slice(&seqno.to_be_bytes());
    }
    extras.resize(row["extras_len"].as_u64().unwrap_or(48) as usize, 0);
    packet(
        Frame::request(Opcode::DCP_STREAM_REQ)
            .with_vbid(Vbid(number(row, "vbid") as u16))
            .with_opaque(OPAQUE)
            .with_extras(&extras)
            .with_key(row["key"].as_str().unwrap_or_default().as_bytes())
            .with_datatype(Datatype(number(row, "datatype") as u8))
            .with_value(row["value"].as_str().unwrap_or_default().as_bytes()),
    )
}

fn check_body(row: &Value, answer: &Response) -> Result<(), String> {
    if let Some(uid) = row["manifest_uid"].as_str() {
        let body: Value = serde_json::from_slice(&answer.value).expect("a JSON body");
        expect(body["manifest_uid"].as_str(), Some(uid))?;
        let context = body["error"]["context"].as_str();
        expect(context.is_some(), true)?;
        if row["context"].is_string() {
            expect(context, row["context"].as_str())?;
        }
        expect(answer.datatype, Datatype::JSON)?;
    }
    if let Some(to) = row["to"].as_u64() {
        expect(&answer.value[..], &to.to_be_bytes())?;
    }
    Ok(())
}

#[test]
fn sr_67_a_success_carries_the_failover_log_and_nothing_else() {
    let mut client = Client::open(Bucket::with(VBucket::new()), LEGACY);
    let answer = client.ask(&from_scratch());
    let mut log = BRANCH.0.to_be_bytes().to_vec();
    log.extend_from_slice(&[0; 8]);
    let wanted =
        Response { status: Status::SUCCESS, datatype: Datatype::RAW, opaque: OPAQUE, value: log };
    assert_eq!(answer, wanted);
}

#[test]
fn ax_07_the_failover_log_is_read_on_an_opened_connection_only() {
    let log = |opaque| packet(Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_opaque(opaque));
    let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
    let refused = client.exchange(&log(Opaque(5))).unwrap().unwrap();
    assert_eq!((refused.status, refused.datatype), (Status::EINVAL, Datatype::JSON));
    client.send_open(OpenFlags::PRODUCER);
    let answer = client.exchange(&log(Opaque(6))).unwrap().unwrap();
    assert_eq!((answer.status, answer.value.len()), (Status::SUCCESS, 16));
    let absent = Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_vbid(Vbid(9));
    assert_eq!(client.status(&packet(absent)), Status::NOT_MY_VBUCKET);
    let with_extras = Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_extras(&[0; 4]);
    assert_eq!(client.status(&packet(with_extras)), Status::EINVAL);
}

#[test]
fn not_my_vbucket_carries_the_cluster_map() {
    let mut bucket = Bucket::with(VBucket::new());
    bucket.cluster_map = Some(br#"{"rev":7}"#);
    let mut client = Client::open(bucket, LEGACY);
    let absent = StreamRequest { vbid: Vbid(9), ..from_scratch() };
    let answer = client.ask(&absent);
    assert_eq!(answer.status, Status::NOT_MY_VBUCKET);
    assert_eq!((answer.value, answer.datatype), (br#"{"rev":7}"#.to_vec(), Datatype::JSON));
    client.connection = Connection::new(before_collections());
    assert_eq!(client.send_open(OpenFlags::PRODUCER), Status::SUCCESS);
    let answer = client.ask(&absent);
    assert_eq!((answer.value, answer.datatype), (br#"{"rev":7}"#.to_vec(), Datatype::RAW));
}

/// A server from before collections.
fn before_collections() -> ConnectionConfig {
    let server_version = ServerVersion { major: 6, minor: 0, patch: 5 };
    ConnectionConfig { server_version, ..ConnectionConfig::default() }
}

#[test]
fn server_before_collections_sends_failover_logs_without_dcp() {
    let log = packet(Frame::request(Opcode::DCP_GET_FAILOVER_LOG));
    let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
    client.connection = Connection::new(before_collections());
    let answer = client.exchange(&log).unwrap().unwrap();
    assert_eq!((answer.status, answer.value.len()), (Status::SUCCESS, 16));
    let mut out = BytesMut::new();
    let mut connection = Connection::new(before_collections());
    let request = crate::client::frame(&log);
    let answered =
        connection.handle_frame(some_instant(), &request, None::<&Bucket>, LEGACY, &mut out);
    assert_eq!(answered, Ok(()));
    assert_eq!(crate::client::frame(&out).header.status(), Status::NO_BUCKET);
}

#[test]
fn requests_a_server_does_not_support_are_refused_and_it_stays_open() {
    let mut client = Client::open(Bucket::with(VBucket::new()), LEGACY);
    for (opcode, status) in [
        (Opcode::DCP_FLUSH, Status::NOT_SUPPORTED),
        (Opcode::DCP_CACHE_TRANSFER, Status::UNKNOWN_COMMAND),
        (Opcode::DCP_CACHE_TRANSFER_END, Status::UNKNOWN_COMMAND),
    ] {
        assert_eq!(client.status(&packet(Frame::request(opcode))), status, "{opcode}");
    }
}

#[test]
fn request_may_not_be_marked_as_json() {
    let mut client = Client::open(Bucket::with(VBucket::new()), LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let extras = &[0; 4];
    for request in [
        Frame::request(Opcode::DCP_GET_FAILOVER_LOG),
        Frame::request(Opcode::DCP_CLOSE_STREAM),
        Frame::request(Opcode::DCP_CONTROL).with_key(b"enable_noop").with_value(b"true"),
        Frame::request(Opcode::DCP_BUFFER_ACK).with_extras(extras),
    ] {
        let marked = packet(request.with_datatype(Datatype::JSON));
        assert_eq!(client.status(&marked), Status::EINVAL, "{}", request.header.opcode);
    }
    assert_eq!(client.connection.stream_count(), 1);
}

#[test]
fn explanation_names_status_seqno_and_reason() {
    let table = FailoverTable::new(BRANCH);
    let mut query = RollbackQuery {
        table: &table,
        high_seqno: Seqno(100),
        purge_seqno: Seqno(50),
        start_seqno: Seqno(49),
        vbuuid: BRANCH,
        snapshot: Snapshot { start: Seqno(49), end: Seqno(49) },
        strict_vbuuid: false,
        client_purge_seqno: Seqno(0),
        collection_high_seqno: None,
    };
    let explained = rollback::explain(&query, Seqno::MAX).to_string();
    assert!(explained.starts_with("rollback to 0: tombstones up to seqno 50"), "{explained}");
    query.start_seqno = Seqno(48);
    let explained = rollback::explain(&query, Seqno::MAX).to_string();
    assert!(explained.starts_with("erange: start seqno 48"), "{explained}");
    query.start_seqno = Seqno(60);
    query.snapshot = Snapshot { start: Seqno(60), end: Seqno(60) };
    let explained = rollback::explain(&query, Seqno::MAX).to_string();
    assert!(
        explained.starts_with("ok: the client's branch is shared up to seqno 100"),
        "{explained}"
    );
}

#[test]
fn start_seqno_beyond_the_high_seqno_is_out_of_range_on_any_branch() {
    // Branch D is shared up to 600, although the vBucket now ends at 300.
    let (mut vbucket, entries) = (VBucket::at(300), [(5, 600), (4, 450)]);
    vbucket = vbucket.with_table(&entries);
    let query = RollbackQuery {
        table: &vbucket.table,
        high_seqno: Seqno(300),
        purge_seqno: Seqno(0),
        start_seqno: Seqno(400),
        vbuuid: Vbuuid(4),
        snapshot: Snapshot { start: Seqno(400), end: Seqno(400) },
        strict_vbuuid: false,
        client_purge_seqno: Seqno(0),
        collection_high_seqno: None,
    };
    assert!(matches!(rollback::decide(&query), Verdict::Continue(_)));
    let explained = rollback::explain(&query, Seqno::MAX).to_string();
    assert!(explained.starts_with("erange: start seqno 400 is greater than the vBucket's high"));
    let request = StreamRequest {
        start_seqno: Seqno(400),
        snapshot_start: Seqno(400),
        snapshot_end: Seqno(400),
        vbuuid: Vbuuid(4),
        ..from_scratch()
    };
    let vbucket = VBucket::at(300).with_table(&entries).with_collection(0, 300);
    let answer = Client::open(Bucket::with(vbucket), LEGACY).ask(&request);
    assert_eq!(answer.status, Status::ERANGE);
}
