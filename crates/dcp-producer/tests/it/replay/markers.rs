//! The fields of snapshot markers, and what the history they are judged by is taken from.

use std::collections::BTreeMap;

use dcp_wire::message::SnapshotMarker;
use serde::Deserialize;

/// Bits of the flags: from memory, from disk.
const PLACE: u8 = 0x03;

/// A field of a snapshot marker.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Field {
    Start,
    End,
    /// Whether it comes from memory or from disk.
    Place,
    /// Whether it begins a checkpoint, and the other flags.
    Checkpoint,
    MaxVisible,
    HighCompleted,
    Purge,
    HighPrepared,
}

/// What the cluster's field follows from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Source {
    /// Line 1 of the recording and what clients ask for.
    Operations,
    /// The changes that came with the marker: which of them is the last.
    Changes,
    /// The field itself, so that it is not compared.
    Itself,
}

/// What the fields of one marker follow from that do not follow from operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sources {
    pub(super) end: Source,
    pub(super) place: Source,
}

impl Sources {
    fn of(self, field: Field) -> Source {
        match field {
            Field::End | Field::MaxVisible => self.end,
            Field::Place => self.place,
            _ => Source::Operations,
        }
    }
}

/// How many fields follow from what.
pub(super) type Counts = BTreeMap<Field, BTreeMap<Source, usize>>;

/// A recorded marker, and what its fields follow from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marker {
    pub(super) marker: SnapshotMarker,
    pub(super) sources: Sources,
}

impl Marker {
    /// Counts its fields.
    pub(super) fn count(&self, counts: &mut Counts) {
        let marker = &self.marker;
        let fields = [
            Some(Field::Start),
            Some(Field::End),
            Some(Field::Place),
            Some(Field::Checkpoint),
            marker.max_visible_seqno.map(|_| Field::MaxVisible),
            marker.high_completed_seqno.map(|_| Field::HighCompleted),
            marker.purge_seqno.map(|_| Field::Purge),
            marker.high_prepared_seqno.map(|_| Field::HighPrepared),
        ];
        for field in fields.into_iter().flatten() {
            let by_source = counts.entry(field).or_default();
            *by_source.entry(self.sources.of(field)).or_default() += 1;
        }
    }

    /// Clears what follows from itself, in the extras or the value of a marker.
    pub(super) fn clear_taken(&self, extras: &mut [u8], value: &mut [u8]) {
        let is_v1 = extras.len() == SnapshotMarker::EXTRAS_LEN_V1;
        let fields = if is_v1 { extras } else { value };
        let mut clear = |from: usize, len: usize, mask: u8| {
            fields.iter_mut().skip(from).take(len).for_each(|byte| *byte &= !mask);
        };
        if self.sources.end == Source::Itself {
            clear(8, 8, 0xff);
            // The highest that is visible, of version 2.
            clear(20, 8, 0xff);
        }
        if self.sources.place == Source::Itself {
            clear(19, 1, PLACE);
        }
    }
}
