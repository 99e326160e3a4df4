//! Ready-made frames: one pass over a few vBuckets that can be sent again and again.

use std::ops::Range;
use std::time::Duration;

use dcp_wire::message::{
    Mutation, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd, StreamEndReason,
};
use dcp_wire::{Cas, Datatype, Header, Opaque, RevSeqno, Seqno, Vbid, leb128};

use crate::Error;

/// Length of a key in bytes, including one byte of collection id.
pub const KEY_LEN: usize = 20;

/// Length of a mutation in bytes: header, extras, key, value.
#[must_use]
pub const fn frame_len(value_len: usize) -> usize {
    Header::LEN + Mutation::EXTRAS_LEN + KEY_LEN + value_len
}

/// Length of a snapshot marker with one mutation in bytes.
#[must_use]
pub const fn marked_len(value_len: usize) -> usize {
    Header::LEN + SnapshotMarker::EXTRAS_LEN_V1 + frame_len(value_len)
}

/// Minimum length of a value with a timestamp.
pub const STAMPED_LEN: usize = VALUE_HEAD.len() + STAMP_LEN + VALUE_TAIL.len();

const VALUE_HEAD: &[u8] = br#"{"body":""#;
const VALUE_TAIL: &[u8] = br#""}"#;
/// Digits of the timestamp in a value, in nanoseconds since 1970.
const STAMP_LEN: usize = 20;
const SEQNO_AT: usize = Header::LEN;
const MARKER_END_AT: usize = Header::LEN + 8;
const OPAQUE_AT: usize = 12;

/// Shape of the frames.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Length of each value in bytes.
    pub value_len: usize,
    /// Number of vBuckets.
    pub vbuckets: u16,
    /// Approximate length of one pass over all vBuckets in bytes.
    pub pass_bytes: usize,
}

struct Run {
    marker: usize,
    mutations: Range<usize>,
}

/// One pass over the vBuckets: for each of them a snapshot marker and the same number of mutations.
/// [`advance`](Self::advance) turns it into the next pass in place, so that a valid stream of any
/// length takes the memory of one pass.
pub struct Frames {
    shape: Shape,
    bytes: Vec<u8>,
    runs: Vec<Run>,
    per_run: u64,
}

impl std::fmt::Debug for Frames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frames").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Frames {
    /// The first pass: seqnos of every vBucket start at 1.
    ///
    /// # Errors
    /// If a part does not fit a packet.
    pub fn new(shape: Shape) -> Result<Self, Error> {
        let per_run =
            (shape.pass_bytes / frame_len(shape.value_len) / usize::from(shape.vbuckets)).max(1);
        let mut bytes = Vec::with_capacity(shape.pass_bytes + frame_len(shape.value_len));
        let value = json_value(shape.value_len);
        let mut runs = Vec::with_capacity(usize::from(shape.vbuckets));
        for vbid in (0..shape.vbuckets).map(Vbid) {
            let address =
                StreamAddress { vbid, opaque: Opaque(u32::from(vbid.0)), stream_id: None };
            let marker = bytes.len();
            SnapshotMarker::new(Seqno(1), Seqno(per_run as u64), SnapshotFlags::MEMORY)
                .encode(address, &mut bytes)?;
            let first = bytes.len();
            for seqno in 1..=per_run as u64 {
                mutation(vbid, seqno, &key(vbid, seqno), &value).encode(address, &mut bytes)?;
            }
            runs.push(Run { marker, mutations: first..bytes.len() });
        }
        Ok(Self { shape, bytes, runs, per_run: per_run as u64 })
    }

    /// The frames of this pass.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of mutations in one pass.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.per_run * u64::from(self.shape.vbuckets)
    }

    /// Number of mutations of one vBucket in one pass.
    #[must_use]
    pub const fn rows_per_vbucket(&self) -> u64 {
        self.per_run
    }

    /// Shape of the frames.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The range of one vBucket's frames in [`bytes`](Self::bytes).
    fn places(&self, run: &Run) -> impl Iterator<Item = usize> + use<> {
        run.mutations.clone().step_by(frame_len(self.shape.value_len))
    }

    /// Sets the opaque in every frame of `vbid`.
    pub fn set_opaque(&mut self, vbid: Vbid, opaque: Opaque) {
        let Some(run) = self.runs.get(vbid.index()) else { return };
        let opaque = opaque.0.to_be_bytes();
        if self.bytes[run.marker + OPAQUE_AT..][..4] == opaque {
            return;
        }
        for place in std::iter::once(run.marker).chain(self.places(run)) {
            self.bytes[place + OPAQUE_AT..][..4].copy_from_slice(&opaque);
        }
    }

    /// Turns this pass into the next one.
    pub fn advance(&mut self) {
        let step = self.per_run;
        for run in &self.runs {
            add(&mut self.bytes, run.marker + SEQNO_AT, step);
            add(&mut self.bytes, run.marker + MARKER_END_AT, step);
            for place in self.places(run) {
                add(&mut self.bytes, place + SEQNO_AT, step);
            }
        }
    }

    /// Turns this pass back into the first one.
    pub fn rewind(&mut self) {
        let step = self.per_run;
        for run in &self.runs {
            set(&mut self.bytes, run.marker + SEQNO_AT, 1);
            set(&mut self.bytes, run.marker + MARKER_END_AT, step);
            for (place, seqno) in self.places(run).zip(1..) {
                set(&mut self.bytes, place + SEQNO_AT, seqno);
            }
        }
    }

    /// Writes `since_1970`, in nanoseconds, into the last 20 digits of the value of the mutation
    /// that ends at `end`. Values must have at least [`STAMPED_LEN`] bytes.
    pub fn stamp(&mut self, end: usize, since_1970: Duration) {
        let digits = format!("{:0STAMP_LEN$}", since_1970.as_nanos());
        let at = end - VALUE_TAIL.len() - STAMP_LEN;
        self.bytes[at..][..STAMP_LEN].copy_from_slice(digits.as_bytes());
    }

    /// Splits the bytes so that each piece has whole frames and about `len` bytes at most (a longer
    /// frame is a piece by itself).
    #[must_use]
    pub fn pieces(&self, len: usize) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let mut end = 0;
        let frames = self.runs.iter().flat_map(|run| {
            std::iter::once(run.mutations.start)
                .chain(self.places(run).map(|place| place + frame_len(self.shape.value_len)))
        });
        for frame_end in frames {
            if frame_end - start > len && end > start {
                pieces.push(start..end);
                start = end;
            }
            end = frame_end;
        }
        pieces.push(start..end);
        pieces
    }

    /// A STREAM_END for every vBucket, with the opaque of its frames.
    ///
    /// # Errors
    /// Never: every part has a fixed size.
    pub fn stream_ends(&self) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        for (run, vbid) in self.runs.iter().zip((0..).map(Vbid)) {
            let opaque = self.bytes[run.marker + OPAQUE_AT..].first_chunk().copied();
            let opaque = Opaque(u32::from_be_bytes(opaque.unwrap_or_default()));
            let address = StreamAddress { vbid, opaque, stream_id: None };
            StreamEnd { reason: StreamEndReason::OK }.encode(address, &mut out)?;
        }
        Ok(out)
    }
}

