//! The checkpoint as a JSON document.
//!
//! `{"format":"dcp_rs checkpoint","version":1,"crc32":"xxxxxxxx","content":{...}}`, where the CRC
//! is that of the content written without spaces and in this order, so that a document may be
//! reformatted but not changed. A later version adds a branch to [`read`] and keeps the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_wire::message::FailoverEntry;
use dcp_wire::{ManifestUid, Seqno, Vbid, Vbuuid};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Checkpoint, CheckpointError, FilterHash};
use crate::{FailoverLog, Position, Snapshot};

const FORMAT: &str = "dcp_rs checkpoint";
const VERSION: u64 = 1;

/// What every version has; the rest is read once the version is known.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct DocumentV1<'a> {
    #[serde(borrow)]
    format: std::borrow::Cow<'a, str>,
    version: u64,
    crc32: Hex<u32>,
    content: ContentV1,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ContentV1 {
    bucket_uuid: String,
    filter: Hex<u64>,
    positions: BTreeMap<VbidKey, PositionV1>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PositionV1 {
    seqno: u64,
    snapshot: [u64; 2],
    /// Newest first; empty if there was no stream yet.
    failover_log: Vec<(Hex<u64>, u64)>,
    manifest: Hex<u64>,
    purge_seqno: u64,
    epoch: u32,
}

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
    let content = ContentV1 {
        bucket_uuid: checkpoint.bucket_uuid.to_string(),
        filter: Hex(checkpoint.filter_hash.0),
        positions: checkpoint
            .positions()
            .map(|(vbid, position)| (VbidKey(vbid.0), PositionV1::from(position)))
            .collect(),
    };
    let document = DocumentV1 {
        format: FORMAT.into(),
        version: VERSION,
        crc32: Hex(crc32(&content)),
        content,
    };
    to_json(&document)
}

pub(super) fn read(json: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let preamble: Preamble = serde_json::from_slice(json)
        .map_err(|_| CheckpointError::Damaged("not a checkpoint document"))?;
    if preamble.format != FORMAT {
        return Err(CheckpointError::Damaged("another kind of document"));
    }
    match preamble.version {
        1 => read_v1(json),
        found => Err(CheckpointError::Version { found, supported: VERSION }),
    }
}

fn read_v1(json: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let document: DocumentV1<'_> = serde_json::from_slice(json)
        .map_err(|_| CheckpointError::Damaged("a member is missing or has the wrong form"))?;
    let content = document.content;
    if crc32(&content) != document.crc32.0 {
        return Err(CheckpointError::Damaged("checksum mismatch"));
    }
    let mut checkpoint = Checkpoint::new(&content.bucket_uuid, FilterHash(content.filter.0));
    for (vbid, position) in content.positions {
        checkpoint.put(Vbid(vbid.0), Some(Arc::new(position.try_into()?)));
    }
    Ok(checkpoint)
}

fn crc32(content: &ContentV1) -> u32 {
    crc32fast::hash(to_json(content).as_bytes())
}

fn to_json(value: &impl Serialize) -> String {
    // Strings, numbers and maps with string keys only: there is nothing JSON cannot hold.
    serde_json::to_string(value).unwrap_or_default()
}

impl From<&Position> for PositionV1 {
    fn from(position: &Position) -> Self {
        let log = position.failover_log.as_ref().map_or(&[][..], FailoverLog::entries);
        Self {
            seqno: position.seqno.0,
            snapshot: [position.snapshot.start.0, position.snapshot.end.0],
            failover_log: log.iter().map(|entry| (Hex(entry.vbuuid.0), entry.seqno.0)).collect(),
            manifest: Hex(position.manifest_uid.0),
            purge_seqno: position.purge_seqno.0,
            epoch: position.epoch,
        }
    }
}

impl TryFrom<PositionV1> for Position {
    type Error = CheckpointError;

    fn try_from(position: PositionV1) -> Result<Self, CheckpointError> {
        let [start, end] = position.snapshot;
        if start > position.seqno || position.seqno > end {
            return Err(CheckpointError::Damaged("a seqno lies outside its snapshot"));
        }
        let entries = position
            .failover_log
            .into_iter()
            .map(|(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid.0), seqno: Seqno(seqno) });
        Ok(Self {
            seqno: Seqno(position.seqno),
            snapshot: Snapshot { start: Seqno(start), end: Seqno(end) },
            failover_log: FailoverLog::new(entries.collect()).ok(),
            manifest_uid: ManifestUid(position.manifest.0),
            purge_seqno: Seqno(position.purge_seqno),
            epoch: position.epoch,
        })
    }
}
