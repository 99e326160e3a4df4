//! A consumer's machine: rows of the conformance tables as data, and scripts of whole connections.

mod backfills;
mod closing;
mod delivery;
mod exclusions;
mod flow;
mod hostile;
mod pair;
mod producer_rows;
mod requests;
mod rollbacks;
mod rules;
mod runs;
mod script;
mod setup;
mod tokens;

use dcp_test::conformance::{Outcome, note};
use dcp_test::harness::{Document, Request};
use serde_json::{Value, json};

use script::{Script, branch, name_of};

const ROWS: &str = include_str!("../../../../tests/rows/consumer.json");

#[test]
fn consumer_follows_the_rows() {
    let rows: Vec<Value> = serde_json::from_str(ROWS).expect("rows");
    let failures: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            let name = row["row"].as_str().expect("a name");
            let outcome = if row["departs"].is_string() { Outcome::Departs } else { Outcome::Held };
            let checked = check(row).map(|()| note("consumer", name, outcome));
            checked.err().map(|why| format!("{name}: {why}"))
        })
        .collect();
    assert!(failures.is_empty(), "{} rows fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn consumer_takes_what_a_producer_sends_by_the_rows() {
    let rows = producer_rows::rows();
    let failures: Vec<String> = rows
        .iter()
        .filter_map(|(name, row)| {
            let checked = producer_rows::check(row).map(|()| note("consumer", name, Outcome::Held));
            checked.err().map(|why| format!("{name}: {why}"))
        })
        .collect();
    assert!(failures.is_empty(), "{} rows fail:\n{}", failures.len(), failures.join("\n"));
    assert!(rows.len() > 90, "{} rows", rows.len());
}

/// Runs one row. What it does not mention is not looked at.
fn check(row: &Value) -> Result<(), String> {
    let mut script = Script::open(row);
    let mut fault = None;
    for step in row["steps"].as_array().expect("steps") {
        if let Some(fault) = &fault {
            return Err(format!("before {step}: {fault}"));
        }
        fault = script.step(step.as_str().expect("a step")).err();
    }
    match (&fault, row["fails"].as_str()) {
        (None, None) => {}
        (Some(fault), Some(wanted)) if fault.contains(wanted) => return Ok(()),
        (fault, wanted) => return Err(format!("{fault:?}, want {wanted:?}")),
    }
    let delivered: Vec<Value> = script.delivered().iter().map(|&seqno| seqno.into()).collect();
    expect(row, "delivered", delivered.into())?;
    expect(row, "documents", script.documents().iter().map(in_full).collect())?;
    let branch_of = |row: &Document| json!([row.seqno, name_of(row.vbuuid)]);
    expect(row, "branches", script.documents().iter().map(branch_of).collect())?;
    expect(row, "at", script.position().into())?;
    expect(row, "counted", script.counted().into())?;
    expect(row, "unacknowledged", script.unacknowledged().0.into())?;
    expect(row, "full", script.unacknowledged().1.into())?;
    expect(row, "sends", script.sent().into())?;
    expect(row, "answers", script.answers().into())?;
    expect(row, "maps", script.maps().into())?;
    expect(row, "manifest", script.manifest().into())?;
    expect(row, "refused for", script.refused_for().into())?;
    expect(row, "value", script.requested().value.as_str().into())?;
    expect(row, "flags", script.requested().flags.bits().into())?;
    match (script.end(), row["ends"].as_str()) {
        (None, None) => {}
        (Some(end), Some(wanted)) if end.contains(wanted) => {}
        (end, wanted) => return Err(format!("ends: {end:?}, want {wanted:?}")),
    }
    let Some(resume) = row["resume"].as_array() else { return Ok(()) };
    let Request { start, snapshot, vbuuid, .. } = *script.requested();
    let wanted_vbuuid = branch(resume[3].as_str().expect("a branch"));
    let wanted: Vec<u64> = resume.iter().filter_map(Value::as_u64).collect();
    if (wanted, wanted_vbuuid) != (vec![start, snapshot.0, snapshot.1], vbuuid) {
        return Err(format!("resumes at {start} of {snapshot:?} on {vbuuid:#x}"));
    }
    Ok(())
}

/// Operation, seqno, datatype and value of a document.
fn in_full(row: &Document) -> Value {
    let value: String = row.value.iter().map(|byte| format!("{byte:02x}")).collect();
    json!([row.op.name(), row.seqno, row.datatype, value])
}

fn expect(row: &Value, what: &str, got: Value) -> Result<(), String> {
    match row.get(what) {
        Some(wanted) if *wanted != got => Err(format!("{what}: {got}, want {wanted}")),
        _ => Ok(()),
    }
}
