//! The checkpoint as a JSON document.
//!
//! `{"format":"dcp_rs checkpoint","version":2,"crc32":"xxxxxxxx","content":{...}}`, where the CRC
//! is that of the content written without spaces and in this order, so that a document may be
//! reformatted but not changed. A later version adds a branch to [`read`] and keeps the others.
//!
//! Version 2 has, beside a position, the points below it that a rollback can go back to, oldest
//! first; of each only what differs from the position. Version 3 stores the filter, of which
//! earlier versions have only a hash; version 4, which is written only if it is needed, adds
//! collection patterns, keys, operations and a time to the filter. A checkpoint that was read from
//! version 2 or earlier, and has not been used with a filter since, is written as version 2 again.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_wire::message::FailoverEntry;
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Seqno, Vbid, Vbuuid};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Checkpoint, CheckpointEntry, CheckpointError, Form, MadeWith, Origin, StoredFilter};
use crate::consumer::StreamFilter;
use crate::{
    CollectionPatterns, CompletePoint, FailoverLog, History, Op, Position, RowFilter, Snapshot,
};

const FORMAT: &str = "dcp_rs checkpoint";
const VERSION: u64 = 4;

/// Newest version whose filter has no patterns, keys, operations or time.
const VERSION_WITHOUT_ROWS: u64 = 3;

/// Newest version with a hash in place of the filter.
const VERSION_WITH_HASH: u64 = 2;

/// What every version has; the rest is read once the version is known.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u64,
}

/// A document: its kind and version, and its content with a checksum.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Envelope<C> {
    format: String,
    version: u64,
    crc32: Hex<u32>,
    content: C,
}

impl<C: Serialize> Envelope<C> {
    pub(crate) fn write(format: &str, version: u64, content: C) -> String {
        let crc32 = Hex(crc32(&content));
        to_json(&Self { format: format.to_owned(), version, crc32, content })
    }
}

impl<C: DeserializeOwned + Serialize> Envelope<C> {
    /// The content of a document, of a version that has this form.
    pub(crate) fn read(json: &[u8], form: Form) -> Result<C, CheckpointError> {
        let damaged = |what| CheckpointError::damaged(form, what);
        let document: Self = serde_json::from_slice(json)
            .map_err(|_| damaged("a member is missing or has the wrong form"))?;
        if crc32(&document.content) != document.crc32.0 {
            return Err(damaged("checksum mismatch"));
        }
        Ok(document.content)
    }
}

impl Envelope<()> {
    /// The version of a document of one kind.
    pub(crate) fn version_of(
        json: &[u8],
        format: &str,
        form: Form,
    ) -> Result<u64, CheckpointError> {
        let damaged = |what| CheckpointError::damaged(form, what);
        let preamble: Preamble =
            serde_json::from_slice(json).map_err(|_| damaged("not such a document"))?;
        if preamble.format != format {
            return Err(damaged("another kind of document"));
        }
        Ok(preamble.version)
    }
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Content<F> {
    bucket_uuid: String,
    filter: F,
    positions: BTreeMap<VbidKey, PositionDocument>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PositionDocument {
    seqno: u64,
    snapshot: [u64; 2],
    /// Newest first; empty if there was no stream yet.
    failover_log: Log,
    manifest: Hex<u64>,
    purge_seqno: u64,
    epoch: u32,
    /// Oldest first, below the position; absent in version 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    earlier: Vec<PointDocument>,
}

/// Members that are left out have the value they have in the position.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PointDocument {
    seqno: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failover_log: Option<Log>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    manifest: Option<Hex<u64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    purge_seqno: Option<u64>,
}

/// A filter in a document: a scope, collections or neither.
#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FilterDocument {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scope: Option<Hex<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    collections: Option<Vec<Hex<u32>>>,
    system_documents: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    patterns: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ops: Option<Vec<String>>,
    /// In nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since: Option<u64>,
}

type Log = Vec<(Hex<u64>, u64)>;

/// Fixed-width lower-case hexadecimal text.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Hex<T>(T);

macro_rules! hex {
    ($int:ty, $width:literal) => {
        impl Serialize for Hex<$int> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(&format_args!(concat!("{:0", $width, "x}"), self.0))
            }
        }

        impl<'de> Deserialize<'de> for Hex<$int> {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let number = <$int>::from_str_radix(&text, 16).map_err(D::Error::custom)?;
                if format!(concat!("{:0", $width, "x}"), number) != text {
                    return Err(D::Error::custom("not fixed-width lower-case hexadecimal"));
                }
                Ok(Self(number))
            }
        }
    };
}
hex!(u32, 8);
hex!(u64, 16);

