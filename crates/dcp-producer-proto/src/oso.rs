//! Backfills in key order, "out of sequence order" (DCP page "oso-snapshot").
//!
//! For a client that wants one small collection of a large vBucket, the server looks up that
//! collection instead of reading everything. There is no snapshot marker: one message begins the
//! snapshot and one ends it, and only then does the client have a position.

use std::collections::BTreeSet;

use dcp_wire::message::{OsoSnapshot, SeqnoAdvanced, StreamAddress};
use dcp_wire::{CollectionId, EncodeError, Seqno};

use super::filter::Filter;
use super::message_format::MessageFormat;
use super::output::Output;
use super::read_ahead::DiskItems;
use super::read_ahead::Next;
use super::settings::{OutOfOrder, Settings};
use super::snapshot::{Step, Unreadable};
use super::{Backfill, ConnectionConfig, DiskShare, OsoBackfill, VBucketSource};

/// Mean size of items in bytes from which they count as large.
const LARGE_ITEM: u64 = 256;

/// Largest part of a vBucket's items, in thousandths, for which lookups of small items beat reading
/// everything; the next constant is for large items.
const SMALL_ITEMS_RATIO: u64 = 5;
const LARGE_ITEMS_RATIO: u64 = 40;

/// Conditions for a backfill of a stream in key order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    client: OutOfOrder,
    server: OsoBackfill,
    max_collections: usize,
}

impl Terms {
    pub(super) const fn new(settings: &Settings, config: &ConnectionConfig) -> Self {
        Self {
            client: settings.out_of_order,
            server: config.oso_backfill,
            max_collections: config.oso_max_collections,
        }
    }

    /// Opens such a backfill for a stream that starts from 0, if both ends allow it.
    pub(super) fn open(&self, filter: &Filter, vbucket: &impl VBucketSource) -> Option<Sending> {
        if self.client == OutOfOrder::No || self.server == OsoBackfill::Disabled {
            return None;
        }
        let collections = filter.collections()?;
        if !(1..=self.max_collections).contains(&collections.len()) {
            return None;
        }
        if self.server == OsoBackfill::Auto && !is_worth_it(&collections, vbucket) {
            return None;
        }
        let Backfill { end_seqno, items, superseded, .. } =
            vbucket.open_key_order_backfill(&collections)?;
        Some(Sending {
            items: DiskItems::new(items),
            superseded,
            end_seqno,
            tells_end: self.client == OutOfOrder::WithSeqnoAdvanced,
            sent: Seqno::ZERO,
            stage: Stage::Start,
        })
    }
}

fn is_worth_it(collections: &[CollectionId], vbucket: &impl VBucketSource) -> bool {
    let (wanted, all): (DiskShare, DiskShare) = vbucket.disk_share(collections);
    let is_large = wanted.bytes >= wanted.items.saturating_mul(LARGE_ITEM);
    let ratio = if is_large { LARGE_ITEMS_RATIO } else { SMALL_ITEMS_RATIO };
    wanted.items.saturating_mul(1000) < all.items.saturating_mul(ratio)
}

/// Which part of the snapshot is written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Items,
    End,
    Done,
}

/// A snapshot in key order that is being sent.
pub(super) struct Sending {
    items: DiskItems,
    superseded: BTreeSet<Seqno>,
    /// Highest seqno in the image.
    pub(super) end_seqno: Seqno,
    tells_end: bool,
    /// Highest seqno sent.
    sent: Seqno,
    stage: Stage,
}

impl core::fmt::Debug for Sending {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Sending")
            .field("end_seqno", &self.end_seqno)
            .field("sent", &self.sent)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

impl Sending {
    /// Writes the next message.
    pub(super) fn write_message(
        &mut self,
        filter: &mut Filter,
        format: &MessageFormat,
        to: StreamAddress,
        output: &mut Output<'_>,
    ) -> Result<Step, Unreadable> {
        match self.stage {
            Stage::Start => {
                write_bound(OsoSnapshot::Start, to, output)?;
                self.stage = Stage::Items;
            }
            Stage::Items => match self.items.next(filter)? {
                Next::Scanned => return Ok(Step::Scanned),
                Next::Item(item) => {
                    self.sent = self.sent.max(item.seqno);
                    let is_cached = !self.superseded.contains(&item.seqno);
                    output.send(|out, scratch| {
                        format.write_from_disk(&item, is_cached, to, scratch, out)
                    })?;
                }
                Next::None if self.tells_end && self.sent < self.end_seqno => {
                    let seqno = self.end_seqno;
                    output.send(|out, _| SeqnoAdvanced { seqno }.encode(to, out))?;
                    self.stage = Stage::End;
                }
                Next::None => {
                    write_bound(OsoSnapshot::End, to, output)?;
                    self.stage = Stage::Done;
                }
            },
            Stage::End => {
                write_bound(OsoSnapshot::End, to, output)?;
                self.stage = Stage::Done;
            }
            Stage::Done => return Ok(Step::Done),
        }
        Ok(Step::Sent)
    }
}

fn write_bound(
    bound: OsoSnapshot,
    to: StreamAddress,
    output: &mut Output<'_>,
) -> Result<(), EncodeError> {
    output.send(|out, _| bound.encode(to, out))
}
