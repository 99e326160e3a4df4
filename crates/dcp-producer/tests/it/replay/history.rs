//! What was done to each vBucket of a recording, step by step: its KV operations where they are
//! written down, else what its streams show.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_producer::ServerVersion;
use dcp_test::traces::Scenario;
use dcp_wire::message::Counter;
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opaque, Status};
use serde_json::Value;

use super::facts::version;
use super::manifests::{Model, USUAL};
use super::markers::Source;
use super::shown::{Item, Shown, refused, shown, with_collections};

/// Most writes that are made up to have been before a recording.
const MOST_EARLIER: u64 = 10_000;

/// Longest pause within a burst. Operations of a burst followed each other within a tenth of a
/// second, and what was recorded had time to arrive before the next.
const PAUSE: Duration = Duration::from_millis(200);

/// Something that was done to a vBucket.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Seqno it got; that of the step before for those that get none.
    pub(super) seqno: u64,
    pub(super) deed: Deed,
    /// The recorded version, 0 if it is not known.
    pub(super) cas: u64,
    /// The recorded branch, 0 if it is not known.
    pub(super) vbuuid: u64,
    /// Whether it reached the disk, and the replicas.
    pub(super) spreads: bool,
    /// Whether nothing was done for a while before.
    pub(super) begins_burst: bool,
}

/// What was done.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    Set {
        key: Vec<u8>,
        value: Vec<u8>,
        datatype: Datatype,
        flags: u32,
        expiry: u32,
    },
    SetXattr {
        key: Vec<u8>,
        path: String,
        value: String,
        of_tombstone: bool,
    },
    Delete {
        key: Vec<u8>,
    },
    /// An access after the expiry.
    Expire {
        key: Vec<u8>,
    },
    /// The manifest became another one, which made one event.
    Manifest(Model),
    /// The vBucket became a replica and active again: a branch began.
    Promote,
    /// The node crashed, or failed and was replaced: a branch began.
    Fail,
}

fn bytes(text: &str) -> Vec<u8> {
    let Some(digits) = text.strip_prefix("hex:") else { return text.as_bytes().to_vec() };
    let pairs = digits.as_bytes().as_chunks::<2>().0.iter();
    pairs.filter_map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()).collect()
}

fn number(value: &Value) -> u64 {
    value.as_str().map_or(0, |digits| u64::from_str_radix(digits, 16).unwrap_or_default())
}

/// Gives recordings that do not write their KV operations down those of another one of the same
/// bucket: of the one that ends where the streams do, or soonest after.
pub(super) fn share_operations(scenarios: &mut [Scenario]) {
    let is_null = |scenario: &Scenario| scenario.expected["kv_ops"].is_null();
    let all: Vec<_> = scenarios.iter().map(shown).collect();
    for at in 0..scenarios.len() {
        if !is_null(&scenarios[at]) || !scenarios[at].expected.is_object() {
            continue;
        }
        let ours = vbuuids(&all[at]);
        let same_bucket = |(place, other): &(usize, &Scenario)| {
            let ops = operations(other);
            let is_same = !ours.is_disjoint(&vbuuids(&all[*place]))
                || ops.iter().any(|op| ours.contains(&number(&op["vbuuid"])));
            !ops.is_empty() && is_same && ops.iter().all(|op| agrees(op, &all[at]))
        };
        let shows = all[at].values().filter_map(Shown::last).max().unwrap_or_default();
        let distance = |(_, other): &(usize, &Scenario)| {
            let last = operations(other).iter().filter_map(|op| op["seqno"].as_u64()).max();
            (last < Some(shows), last.unwrap_or_default().abs_diff(shows))
        };
        let others = scenarios.iter().enumerate().filter(same_bucket);
        let Some((_, other)) = others.min_by_key(distance) else { continue };
        let other = other.expected.clone();
        for name in ["kv_ops", "manifests", "manifest"] {
            if !other[name].is_null() {
                scenarios[at].expected[name] = other[name].clone();
            }
        }
    }
}

/// The KV operations that line 1 lists.
fn operations(scenario: &Scenario) -> &[Value] {
    scenario.expected["kv_ops"].as_array().map_or(&[], Vec::as_slice)
}

/// The branches that logs name.
fn vbuuids(shown: &BTreeMap<u16, Shown>) -> BTreeSet<u64> {
    let logs = shown.values().flat_map(|shown| &shown.logs).flatten();
    logs.map(|(vbuuid, _)| *vbuuid).collect()
}

