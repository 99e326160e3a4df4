//! When things were done, as clients and the changes they got tell. Markers tell it only by where
//! they stand between changes: what they say is judged.

use std::collections::BTreeMap;

use dcp_test::traces::{Event, EventKind, Scenario};
use dcp_wire::message::StreamRequest;
use dcp_wire::{Frame, Opaque, Opcode};

use super::facts::frame;

/// What came of each stream, and when.
#[derive(Debug, Default)]
pub(super) struct Moments {
    /// Highest seqno that each snapshot holds, by the event that begins it.
    held: BTreeMap<usize, u64>,
    /// The event that begins the first snapshot of each stream, by that of its request.
    first: BTreeMap<usize, usize>,
    /// Events and vBuckets of the first snapshots of streams.
    begun: Vec<(usize, u16)>,
    /// Events, vBuckets and seqnos of all changes.
    came: Vec<(usize, u16, u64)>,
}

/// A stream so far.
#[derive(Debug)]
struct Stream {
    conn: u32,
    opaque: Opaque,
    vbid: u16,
    asked_at: usize,
    /// The event that begins its newest snapshot.
    snapshot: Option<usize>,
    last: u64,
}

impl Moments {
    pub(super) fn of(scenario: &Scenario) -> Self {
        let (mut moments, mut streams) = (Self::default(), Vec::new());
        for (at, event) in scenario.events.iter().enumerate() {
            let Some(frame) = frame(event) else { continue };
            if matches!(event.kind, EventKind::ServerPacket(_)) {
                if !frame.header.magic.is_response() {
                    moments.take(at, event, &frame, &mut streams);
                }
            } else if let Ok(request) = StreamRequest::decode(&frame) {
                moments.note_claim(&streams, &request);
                let (conn, opaque, vbid) = (event.conn, frame.header.opaque, request.vbid.0);
                streams.push(Stream { conn, opaque, vbid, asked_at: at, snapshot: None, last: 0 });
            }
        }
        moments
    }

    /// Takes a packet of a stream.
    fn take(&mut self, at: usize, event: &Event, frame: &Frame<'_>, streams: &mut [Stream]) {
        let of = (event.conn, frame.header.opaque);
        let Some(stream) = streams.iter_mut().rfind(|one| (one.conn, one.opaque) == of) else {
            return;
        };
        match frame.header.opcode {
            Opcode::DCP_SNAPSHOT_MARKER => stream.snapshot = Some(at),
            // One in the order of the keys has a packet at its end too.
            Opcode::DCP_OSO_SNAPSHOT => stream.snapshot = stream.snapshot.or(Some(at)),
            Opcode::DCP_MUTATION
            | Opcode::DCP_DELETION
            | Opcode::DCP_EXPIRATION
            | Opcode::DCP_SYSTEM_EVENT
            | Opcode::DCP_SEQNO_ADVANCED => {
                let Some(seqno) = frame.extras.first_chunk().copied() else { return };
                let seqno = u64::from_be_bytes(seqno);
                self.came.push((at, stream.vbid, seqno));
                stream.last = stream.last.max(seqno);
                if let Some(snapshot) = stream.snapshot {
                    let held = self.held.entry(snapshot).or_default();
                    *held = seqno.max(*held);
                }
            }
            _ => {}
        }
        if let Some(snapshot) = stream.snapshot
            && !self.first.contains_key(&stream.asked_at)
        {
            self.first.insert(stream.asked_at, snapshot);
            self.begun.push((snapshot, stream.vbid));
        }
    }

    /// A client that goes on in the middle of a snapshot says where that ends.
    fn note_claim(&mut self, streams: &[Stream], request: &StreamRequest<'_>) {
        let (start, end) = (request.start_seqno.0, request.snapshot_end.0);
        let left = |one: &&Stream| one.vbid == request.vbid.0 && one.last == start && start < end;
        if let Some(snapshot) = streams.iter().rfind(left).and_then(|one| one.snapshot) {
            let held = self.held.entry(snapshot).or_default();
            *held = end.max(*held);
        }
    }

    /// Highest seqno of a snapshot, by the event that begins it, if anything came of it.
    pub(super) fn held(&self, at: usize) -> Option<u64> {
        self.held.get(&at).copied()
    }

    /// The event that begins the first snapshot of a stream.
    pub(super) fn first(&self, asked_at: usize) -> Option<usize> {
        self.first.get(&asked_at).copied()
    }

    /// Highest seqno of the first snapshot of a vBucket that any stream gets; everything if none does.
    pub(super) fn first_held(&self, vbid: u16) -> u64 {
        let mut begun = self.begun.iter().filter(|(_, of)| *of == vbid);
        begun.find_map(|(at, _)| self.held(*at)).unwrap_or(u64::MAX)
    }

    /// Highest seqno of a vBucket that had come before an event.
    pub(super) fn came_before(&self, at: usize, vbid: u16) -> u64 {
        let before = self.came.iter().filter(|(when, of, _)| *when < at && *of == vbid);
        before.map(|(.., seqno)| *seqno).max().unwrap_or_default()
    }
}
