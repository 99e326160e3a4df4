//! Statuses, failover logs, seqnos and byte counts.

use dcp_test::traces::EventKind;
use dcp_wire::message::{Request, Response, StreamRequest};
use dcp_wire::{Opaque, Opcode, Seqno, Vbuuid};
use serde_json::Value;

use super::{Facts, Packet, Recording, hex_u64};

pub(super) fn check(recording: &Recording<'_>, facts: &mut Facts) {
    failover_logs(recording, facts);
    seqnos(recording, facts);
    cases(recording, facts);
    results(recording, facts);
    statuses(recording, facts);
    resumption(recording, facts);
    controls(recording, facts);
    flow_control(recording, facts);
    noops(recording, facts);
}

fn failover_logs(recording: &Recording<'_>, facts: &mut Facts) {
    let told = recording.failover_logs();
    for name in ["failover_log", "failover_before", "failover_after"] {
        let Some(expected) = recording.expected(name).and_then(Value::as_array) else { continue };
        let expected: Vec<_> = expected
            .iter()
            .map(|entry| (hex_u64(&entry[0]).unwrap(), entry[1].as_u64().unwrap()))
            .collect();
        facts.check("failover log", told.contains(&expected), || format!("{expected:x?}"));
    }
    if let Some(vbuuid) = recording.expected("uuid").and_then(hex_u64) {
        let known = recording.vbuuids().contains(&Vbuuid(vbuuid));
        facts.check("vBucket uuid", known, || format!("{vbuuid:x}"));
    }
}

/// Seqnos of all changes and markers of the streams.
fn highest_seqno(recording: &Recording<'_>) -> u64 {
    let seqnos =
        recording.packets.iter().filter(|packet| !packet.from_client).filter_map(|packet| {
            match packet.request()? {
                Request::Mutation(message) => Some(message.seqno),
                Request::Deletion(message) => Some(message.seqno),
                Request::Expiration(message) => Some(message.seqno),
                Request::Prepare(message) => Some(message.seqno),
                Request::Commit(message) => Some(message.commit_seqno),
                Request::Abort(message) => Some(message.abort_seqno),
                Request::SystemEvent(message) => Some(message.seqno),
                Request::SeqnoAdvanced(message) => Some(message.seqno),
                Request::SnapshotMarker(message) => Some(message.end_seqno),
                _ => None,
            }
        });
    seqnos.max().unwrap_or_default().0
}

fn seqnos(recording: &Recording<'_>, facts: &mut Facts) {
    let highest = highest_seqno(recording);
    if let Some(high) = recording.expected("high_seqno").and_then(Value::as_u64) {
        facts.check("high seqno", highest == high, || format!("{highest}, not {high}"));
    }
    if let Some(observed) = recording.expected("observe").filter(|observed| observed.is_object()) {
        let vbuuid = observed["uuid"].as_u64().unwrap();
        let vbuuids = recording.vbuuids();
        // Without a stream there is no log to find it in.
        if !vbuuids.is_empty() {
            let known = vbuuids.contains(&Vbuuid(vbuuid));
            facts.check("observed vBucket uuid", known, || format!("{vbuuid:x}"));
        }
        let high = observed["high"].as_u64().unwrap();
        facts.check("observed high seqno", highest <= high, || format!("{highest} > {high}"));
    }
    if let Some(purge) = recording.expected("purge_seqno").and_then(Value::as_u64) {
        for packet in &recording.packets {
            let Some(Request::SnapshotMarker(marker)) = packet.request() else { continue };
            if let Some(told) = marker.purge_seqno {
                facts.check("purge seqno", told == Seqno(purge), || format!("{told}"));
            }
        }
    }
}

/// Stream requests with the fields and the answer that are listed for their opaque.
fn cases(recording: &Recording<'_>, facts: &mut Facts) {
    let Some(cases) = recording.expected("cases").and_then(Value::as_array) else { return };
    let requests: Vec<_> = recording.stream_requests().collect();
    for case in cases {
        let opaque = Opaque(u32::try_from(case["opaque"].as_u64().unwrap()).unwrap());
        let mut requests = requests.iter().filter(|(request, _)| request.opaque == opaque);
        let Some((request, Some(answer))) = requests.next() else {
            facts.check("request of a case", false, || format!("no request for {case}"));
            continue;
        };
        // Two forms: fields in an object, or beside the rest.
        let fields = case.get("req").unwrap_or(case);
        let agrees = request_agrees(request, fields);
        facts.check("request of a case", agrees, || format!("{request:?} {case}"));
        answer_agrees(answer, case, facts);
    }
}