/// Whether streams show an operation as it was, if they show its seqno at all.
fn agrees(op: &Value, shown: &BTreeMap<u16, Shown>) -> bool {
    let vbid = op["vb"].as_u64().and_then(|vbid| u16::try_from(vbid).ok());
    let shown = vbid.and_then(|vbid| shown.get(&vbid));
    let item = op["seqno"].as_u64().and_then(|seqno| shown?.items.get(&seqno));
    let (Some(item), Some(key)) = (item, op["key"].as_str().map(bytes)) else { return true };
    item.raw_key == key || item.key == key || item.key[1..] == key
}

/// The steps of each vBucket.
pub(super) fn histories(scenario: &Scenario) -> BTreeMap<u16, Vec<Step>> {
    let shown = shown(scenario);
    let mut histories = written_down(scenario, &shown);
    let manifests = manifests(scenario);
    earlier(scenario, &mut histories);
    for &vbid in shown.keys() {
        histories.entry(vbid).or_default();
    }
    let nothing = Shown::default();
    for (vbid, steps) in &mut histories {
        let shown = shown.get(vbid).unwrap_or(&nothing);
        let hidden = !shown.prefixed && !version(&scenario.server).is_legacy();
        let least = told_end(scenario, *vbid).unwrap_or(shown.announced);
        let told =
            Told { manifests: &manifests, version: version(&scenario.server), hidden, least };
        fill(steps, shown, &told);
        branch(steps, &begins(scenario, shown), shown);
        part(steps);
    }
    histories
}

/// Marks the steps before which nothing was done for a while, as the server's clock tells, which
/// CAS are read from.
fn part(steps: &mut [Step]) {
    let mut before = None;
    for step in steps {
        // A vBucket changes its state between bursts.
        step.begins_burst = matches!(step.deed, Deed::Promote);
        let Some(at) = Some(step.cas).filter(|cas| *cas != 0).map(Duration::from_nanos) else {
            continue;
        };
        step.begins_burst = before.is_some_and(|before| at.saturating_sub(before) > PAUSE);
        before = Some(at);
    }
}

/// The last seqno of the operations on a vBucket, if any are listed.
fn told_end(scenario: &Scenario, vbid: u16) -> Option<u64> {
    let is_of = |op: &&Value| op["vb"].as_u64().is_none_or(|of| of == u64::from(vbid));
    operations(scenario).iter().filter(is_of).filter_map(|op| op["seqno"].as_u64()).max()
}

/// What the lengths of the histories follow from.
pub(super) fn sources(scenario: &Scenario) -> BTreeMap<u16, Source> {
    let told = |(vbid, shown): (u16, Shown)| {
        let source = if told_end(scenario, vbid).is_some() {
            Source::Operations
        } else if shown.last() >= Some(shown.announced) {
            Source::Changes
        } else {
            Source::Itself
        };
        (vbid, source)
    };
    shown(scenario).into_iter().map(told).collect()
}

/// Where branches begin, as line 1 says.
fn told_branches(scenario: &Scenario) -> BTreeMap<u64, u64> {
    let logs = ["failover_before", "failover_after", "failover_log"];
    let entries = logs.iter().filter_map(|name| scenario.expected[name].as_array()).flatten();
    entries.filter_map(|entry| Some((number(&entry[0]), entry[1].as_u64()?))).collect()
}

/// Where each branch begins, as line 1 says, else as the logs of the streams do.
fn begins(scenario: &Scenario, shown: &Shown) -> BTreeMap<u64, u64> {
    let mut begins: BTreeMap<u64, u64> = shown.logs.iter().flatten().copied().collect();
    begins.extend(told_branches(scenario));
    begins
}

/// Whether logs name branches besides the oldest of which line 1 does not say where they begin.
pub(super) fn has_untold_branches(scenario: &Scenario) -> bool {
    let told = told_branches(scenario);
    let shown = shown(scenario);
    let logs = shown.values().flat_map(|shown| &shown.logs);
    let mut branches = logs.flat_map(|log| log.iter().skip(1));
    branches.any(|(vbuuid, _)| !told.contains_key(vbuuid))
}

/// The manifests the bucket had, oldest first.
fn manifests(scenario: &Scenario) -> Vec<Model> {
    let usual: Value = serde_json::from_str(USUAL).unwrap();
    let read = |all: &Value| all.as_array().map(|all| all.iter().map(Model::read).collect());
    let written = read(&scenario.expected["manifests"]);
    let one = Some(&scenario.expected["manifest"]).filter(|one| one.is_object());
    let written = written.or_else(|| one.map(|one| vec![Model::read(one)]));
    if written.is_some() {
        return written.unwrap_or_default();
    }
    // A connection that gets no stream says nothing of a bucket's collections.
    let refused = refused(scenario);
    let collections = with_collections(scenario);
    let mut streams = collections.iter().filter(|(conn, _)| !refused.contains(conn));
    let used = names_collections(scenario) || streams.any(|(_, &on)| on);
    read(&usual).filter(|_| used).unwrap_or_default()
}

