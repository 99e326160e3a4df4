//! The progress of consecutive bounded reads, as a small JSON document.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::checkpoint::{FilterDocument, FilterMismatch, StoredFilter};
use crate::topology::Manifest;

const VERSION: u64 = 3;

/// Version whose filter has no patterns, keys, operations or time.
const VERSION_WITHOUT_ROWS: u64 = 2;

/// Version without a filter.
const VERSION_WITHOUT_FILTER: u64 = 1;

/// Most vBuckets that a bucket can have.
const MAX_VBUCKETS: usize = 1 << 16;

/// Why a document cannot be used as offsets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OffsetsError {
    /// The document was truncated or changed, or is not a document of offsets.
    #[error("the offsets are damaged ({what}): restore them, or start with new ones")]
    Damaged {
        /// What is wrong.
        what: String,
    },
    /// A later release wrote the document.
    #[error(
        "the offsets have format version {found}, this release reads up to {VERSION}: use the \
         release that wrote them, or a newer one"
    )]
    Version {
        /// Version of the document.
        found: u64,
    },
    /// The offsets belong to another bucket, or to a deleted one of the same name.
    #[error(
        "the offsets belong to the bucket with the UUID {found}, but this one has {expected}: the \
         bucket was recreated, or the offsets were made for another one; start with new offsets"
    )]
    OtherBucket {
        /// UUID in the offsets.
        found: String,
        /// UUID of the bucket.
        expected: String,
    },
    /// The bucket has another number of vBuckets than the offsets.
    #[error(
        "the offsets cover {found} vBuckets, the bucket has {expected}: start with new offsets"
    )]
    OtherShape {
        /// vBuckets in the offsets.
        found: usize,
        /// vBuckets of the bucket.
        expected: usize,
    },
    /// The read goes beyond the filter that the offsets were made with.
    #[error(
        "the offsets were {0}: use the filter they were made with or a narrower one, or start with \
         new offsets"
    )]
    OtherFilter(FilterMismatch),
}

impl OffsetsError {
    fn damaged(what: impl ToString) -> Self {
        Self::Damaged { what: what.to_string() }
    }
}

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
/// use dcp_proto::checkpoint::StoredFilter;
/// use dcp_proto::micro_batch::{Offset, Offsets};
/// use dcp_wire::{Seqno, Vbid, Vbuuid};
///
/// let mut offsets = Offsets::new("6cf5", StoredFilter::default(), 2);
/// offsets.set(Vbid(1), Offset { seqno: Seqno(7), vbuuid: Vbuuid(9), epoch: 0 });
/// assert_eq!(Offsets::from_json(&offsets.to_json())?, offsets);
/// # Ok::<(), dcp_proto::micro_batch::OffsetsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets {
    bucket_uuid: String,
    filter: Option<StoredFilter>,
    vbuckets: Vec<Offset>,
}

impl Offsets {
    /// Offsets before the first change of every vBucket.
    #[must_use]
    pub fn new(bucket_uuid: &str, filter: StoredFilter, num_vbuckets: u16) -> Self {
        let vbuckets = vec![Offset::default(); usize::from(num_vbuckets)];
        Self { bucket_uuid: bucket_uuid.to_owned(), filter: Some(filter), vbuckets }
    }

