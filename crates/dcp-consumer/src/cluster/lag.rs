//! Lag behind the server by collection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::{CollectionSeqnos, StreamFilter};
use dcp_proto::topology::Manifest;
use dcp_wire::{CollectionId, Seqno, Vbid};

use super::Cluster;
use super::polls::POLL_PROGRESS;
use crate::driver::{Command, Progress};

/// Collections per round of requests. An answer has 10 bytes per vBucket, so rounds for more
/// collections are less frequent.
const PER_ROUND: usize = 100;

/// Most collections to request: no cluster has as many.
const MOST: usize = 2_000;

/// Result of a round for one collection.
#[derive(Debug, Default)]
pub(crate) struct KnownCollection {
    /// Its name as `scope.collection`.
    pub(crate) name: String,
    /// Its highest seqno in the vBuckets whose nodes have answered.
    pub(crate) seqnos: BTreeMap<Vbid, Seqno>,
}

/// By collection.
pub(crate) type KnownCollections = BTreeMap<CollectionId, KnownCollection>;

/// The collections that a filter passes; `None` if there are too many.
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
    /// Whether the server sends only some collections, so that the high seqno of a vBucket is not
    /// comparable.
    pub(super) fn is_filtered(&self) -> bool {
        self.config.filter != StreamFilter::All
    }

    /// The collections to request from a connection; `None` if the application does not use their
    /// lag.
    pub(super) fn collection_question(&self) -> Option<Command> {
        if !self.is_filtered() && !self.stats.wants_collections() {
            return None;
        }
        let ids = passed(&self.config.filter, &self.bucket.manifest())?;
        Some(Command::FetchCollectionSeqnos(ids.into()))
    }

    /// Interval between requests.
    pub(super) fn poll_interval(question: Option<&Command>) -> Duration {
        let asked = match question {
            Some(Command::FetchCollectionSeqnos(ids)) => ids.len(),
            _ => 0,
        };
        let rounds = u32::try_from(asked.div_ceil(PER_ROUND)).unwrap_or(u32::MAX);
        POLL_PROGRESS.saturating_mul(rounds.max(1))
    }

    /// Handles a node's collection seqnos; `streaming` are the vBuckets that stream from it.
    pub(super) fn collections_progressed(
        &mut self,
        answers: &[CollectionSeqnos],
        streaming: &[Progress],
        now: Instant,
    ) {
        if self.is_filtered() && answers.iter().all(|answer| answer.seqnos.is_ok()) {
            let mut highest = BTreeMap::<Vbid, Seqno>::new();
            for &(vbid, seqno) in
                answers.iter().filter_map(|each| each.seqnos.as_ref().ok()).flatten()
            {
                let most = highest.entry(vbid).or_default();
                *most = seqno.max(*most);
            }
            for progress in streaming {
                // A vBucket without an entry has nothing of these collections.
                let high_seqno = highest.get(&progress.vbid).copied().unwrap_or_default();
                self.compare(Progress { high_seqno, ..*progress }, now);
            }
        }
        let manifest = self.bucket.manifest();
        let asked: BTreeSet<_> = answers.iter().map(|answer| answer.collection).collect();
        self.stats.update_collections(|known| {
            known.retain(|id, _| asked.contains(id));
            for CollectionSeqnos { collection, seqnos } in answers {
                let Ok(seqnos) = seqnos else {
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

    /// The application has read outdated figures.
    pub(super) fn looked_at(&mut self, now: Instant) {
        if self.reconciler.has_streaming() {
            self.poll_progress_at = self.poll_progress_at.min(now);
        }
    }
}

/// When reading figures triggers new requests to nodes.
#[derive(Debug, Default)]
pub(crate) struct Freshness {
    stale_from: Option<Instant>,
}

impl Freshness {
    /// Notes a request, whose regular interval is `interval`; reading figures may shorten it to a
    /// tenth.
    pub(super) fn asked(&mut self, now: Instant, interval: Duration) {
        self.stale_from = Some(now + interval / 10);
    }

    /// Whether reading figures now triggers requests; true once.
    pub(crate) fn is_stale(&mut self, now: Instant) -> bool {
        let is_stale = self.stale_from.is_some_and(|from| now >= from);
        if is_stale {
            self.stale_from = None;
        }
        is_stale
    }
}
