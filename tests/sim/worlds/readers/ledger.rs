//! What the committed micro-batches amount to, by the true history alone: every row of every
//! committed batch is kept in the order of the commits, whatever a rollback takes back later.

use std::collections::{BTreeMap, BTreeSet};

use dcp_proto::plan::Offsets;
use dcp_wire::{Seqno, Vbid};

use super::Reader;
use super::verdict::wanted_ids;
use crate::plan::ReaderKind;
use crate::rows::{Item, Row};
use crate::world::World;

/// The rows of one vBucket that no rollback has taken back, by seqno.
type Standing<'a> = BTreeMap<Seqno, &'a Row>;

impl Reader {
    /// Among committed batches no change occurs twice, no rollback is silent, and every document's
    /// last version at or below the final offset is there.
    pub(crate) fn check_ledger(&self) -> Result<(), String> {
        if self.plan.kind != ReaderKind::Batches {
            return Ok(());
        }
        let (storage, world) = (self.storage.borrow(), self.shared.world.borrow());
        let Some(end) = storage.batches.committed_end() else { return Ok(()) };
        let standing = follow(storage.batches.rows(), &end);
        let ids = wanted_ids(&self.plan, &world, storage.batches.as_pair().as_ref());
        let checked = standing.and_then(|standing| {
            check_standing(&standing, &end, &world, &ids, self.plan.system_documents)
        });
        checked.map_err(|wrong| format!("{self}: among committed batches {wrong}"))?;
        self.shared.count("committed batches judged");
        Ok(())
    }
}

/// Follows the rows through their rollbacks.
fn follow<'a>(items: &'a [Item], end: &Offsets) -> Result<BTreeMap<Vbid, Standing<'a>>, String> {
    let mut seen = BTreeSet::new();
    let mut rollbacks = BTreeMap::<Vbid, u32>::new();
    let mut standing = BTreeMap::<Vbid, Standing<'a>>::new();
    for item in items {
        match item {
            Item::Change(row) => {
                if !seen.insert((row.vbid, row.epoch, row.seqno)) {
                    return Err(format!("one occurs twice: {row:?}"));
                }
                standing.entry(row.vbid).or_default().insert(row.seqno, row);
            }
            Item::Rollback(rollback) => {
                *rollbacks.entry(rollback.vbid).or_default() += 1;
                let of = standing.entry(rollback.vbid).or_default();
                of.retain(|seqno, _| *seqno <= rollback.seqno);
            }
            Item::Emptied { .. } => {}
        }
    }
    let told = |vbid| rollbacks.get(&vbid).copied().unwrap_or_default();
    match end.iter().find(|(vbid, offset)| offset.epoch != told(*vbid)) {
        Some((vbid, offset)) => {
            Err(format!("{} rollbacks of {vbid} are told of {}", told(vbid), offset.epoch))
        }
        None => Ok(standing),
    }
}

/// What stands is part of the history there is, and is all of it up to the offsets.
fn check_standing(
    standing: &BTreeMap<Vbid, Standing<'_>>,
    end: &Offsets,
    world: &World,
    ids: &BTreeSet<u32>,
    sees_system: bool,
) -> Result<(), String> {
    for (vbid, rows) in standing {
        let mut newest = BTreeMap::new();
        for row in rows.values() {
            if world.truth.is_lost(row) {
                return Err(format!("one was lost, and no rollback was told: {row:?}"));
            }
            newest.insert((row.collection, row.key.as_slice()), row.seqno);
        }
        let range = (Seqno::ZERO, end.get(*vbid).seqno);
        let wanted = world.wanted_within(*vbid, range, Seqno::ZERO, sees_system);
        for (collection, key, seqno) in wanted.filter(|(id, ..)| ids.contains(id)) {
            let has = newest.get(&(collection, key));
            if has != Some(&seqno) {
                let name = String::from_utf8_lossy(key);
                return Err(format!("{vbid} has {collection}/{name} at {has:?}, not at {seqno}"));
            }
        }
    }
    Ok(())
}
