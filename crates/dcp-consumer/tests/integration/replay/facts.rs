//! What was delivered, against what is known from outside the stream.

use std::collections::{BTreeMap, BTreeSet};

use dcp_proto::{FailoverLog, Op};
use dcp_test::facts::{Change, hex_u64, item_in_words, key_of};
use dcp_test::scripted_server::Asked;
use dcp_test::traces::Scenario;
use dcp_wire::{CollectionId, Seqno, Vbuuid, leb128};
use serde_json::Value;

use super::recorded::Recorded;
use crate::rows::Row;

/// What was delivered of a recorded stream.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) recorded: Recorded,
    pub(super) rows: Vec<Row>,
}

/// How much was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    /// Streams that were granted.
    pub(super) streams: usize,
    /// Streams that this consumer cannot have.
    pub(super) not_played: usize,
    /// Rows that an operation or a list names.
    pub(super) named_rows: usize,
    /// Rows that nothing names.
    pub(super) other_rows: usize,
    /// Operations that must have arrived.
    pub(super) operations: usize,
    /// Lists of changes in words.
    pub(super) lists: usize,
}

/// Compares what was delivered of a recording with its facts.
pub(super) fn compare(scenario: &Scenario, delivered: &[Delivered]) -> Compared {
    let mut compared = Compared { streams: delivered.len(), ..Compared::default() };
    let operations = scenario.expected["kv_ops"].as_array().map_or(&[][..], Vec::as_slice);
    let operations: Vec<_> =
        operations.iter().filter(|operation| operation.get("seqno").is_some()).collect();
    let mut lists = Vec::new();
    collect_lists(&scenario.expected, &mut lists);
    for list in &lists {
        let found = delivered.iter().any(|delivered| contains_in_order(&in_words(delivered), list));
        assert!(found, "{}: not delivered in this order: {list:#?}", scenario.name);
        compared.lists += 1;
    }
    let listed: BTreeSet<_> = lists.iter().flatten().collect();
    for delivered in delivered {
        let name = format!("{} {:?}", scenario.name, delivered.recorded.asked);
        let keys = keys(delivered);
        for ((row, key), words) in delivered.rows.iter().zip(&keys).zip(in_words(delivered)) {
            let change = change(row, key, delivered.recorded.on.no_value);
            let at = |operation: &&&Value| is_at(operation, row.seqno, row);
            let candidates: Vec<_> = operations.iter().filter(at).collect();
            // After a rollback a seqno may have been used twice: one of them is the right one.
            let wrong: Vec<_> =
                candidates.iter().map(|operation| change.differences(operation)).collect();
            assert!(wrong.is_empty() || wrong.iter().any(Vec::is_empty), "{name}: {wrong:?}");
            let is_named = !candidates.is_empty() || listed.contains(&words);
            compared.named_rows += usize::from(is_named);
            compared.other_rows += usize::from(!is_named);
        }
        compared.operations += arrived(&name, scenario, delivered, &keys, &operations);
    }
    compared
}

/// Checks that what was written has arrived, or a newer version of it; returns how many operations
/// that were.
fn arrived(
    name: &str,
    scenario: &Scenario,
    delivered: &Delivered,
    keys: &[Vec<u8>],
    operations: &[&Value],
) -> usize {
    let Some(last) = delivered.rows.iter().map(|row| row.seqno).max() else { return 0 };
    let asked = &delivered.recorded.asked;
    let log = FailoverLog::decode(&delivered.recorded.log).unwrap();
    let prefixes = prefixes(scenario, asked);
    let mut arrived = 0;
    for operation in operations {
        let seqno = seqno_of(operation);
        let branch = hex_u64(&operation["vbuuid"]).unwrap_or_default();
        let vbid = operation.get("vb").and_then(Value::as_u64);
        let key = key_of(operation);
        let is_wanted = seqno > asked.start_seqno
            && seqno <= last
            && vbid.is_none_or(|vbid| vbid == u64::from(asked.vbid.0))
            // A failover may have lost it.
            && log.branch_of(seqno).vbuuid == Vbuuid(branch)
            && prefixes.as_ref().is_none_or(|prefixes| {
                prefixes.iter().any(|prefix| key.starts_with(prefix))
            })
            && !is_purged(scenario, operation, operations);
        if !is_wanted {
            continue;
        }
        let mut rows = delivered.rows.iter().zip(keys);
        let found =
            rows.any(|(row, key)| row.seqno >= seqno && change(row, key, false).is_of(operation));
        assert!(found, "{name}: {operation} has not arrived");
        arrived += 1;
    }
    arrived
}