/// A vBucket id as a member name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct VbidKey(u16);

impl Serialize for VbidKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for VbidKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let vbid = text.parse::<u16>().map_err(D::Error::custom)?;
        if vbid.to_string() != text {
            return Err(D::Error::custom("not a vBucket id"));
        }
        Ok(Self(vbid))
    }
}

pub(super) fn write(checkpoint: &Checkpoint) -> String {
    match &checkpoint.origin.made_with {
        MadeWith::Filter(filter) => {
            // Without these filters, it has the version that earlier releases read.
            let version = if filter.leaves_out() { VERSION } else { VERSION_WITHOUT_ROWS };
            write_version(version, FilterDocument::from(&**filter), checkpoint)
        }
        MadeWith::Hash(hash) => write_version(VERSION_WITH_HASH, Hex(*hash), checkpoint),
        // Only offsets have none.
        MadeWith::Unknown => write_version(VERSION_WITH_HASH, Hex(0_u64), checkpoint),
    }
}

fn write_version(version: u64, filter: impl Serialize, checkpoint: &Checkpoint) -> String {
    let content = Content {
        bucket_uuid: checkpoint.bucket_uuid().to_owned(),
        filter,
        positions: checkpoint
            .entries()
            .map(|(vbid, entry)| (VbidKey(vbid.0), PositionDocument::from(&**entry)))
            .collect(),
    };
    Envelope::write(FORMAT, version, content)
}

pub(super) fn read(json: &[u8]) -> Result<Checkpoint, CheckpointError> {
    match Envelope::version_of(json, FORMAT, Form::Checkpoint)? {
        1 | VERSION_WITH_HASH => read_version::<Hex<u64>>(json),
        version @ (VERSION_WITHOUT_ROWS | VERSION) => {
            let read = read_version::<FilterDocument>(json)?;
            // The checksum does not cover the version.
            let leaves_out = read.filter().is_some_and(StoredFilter::leaves_out);
            if leaves_out != (version == VERSION) {
                return Err(damaged("the version and the filter do not match"));
            }
            Ok(read)
        }
        found => {
            Err(CheckpointError::Version { form: Form::Checkpoint, found, supported: VERSION })
        }
    }
}

/// Reads a version by its form of a filter.
fn read_version<F>(json: &[u8]) -> Result<Checkpoint, CheckpointError>
where
    F: DeserializeOwned + Serialize + TryInto<MadeWith, Error = CheckpointError>,
{
    let content: Content<F> = Envelope::read(json, Form::Checkpoint)?;
    let bucket_uuid = content.bucket_uuid.into();
    let origin = Origin { bucket_uuid, made_with: content.filter.try_into()? };
    let mut checkpoint = Checkpoint::of(origin);
    for (vbid, position) in content.positions {
        checkpoint.put(Vbid(vbid.0), Arc::new(position.try_into()?));
    }
    Ok(checkpoint)
}

fn damaged(what: &'static str) -> CheckpointError {
    CheckpointError::damaged(Form::Checkpoint, what)
}

fn crc32(content: &impl Serialize) -> u32 {
    crc32fast::hash(to_json(content).as_bytes())
}

fn to_json(value: &impl Serialize) -> String {
    // Strings, numbers and maps with string keys only: there is nothing JSON cannot hold.
    serde_json::to_string(value).unwrap_or_default()
}

impl TryFrom<Hex<u64>> for MadeWith {
    type Error = CheckpointError;

    fn try_from(hash: Hex<u64>) -> Result<Self, CheckpointError> {
        Ok(Self::Hash(hash.0))
    }
}

impl TryFrom<FilterDocument> for MadeWith {
    type Error = CheckpointError;

    fn try_from(filter: FilterDocument) -> Result<Self, CheckpointError> {
        let filter = StoredFilter::try_from(filter).map_err(damaged)?;
        Ok(Self::Filter(Arc::new(filter)))
    }
}

impl From<&StoredFilter> for FilterDocument {
    fn from(filter: &StoredFilter) -> Self {
        let (scope, collections) = match filter.documents() {
            StreamFilter::All => (None, None),
            StreamFilter::Scope(id) => (Some(Hex(id.0)), None),
            StreamFilter::Collections(ids) => {
                (None, Some(ids.iter().map(|id| Hex(id.0)).collect()))
            }
        };
        let rows = filter.rows();
        let name = |op: &Op| op.name().to_owned();
        Self {
            scope,
            collections,
            system_documents: filter.system_documents(),
            patterns: (!filter.patterns().is_all()).then(|| filter.patterns().names()),
            keys: rows.keys().map(<[String]>::to_vec),
            ops: rows.ops().map(|ops| ops.iter().map(name).collect()),
            since: rows.since(),
        }
    }
}

