//! What really happened: every write by the answer it was given, every branch of history by when it
//! appeared, every copy by how long it has been there.
//!
//! None of it comes from the machines under test or from their decisions: the embedded cluster says
//! what it answered a writer, which branch a vBucket is on, how high it stands and which nodes hold
//! it, after each thing that is done to it, and the rest follows from that.
//!
//! What it does not show: that the cluster itself does what a real one does. Its documents are
//! held against the writes, and its behaviour against recordings of real ones, in other tests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use dcp_producer::{MutationToken, Producer};
use dcp_proto::Op;
use dcp_wire::{Seqno, Vbid};

use crate::rows::{Documents, Row, shown};

/// One write.
#[derive(Clone)]
pub(crate) struct Write {
    pub(crate) op: Op,
    pub(crate) collection: u32,
    pub(crate) key: Vec<u8>,
    /// Without extended attributes.
    pub(crate) value: Vec<u8>,
    cas: u64,
    vbuuid: u64,
    /// How many writes there were before it, in the whole world.
    pub(crate) order: u64,
    /// Copies of its vBucket there were.
    copies: BTreeSet<u64>,
    /// Who was given it as something no failover takes back.
    promised_to: BTreeSet<u64>,
    fate: Fate,
}

/// Whether a write is part of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Held,
    /// A copy took over that did not have it, though it was there when it was written.
    TakenBack,
    /// It was lost in a way that nobody is safe from.
    Lost,
}

impl fmt::Debug for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, collection, vbuuid, copies, promised_to, .. } = self;
        let (key, value) = (String::from_utf8_lossy(&self.key), shown(&self.value));
        write!(f, "{op:?} {collection}/{key} = {value} on {vbuuid:x}, ")?;
        write!(f, "copies {copies:?}, given to readers {promised_to:?}")
    }
}

/// One branch of a vBucket's history.
#[derive(Clone, Copy, Debug)]
struct Branch {
    vbuuid: u64,
    /// Where its failover log entry begins it.
    begin: u64,
    /// How high the copy that began it stood.
    high: u64,
    parent: Option<u64>,
    /// Branches there were before it.
    order: usize,
}

/// One vBucket.
#[derive(Debug, Default)]
struct History {
    /// By seqno; several where history was cut back.
    writes: HashMap<u64, Vec<Write>>,
    branches: Vec<Branch>,
    newest: u64,
    /// By node.
    copies: BTreeMap<usize, u64>,
}

/// The true history of all vBuckets.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    vbuckets: BTreeMap<Vbid, History>,
    writes: u64,
    copies: u64,
    /// Branches that took over from another.
    pub(crate) branches: u64,
    /// What was promised and broken.
    pub(crate) broken: Option<String>,
}

impl Truth {
    /// Every write to vBuckets that were always on one branch, with its place.
    pub(crate) fn held(&self) -> impl Iterator<Item = (Vbid, u64, &Write)> {
        let vbuckets = self.vbuckets.iter().filter(|(_, history)| history.branches.len() == 1);
        let writes = vbuckets.flat_map(|(vbid, history)| {
            history.writes.iter().flat_map(move |(seqno, writes)| {
                writes.iter().map(move |write| (*vbid, *seqno, write))
            })
        });
        writes.filter(|(.., write)| write.fate == Fate::Held)
    }

    /// How many writes there were.
    pub(crate) fn writes(&self) -> u64 {
        self.writes
    }

    /// Notes a write and what it was answered.
    pub(crate) fn written(
        &mut self,
        token: MutationToken,
        op: Op,
        collection: u32,
        key: &[u8],
        value: &[u8],
    ) {
        self.writes += 1;
        let history = self.vbuckets.entry(token.vbid).or_default();
        let write = Write {
            op,
            collection,
            key: key.to_vec(),
            value: value.to_vec(),
            cas: token.cas.0,
            vbuuid: token.vbuuid.0,
            order: self.writes,
            copies: history.copies.values().copied().collect(),
            promised_to: BTreeSet::new(),
            fate: Fate::Held,
        };
        history.writes.entry(token.seqno.0).or_default().push(write);
    }

