//! What a producer sends in its own rows, as a consumer takes it: whatever those rows expect of a
//! producer is delivered, moves the position, and can be gone on from.

use dcp_test::words::number;
use serde_json::{Value, json};

use crate::script::Script;

const TABLES: [&str; 4] = [
    include_str!("../data/collections.json"),
    include_str!("../data/oso.json"),
    include_str!("../data/snapshots.json"),
    include_str!("../data/stream_end.json"),
];

/// Messages that come only to who has asked for what this consumer never does: stream ids and
/// synchronous replication.
const UNASKED: [&str; 4] = [" sid ", "PREPARE", "COMMIT", "ABORT"];

/// The rows, with what is sent in each; none of those that send something unasked for.
pub(crate) fn rows() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for table in TABLES {
        let rows: Vec<Value> = serde_json::from_str(table).expect("rows");
        for row in rows {
            let sent = sent(&row);
            let is_unasked = |message: &String| UNASKED.iter().any(|word| message.contains(word));
            if !sent.is_empty() && !sent.iter().any(is_unasked) {
                let name = row["row"].as_str().expect("a name").to_owned();
                found.push((name, script(&row, &sent)));
            }
        }
    }
    found
}

/// All messages of a row, in order.
fn sent(row: &Value) -> Vec<String> {
    let then = row["then"].as_array().into_iter().flatten().map(|then| &then["expect"]);
    let steps = row["steps"].as_array().into_iter().flatten();
    let lists = std::iter::once(&row["expect"]).chain(then).chain(steps);
    let texts = lists.filter_map(Value::as_array).flatten();
    texts.filter_map(Value::as_str).map(ToOwned::to_owned).collect()
}

/// The row as one of a consumer: where it starts, what it is sent, what must come of it.
fn script(row: &Value, sent: &[String]) -> Value {
    let request = if row["request"].is_object() { &row["request"] } else { row };
    let start = request["start"].as_u64().unwrap_or_default();
    let bound = |at: usize| request["snapshot"][at].as_u64().unwrap_or(start);
    let mut script =
        json!({ "steps": sent.iter().flat_map(|text| steps(text)).collect::<Vec<_>>() });
    let has_collections = row["collections"] == true || row["filter"].is_string();
    script["collections"] = has_collections.into();
    if start > 0 {
        script["position"] = json!([start, bound(0), bound(1)]);
    }
    if let Some(end) = request["end"].as_u64() {
        script["end"] = end.into();
    }
    script
}

/// A message as steps of a script: of several one after the other.
fn steps(message: &str) -> Vec<String> {
    match message.split(' ').collect::<Vec<_>>()[..] {
        [what, seqnos] if what != "MARK" && seqnos.contains('-') => {
            let (first, last) = seqnos.split_once('-').expect("a range");
            (number(first)..=number(last)).map(|seqno| format!("{what} {seqno}")).collect()
        }
        _ => vec![message.to_owned()],
    }
}

/// Bounds and history of a marker: `[1-4] 0x15 visible 4`.
fn marked(words: &str) -> ((u64, u64), bool) {
    const HISTORY: u64 = 0x10;
    let (range, flags) = words.split_once(' ').expect("a range and flags");
    let (first, last) = range.trim_matches(['[', ']']).split_once('-').expect("a range");
    let flags = number(flags.split(' ').next().expect("flags"));
    ((number(first), number(last)), flags & HISTORY != 0)
}

/// Plays a row; what is wrong with what came of it.
pub(crate) fn check(row: &Value) -> Result<(), String> {
    let mut script = Script::open(row);
    let (mut wanted, mut at) = (Vec::new(), row["position"][0].as_u64().unwrap_or_default());
    let (mut in_oso, mut ended) = (None, None);
    // Bounds of the last snapshot, whether it has history, and what is to come of its changes.
    let (mut snapshot, mut history, mut changes) = ((0, 0), false, Vec::new());
    for step in row["steps"].as_array().expect("steps") {
        let step = step.as_str().expect("a step");
        let (what, rest) = step.split_once(' ').expect("two words");
        script.step(step).map_err(|fault| format!("{step}: {fault}"))?;
        let number = rest.split(' ').next().and_then(|word| word.parse::<u64>().ok());
        match (what, number) {
            ("MARK", _) => ((snapshot, history), in_oso) = (marked(rest), None),
            ("OSO", _) if rest == "start" => in_oso = Some(at),
            ("OSO", _) => at = in_oso.take().expect("it began"),
            ("MUT" | "DEL" | "EXP" | "SYS" | "ADV", Some(seqno)) => {
                if what != "ADV" {
                    wanted.push(seqno);
                }
                if in_oso.is_none() && !matches!(what, "SYS" | "ADV") {
                    changes.push((seqno, snapshot, history));
                }
                match &mut in_oso {
                    Some(highest) => *highest = seqno.max(*highest),
                    None => at = seqno,
                }
            }
            ("END", reason) => ended = reason,
            _ => {}
        }
    }
    if script.delivered() != wanted {
        return Err(format!("delivered {:?}, want {wanted:?}", script.delivered()));
    }
    let delivered = script.changes();
    if let Some(change) = changes.iter().find(|change| !delivered.contains(change)) {
        return Err(format!("delivered {delivered:?}, without {change:?}"));
    }
    let stands = script.position()[0].max(row["position"][0].as_u64().unwrap_or_default());
    if stands != at {
        return Err(format!("stands at {stands}, want {at}"));
    }
    if ended.is_some() != script.end().is_some() {
        return Err(format!("ends: {:?}, was sent {ended:?}", script.end()));
    }
    if ended.is_none() {
        script.step("LOST")?;
        let (start, (from, to), _) = script.requested().expect("a stream request");
        if start != at || from > start || to < start {
            return Err(format!("goes on at {start} of [{from}, {to}], want {at}"));
        }
    }
    Ok(())
}
