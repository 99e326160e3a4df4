//! Which items of a vBucket a stream carries.

use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, ScopeId, Seqno, StreamId};
use rustc_hash::FxHashSet;
use serde_json::{Map, Value};
use thiserror::Error;

use super::{BucketSource, Item, ItemKind, Privilege, ServerVersion, VBucketSource};

/// Why the JSON value of a stream request is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(super) enum InvalidFilter {
    #[error("the value is longer than {} bytes", RequestValue::MAX_LEN)]
    TooLong,
    #[error("the value is not a JSON object")]
    NotAnObject,
    #[error("the value has no member this server knows")]
    NothingKnown,
    #[error("{0:?} has the wrong type")]
    WrongType(&'static str),
    #[error("a scope and collections exclude each other")]
    ScopeAndCollections,
}

/// The members of a stream request's value (DCP page "stream-request-value"); none for an empty
/// one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestValue {
    pub(super) collections: Option<Vec<CollectionId>>,
    pub(super) scope: Option<ScopeId>,
    /// As sent, cut to 16 bits; 0 is not a valid id.
    pub(super) stream_id: Option<StreamId>,
    pub(super) purge_seqno: Seqno,
}

impl RequestValue {
    /// Longest value that is parsed, in bytes: ten times the length of one that lists all
    /// collections a bucket may have.
    const MAX_LEN: usize = 256 * 1024;

    /// Reads the value; unknown members next to a known one are ignored.
    pub(super) fn parse(value: &[u8], version: ServerVersion) -> Result<Self, InvalidFilter> {
        if value.is_empty() {
            return Ok(Self::default());
        }
        if value.len() > Self::MAX_LEN {
            return Err(InvalidFilter::TooLong);
        }
        let object: Map<String, Value> =
            serde_json::from_slice(value).map_err(|_| InvalidFilter::NotAnObject)?;
        // Purge seqnos were added with 8.0.
        let takes_purge_seqno = version.is_at_least(8, 0);
        let known = ["uid", "collections", "scope", "sid", "purge_seqno"];
        let known = known.get(..known.len() - usize::from(!takes_purge_seqno)).unwrap_or(&known);
        if !known.iter().any(|&name| object.contains_key(name)) {
            return Err(InvalidFilter::NothingKnown);
        }
        let parsed = Self {
            collections: member(&object, "collections", collections)?,
            scope: member(&object, "scope", |value| hex(value).map(ScopeId))?,
            stream_id: member(&object, "sid", stream_id)?,
            purge_seqno: if takes_purge_seqno {
                member(&object, "purge_seqno", decimal)?.unwrap_or_default()
            } else {
                Seqno::ZERO
            },
        };
        if parsed.scope.is_some() && parsed.collections.is_some() {
            return Err(InvalidFilter::ScopeAndCollections);
        }
        Ok(parsed)
    }

    /// Whether it restricts the stream to a scope or collections.
    pub(super) const fn is_filtered(&self) -> bool {
        self.collections.is_some() || self.scope.is_some()
    }
}

fn member<T>(
    object: &Map<String, Value>,
    name: &'static str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, InvalidFilter> {
    object.get(name).map(|value| read(value).ok_or(InvalidFilter::WrongType(name))).transpose()
}

fn hex(value: &Value) -> Option<u32> {
    let digits = value.as_str()?;
    if digits.starts_with('+') {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}

fn collections(value: &Value) -> Option<Vec<CollectionId>> {
    value.as_array()?.iter().map(|id| hex(id).map(CollectionId)).collect()
}

fn decimal(value: &Value) -> Option<Seqno> {
    let digits = value.as_str()?;
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok().map(Seqno)
}

fn stream_id(value: &Value) -> Option<StreamId> {
    // Larger numbers lose their upper bits, as in the server.
    let [.., high, low] = value.as_u64()?.to_be_bytes();
    Some(StreamId(u16::from_be_bytes([high, low])))
}

/// How a stream treats an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// Send it.
    Passes,
    /// It belongs to the stream, but the client only gets its seqno.
    SeqnoOnly,
    /// It does not belong to the stream.
    Foreign,
}

/// Which items of a vBucket a stream carries (DCP page "collections"); it follows the creation and
/// drop of collections as the stream passes their events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    rule: Rule,
    /// Nothing can pass from now on.
    exhausted: bool,
    /// Whether the client understands modifications of collections, which exist only as
    /// FlatBuffers.
    tells_modifications: bool,
    view: View,
    /// Whether a deletion was left out because the view skips them.
    has_skipped: bool,
}

