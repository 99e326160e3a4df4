//! How far the server is ahead, by collection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::{CollectionSeqnos, StreamFilter};
use dcp_proto::topology::Manifest;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::Cluster;
use super::polls::POLL_PROGRESS;
use crate::driver::{Command, Progress};

/// Collections that are asked for in one round. An answer has 10 bytes for each vBucket, so that
/// more collections are asked for less often.
const PER_ROUND: usize = 100;

/// Most collections that are asked for at all: no cluster has as many.
const MOST: usize = 2_000;

/// What a round has to say of one collection.
#[derive(Debug, Default)]
pub(crate) struct KnownCollection {
    /// Its name as `scope.collection`.
    pub(crate) name: String,
    /// Its highest seqno in the vBuckets whose nodes have answered.
    pub(crate) seqnos: BTreeMap<Vbid, Seqno>,
}

/// By collection.
pub(crate) type KnownCollections = BTreeMap<CollectionId, KnownCollection>;

/// The collections that a filter passes; `None` if they are too many to ask for.
fn passed(filter: &StreamFilter, manifest: &Manifest) -> Option<Vec<CollectionId>> {
    let ids: Vec<_> = match filter {
        StreamFilter::All => manifest.collections().map(|entry| entry.id).collect(),
        StreamFilter::Scope(scope) => {
            let inside = manifest.collections().filter(|entry| entry.scope_id == *scope);
            inside.map(|entry| entry.id).collect()
        }
        StreamFilter::Collections(ids) => ids.clone(),
    };
    (ids.len() <= MOST).then_some(ids)
}

impl<S: BatchSink> Cluster<S> {
    /// Whether the server sends some collections only, so that a vBucket's high seqno says nothing.
    pub(super) fn is_filtered(&self) -> bool {
        self.config.filter != StreamFilter::All
    }

    /// What a connection is asked about collections; `None` if nobody wants to know.
    pub(super) fn collection_question(&self) -> Option<Command> {
        if !self.is_filtered() && !self.stats.wants_collections() {
            return None;
        }
        let ids = passed(&self.config.filter, &self.bucket.manifest())?;
        Some(Command::FetchCollectionSeqnos(ids.into()))
    }

    /// How long the answers to a question are good for.
    pub(super) fn poll_interval(question: Option<&Command>) -> Duration {
        let asked = match question {
            Some(Command::FetchCollectionSeqnos(ids)) => ids.len(),
            _ => 0,
        };
        let rounds = u32::try_from(asked.div_ceil(PER_ROUND)).unwrap_or(u32::MAX);
        POLL_PROGRESS.saturating_mul(rounds.max(1))
    }

    /// A node has answered how far collections have come; `streaming` are the vBuckets that stream
    /// from it.
    pub(super) fn collections_progressed(
        &mut self,
        answers: &[CollectionSeqnos],
        streaming: &[Progress],
        now: Instant,
    ) {
        if self.is_filtered() && answers.iter().all(|answer| answer.seqnos.is_some()) {
            let mut highest = BTreeMap::<Vbid, Seqno>::new();
            for &(vbid, seqno) in answers.iter().filter_map(|each| each.seqnos.as_ref()).flatten() {
                let most = highest.entry(vbid).or_default();
                *most = seqno.max(*most);
            }
            for progress in streaming {
                // A vBucket that is left out has nothing of any of them.
                let high_seqno = highest.get(&progress.vbid).copied().unwrap_or_default();
                self.compare(Progress { high_seqno, ..*progress }, now);
            }
        }
        let manifest = self.bucket.manifest();
        let asked: BTreeSet<_> = answers.iter().map(|answer| answer.collection).collect();
        self.stats.update_collections(|known| {
            known.retain(|id, _| asked.contains(id));
            for CollectionSeqnos { collection, seqnos } in answers {
                let Some(seqnos) = seqnos else {
                    known.remove(collection);
                    continue;
                };
                let seqnos: BTreeMap<Vbid, Seqno> = seqnos.iter().copied().collect();
                let entry = known.entry(*collection).or_default();
                if let Some((scope, name)) = manifest.names(*collection) {
                    entry.name = format!("{scope}.{name}");
                }
                for Progress { vbid, .. } in streaming {
                    let seqno = seqnos.get(vbid).copied().unwrap_or_default();
                    entry.seqnos.insert(*vbid, seqno);
                }
            }
        });
    }

    /// The application has looked at figures that are not fresh.
    pub(super) fn looked_at(&mut self, now: Instant) {
        if self.reconciler.has_streaming() {
            self.poll_progress_at = self.poll_progress_at.min(now);
        }
    }
}

/// When an application that looks at figures has nodes asked again.
#[derive(Debug, Default)]
pub(crate) struct Freshness {
    stale_from: Option<Instant>,
}

impl Freshness {
    /// Nodes are asked, and would be again after `interval`: for one who looks, ten times as often.
    pub(super) fn asked(&mut self, now: Instant, interval: Duration) {
        self.stale_from = Some(now + interval / 10);
    }

    /// Whether nodes are to be asked for one who looks now; true once.
    pub(crate) fn is_stale(&mut self, now: Instant) -> bool {
        let is_stale = self.stale_from.is_some_and(|from| now >= from);
        if is_stale {
            self.stale_from = None;
        }
        is_stale
    }
}