/// Whether the keys of KV operations come with their collections, as far as they tell themselves:
/// such keys are always written in hex.
fn names_collections(scenario: &Scenario) -> bool {
    let Value::Array(ops) = &scenario.expected["kv_ops"] else { return false };
    let in_hex = |op: &Value| op["key"].as_str().is_some_and(|key| key.starts_with("hex:"));
    !ops.is_empty() && ops.iter().all(in_hex)
}

/// A write a client asked for.
struct Asked {
    vbid: u16,
    key: Vec<u8>,
    /// By how much a counter was to change, and where it was to begin.
    counting: Option<(u64, u64)>,
}

/// Writes from before the recording, of vBuckets its clients write to: the first answer tells how
/// many there were, and of a counter what it was.
fn earlier(scenario: &Scenario, histories: &mut BTreeMap<u16, Vec<Step>>) {
    let collections = with_collections(scenario);
    let mut asked: BTreeMap<(u32, Opaque), Asked> = BTreeMap::new();
    for event in &scenario.events {
        let Some(packet) = event.packet() else { continue };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
        let (header, place) = (frame.header, (event.conn, frame.header.opaque));
        if !header.magic.is_response() {
            let mut key = frame.key.to_vec();
            if !collections.get(&event.conn).is_some_and(|&on| on) {
                key.insert(0, 0);
            }
            let counter = Counter::decode(&frame).ok();
            let counting = counter.map(|counter| (counter.delta, counter.initial));
            asked.insert(place, Asked { vbid: header.vbid().0, key, counting });
            continue;
        }
        let token = frame.extras.get(8..).and_then(|rest| rest.first_chunk());
        let token =
            token.filter(|_| frame.extras.len() == 16 && header.status() == Status::SUCCESS);
        let (Some(token), Some(asked)) = (token, asked.get(&place)) else { continue };
        let before = before(u64::from_be_bytes(*token), asked, frame.value);
        histories.entry(asked.vbid).or_insert(before);
    }
}

/// The writes before the one that got `written`, and was answered `value`.
fn before(written: u64, asked: &Asked, value: &[u8]) -> Vec<Step> {
    let step = |seqno| {
        let deed = write_of(filler_key(seqno), b"{}".to_vec());
        Step { seqno, deed, cas: 0, vbuuid: 0, spreads: true, begins_burst: false }
    };
    // So many are nothing that went before.
    let mut steps: Vec<Step> = (1..written.min(MOST_EARLIER)).map(step).collect();
    if let (Some((delta, initial)), Some(number)) = (asked.counting, value.first_chunk())
        && let number = u64::from_be_bytes(*number)
        && number != initial
        && let Some(last) = steps.last_mut()
    {
        let value = number.wrapping_sub(delta).to_string().into_bytes();
        let key = asked.key.clone();
        last.deed = Deed::Set { key, value, datatype: Datatype::RAW, flags: 0, expiry: 0 };
    }
    steps
}

/// A write without flags and expiry.
fn write_of(key: Vec<u8>, value: Vec<u8>) -> Deed {
    Deed::Set { key, value, datatype: Datatype::RAW, flags: 0, expiry: 0 }
}

/// The KV operations a recording writes down.
fn written_down(scenario: &Scenario, shown: &BTreeMap<u16, Shown>) -> BTreeMap<u16, Vec<Step>> {
    let mut histories: BTreeMap<u16, Vec<Step>> = BTreeMap::new();
    let Value::Array(ops) = &scenario.expected["kv_ops"] else { return histories };
    let prefixed = names_collections(scenario)
        || ops.iter().any(|op| {
            let vbid = u16::try_from(op["vb"].as_u64().unwrap_or_default()).unwrap();
            let item = shown.get(&vbid).and_then(|shown| shown.items.get(&op["seqno"].as_u64()?));
            let key = bytes(op["key"].as_str().unwrap());
            item.is_some_and(|item| shown[&vbid].prefixed && item.raw_key == key && item.key == key)
        });
    let mut at = 0;
    for op in ops.iter().filter(|op| op["op"].is_string()) {
        let triggers_expiry = op["op"] == "get_triggers_expiry";
        if !triggers_expiry && !matches!(op["status"].as_u64(), Some(0 | 205)) {
            continue;
        }
        at = op["vb"].as_u64().map_or(at, |vbid| u16::try_from(vbid).unwrap());
        let mut key = bytes(op["key"].as_str().unwrap());
        if !prefixed {
            key.insert(0, 0);
        }
        let deed = match op["op"].as_str().unwrap() {
            "set" => set(op, key, shown.get(&at)),
            "xattr_upsert" => Deed::SetXattr {
                key,
                path: op["path"].as_str().unwrap().to_owned(),
                value: op["xvalue"].as_str().unwrap().to_owned(),
                of_tombstone: op["status"] == 205,
            },
            "delete" => Deed::Delete { key },
            "get_triggers_expiry" => Deed::Expire { key },
            // What it did is taken from what streams show of it.
            _ => continue,
        };
        let steps = histories.entry(at).or_default();
        let next = steps.last().map_or(1, |step| step.seqno + 1);
        let seqno = op["seqno"].as_u64().unwrap_or(next);
        let (cas, vbuuid) = (number(&op["cas"]), number(&op["vbuuid"]));
        steps.push(Step { seqno, deed, cas, vbuuid, spreads: true, begins_burst: false });
    }
    histories
}