fn request_agrees(request: &StreamRequest<'_>, fields: &Value) -> bool {
    let number = |name: &str| fields.get(name).and_then(Value::as_u64);
    let start = number("start").unwrap();
    let (mut low, mut high) = (number("ss").unwrap_or(start), number("se").unwrap_or(start));
    if let Some(range) = fields.get("snap").and_then(Value::as_array) {
        (low, high) = (range[0].as_u64().unwrap(), range[1].as_u64().unwrap());
    }
    let vbuuid = fields.get("uuid").and_then(hex_u64);
    request.start_seqno == Seqno(start)
        && request.end_seqno == Seqno(number("end").unwrap_or(u64::MAX))
        && (request.snapshot_start, request.snapshot_end) == (Seqno(low), Seqno(high))
        && vbuuid.is_none_or(|vbuuid| request.vbuuid == Vbuuid(vbuuid))
        && number("flags").is_none_or(|flags| u64::from(request.flags.bits()) == flags)
        && request.value == fields.get("value").and_then(Value::as_str).unwrap_or("").as_bytes()
}

fn answer_agrees(answer: &Packet<'_>, expected: &Value, facts: &mut Facts) {
    let status = expected["status"].as_u64().unwrap();
    facts.check("status of a stream request", answer.status() == status, || {
        format!("{} {expected}", answer.status())
    });
    if let Some(seqno) = expected.get("rollback_to").and_then(Value::as_u64) {
        let agrees = matches!(answer.response(), Some(Response::Rollback(Seqno(s))) if *s == seqno);
        facts.check("rollback seqno", agrees, || expected.to_string());
    }
}

/// Answers listed by opaque (objects), or in words with status and value (lists).
fn results(recording: &Recording<'_>, facts: &mut Facts) {
    let Some(results) = recording.expected("results").and_then(Value::as_array) else { return };
    for result in results {
        if result.is_object() {
            result_by_opaque(recording, result, facts);
        } else {
            result_in_words(recording, result, facts);
        }
    }
}

fn result_by_opaque(recording: &Recording<'_>, result: &Value, facts: &mut Facts) {
    let number = |name: &str| result.get(name).and_then(Value::as_u64);
    let conn = number("conn").map(|conn| u32::try_from(conn).unwrap());
    let closed = || {
        recording.scenario.events.iter().any(|event| {
            conn.is_none_or(|conn| conn == event.conn) && event.kind == EventKind::ServerClosed
        })
    };
    let Some(opaque) = number("opaque") else {
        return facts.check("answer", closed(), || result.to_string());
    };
    let opaque = Opaque(u32::try_from(opaque).unwrap());
    let answer = recording.answers(conn, opaque).next();
    let agrees = match (result["status"].as_str(), answer) {
        (Some("EOF"), None) => closed(),
        (Some(_), None) => true,
        (None, Some(answer)) => {
            // Where there is a body, the value is the request's.
            let body = ["body", "value"].into_iter().find_map(|name| result.get(name)?.as_str());
            let body = body.unwrap_or_default();
            // Of a success the body is listed only sometimes.
            Some(answer.status()) == result["status"].as_u64()
                && (body.is_empty() || latin_1(answer.frame.value) == body)
        }
        _ => false,
    };
    facts.check("answer", agrees, || result.to_string());
}

fn result_in_words(recording: &Recording<'_>, result: &Value, facts: &mut Facts) {
    let answers =
        || recording.packets.iter().filter(|packet| !packet.from_client && packet.is_response());
    let fits = |packet: &Packet<'_>| match (result[1].as_u64(), &result[2]) {
        (None, _) => latin_1(packet.frame.value) == result[1],
        (Some(status), Value::String(hex)) => packet.status() == status && to_hex(packet) == *hex,
        (Some(status), Value::Number(len)) => {
            packet.status() == status
                && len.as_u64() == u64::try_from(packet.frame.value.len()).ok()
        }
        (Some(status), _) => packet.status() == status,
    };
    facts.check("answer in words", answers().any(fits), || result.to_string());
}

