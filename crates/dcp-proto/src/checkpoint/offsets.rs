//! The progress of consecutive bounded reads, as a small JSON document.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{CheckpointError, FilterDocument, Form, MadeWith, Origin, StoredFilter};
use crate::topology::Manifest;

const VERSION: u64 = 3;

/// Version whose filter has no patterns, keys, operations or time.
const VERSION_WITHOUT_ROWS: u64 = 2;

/// Version without a filter.
const VERSION_WITHOUT_FILTER: u64 = 1;

/// Most vBuckets that a bucket can have.
const MAX_VBUCKETS: usize = 1 << 16;

/// How far one vBucket has been read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offset {
    /// Last seqno that was read.
    pub seqno: Seqno,
    /// Newest branch of the vBucket's history when that seqno was chosen; not necessarily the one
    /// that contains the seqno. 0 before the first change.
    pub vbuuid: Vbuuid,
    /// How many rollbacks were seen.
    pub epoch: u32,
}

/// How far each vBucket of a bucket has been read.
///
/// ```
/// use dcp_proto::checkpoint::{Offset, Offsets, StoredFilter};
/// use dcp_wire::{Seqno, Vbid, Vbuuid};
///
/// let mut offsets = Offsets::new("6cf5", StoredFilter::default(), 2);
/// offsets.set(Vbid(1), Offset { seqno: Seqno(7), vbuuid: Vbuuid(9), epoch: 0 });
/// assert_eq!(Offsets::from_json(&offsets.to_json())?, offsets);
/// # Ok::<(), dcp_proto::checkpoint::CheckpointError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets {
    origin: Origin,
    vbuckets: Vec<Offset>,
}

impl Offsets {
    /// Offsets before the first change of every vBucket.
    #[must_use]
    pub fn new(bucket_uuid: &str, filter: StoredFilter, num_vbuckets: u16) -> Self {
        let vbuckets = vec![Offset::default(); usize::from(num_vbuckets)];
        Self { origin: Origin::new(bucket_uuid, filter), vbuckets }
    }

    /// Identity of the bucket.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        &self.origin.bucket_uuid
    }

    /// The filter of the reads; `None` if an earlier release, which stored none, wrote the offsets.
    #[must_use]
    pub fn filter(&self) -> Option<&StoredFilter> {
        self.origin.filter()
    }

    /// Number of vBuckets of the bucket.
    #[must_use]
    pub const fn num_vbuckets(&self) -> usize {
        self.vbuckets.len()
    }

    /// How far a vBucket has been read; the default for one that the bucket does not have.
    #[must_use]
    pub fn get(&self, vbid: Vbid) -> Offset {
        self.vbuckets.get(usize::from(vbid.0)).copied().unwrap_or_default()
    }

    /// Sets how far a vBucket has been read. Has no effect for one that the bucket does not have.
    pub fn set(&mut self, vbid: Vbid, offset: Offset) {
        if let Some(slot) = self.vbuckets.get_mut(usize::from(vbid.0)) {
            *slot = offset;
        }
    }

    /// All vBuckets, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (Vbid, Offset)> {
        (0..=u16::MAX).map(Vbid).zip(self.vbuckets.iter().copied())
    }

    /// Checks that the offsets belong to a bucket, regardless of their filter: sufficient for
    /// offsets that only define where to stop.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`] or [`CheckpointError::OtherShape`].
    pub fn check(&self, bucket_uuid: &str, num_vbuckets: usize) -> Result<(), CheckpointError> {
        self.origin.check_bucket(bucket_uuid)?;
        let found = self.vbuckets.len();
        if found != num_vbuckets {
            return Err(CheckpointError::OtherShape { found, expected: num_vbuckets });
        }
        Ok(())
    }

    /// The offsets to continue from with `filter`. They store `filter` from then on, as do the
    /// offsets planned from them, so that a narrowed filter cannot be widened again.
    ///
    /// # Errors
    /// Those of [`check`](Self::check); [`CheckpointError::OtherFilter`] if the offsets were not made
    /// with `filter` or one that contains it.
    pub fn narrowed_to(
        self,
        bucket_uuid: &str,
        num_vbuckets: usize,
        filter: &StoredFilter,
        manifest: &Manifest,
    ) -> Result<Self, CheckpointError> {
        self.check(bucket_uuid, num_vbuckets)?;
        Ok(Self { origin: self.origin.narrowed_to(bucket_uuid, filter, manifest)?, ..self })
    }

    /// The offsets as JSON in one line, about 17 KB for 1024 vBuckets.
    ///
    /// `v` is the version, `bucket` the bucket's UUID, `f` the filter, `s` the seqnos by vBucket,
    /// `u` the vbuuids in base64 with 8 bytes each, `e` the epochs above 0, `c` the CRC-32 of the
    /// other members. Version 1 has no `f`; version 3 is that of a filter by patterns of collections,
    /// keys, operations or time.
    #[must_use]
    pub fn to_json(&self) -> String {
        let content = Content {
            v: match self.filter() {
                None => VERSION_WITHOUT_FILTER,
                Some(filter) if !filter.leaves_out() => VERSION_WITHOUT_ROWS,
                Some(_) => VERSION,
            },
            bucket: self.bucket_uuid().to_owned(),
            f: self.filter().map(FilterDocument::from),
            s: self.vbuckets.iter().map(|offset| offset.seqno.0).collect(),
            u: BASE64.encode(
                self.vbuckets
                    .iter()
                    .flat_map(|offset| offset.vbuuid.0.to_be_bytes())
                    .collect::<Vec<_>>(),
            ),
            e: epochs(&self.vbuckets),
        };
        let c = content.crc();
        to_text(&Document { content, c })
    }

    /// Reads a document that [`to_json`](Self::to_json) wrote, in this release or an older one.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Version`].
    pub fn from_json(json: &str) -> Result<Self, CheckpointError> {
        let preamble: Preamble = serde_json::from_str(json).map_err(damaged)?;
        if !(VERSION_WITHOUT_FILTER..=VERSION).contains(&preamble.v) {
            return Err(CheckpointError::Version {
                form: Form::Offsets,
                found: preamble.v,
                supported: VERSION,
            });
        }
        let Document { content, c } = serde_json::from_str(json).map_err(damaged)?;
        if content.crc() != c {
            return Err(damaged("checksum mismatch"));
        }
        content.offsets()
    }
}