    /// Looks at the cluster after something was done to it. `keeps_promises` unless what was done
    /// may take back what is on every disk.
    pub(crate) fn observe(&mut self, producer: &Producer, keeps_promises: bool) {
        let (logs, highs) = (producer.failover_logs(), producer.high_seqnos());
        for index in 0..producer.num_vbuckets() {
            let vbid = Vbid(index);
            let history = self.vbuckets.entry(vbid).or_default();
            let nodes = producer.copies_of(vbid).unwrap_or_default();
            history.copies.retain(|node, _| nodes.contains(node));
            for &node in &nodes {
                history.copies.entry(node).or_insert_with(|| {
                    self.copies += 1;
                    self.copies
                });
            }
            let (Some(log), Some(high)) = (logs.get(&vbid), highs.get(&vbid)) else { continue };
            let mut parent = None;
            let before = history.newest;
            for entry in log.iter().rev() {
                let (vbuuid, begin) = (entry.vbuuid.0, entry.seqno.0);
                if !history.branches.iter().any(|branch| branch.vbuuid == vbuuid) {
                    let order = history.branches.len();
                    let branch = Branch { vbuuid, begin, high: high.0, parent, order };
                    history.branches.push(branch);
                }
                parent = Some(vbuuid);
            }
            history.newest = parent.unwrap_or_default();
            if before != 0 && history.newest != before {
                self.branches += 1;
                let promoted = nodes.first().and_then(|node| history.copies.get(node)).copied();
                let broken = history.settle_promises(high.0, promoted, keeps_promises);
                if let Some(broken) = broken {
                    self.broken.get_or_insert(format!("{vbid}: {broken}"));
                }
            }
        }
    }

    /// A row was given to a reader as one that no failover takes back.
    pub(crate) fn promise(&mut self, row: &Row, reader: u64) {
        let history = self.vbuckets.entry(row.vbid).or_default();
        let is_it = |write: &Write| write.cas == row.cas && write.key == row.key;
        // What was taken back may be back, with a copy that never heard of the one which took over
        // without it, and that is gone now.
        let mut writes = history.writes.get(&row.seqno.0).into_iter().flatten();
        let is_back = writes.any(|write| is_it(write) && history.surely_holds(row.seqno.0, write));
        let there: BTreeSet<u64> = history.copies.values().copied().collect();
        let writes = history.writes.get_mut(&row.seqno.0).into_iter().flatten();
        for write in writes.filter(|write| is_it(write)) {
            write.promised_to.insert(reader);
            if write.fate == Fate::TakenBack && is_back {
                (write.fate, write.copies) = (Fate::Held, there.clone());
            }
            if write.fate == Fate::TakenBack {
                let broken = format!(
                    "{}: what some copy did not have was given as persisted: {write:?}",
                    row.vbid
                );
                self.broken.get_or_insert(broken);
            }
        }
    }

    pub(crate) fn knows(&self, vbid: Vbid, vbuuid: u64) -> bool {
        self.vbuckets.get(&vbid).is_some_and(|history| history.branch(vbuuid).is_some())
    }

    /// A row must have been written, at its seqno, on the branch it names.
    pub(crate) fn check(&self, row: &Row) -> Result<(), String> {
        self.check_on(row, row.vbuuid)
    }

    /// A row must have been written, at its seqno, and be part of a branch.
    pub(crate) fn check_on(&self, row: &Row, vbuuid: u64) -> Result<(), String> {
        let history = self.vbuckets.get(&row.vbid).ok_or("no such vBucket")?;
        let writes = history.writes.get(&row.seqno.0).map(Vec::as_slice).unwrap_or_default();
        let is_it = |write: &&Write| {
            let value = if write.op == Op::Mutation { &write.value } else { &row.value };
            (write.op, write.collection, &write.key, value, write.cas)
                == (row.op, row.collection, &row.key, &row.value, row.cas)
        };
        let Some(write) = writes.iter().find(is_it) else {
            return Err(format!("was never written so: {row:?}"));
        };
        if history.holds(vbuuid, row.seqno.0, write) {
            return Ok(());
        }
        Err(format!(
            "is not on the branch {vbuuid:x}: {row:?}, written on {:x}; {:?}",
            write.vbuuid, history.branches
        ))
    }

    /// The write that made a document what it is in the cluster.
    pub(crate) fn of_document(&self, vbid: Vbid, seqno: u64, cas: u64) -> Option<&Write> {
        let writes = self.vbuckets.get(&vbid)?.writes.get(&seqno)?;
        writes.iter().find(|write| write.cas == cas)
    }

    /// Whether a row that was true has been taken back since.
    pub(crate) fn is_lost(&self, row: &Row) -> bool {
        let writes = self.vbuckets.get(&row.vbid).and_then(|of| of.writes.get(&row.seqno.0));
        let mut of_row = writes.into_iter().flatten().filter(|write| write.cas == row.cas);
        of_row.any(|write| write.fate != Fate::Held)
    }

