//! Whether what a reader has is right, and whether it may have stopped.

use std::collections::{BTreeMap, BTreeSet};

use dcp_consumer::{Client, ErrorKind, OnRollback};
use dcp_proto::Op;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::{Process, Stop};
use crate::plan::{FilterPlan, ReaderKind, ReaderPlan};
use crate::rows::Table;
use crate::storage::Pair;
use crate::world::World;

/// Whether rows are what the cluster has, of what the reader asks for.
pub(super) fn compare(plan: &ReaderPlan, world: &World, pair: Option<&Pair>) -> Result<(), String> {
    let ids = wanted_ids(plan, world, pair);
    if plan.filter == FilterPlan::Collections && ids.is_empty() {
        let is_more = !world.live(|of| of.scope == "shop").is_empty();
        return if is_more { Err("nothing of its filter was read".to_owned()) } else { Ok(()) };
    }
    let mut wants = world.documents(&ids, plan.system_documents)?;
    wants.retain(|(_, key), _| is_asked_for(plan, key));
    let nothing = Table::default();
    let of = (plan.filter == FilterPlan::Collections).then_some(&ids);
    let has = pair.map_or(&nothing, |pair| &pair.table).documents(of);
    let since = pair.map_or(0, |pair| pair.since);
    let mut off = Vec::new();
    for (key, value) in &wants {
        if has.get(key) != Some(value) && (has.contains_key(key) || is_since(world, key, since)) {
            let id = CollectionId(key.0);
            let seqno = world.producer.get_from(id, &key.1).map(|document| document.seqno.0);
            let (vbid, name) = (world.producer.vbid_of(&key.1), String::from_utf8_lossy(&key.1));
            let state = if has.contains_key(key) { "old" } else { "missing" };
            off.push(format!("{}/{name} is {state}, {vbid} has it at {seqno:?}", key.0));
        }
    }
    for key in has.keys().filter(|key| !wants.contains_key(*key)) {
        off.push(format!("{}/{} should be gone", key.0, String::from_utf8_lossy(&key.1)));
    }
    if off.is_empty() { Ok(()) } else { Err(off.join(", ")) }
}

/// Whether rows up to these ends are what the cluster has of them: a document whose newest version
/// lies at or below the end is there in that version, and one whose removal does is not.
pub(super) fn compare_up_to(
    plan: &ReaderPlan,
    world: &World,
    pair: &Pair,
    ends: &BTreeMap<Vbid, Seqno>,
) -> Result<(), String> {
    let ids = wanted_ids(plan, world, Some(pair));
    let is_below = |vbid, seqno| ends.get(&vbid).is_some_and(|end| seqno <= *end);
    let has = pair.table.documents(Some(&ids));
    let wants = world.documents(&ids, plan.system_documents)?.into_iter();
    for (key, value) in wants.filter(|((_, key), _)| is_asked_for(plan, key)) {
        let vbid = world.producer.vbid_of(&key.1);
        let document = world.producer.get_from(CollectionId(key.0), &key.1);
        let Some(seqno) = document.map(|document| document.seqno) else { continue };
        if is_below(vbid, seqno) && has.get(&key) != Some(&value) {
            let (name, state) = (String::from_utf8_lossy(&key.1), has.contains_key(&key));
            return Err(format!("{}/{name}, {vbid} {seqno}, is not there: {state}", key.0));
        }
    }
    // What was removed in a collection that was flushed later need not be sent.
    let was_emptied = |id| world.collections.get(&id).is_some_and(|of| of.was_emptied);
    for &vbid in ends.keys() {
        let newest = world.truth.newest(vbid).into_iter();
        for ((collection, key), (seqno, write)) in newest.filter(|((id, _), _)| !was_emptied(*id)) {
            let is_removed = write.op != Op::Mutation && is_below(vbid, seqno);
            if is_removed && has.contains_key(&(collection, key.to_vec())) {
                let name = String::from_utf8_lossy(key);
                return Err(format!("{collection}/{name} was removed at {vbid} {seqno}"));
            }
        }
    }
    Ok(())
}

/// Whether a key is asked for.
pub(super) fn is_asked_for(plan: &ReaderPlan, key: &[u8]) -> bool {
    !plan.some_keys || key.starts_with(b"key-1")
}

/// Whether a document was written after a reader began.
fn is_since(world: &World, (collection, key): &(u32, Vec<u8>), since: u64) -> bool {
    let document = world.producer.get_from(CollectionId(*collection), key);
    let Some(document) = document else { return false };
    let vbid = world.producer.vbid_of(key);
    let write = world.truth.of_document(vbid, document.seqno.0, document.cas.0);
    write.is_none_or(|write| write.order > since)
}