/// What a client wants of the items that pass its filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Prepares, commits and aborts of durable writes, not just their results.
    pub(super) sync_writes: bool,
    /// No deletions of documents and no drops: the client has nothing yet.
    pub(super) skips_deletions: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Everything.
    PassThrough,
    /// The documents of the default collection, for clients without collections.
    DefaultDocuments,
    /// The collections named.
    Collections(FxHashSet<CollectionId>),
    /// A scope, with the collections it has at this point of the stream.
    Scope { id: ScopeId, collections: FxHashSet<CollectionId> },
}

/// Something that a filter names does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Collection,
    Scope,
}

impl Filter {
    /// The filter for a client with collections.
    pub(super) fn new<S: BucketSource>(value: &RequestValue, source: &S) -> Result<Self, Missing> {
        if let Some(ids) = &value.collections {
            // The bucket's manifest decides, since a replica may not have caught up with it yet.
            if !ids.iter().all(|&id| source.has_collection(id)) {
                return Err(Missing::Collection);
            }
            return Ok(Self::from(Rule::Collections(ids.iter().copied().collect())));
        }
        let Some(id) = value.scope else {
            return Ok(Self::from(Rule::PassThrough));
        };
        let collections = source.scope_collections(id).ok_or(Missing::Scope)?;
        let collections = collections.into_iter().collect();
        Ok(Self::from(Rule::Scope { id, collections }))
    }

    /// The same, with or without modifications of collections.
    pub(super) fn telling_modifications(self, tells_modifications: bool) -> Self {
        Self { tells_modifications, ..self }
    }

    /// The filter for a client without collections.
    pub(super) fn default_documents(vbucket: &impl VBucketSource) -> Result<Self, Missing> {
        if vbucket.collection_high_seqno(CollectionId::DEFAULT).is_none() {
            return Err(Missing::Collection);
        }
        Ok(Self::from(Rule::DefaultDocuments))
    }

    /// What the client wants of the items that pass.
    pub(super) const fn view(&self) -> View {
        self.view
    }

    /// The same, mutable.
    pub(super) const fn view_mut(&mut self) -> &mut View {
        &mut self.view
    }

    /// Whether a deletion was left out because the view skips them.
    pub(super) const fn has_skipped(&self) -> bool {
        self.has_skipped
    }

    /// The first load is over, or does not come from disk in the order of seqnos.
    pub(super) const fn stop_skipping(&mut self) {
        self.view.skips_deletions = false;
        self.has_skipped = false;
    }

    /// Whether the client knows of collections.
    pub(super) const fn is_collection_aware(&self) -> bool {
        !matches!(self.rule, Rule::DefaultDocuments)
    }

    /// Whether every item belongs to the stream, sent or not; checking one then has no side
    /// effects.
    pub(super) const fn is_pass_through(&self) -> bool {
        matches!(self.rule, Rule::PassThrough)
    }

    /// Whether nothing can pass from now on.
    pub(super) const fn is_exhausted(&self) -> bool {
        self.exhausted
    }

    /// The collections whose documents pass; `None` without a filter.
    pub(super) fn collections(&self) -> Option<Vec<CollectionId>> {
        match &self.rule {
            Rule::PassThrough => None,
            Rule::DefaultDocuments => Some(vec![CollectionId::DEFAULT]),
            Rule::Collections(ids) | Rule::Scope { collections: ids, .. } => {
                Some(ids.iter().copied().collect())
            }
        }
    }

    /// Whether the client's user may read the items that pass.
    pub(super) fn may_be_read<S: BucketSource>(&self, source: &S) -> bool {
        match self.collections() {
            None => source.has_privilege(Privilege::StreamBucket),
            Some(collections) => collections
                .into_iter()
                .all(|collection| source.has_privilege(Privilege::StreamCollection(collection))),
        }
    }

    /// Highest seqno of the items that pass: `None` without a filter, `Err` if the vBucket lacks
    /// one of its collections.
    pub(super) fn high_seqno(
        &self,
        vbucket: &impl VBucketSource,
    ) -> Result<Option<Seqno>, Missing> {
        let highest = |ids: &FxHashSet<CollectionId>| {
            ids.iter().try_fold(Seqno::ZERO, |high, &id| {
                vbucket.collection_high_seqno(id).map(|seqno| high.max(seqno))
            })
        };
        let high = match &self.rule {
            Rule::PassThrough => return Ok(None),
            Rule::DefaultDocuments => vbucket.collection_high_seqno(CollectionId::DEFAULT),
            Rule::Collections(ids) | Rule::Scope { collections: ids, .. } => highest(ids),
        };
        high.map(Some).ok_or(Missing::Collection)
    }

