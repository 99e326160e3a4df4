//! What a stream's connections request and deliver, which follows the collections of the bucket.

use dcp_proto::consumer::{Delivery, Exclusions, StreamFilter};
use dcp_proto::topology::Manifest;

use crate::opening::Opening;
use crate::{BatchPolicy, OnRollback, filter};

/// Configuration of a stream's connections.
#[derive(Clone, Debug)]
pub(crate) struct StreamConfig {
    pub(crate) opening: Opening,
    pub(crate) filter: StreamFilter,
    pub(crate) on_rollback: OnRollback,
    pub(crate) ignore_purged_tombstones: bool,
    pub(crate) delivery: Delivery,
    pub(crate) batch: BatchPolicy,
    /// Whether a high seqno below the end means that the vBucket was rolled back.
    pub(crate) end_exists: bool,
}

/// What became of a filter whose scope or collections may have been dropped.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// Nothing was.
    Nothing,
    /// Something was: this is the new filter.
    Some(StreamFilter),
    /// Everything was.
    All,
}

impl StreamConfig {
    /// Whether the server sends only some collections, so that the high seqno of a vBucket is not
    /// comparable.
    pub(super) fn is_filtered(&self) -> bool {
        self.filter != StreamFilter::All
    }

    /// Removes from the filter of future requests what the manifest no longer has. Checkpoints keep
    /// the filter of the stream: it contains the remaining one, and ids are not reused.
    pub(super) fn drop_from_filter(&mut self, manifest: &Manifest) -> Dropped {
        match filter::remaining(&self.filter, manifest) {
            Some(remaining) if remaining == self.filter => Dropped::Nothing,
            Some(remaining) => {
                self.filter = remaining.clone();
                Dropped::Some(remaining)
            }
            None => Dropped::All,
        }
    }

    /// A connection has learned of documents to leave out.
    ///
    /// Every connection leaves out the same collections: one learns of a new collection from the
    /// event in its own streams, and another may take over a vBucket that is past that event.
    pub(super) fn exclude(&mut self, learned: &Exclusions) {
        self.delivery.exclusions.merge(learned);
    }

    /// Learns what to leave out from a manifest. Returns it if it is new: open connections must
    /// leave it out as well, since a vBucket may move to one of them when it is past the event of a
    /// collection.
    pub(super) fn exclude_by_manifest(&mut self, manifest: &Manifest) -> Option<Exclusions> {
        let mut exclusions = self.delivery.exclusions.clone();
        if exclusions.excludes_system_scope() {
            exclusions.merge(&filter::exclusions(&self.filter, manifest));
        }
        exclusions.learn_manifest(manifest);
        (exclusions != self.delivery.exclusions).then(|| {
            self.exclude(&exclusions);
            exclusions
        })
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::{CollectionId, ScopeId};

    use super::*;
    use crate::StreamOptions;

    fn config(filter: StreamFilter, exclusions: Exclusions) -> StreamConfig {
        StreamConfig {
            opening: Opening::new(&StreamOptions::default()).unwrap(),
            filter,
            on_rollback: OnRollback::Fail,
            ignore_purged_tombstones: false,
            delivery: Delivery { exclusions, ..Delivery::default() },
            batch: BatchPolicy::default(),
            end_exists: false,
        }
    }

    /// Collections by scope, each with its id.
    fn manifest(scopes: &[(&str, &str, &[&str])]) -> Manifest {
        let scope = |(name, uid, collections): &(&str, &str, &[&str])| {
            let collection = |uid: &&str| format!(r#"{{"name":"c{uid}","uid":"{uid}"}}"#);
            let collections: Vec<_> = collections.iter().map(collection).collect();
            let collections = collections.join(",");
            format!(r#"{{"name":"{name}","uid":"{uid}","collections":[{collections}]}}"#)
        };
        let scopes: Vec<_> = scopes.iter().map(scope).collect();
        let json = format!(r#"{{"uid":"5","scopes":[{}]}}"#, scopes.join(","));
        Manifest::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn dropped_collections_leave_the_filter_of_future_requests() {
        let [first, second] = [CollectionId(9), CollectionId(10)];
        let filter = StreamFilter::Collections(vec![first, second]);
        let mut config = config(filter, Exclusions::default());
        assert!(config.is_filtered());
        let both = manifest(&[("shop", "8", &["9", "a"])]);
        assert_eq!(config.drop_from_filter(&both), Dropped::Nothing);
        let remaining = StreamFilter::Collections(vec![second]);
        let one = manifest(&[("shop", "8", &["a"])]);
        assert_eq!(config.drop_from_filter(&one), Dropped::Some(remaining.clone()));
        assert_eq!(config.drop_from_filter(&one), Dropped::Nothing, "once");
        assert_eq!(config.drop_from_filter(&manifest(&[])), Dropped::All);
        assert_eq!(config.filter, remaining);
    }

    #[test]
    fn stream_without_a_filter_drops_nothing() {
        let mut config = config(StreamFilter::All, Exclusions::default());
        assert!(!config.is_filtered());
        assert_eq!(config.drop_from_filter(&manifest(&[])), Dropped::Nothing);
    }

    #[test]
    fn new_collections_of_the_system_scope_are_hidden_on_every_connection_once() {
        let before = filter::exclusions(&StreamFilter::All, &manifest(&[("_system", "8", &["9"])]));
        let mut config = config(StreamFilter::All, before.clone());
        let after = manifest(&[("_system", "8", &["9", "a"])]);
        let learned = config.exclude_by_manifest(&after).unwrap();
        assert_ne!(learned, before);
        assert_eq!(config.delivery.exclusions, learned);
        assert_eq!(config.exclude_by_manifest(&after), None);

        let of_connection = before.with_system_scope(Some(ScopeId(8)), [CollectionId(11)]);
        config.exclude(&of_connection);
        let mut both = learned;
        both.merge(&of_connection);
        assert_eq!(config.delivery.exclusions, both);
    }
}