fn add(bytes: &mut [u8], place: usize, step: u64) {
    if let Some(field) = bytes[place..].first_chunk_mut::<8>() {
        *field = (u64::from_be_bytes(*field) + step).to_be_bytes();
    }
}

fn set(bytes: &mut [u8], place: usize, value: u64) {
    if let Some(field) = bytes[place..].first_chunk_mut::<8>() {
        *field = value.to_be_bytes();
    }
}

fn mutation<'a>(vbid: Vbid, seqno: u64, key: &'a [u8], value: &'a [u8]) -> Mutation<'a> {
    // 2026-01-01 in nanoseconds; a vBucket's changes are 65,536 ns apart like those of a hybrid
    // clock.
    let cas = 1_767_225_600_000_000_000 + ((seqno * 1024 + u64::from(vbid.0)) << 16);
    Mutation {
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(1),
        cas: Cas(cas),
        datatype: Datatype::JSON,
        flags: 0x0200_0000,
        key,
        value,
        ..Mutation::default()
    }
}

/// A key of [`KEY_LEN`] bytes in the default collection.
fn key(vbid: Vbid, seqno: u64) -> Vec<u8> {
    let mut key = leb128::encode(0).as_slice().to_vec();
    key.extend_from_slice(format!("key-{:04}-{seqno:010}", vbid.0).as_bytes());
    debug_assert_eq!(key.len(), KEY_LEN);
    key
}

/// A JSON document of `len` bytes.
#[must_use]
pub fn json_value(len: usize) -> Vec<u8> {
    let mut value = VALUE_HEAD.to_vec();
    value.extend((b'a'..=b'z').cycle().take(len.saturating_sub(value.len() + VALUE_TAIL.len())));
    value.extend_from_slice(VALUE_TAIL);
    value.truncate(len);
    value
}

/// A JSON object of `len` bytes, at least 90, with fields of several types.
#[must_use]
pub fn json_object(number: u64, len: usize) -> Vec<u8> {
    let price = number % 100_000;
    let head = format!(
        r#"{{"id":{number},"name":"item {number}","price":{price}.25,"stock":{},"body":""#,
        number.is_multiple_of(3)
    );
    let tail = r#""}"#;
    let body = (b'a'..=b'z').cycle().take(len.saturating_sub(head.len() + tail.len()));
    head.bytes().chain(body).chain(tail.bytes()).collect()
}

