//! The packets of one connection, recorded and ours, side by side.

use std::collections::BTreeMap;

use dcp_wire::message::SnapshotMarker;
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode};

use super::ignored::Ignored;
use super::markers::{Marker, Sources};
use super::seen::{OWN, Seen};
use super::twins::Twins;

/// Both servers' packets on one connection.
#[derive(Debug, Default)]
pub(super) struct Sides {
    recorded: Vec<Seen>,
    ours: Vec<Seen>,
    recorded_end: bool,
    our_end: bool,
    /// Packets of each opaque that were compared; `usize::MAX` once they went different ways.
    compared: BTreeMap<u32, usize>,
    /// Ends of the last snapshots, and whether they were reached.
    snapshots: BTreeMap<u32, (u64, u64)>,
    has_window: bool,
    /// Whether the recorded node knows the cluster map; ours always does.
    pub(super) has_map: bool,
    /// vBuckets of requests, by opaque.
    asked: BTreeMap<u32, u16>,
    /// Opaques of noops, recorded and ours.
    noops: (Vec<u32>, Vec<u32>),
    ignored: Vec<Ignored>,
    differences: Vec<String>,
}

impl Sides {
    /// Takes a packet of the recorded server, and what a marker's fields follow from.
    pub(super) fn push_recorded(&mut self, packet: &[u8], sources: Option<Sources>) {
        let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
        let opaque = frame.header.opaque.0;
        if frame.header.opcode == Opcode::SET_CLUSTER_CONFIG && frame.header.status().is_success() {
            self.ignored.push(Ignored::SetClusterConfig);
            return;
        }
        if frame.header.opcode == Opcode::DCP_NOOP {
            self.noops.0.push(opaque);
        }
        if let Ok(marker) = SnapshotMarker::decode(&frame) {
            self.snapshots.insert(opaque, (marker.end_seqno.0, 0));
        } else if let Some(seqno) = frame.extras.first_chunk()
            && let Some((_, reached)) = self.snapshots.get_mut(&opaque)
            && !frame.header.magic.is_response()
        {
            *reached = u64::from_be_bytes(*seqno);
        }
        let asked = self.asked.get(&opaque).copied();
        let marker = SnapshotMarker::decode(&frame).ok().zip(sources);
        let marker = marker.map(|(marker, sources)| Marker { marker, sources });
        let mut seen = Seen::of(packet, asked);
        seen.marker = marker;
        self.recorded.push(seen);
    }

    pub(super) fn push_ours(&mut self, packet: &[u8]) {
        let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
        if frame.header.opcode == Opcode::DCP_NOOP {
            self.noops.1.push(frame.header.opaque.0);
        }
        let asked = self.asked.get(&frame.header.opaque.0).copied();
        let seen = Seen::of(packet, asked);
        if self.has_map {
            self.ours.push(seen);
            return;
        }
        let without_map = seen.clone().without_map();
        if without_map.length() != seen.length() {
            self.ignored.push(Ignored::NodeWithoutMap);
        }
        self.ours.push(without_map);
    }

    /// Notes a client's request.
    pub(super) fn ask(&mut self, opaque: u32, vbid: u16) {
        self.asked.insert(opaque, vbid);
    }

    /// The opaque of our noop in the place of a recorded one.
    pub(super) fn our_noop(&self, recorded: u32) -> Option<u32> {
        let at = self.noops.0.iter().position(|opaque| *opaque == recorded)?;
        self.noops.1.get(at).copied()
    }

    pub(super) fn our_count(&self) -> usize {
        self.ours.len()
    }

    pub(super) fn recorded_count(&self) -> usize {
        self.recorded.len()
    }

    pub(super) fn end_recorded(&mut self) {
        self.recorded_end = true;
    }

    pub(super) fn end_ours(&mut self) {
        self.our_end = true;
    }

    /// Notes what differs besides packets.
    pub(super) fn note(&mut self, what: &str) {
        self.differences.push(what.to_owned());
    }

    /// The client limits what may be on its way.
    pub(super) fn limit(&mut self) {
        self.has_window = true;
    }

    /// Compares what both sides have by now.
    pub(super) fn compare(&mut self, twins: &mut Twins) {
        let (theirs, ours) = (by_opaque(&self.recorded), by_opaque(&self.ours));
        for (opaque, theirs) in theirs {
            let Some(ours) = ours.get(&opaque) else { continue };
            let compared = self.compared.entry(opaque).or_default();
            while let (Some(recorded), Some(own)) = (theirs.get(*compared), ours.get(*compared)) {
                let found = recorded.differences(own, twins);
                let place = place(opaque, *compared);
                *compared += 1;
                for differs in found {
                    self.differences.push(format!("{place}: {}", differs.what));
                    if differs.is_another {
                        *compared = usize::MAX;
                    }
                }
            }
        }
    }

    /// All differences, once everything that would come has come.
    pub(super) fn finish(mut self, twins: &mut Twins) -> Vec<String> {
        let (theirs, ours) = (by_opaque(&self.recorded), by_opaque(&self.ours));
        let opaques =
            theirs.keys().chain(ours.keys().filter(|opaque| !theirs.contains_key(opaque)));
        let mut same = true;
        for opaque in opaques {
            if self.compared.get(opaque) == Some(&usize::MAX) {
                same = false;
                continue;
            }
            let counts = [&theirs, &ours].map(|side| side.get(opaque).map_or(0, Vec::len));
            let [recorded, own] = counts;
            // A client that left in the middle of a snapshot did not get the rest of it.
            let left = !self.has_window
                && !self.recorded_end
                && self.snapshots.get(opaque).is_some_and(|(end, reached)| reached < end);
            twins.ignore(Ignored::RestOfSnapshot, own > recorded && left);
            if recorded > own || (own > recorded && !left) {
                same = false;
                let place = format!("opaque {opaque:#x}");
                self.differences.push(format!("{place}: {recorded} packets are {own}"));
            }
            same &= own == recorded;
        }
        if self.recorded_end != self.our_end {
            let state = |ended| if ended { "closed" } else { "open" };
            let (recorded, own) = (state(self.recorded_end), state(self.our_end));
            self.differences.push(format!("left {recorded} is left {own}"));
        }
        if same && self.order(&self.recorded) != self.order(&self.ours) {
            self.differences.push("another order".to_owned());
        }
        let in_order = |side: &[Seen]| side.iter().map(|seen| seen.opaque).collect::<Vec<_>>();
        twins.ignore(Ignored::Turns, same && in_order(&self.recorded) != in_order(&self.ours));
        twins.ignored.extend(self.ignored);
        self.differences
    }

    /// Opaques in their order. Where several streams take turns, which the server is free to do
    /// as it likes, only that of responses.
    fn order(&self, side: &[Seen]) -> Vec<u32> {
        let streams = self.recorded.iter();
        let streams =
            streams.filter(|seen| seen.is_response && seen.opcode == Opcode::DCP_STREAM_REQ);
        let take_turns = streams.count() > 1;
        let counts = |seen: &&Seen| seen.opaque != OWN && (seen.is_response || !take_turns);
        side.iter().filter(counts).map(|seen| seen.opaque).collect()
    }
}

fn place(opaque: u32, index: usize) -> String {
    if opaque == OWN {
        format!("own packet {index}")
    } else {
        format!("opaque {opaque:#x}, packet {index}")
    }
}

fn by_opaque(packets: &[Seen]) -> BTreeMap<u32, Vec<&Seen>> {
    let mut groups: BTreeMap<u32, Vec<&Seen>> = BTreeMap::new();
    for packet in packets {
        groups.entry(packet.opaque).or_default().push(packet);
    }
    groups
}