impl TryFrom<FilterDocument> for StoredFilter {
    /// What is wrong.
    type Error = &'static str;

    fn try_from(read: FilterDocument) -> Result<Self, &'static str> {
        let documents = match (read.scope, read.collections) {
            (None, None) => StreamFilter::All,
            (Some(id), None) => StreamFilter::Scope(ScopeId(id.0)),
            (None, Some(ids)) => {
                StreamFilter::Collections(ids.iter().map(|id| CollectionId(id.0)).collect())
            }
            (Some(_), Some(_)) => return Err("the filter has both a scope and collections"),
        };
        let op = |name: String| {
            let op = Op::ALL.into_iter().find(|op| op.name() == name);
            op.ok_or("the filter names an unknown operation")
        };
        let ops = read.ops.map(|ops| ops.into_iter().map(op).collect::<Result<_, _>>());
        let rows = RowFilter::new(read.keys, ops.transpose()?, read.since)
            .map_err(|_| "the filter's keys or operations are empty, too many or too long")?;
        let filter = Self::new(documents, read.system_documents).with_rows(rows);
        let Some(patterns) = read.patterns else { return Ok(filter) };
        if matches!(filter.documents(), StreamFilter::Collections(_)) {
            return Err("the filter has both collections and collection patterns");
        }
        let patterns = CollectionPatterns::new(patterns.iter().map(String::as_str))
            .map_err(|_| "the filter's collection patterns are empty, too many or too long")?;
        Ok(filter.with_patterns(patterns))
    }
}

impl From<&CheckpointEntry> for PositionDocument {
    fn from(entry: &CheckpointEntry) -> Self {
        let CheckpointEntry { position, history } = entry;
        let changed = |point: &CompletePoint| PointDocument {
            seqno: point.seqno.0,
            failover_log: (point.failover_log != position.failover_log)
                .then(|| write_log(point.failover_log.as_ref())),
            manifest: (point.manifest_uid != position.manifest_uid)
                .then_some(Hex(point.manifest_uid.0)),
            purge_seqno: (point.purge_seqno != position.purge_seqno).then_some(point.purge_seqno.0),
        };
        Self {
            seqno: position.seqno.0,
            snapshot: [position.snapshot.start.0, position.snapshot.end.0],
            failover_log: write_log(position.failover_log.as_ref()),
            manifest: Hex(position.manifest_uid.0),
            purge_seqno: position.purge_seqno.0,
            epoch: position.epoch,
            earlier: history.points().iter().map(changed).collect(),
        }
    }
}

impl TryFrom<PositionDocument> for CheckpointEntry {
    type Error = CheckpointError;

    fn try_from(read: PositionDocument) -> Result<Self, CheckpointError> {
        let [start, end] = read.snapshot;
        if start > read.seqno || read.seqno > end {
            return Err(damaged("a seqno lies outside its snapshot"));
        }
        let position = Position {
            seqno: Seqno(read.seqno),
            snapshot: Snapshot { start: Seqno(start), end: Seqno(end) },
            failover_log: read_log(read.failover_log),
            manifest_uid: ManifestUid(read.manifest.0),
            purge_seqno: Seqno(read.purge_seqno),
            epoch: read.epoch,
        };
        if read.earlier.last().is_some_and(|newest| newest.seqno > read.seqno) {
            return Err(damaged("an earlier point lies above its position"));
        }
        let point = |point: PointDocument| CompletePoint {
            seqno: Seqno(point.seqno),
            failover_log: point
                .failover_log
                .map_or_else(|| position.failover_log.clone(), read_log),
            manifest_uid: point.manifest.map_or(position.manifest_uid, |uid| ManifestUid(uid.0)),
            purge_seqno: point.purge_seqno.map_or(position.purge_seqno, Seqno),
        };
        let history = History::from_points(read.earlier.into_iter().map(point).collect())
            .ok_or(damaged("earlier points are out of order"))?;
        Ok(Self { position, history })
    }
}

fn write_log(log: Option<&FailoverLog>) -> Log {
    let entries = log.map_or(&[][..], FailoverLog::entries);
    entries.iter().map(|entry| (Hex(entry.vbuuid.0), entry.seqno.0)).collect()
}

fn read_log(log: Log) -> Option<FailoverLog> {
    let entry = |(vbuuid, seqno): (Hex<u64>, u64)| FailoverEntry {
        vbuuid: Vbuuid(vbuuid.0),
        seqno: Seqno(seqno),
    };
    FailoverLog::new(log.into_iter().map(entry).collect()).ok()
}