fn set(op: &Value, key: Vec<u8>, shown: Option<&Shown>) -> Deed {
    let number = |name: &str| u32::try_from(op[name].as_u64().unwrap()).unwrap();
    let text = op["value"].as_str().unwrap();
    let value = match text.strip_prefix("len:") {
        None => bytes(text),
        Some(rest) => {
            let len: usize = rest.split(' ').next().unwrap().parse().unwrap();
            let mut items = shown.into_iter().flat_map(|shown| shown.items.values());
            let body = items.rfind(|item| item.key == key && item.body.len() == len);
            // Streams without values do not show it.
            body.map_or_else(|| vec![b' '; len], |item| item.body.clone())
        }
    };
    let datatype = Datatype(u8::try_from(number("dt")).unwrap());
    Deed::Set { key, value, datatype, flags: number("flags"), expiry: number("exp") }
}

/// What is known of a history besides what streams show of it.
struct Told<'a> {
    manifests: &'a [Model],
    version: ServerVersion,
    /// What no stream shows is hidden from clients without collections.
    hidden: bool,
    /// Without operations there are changes up to here.
    least: u64,
}

/// Puts what the streams show, and what must have been for it, between the written operations.
fn fill(steps: &mut Vec<Step>, shown: &Shown, told: &Told<'_>) {
    let &Told { hidden, least, .. } = told;
    let mut by_seqno: BTreeMap<u64, Deed> = BTreeMap::new();
    // The first branch only: of a later one everything is written down.
    let fallen = steps.windows(2).position(|pair| pair[1].seqno <= pair[0].seqno);
    let rest = fallen.map_or_else(Vec::new, |at| steps.split_off(at + 1));
    let known: Vec<u64> = steps.iter().map(|step| step.seqno).collect();
    let last_known = known.last().copied().unwrap_or_default();
    let missing_items = shown
        .items
        .iter()
        .filter(|(seqno, _)| !known.contains(seqno) && (rest.is_empty() || **seqno <= last_known));
    for (&seqno, item) in missing_items {
        by_seqno.insert(seqno, item.deed());
    }
    let end = by_seqno.keys().next_back().copied().unwrap_or_default();
    let end = if known.is_empty() { end.max(least) } else { end };
    let end = end.max(last_known).max(shown.events.keys().next_back().copied().unwrap_or_default());
    let free: Vec<u64> =
        (1..=end).filter(|seqno| !known.contains(seqno) && !by_seqno.contains_key(seqno)).collect();
    let mut model = Model::default();
    let mut wanting: Vec<(u64, &Item, u64)> =
        shown.items.iter().map(|(&seqno, item)| (seqno, item, item.rev - 1)).collect();
    if !known.is_empty() {
        wanting.retain(|(seqno, ..)| !known.contains(seqno));
    }
    for run in free.chunk_by(|one, next| one + 1 == *next) {
        if let Some(models) = manifests_of(run.len(), &model, shown, told) {
            model = models.last().unwrap_or(&model).clone();
            by_seqno.extend(run.iter().copied().zip(models.into_iter().map(Deed::Manifest)));
            continue;
        }
        // A client that left early does not tell what would have come.
        let hides = hidden && shown.items.keys().next_back() > run.last();
        for &seqno in run {
            by_seqno.insert(seqno, fill_one(seqno, shown, hides, &mut model, &mut wanting));
        }
    }
    for (seqno, deed) in by_seqno {
        let cas = shown.items.get(&seqno).map_or(0, |item| item.cas);
        steps.push(Step { seqno, deed, cas, vbuuid: 0, spreads: true, begins_burst: false });
    }
    steps.sort_by_key(|step| step.seqno);
    steps.extend(rest);
}