/// The collections a reader is to have.
pub(super) fn wanted_ids(plan: &ReaderPlan, world: &World, pair: Option<&Pair>) -> BTreeSet<u32> {
    match plan.filter {
        FilterPlan::All => world.live(|of| plan.system_documents || of.scope != "_system"),
        chosen @ (FilterPlan::Scope | FilterPlan::Patterns) => {
            world.live(|of| chosen.holds(&of.scope, &of.name))
        }
        FilterPlan::Collections => {
            let ids = pair.and_then(|pair| pair.ids.clone()).unwrap_or_default();
            ids.intersection(&world.live(|_| true)).copied().collect()
        }
    }
}

impl Process {
    /// Whether it asked for a collection that is gone.
    pub(super) fn names_dropped(&self, world: &World) -> bool {
        let live = world.live(|_| true);
        self.ids.borrow().as_ref().is_some_and(|ids| !ids.is_subset(&live))
    }

    /// Decides whether a reader may have stopped for this.
    pub(super) fn judge(&self, read: Result<(), Stop>) -> Result<(), String> {
        let (error, is_running) = match read {
            Ok(()) | Err(Stop::Again) => return Ok(()),
            Err(Stop::Violation(violation)) => return Err(violation),
            Err(Stop::Opening(error)) => (error, false),
            Err(Stop::Running(error)) => (error, true),
        };
        let at = format!("life {}, foreign {}", self.life.get(), self.is_foreign.get());
        let kind = error.kind();
        self.shared.trace.add(format!("reader {}, {at}: {kind:?}: {error}", self.plan.number));
        self.shared.count(format!("error {:?}", error.kind()));
        let world = self.shared.world.borrow();
        let stored = self.storage.borrow().newest().cloned();
        let is_of_this_bucket =
            |pair: &Pair| pair.checkpoint.bucket_uuid() == world.producer.bucket_uuid();
        let is_another_bucket =
            self.life.get() != world.lives || self.is_foreign.get() || self.is_of_old_bucket();
        if is_another_bucket {
            let is_old = |(_, life): &(Client, u32)| *life != world.lives;
            let mut clients = self.shared.clients.borrow_mut();
            if clients.get(&self.plan.client).is_some_and(is_old) {
                clients.remove(&self.plan.client);
            }
            let is_stale = !stored.as_ref().is_none_or(is_of_this_bucket);
            if is_stale || self.is_of_old_bucket() {
                self.storage.borrow_mut().lose();
            }
            self.shared.count("began anew on another bucket");
            return Ok(());
        }
        let has_nothing_left = self.plan.filter == FilterPlan::Collections
            && self.ids.borrow().as_ref().is_some_and(|ids| ids.is_disjoint(&world.live(|_| true)));
        if has_nothing_left {
            self.storage.borrow_mut().lose();
            self.shared.count("began anew with other collections");
            return Ok(());
        }
        if error.kind() == ErrorKind::Rollback && self.plan.kind == ReaderKind::Batches {
            self.shared.count("rollback inside of a micro-batch");
            return Ok(());
        }
        let end_was_lost = self.end_existed.get().is_some_and(|losses| losses != world.losses);
        if error.kind() == ErrorKind::Rollback && end_was_lost {
            self.shared.count("end that was lost");
            return Ok(());
        }
        if error.kind() == ErrorKind::Rollback && self.plan.on_rollback == OnRollback::Fail {
            self.storage.borrow_mut().lose();
            self.shared.count("began anew after a rollback");
            return Ok(());
        }
        if error.kind() == ErrorKind::Rollback && error.to_string().contains("began again") {
            self.storage.borrow_mut().lose();
            self.shared.count("first load that purges overtook");
            return Ok(());
        }
        let (healed, filtered) = (self.shared.is_well(), self.plan.filter != FilterPlan::All);
        let may_be = match error.kind() {
            // A node that damages packets may damage the same one again and again.
            ErrorKind::UnusablePacket => self.shared.damages_packets,
            // Only a new process may fail for an outage.
            _ if is_running => false,
            ErrorKind::Connect | ErrorKind::ConnectionLost | ErrorKind::Timeout => !healed,
            ErrorKind::BucketNotFound
            | ErrorKind::AccessDenied
            | ErrorKind::Authentication
            | ErrorKind::NotCouchbase
            | ErrorKind::Protocol
            | ErrorKind::Status => !healed,
            // There may be no such collection.
            ErrorKind::Config => filtered,
            // One has taken the name of another.
            ErrorKind::Checkpoint => self.names_dropped(&world),
            _ => false,
        };
        if may_be {
            return Ok(());
        }
        let when = if is_running { "while it ran" } else { "while it was opened" };
        let mut causes = format!("{error}");
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause {
            causes = format!("{causes}: {next}");
            cause = next.source();
        }
        Err(format!("a stream ended {when}: {:?}: {causes}", error.kind()))
    }
}