    /// Identity of the bucket.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        &self.bucket_uuid
    }

    /// The filter of the reads; `None` if an earlier release, which stored none, wrote the offsets.
    #[must_use]
    pub const fn filter(&self) -> Option<&StoredFilter> {
        self.filter.as_ref()
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
    /// [`OffsetsError::OtherBucket`] or [`OffsetsError::OtherShape`].
    pub fn check(&self, bucket_uuid: &str, num_vbuckets: usize) -> Result<(), OffsetsError> {
        if self.bucket_uuid != bucket_uuid {
            let (found, expected) = (self.bucket_uuid.clone(), bucket_uuid.to_owned());
            return Err(OffsetsError::OtherBucket { found, expected });
        }
        if self.vbuckets.len() != num_vbuckets {
            let (found, expected) = (self.vbuckets.len(), num_vbuckets);
            return Err(OffsetsError::OtherShape { found, expected });
        }
        Ok(())
    }

    /// The offsets to continue from with `filter`. They store `filter` from then on, as do the
    /// offsets planned from them, so that a narrowed filter cannot be widened again.
    ///
    /// # Errors
    /// Those of [`check`](Self::check); [`OffsetsError::OtherFilter`] if the offsets were not made
    /// with `filter` or one that contains it.
    pub fn narrowed_to(
        self,
        bucket_uuid: &str,
        num_vbuckets: usize,
        filter: &StoredFilter,
        manifest: &Manifest,
    ) -> Result<Self, OffsetsError> {
        self.check(bucket_uuid, num_vbuckets)?;
        if let Some(stored) = &self.filter {
            stored.check(filter, manifest).map_err(OffsetsError::OtherFilter)?;
        }
        Ok(Self { filter: Some(filter.clone()), ..self })
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
            v: match &self.filter {
                None => VERSION_WITHOUT_FILTER,
                Some(filter) if !filter.leaves_out() => VERSION_WITHOUT_ROWS,
                Some(_) => VERSION,
            },
            bucket: self.bucket_uuid.clone(),
            f: self.filter.as_ref().map(FilterDocument::from),
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
    /// [`OffsetsError::Damaged`] or [`OffsetsError::Version`].
    pub fn from_json(json: &str) -> Result<Self, OffsetsError> {
        let preamble: Preamble = serde_json::from_str(json).map_err(OffsetsError::damaged)?;
        if !(VERSION_WITHOUT_FILTER..=VERSION).contains(&preamble.v) {
            return Err(OffsetsError::Version { found: preamble.v });
        }
        let Document { content, c } = serde_json::from_str(json).map_err(OffsetsError::damaged)?;
        if content.crc() != c {
            return Err(OffsetsError::damaged("checksum mismatch"));
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

    fn offsets(self) -> Result<Offsets, OffsetsError> {
        if self.s.is_empty() || self.s.len() > MAX_VBUCKETS {
            return Err(OffsetsError::damaged("too many vBuckets"));
        }
        if self.f.is_some() != (self.v != VERSION_WITHOUT_FILTER) {
            return Err(OffsetsError::damaged("the version and the filter do not match"));
        }
        let filter = self.f.map(StoredFilter::try_from).transpose();
        let filter = filter.map_err(OffsetsError::damaged)?;
        let vbuuids = BASE64.decode(&self.u).map_err(OffsetsError::damaged)?;
        let (vbuuids, rest) = vbuuids.as_chunks::<8>();
        if vbuuids.len() != self.s.len() || !rest.is_empty() {
            return Err(OffsetsError::damaged("the numbers of seqnos and vbuuids differ"));
        }
        let offset = |(&seqno, vbuuid): (&u64, &[u8; 8])| Offset {
            seqno: Seqno(seqno),
            vbuuid: Vbuuid(u64::from_be_bytes(*vbuuid)),
            epoch: 0,
        };
        let vbuckets = self.s.iter().zip(vbuuids).map(offset).collect();
        let mut offsets = Offsets { bucket_uuid: self.bucket, filter, vbuckets };
        for (name, epoch) in self.e {
            let slot = name.parse().ok().and_then(|vbid: usize| offsets.vbuckets.get_mut(vbid));
            let Some(slot) = slot else {
                return Err(OffsetsError::damaged("an epoch of a vBucket that does not exist"));
            };
            slot.epoch = epoch;
        }
        Ok(offsets)
    }
}

fn epochs(vbuckets: &[Offset]) -> BTreeMap<String, u32> {
    let some = vbuckets.iter().enumerate().filter(|(_, offset)| offset.epoch > 0);
    some.map(|(vbid, offset)| (vbid.to_string(), offset.epoch)).collect()
}

/// JSON of numbers and strings, which cannot fail.
fn to_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