#[derive(Deserialize)]
struct Preamble {
    v: u64,
}

#[derive(Deserialize, Serialize)]
struct Document {
    #[serde(flatten)]
    content: Content,
    c: String,
}

#[derive(Deserialize, Serialize)]
struct Content {
    v: u64,
    bucket: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    f: Option<FilterDocument>,
    s: Vec<u64>,
    u: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    e: BTreeMap<String, u32>,
}

impl Content {
    /// CRC-32 of the members without spaces, so that a document may be reformatted.
    fn crc(&self) -> String {
        format!("{:08x}", crc32fast::hash(to_text(self).as_bytes()))
    }

    fn offsets(self) -> Result<Offsets, CheckpointError> {
        if self.s.is_empty() || self.s.len() > MAX_VBUCKETS {
            return Err(damaged("too many vBuckets"));
        }
        if self.f.is_some() != (self.v != VERSION_WITHOUT_FILTER) {
            return Err(damaged("the version and the filter do not match"));
        }
        let made_with = match self.f {
            Some(filter) => MadeWith::Filter(Arc::new(filter.try_into().map_err(damaged)?)),
            None => MadeWith::Unknown,
        };
        let origin = Origin { bucket_uuid: self.bucket.into(), made_with };
        let vbuuids = BASE64.decode(&self.u).map_err(damaged)?;
        let (vbuuids, rest) = vbuuids.as_chunks::<8>();
        if vbuuids.len() != self.s.len() || !rest.is_empty() {
            return Err(damaged("the numbers of seqnos and vbuuids differ"));
        }
        let offset = |(&seqno, vbuuid): (&u64, &[u8; 8])| Offset {
            seqno: Seqno(seqno),
            vbuuid: Vbuuid(u64::from_be_bytes(*vbuuid)),
            epoch: 0,
        };
        let vbuckets = self.s.iter().zip(vbuuids).map(offset).collect();
        let mut offsets = Offsets { origin, vbuckets };
        for (name, epoch) in self.e {
            let slot = name.parse().ok().and_then(|vbid: usize| offsets.vbuckets.get_mut(vbid));
            let Some(slot) = slot else {
                return Err(damaged("an epoch of a vBucket that does not exist"));
            };
            slot.epoch = epoch;
        }
        Ok(offsets)
    }
}

fn damaged(what: impl ToString) -> CheckpointError {
    CheckpointError::damaged(Form::Offsets, what.to_string())
}

fn epochs(vbuckets: &[Offset]) -> BTreeMap<String, u32> {
    let some = vbuckets.iter().enumerate().filter(|(_, offset)| offset.epoch > 0);
    some.map(|(vbid, offset)| (vbid.to_string(), offset.epoch)).collect()
}

/// JSON of numbers and strings, which cannot fail.
fn to_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