    /// The newest write of each document of a vBucket, by collection and key, as far as it surely is
    /// part of the history there is now. What was lost may be back, with a copy that never heard of
    /// the one which took over without it; nothing is said of such a document.
    pub(crate) fn newest(&self, vbid: Vbid) -> BTreeMap<(u32, &[u8]), (Seqno, &Write)> {
        let Some(history) = self.vbuckets.get(&vbid) else { return BTreeMap::new() };
        let mut newest = BTreeMap::new();
        for (&seqno, writes) in &history.writes {
            let is_there =
                |write: &&Write| write.fate == Fate::Held || history.surely_holds(seqno, write);
            for write in writes.iter().filter(is_there) {
                let known = newest.entry((write.collection, write.key.as_slice()));
                let known = known.or_insert((Seqno(seqno), write));
                if known.0 < Seqno(seqno) {
                    *known = (Seqno(seqno), write);
                }
            }
        }
        newest.retain(|_, (seqno, write)| {
            write.fate == Fate::Held && history.surely_holds(seqno.0, write)
        });
        newest
    }

    /// What is in the cluster, of these keys, up to the end of their vBucket; each must have been
    /// written.
    pub(crate) fn documents<'a>(
        &self,
        producer: &Producer,
        keys: impl Iterator<Item = (u32, &'a [u8])>,
        end: impl Fn(Vbid) -> Option<u64>,
    ) -> Result<Documents, String> {
        let mut documents = Documents::new();
        for (collection, key) in keys {
            let id = dcp_wire::CollectionId(collection);
            let Some(found) = producer.get_from(id, key) else { continue };
            let vbid = producer.vbid_of(key);
            if end(vbid).is_none_or(|end| found.seqno.0 > end) {
                continue;
            }
            let write = self.of_document(vbid, found.seqno.0, found.cas.0);
            let name = String::from_utf8_lossy(key);
            let write = write.ok_or_else(|| format!("the cluster made up {name} in {vbid}"))?;
            if (write.collection, write.key.as_slice()) != (collection, key) {
                return Err(format!("the cluster has another document as {name} in {vbid}"));
            }
            documents.insert((collection, key.to_vec()), write.value.clone());
        }
        Ok(documents)
    }
}

impl History {
    fn branch(&self, vbuuid: u64) -> Option<&Branch> {
        self.branches.iter().find(|branch| branch.vbuuid == vbuuid)
    }

    /// Whether a branch has a write at a seqno.
    fn holds(&self, vbuuid: u64, seqno: u64, write: &Write) -> bool {
        let Some(mut branch) = self.branch(vbuuid) else { return false };
        loop {
            if seqno > branch.high {
                return write.vbuuid == branch.vbuuid;
            }
            if seqno > branch.begin {
                // A copy that is promoted within a snapshot keeps the part it has and begins its
                // branch below: what it keeps was written on some branch before.
                let written_on = self.branch(write.vbuuid);
                return written_on.is_some_and(|on| on.order <= branch.order);
            }
            let Some(parent) = branch.parent.and_then(|parent| self.branch(parent)) else {
                // Older branches than the log has room for.
                return self.branch(write.vbuuid).is_some_and(|on| on.order <= branch.order);
            };
            branch = parent;
        }
    }

    /// Whether a write is part of the history there is now. Not sure of what a copy keeps that was
    /// promoted within a snapshot.
    fn surely_holds(&self, seqno: u64, write: &Write) -> bool {
        let mut branch = self.branch(self.newest);
        while let Some(on) = branch {
            if seqno > on.begin {
                return write.vbuuid == on.vbuuid;
            }
            branch = on.parent.and_then(|parent| self.branch(parent));
        }
        false
    }

    /// A new branch begins at `high`, on the copy `promoted`: what is above is gone.
    fn settle_promises(&mut self, high: u64, promoted: Option<u64>, keeps: bool) -> Option<String> {
        if !keeps {
            // Going back by hand takes the other copies' disks back too, further than that.
            self.writes.values_mut().flatten().for_each(|write| write.copies.clear());
        }
        let mut broken = None;
        for (seqno, writes) in self.writes.iter_mut().filter(|(seqno, _)| **seqno > high) {
            for write in writes.iter_mut().filter(|write| write.fate == Fate::Held) {
                let was_there = promoted.is_some_and(|copy| write.copies.contains(&copy));
                write.fate = if keeps && was_there { Fate::TakenBack } else { Fate::Lost };
                if write.fate == Fate::TakenBack && !write.promised_to.is_empty() {
                    broken = Some(format!(
                        "what was on the disks of all copies was taken back: seqno {seqno}, the \
                         new branch begins at {high}; {write:?}"
                    ));
                }
            }
        }
        broken
    }
}