    /// How the stream treats `item`, the next one of its vBucket.
    pub(super) fn check(&mut self, item: &Item) -> Passage {
        match item.kind {
            ItemKind::SystemEvent { id, scope_id, .. } => {
                self.check_event(id, scope_id, item.collection_id)
            }
            _ => {
                let passes = match &self.rule {
                    Rule::PassThrough => true,
                    Rule::DefaultDocuments => item.collection_id == CollectionId::DEFAULT,
                    Rule::Collections(ids) | Rule::Scope { collections: ids, .. } => {
                        ids.contains(&item.collection_id)
                    }
                };
                if passes && !self.exhausted { self.look(item) } else { Passage::Foreign }
            }
        }
    }

    /// How a document that belongs to the stream is passed on to the client.
    const fn look(&mut self, item: &Item) -> Passage {
        match item.kind {
            ItemKind::Prepare { .. } | ItemKind::Abort { .. } if !self.view.sync_writes => {
                // Clients without collections have no message for it.
                if self.is_collection_aware() { Passage::SeqnoOnly } else { Passage::Foreign }
            }
            ItemKind::Deletion | ItemKind::Expiration if self.view.skips_deletions => self.skip(),
            _ => Passage::Passes,
        }
    }

    const fn skip(&mut self) -> Passage {
        self.has_skipped = true;
        Passage::SeqnoOnly
    }

    fn check_event(
        &mut self,
        event: SystemEventId,
        scope: ScopeId,
        collection: CollectionId,
    ) -> Passage {
        let of_scope = matches!(event, SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE);
        let passes = match &mut self.rule {
            Rule::PassThrough => true,
            Rule::DefaultDocuments => {
                if event == SystemEventId::END_COLLECTION && collection == CollectionId::DEFAULT {
                    self.exhausted = true;
                }
                false
            }
            Rule::Collections(_) if of_scope => false,
            Rule::Collections(ids) if event == SystemEventId::END_COLLECTION => {
                let removed = ids.remove(&collection);
                self.exhausted = ids.is_empty();
                removed
            }
            Rule::Collections(ids) => ids.contains(&collection),
            Rule::Scope { id, .. } if *id != scope => false,
            Rule::Scope { collections, .. } => {
                match event {
                    SystemEventId::BEGIN_COLLECTION => _ = collections.insert(collection),
                    SystemEventId::END_COLLECTION => _ = collections.remove(&collection),
                    SystemEventId::DROP_SCOPE => self.exhausted = true,
                    _ => {}
                }
                true
            }
        };
        if !passes {
            return Passage::Foreign;
        }
        if event == SystemEventId::MODIFY_COLLECTION && !self.tells_modifications {
            return Passage::SeqnoOnly;
        }
        // Storage keeps what was dropped as a tombstone too.
        let is_drop = matches!(event, SystemEventId::END_COLLECTION | SystemEventId::DROP_SCOPE);
        if is_drop && self.view.skips_deletions {
            return self.skip();
        }
        Passage::Passes
    }
}

impl From<Rule> for Filter {
    fn from(rule: Rule) -> Self {
        let exhausted = matches!(&rule, Rule::Collections(ids) if ids.is_empty());
        let view = View::default();
        Self { rule, exhausted, tells_modifications: false, view, has_skipped: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purge_seqnos_are_known_since_8_0() {
        const OLDER: ServerVersion = ServerVersion { major: 7, minor: 6, patch: 11 };
        let purge_seqno = |value: &[u8], version| {
            RequestValue::parse(value, version).map(|value| value.purge_seqno)
        };
        let (alone, with_uid) = (br#"{"purge_seqno":"15"}"#, br#"{"uid":"0","purge_seqno":"15"}"#);
        assert_eq!(purge_seqno(alone, ServerVersion::NEWEST).unwrap(), Seqno(15));
        assert_eq!(purge_seqno(with_uid, OLDER).unwrap(), Seqno(0), "not a member it knows");
        assert!(matches!(purge_seqno(alone, OLDER), Err(InvalidFilter::NothingKnown)));
    }

    #[test]
    fn filter_may_list_all_collections_that_a_bucket_may_have() {
        let ids = vec![r#""ffffffff""#; 1200].join(",");
        let value = format!(r#"{{"collections":[{ids}]}}"#);
        let read = RequestValue::parse(value.as_bytes(), ServerVersion::NEWEST).unwrap();
        assert_eq!(read.collections.map(|ids| ids.len()), Some(1200));
    }

    #[test]
    fn value_of_the_longest_length_is_read_and_one_byte_more_is_not() {
        let value = |len: usize| {
            let mut padded = br#"{"sid":7}"#.to_vec();
            padded.resize(len, b' ');
            RequestValue::parse(&padded, ServerVersion::NEWEST)
        };
        assert_eq!(value(RequestValue::MAX_LEN).unwrap().stream_id, Some(StreamId(7)));
        assert_eq!(value(RequestValue::MAX_LEN + 1), Err(InvalidFilter::TooLong));
    }
}