fn to_hex(packet: &Packet<'_>) -> String {
    packet.frame.value.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes as text with one character each.
fn latin_1(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

/// Statuses of the first, second, ... request of a kind.
fn statuses(recording: &Recording<'_>, facts: &mut Facts) {
    let closes: Vec<_> = statuses_of(recording, Opcode::DCP_CLOSE_STREAM);
    let streams: Vec<_> = statuses_of(recording, Opcode::DCP_STREAM_REQ);
    for (name, told) in [
        ("close_status", closes.first()),
        ("second_close_status", closes.get(1)),
        ("re_request_status", streams.get(1)),
        ("second_status", streams.last()),
    ] {
        if let Some(expected) = recording.expected(name).and_then(Value::as_u64) {
            facts.check("status", told == Some(&expected), || format!("{name}: {told:?}"));
        }
    }
    if let Some(expected) = recording.expected("conn1_status").and_then(Value::as_u64) {
        let mut opens = recording.packets.iter().filter(|packet| {
            packet.conn == 1
                && packet.is_response()
                && packet.frame.header.opcode == Opcode::DCP_OPEN
        });
        let told = opens.next().map(Packet::status);
        facts.check("status", told == Some(expected), || format!("conn1_status: {told:?}"));
    }
    if let Some(body) = recording.expected("re_request_body").and_then(Value::as_str) {
        let (_, answer) = recording.stream_requests().nth(1).unwrap();
        let told = answer.map(to_hex);
        facts.check("body", told.as_deref() == Some(body), || format!("{told:?}"));
    }
}

fn statuses_of(recording: &Recording<'_>, opcode: Opcode) -> Vec<u64> {
    let packets = recording.packets.iter();
    packets
        .filter(|packet| packet.is_response() && packet.frame.header.opcode == opcode)
        .map(Packet::status)
        .collect()
}

fn resumption(recording: &Recording<'_>, facts: &mut Facts) {
    let Some(resume) = recording.expected("resume") else { return };
    let mut requests = recording.stream_requests();
    let found = requests.find(|(request, _)| request_agrees(request, resume));
    facts.check("resumption", found.is_some(), || resume.to_string());
    if let Some((_, Some(answer))) = found {
        answer_agrees(answer, resume, facts);
    }
}

fn controls(recording: &Recording<'_>, facts: &mut Facts) {
    let Some(expected) = recording.expected("control_status").and_then(Value::as_object) else {
        return;
    };
    for (setting, status) in expected {
        let mut controls = recording.packets.iter().filter(|packet| {
            matches!(packet.request(), Some(Request::Control(control)) if {
                let (key, value) = (latin_1(control.key), latin_1(control.value));
                *setting == format!("{key}={value}")
            })
        });
        let told = controls.next().and_then(|packet| {
            let opaque = packet.frame.header.opaque;
            recording.answers(Some(packet.conn), opaque).next().map(Packet::status)
        });
        facts.check("status of a control", told == status.as_u64(), || {
            format!("{setting}: {told:?}")
        });
    }
}

/// Bytes of stream messages between acknowledgements, as flow control counts them.
fn flow_control(recording: &Recording<'_>, facts: &mut Facts) {
    let counted = |packet: &Packet<'_>| {
        let pushed = !packet.from_client && packet.request().is_some();
        pushed && packet.frame.header.opcode != Opcode::DCP_NOOP
    };
    if let Some(bytes) = recording.expected("bytes").and_then(Value::as_u64) {
        let sum: usize =
            recording.packets.iter().filter(|p| counted(p)).map(|p| p.frame.packet_len()).sum();
        facts.check("bytes sent", Some(bytes) == u64::try_from(sum).ok(), || sum.to_string());
    }
    let Some(steps) = recording.expected("steps").and_then(Value::as_array) else { return };
    let mut batches = vec![(0, 0)];
    let mut acks = Vec::new();
    for packet in &recording.packets {
        if let Some(Request::BufferAck(ack)) = packet.request() {
            acks.push(u64::from(ack.bytes));
            batches.push((0, 0));
        } else if counted(packet) {
            let (packets, bytes) = batches.last_mut().unwrap();
            *packets += 1;
            *bytes += u64::try_from(packet.frame.packet_len()).unwrap();
        }
    }
    for (index, step) in steps.iter().enumerate() {
        let number = |name: &str| step.get(name).and_then(Value::as_u64);
        let (packets, bytes) = batches[index];
        facts.check("packets in a window", number("received_pkts") == Some(packets), || {
            format!("step {index}: {packets}")
        });
        facts.check("bytes in a window", number("bytes") == Some(bytes), || {
            format!("step {index}: {bytes}")
        });
        // The last window is not acknowledged any more.
        if let (Some(ack), Some(told)) = (number("ack"), acks.get(index)) {
            facts.check("acknowledged bytes", *told == ack, || format!("{told}, not {ack}"));
        }
    }
}

fn noops(recording: &Recording<'_>, facts: &mut Facts) {
    if let Some(answered) = recording.expected("answered").and_then(Value::as_u64) {
        let told = recording.packets.iter().filter(|packet| {
            packet.from_client
                && packet.is_response()
                && packet.frame.header.opcode == Opcode::DCP_NOOP
        });
        let told = u64::try_from(told.count()).unwrap();
        facts.check("answered noops", told == answered, || told.to_string());
    }
}