/// Whether the document was removed later, and nobody is told of that any more.
fn is_purged(scenario: &Scenario, operation: &Value, operations: &[&Value]) -> bool {
    let purged = Seqno(scenario.expected["purge_seqno"].as_u64().unwrap_or_default());
    operations.iter().any(|later| {
        later["op"] == "delete"
            && later["key"] == operation["key"]
            && (seqno_of(operation)..=purged).contains(&seqno_of(later))
    })
}

/// How keys that a filter wants begin; `None` without a filter.
fn prefixes(scenario: &Scenario, asked: &Asked) -> Option<Vec<Vec<u8>>> {
    let filter = asked.filter()?;
    let ids = match (&filter["scope"], filter["collections"].as_array()) {
        (_, Some(ids)) => ids.clone(),
        (Value::String(scope), None) => {
            let one = scenario.expected.get("manifest");
            let many = scenario.expected["manifests"].as_array().into_iter().flatten();
            let scopes = many.chain(one).filter_map(|manifest| manifest["scopes"].as_array());
            let scopes = scopes.flatten().filter(|known| known["uid"] == *scope);
            let collections = scopes.filter_map(|scope| scope["collections"].as_array()).flatten();
            collections.map(|collection| collection["uid"].clone()).collect()
        }
        _ => return None,
    };
    let ids = ids.iter().filter_map(|id| u32::try_from(hex_u64(id)?).ok());
    Some(ids.map(|id| leb128::encode(id).as_slice().to_vec()).collect())
}

fn seqno_of(operation: &Value) -> Seqno {
    Seqno(operation["seqno"].as_u64().unwrap_or_default())
}

fn is_at(operation: &Value, seqno: Seqno, row: &Row) -> bool {
    let vbid = operation.get("vb").and_then(Value::as_u64);
    operation["seqno"] == seqno.0 && vbid.is_none_or(|vbid| vbid == u64::from(row.vbid.0))
}

fn change<'a>(row: &'a Row, key: &'a [u8], no_value: bool) -> Change<'a> {
    let is_mutation = row.op == Op::Mutation;
    Change {
        vbid: row.vbid,
        seqno: row.seqno,
        cas: row.cas,
        deleted: !is_mutation,
        flags: is_mutation.then_some(row.flags),
        expiry: is_mutation.then_some(row.expiry),
        datatype: row.datatype,
        key,
        value: &row.value,
        no_value,
    }
}

/// Keys as on the wire, where they carry their collection.
fn keys(delivered: &Delivered) -> Vec<Vec<u8>> {
    let key = |row: &Row| {
        if !delivered.recorded.on.collections {
            return row.key.clone();
        }
        let CollectionId(id) = row.collection_id;
        [leb128::encode(id).as_slice(), &row.key].concat()
    };
    delivered.rows.iter().map(key).collect()
}

/// The rows in the words of the recordings.
fn in_words(delivered: &Delivered) -> Vec<String> {
    let words = |(row, key): (&Row, Vec<u8>)| {
        let name = match row.op {
            Op::Mutation => "MUTATION",
            Op::Deletion => "DELETION",
            _ => "EXPIRATION",
        };
        item_in_words(name, row.seqno, &key, row.datatype, row.value.len())
    };
    delivered.rows.iter().zip(keys(delivered)).map(words).collect()
}

/// Finds every list of stream messages, however deep it lies, and keeps its changes.
fn collect_lists(value: &Value, lists: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(members) => members.values().for_each(|value| collect_lists(value, lists)),
        Value::Array(elements) => {
            elements.iter().for_each(|element| collect_lists(element, lists));
            let words = elements.iter().filter_map(Value::as_str);
            // What replicas only are told of comes with what everybody is.
            let replication = ["PREPARE ", "COMMIT ", "ABORT "];
            if words.clone().any(|words| replication.iter().any(|name| words.starts_with(name))) {
                return;
            }
            let changes = ["MUTATION seq", "DELETION seq", "EXPIRATION seq"];
            let words = words.filter(|words| changes.iter().any(|name| words.starts_with(name)));
            // Streams of several ids are played one by one, without the ids.
            let mut by_stream_id = BTreeMap::<_, Vec<String>>::new();
            for words in words {
                let (words, stream_id) = words.split_once(" frame=").unwrap_or((words, ""));
                by_stream_id.entry(stream_id).or_default().push(words.to_owned());
            }
            lists.extend(by_stream_id.into_values());
        }
        _ => {}
    }
}

fn contains_in_order(delivered: &[String], list: &[String]) -> bool {
    let mut delivered = delivered.iter();
    list.iter().all(|words| delivered.any(|each| each == words))
}