/// Distinct JSON documents of `len` bytes that compress about as well as real ones.
#[must_use]
pub fn json_records(count: usize, len: usize) -> Vec<Vec<u8>> {
    let mut state = 1u64;
    let mut number = move |below: u64| {
        // Knuth's multiplier.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut record = move || {
        let mut text = String::from("[");
        while text.len() < len {
            let (id, price, place) = (number(1_000_000_000), number(100_000), number(90_000));
            let name: String =
                (0..12).filter_map(|_| char::from_u32(97 + number(26) as u32)).collect();
            text.push_str(&format!(
                r#"{{"id":{id},"name":"{name}","price":{price},"lat":{place}.25,"stock":true}},"#
            ));
        }
        text.truncate(len);
        text.into_bytes()
    };
    (0..count).map(|_| record()).collect()
}

#[cfg(test)]
mod tests {
    use dcp_wire::{Frame, MAX_BODY_LEN, Opcode};

    use super::*;

    fn seqnos(bytes: &[u8], vbid: Vbid) -> Vec<u64> {
        let mut rest = bytes;
        let mut seqnos = Vec::new();
        while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN).unwrap() {
            if frame.header.opcode == Opcode::DCP_MUTATION && frame.header.vbid() == vbid {
                seqnos.push(Mutation::decode(&frame).unwrap().seqno.0);
            }
            rest = &rest[used..];
        }
        assert!(rest.is_empty(), "whole frames");
        seqnos
    }

    #[test]
    fn passes_continue_each_other() {
        let shape = Shape { value_len: 64, vbuckets: 4, pass_bytes: 4096 };
        let mut frames = Frames::new(shape).unwrap();
        assert_eq!((frames.rows(), frames.rows_per_vbucket()), (28, 7));
        assert_eq!(seqnos(frames.bytes(), Vbid(3)), (1..=7).collect::<Vec<_>>());
        frames.advance();
        frames.advance();
        assert_eq!(seqnos(frames.bytes(), Vbid(3)), (15..=21).collect::<Vec<_>>());
        let (frame, _) = Frame::parse(frames.bytes(), MAX_BODY_LEN).unwrap().unwrap();
        let marker = SnapshotMarker::decode(&frame).unwrap();
        assert_eq!((marker.start_seqno, marker.end_seqno), (Seqno(15), Seqno(21)));
        frames.rewind();
        assert_eq!(frames.bytes(), Frames::new(shape).unwrap().bytes());
    }

    #[test]
    fn pieces_hold_whole_frames_and_cover_everything() {
        let frames =
            Frames::new(Shape { value_len: 256, vbuckets: 3, pass_bytes: 10_000 }).unwrap();
        let pieces = frames.pieces(1000);
        assert_eq!(pieces.first().unwrap().start, 0);
        assert_eq!(pieces.last().unwrap().end, frames.bytes().len());
        for pair in pieces.windows(2) {
            assert_eq!(pair[0].end, pair[1].start);
        }
        for piece in pieces {
            assert!(piece.len() <= 1000);
            seqnos(&frames.bytes()[piece], Vbid(0));
        }
    }

    #[test]
    fn a_time_is_the_end_of_a_value_and_of_no_other() {
        let shape = Shape { value_len: STAMPED_LEN, vbuckets: 2, pass_bytes: 0 };
        let mut frames = Frames::new(shape).unwrap();
        let pieces = frames.pieces(marked_len(STAMPED_LEN));
        assert_eq!(pieces.len(), 2, "one mutation each");
        frames.stamp(pieces[1].end, Duration::from_nanos(1_767_225_600_000_000_007));
        let values: Vec<_> = pieces
            .into_iter()
            .map(|piece| {
                let bytes = &frames.bytes()[piece];
                let (_, marker) = Frame::parse(bytes, MAX_BODY_LEN).unwrap().unwrap();
                let (frame, len) = Frame::parse(&bytes[marker..], MAX_BODY_LEN).unwrap().unwrap();
                assert_eq!(marker + len, bytes.len());
                Mutation::decode(&frame).unwrap().value.to_vec()
            })
            .collect();
        assert_eq!(values[0], br#"{"body":"abcdefghijklmnopqrst"}"#);
        assert_eq!(values[1], br#"{"body":"01767225600000000007"}"#);
    }

    #[test]
    fn frames_have_the_stated_length() {
        for value_len in [64, 256, 1024, 4096] {
            let frames =
                Frames::new(Shape { value_len, vbuckets: 1, pass_bytes: 1 << 16 }).unwrap();
            let marker = Header::LEN + SnapshotMarker::EXTRAS_LEN_V1;
            assert_eq!(
                frames.bytes().len() - marker,
                frames.rows() as usize * frame_len(value_len)
            );
        }
    }
}