/// Says what a seqno was given to of which no operation is known: an event that was shown, an older
/// version of a document, or else something made up, which no client sees if it `hides`.
fn fill_one(
    seqno: u64,
    shown: &Shown,
    hides: bool,
    model: &mut Model,
    wanting: &mut [(u64, &Item, u64)],
) -> Deed {
    if let Some(event) = shown.events.get(&seqno) {
        model.follow(event);
    } else if let Some(deed) = older_version(seqno, wanting) {
        return deed;
    } else if hides {
        model.hide();
    } else {
        return write_of(filler_key(seqno), b"{}".to_vec());
    }
    Deed::Manifest(model.clone())
}

/// Key of a write of which nothing is known.
fn filler_key(seqno: u64) -> Vec<u8> {
    format!("\0filler {seqno}").into_bytes()
}

/// The manifest after each event, if there are manifests that make `count` of them.
fn manifests_of(count: usize, model: &Model, shown: &Shown, told: &Told<'_>) -> Option<Vec<Model>> {
    let newer: Vec<_> = told.manifests.iter().filter(|next| next.uid > model.uid).collect();
    for first in 0..newer.len() {
        let (mut at, mut models) = (model.clone(), Vec::new());
        for next in &newer[first..] {
            for event in at.events_to(next, told.version, &shown.events) {
                at.follow(&event);
                models.push(at.clone());
            }
            // The same, in the order in which clients get it.
            at = next.hiding_as(model);
            if let Some(last) = models.last_mut() {
                *last = at.clone();
            }
            if models.len() == count {
                return Some(models);
            }
        }
    }
    None
}

/// An older version of a document that is shown with a later one.
fn older_version(seqno: u64, wanting: &mut [(u64, &Item, u64)]) -> Option<Deed> {
    let later = |(later, _, versions): &&mut (u64, &Item, u64)| *later > seqno && *versions > 0;
    let (_, item, versions) = wanting.iter_mut().find(later)?;
    *versions -= 1;
    // Xattrs are added to the body there is.
    let body = item.xattr.is_some().then(|| item.body.clone());
    Some(write_of(item.key.clone(), body.unwrap_or_else(|| b"{}".to_vec())))
}

impl Item {
    fn deed(&self) -> Deed {
        let key = self.key.clone();
        if !self.is_live {
            return Deed::Delete { key };
        }
        // The first version of a document with one was written with it at once.
        if let (Some((path, value)), true) = (self.xattr.clone(), self.rev > 1) {
            return Deed::SetXattr { key, path, value, of_tombstone: false };
        }
        Deed::Set {
            key,
            value: self.body.clone(),
            datatype: Datatype::RAW,
            flags: self.flags,
            expiry: if self.expires { 3600 } else { 0 },
        }
    }
}

/// Puts the beginnings of branches between the steps.
fn branch(steps: &mut Vec<Step>, begins: &BTreeMap<u64, u64>, shown: &Shown) {
    let mut at = 1;
    while at < steps.len() {
        let (before, after) = (&steps[at - 1], &steps[at]);
        let fell = after.seqno <= before.seqno;
        let (vbuuid, seqno) = (after.vbuuid, before.seqno);
        if fell || (vbuuid != 0 && before.vbuuid != 0 && vbuuid != before.vbuuid) {
            let deed = if fell { Deed::Fail } else { Deed::Promote };
            let begin = begins.get(&vbuuid).copied().unwrap_or(seqno);
            begin_branch(steps, at, deed, vbuuid, begin);
            at += 1;
        }
        at += 1;
    }
    // Branches nothing was written on are known from the first log only.
    let first = shown.logs.first().cloned().unwrap_or_default();
    for &(vbuuid, seqno) in first.iter().skip(1) {
        if steps.iter().all(|step| step.vbuuid != vbuuid) {
            let at = steps.iter().rposition(|step| step.seqno <= seqno).map_or(0, |at| at + 1);
            begin_branch(steps, at, Deed::Promote, vbuuid, seqno);
        }
    }
}

fn begin_branch(steps: &mut Vec<Step>, at: usize, deed: Deed, vbuuid: u64, begin: u64) {
    let seqno = at.checked_sub(1).map_or(0, |last| steps[last].seqno);
    for step in &mut steps[..at] {
        step.spreads &= step.seqno <= begin;
    }
    steps.insert(at, Step { seqno, deed, cas: 0, vbuuid, spreads: true, begins_burst: false });
}
