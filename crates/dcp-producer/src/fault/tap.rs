//! The tap between the machines of one connection and its socket.

use std::sync::Arc;
use std::time::Instant;

use bytes::{BufMut, BytesMut};
use dcp_wire::message::{SnapshotFlags, SnapshotMarker};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status};
use rustc_hash::FxHashMap;
use tokio::sync::watch;

use super::matching::{Asked, ConnectionFacts};
use super::reaction::{Direction, Reaction, is_item};
use super::registry::{Faults, Rules};

/// Bytes that may wait for the socket after the tap.
const WIRE_LIMIT: usize = 512 << 10;

/// How a request is answered that is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A status and an empty body.
    Status(Status),
    /// NOT_MY_VBUCKET with or without the cluster map.
    NotMyVbucket {
        /// Whether the answer carries the map.
        map: bool,
    },
    /// ROLLBACK to a seqno.
    Rollback(Seqno),
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestFault {
    /// It is executed.
    None,
    /// It is lost.
    Lose,
    /// It is refused.
    Refuse(Refusal),
    /// The stream it requests continues for this many changes beyond its end.
    MoveEnd(u64),
    /// It is handled again later, or never if the tap has cut the connection.
    Wait,
}

/// How the connection was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Nothing is read or written any more.
    HalfOpen,
    /// Closed once everything that came before is written.
    Close,
}

/// A fault that affects later messages of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamFault {
    /// Lose messages up to the next marker.
    Silent,
    /// Close the connection after so many items.
    CutAfter(u64),
}

/// The faults of one connection.
#[derive(Debug)]
pub(crate) struct Tap {
    source: watch::Receiver<Rules>,
    rules: Vec<Asked>,
    connection: ConnectionFacts,
    /// Packets on their way to the socket.
    wire: BytesMut,
    /// Bytes at the front of the machines' output that were written before the rules were set, and
    /// may begin inside a packet.
    untouched: usize,
    streams: FxHashMap<Opaque, StreamFault>,
    /// Streams in a snapshot from memory, and whether it has had an item.
    in_memory: FxHashMap<Opaque, bool>,
    /// Until when the output waits.
    output_waits: Option<Instant>,
    /// Until when the input waits.
    input_waits: Option<Instant>,
    /// Whether the request at the front of the input has waited already.
    request_waited: bool,
    /// Bytes to write before the connection is closed.
    bytes_left: Option<usize>,
    cut: Option<Cut>,
    /// How a request cuts the connection once everything before it is on the wire.
    cut_by_request: Option<Cut>,
    /// Noops that were not sent and count as answered.
    lost_noops: Vec<Opaque>,
}

impl Tap {
    pub(crate) fn new(faults: &Faults, node: usize) -> Self {
        let number = faults.number_connection();
        Self {
            source: faults.follow(),
            rules: Vec::new(),
            connection: ConnectionFacts { number, node, name: None },
            wire: BytesMut::new(),
            untouched: 0,
            streams: FxHashMap::default(),
            in_memory: FxHashMap::default(),
            output_waits: None,
            input_waits: None,
            request_waited: false,
            bytes_left: None,
            cut: None,
            cut_by_request: None,
            lost_noops: Vec::new(),
        }
    }

    /// Sets the connection's name, when it is opened for DCP.
    pub(crate) fn name_connection(&mut self, name: &[u8]) {
        self.connection.name = Some(name.to_vec());
    }

    /// Applies new rules, if there are any. They do not affect the first `old` bytes that the
    /// machines have written but the socket has not sent.
    #[inline]
    pub(crate) fn refresh(&mut self, old: usize) {
        if self.source.has_changed().unwrap_or(false) {
            self.take_up(old);
        }
    }

    fn take_up(&mut self, old: usize) {
        if !self.is_active() {
            self.untouched = old;
        }
        let rules = Arc::clone(&self.source.borrow_and_update());
        let number = self.connection.number;
        let of_clients = rules.iter().filter(|armed| armed.rule.condition.between.is_empty());
        self.rules = of_clients.map(|armed| Asked::new(Arc::clone(armed), number)).collect();
        // Effects of previous rules end, except that a cut connection stays cut.
        self.streams.clear();
        (self.output_waits, self.input_waits, self.bytes_left) = (None, None, None);
        (self.cut_by_request, self.request_waited) = (None, false);
    }

    /// Whether the output goes through the tap.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        !self.rules.is_empty() || !self.wire.is_empty() || self.cut.is_some()
    }

    /// The bytes for the socket, if the output goes through the tap.
    pub(crate) fn wire(&mut self) -> &mut BytesMut {
        &mut self.wire
    }

    /// Whether anything waits for the socket after the tap.
    pub(crate) fn has_wire(&self) -> bool {
        !self.wire.is_empty()
    }

    /// Whether nothing is read or written any more.
    pub(crate) fn is_half_open(&self) -> bool {
        self.cut == Some(Cut::HalfOpen)
    }

    /// Whether to close the connection once [`wire`](Self::wire) is written.
    pub(crate) fn is_closing(&self) -> bool {
        self.cut == Some(Cut::Close)
    }

    /// Whether requests are checked.
    pub(crate) fn takes_input(&self) -> bool {
        self.input_waits.is_none() && self.cut.is_none() && self.cut_by_request.is_none()
    }

    /// Whether anything is delayed.
    pub(crate) fn waits(&self) -> bool {
        self.output_waits.is_some() || self.input_waits.is_some()
    }

    /// Waits until something that is delayed is due, or until the rules change.
    pub(crate) async fn wait(&mut self) {
        let deadlines = [self.output_waits, self.input_waits];
        let Some(until) = deadlines.into_iter().flatten().min() else {
            return std::future::pending().await;
        };
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(until.into()) => {}
            Ok(()) = self.source.changed() => {
                // Waiting marked it as seen, but `refresh` must find it.
                self.source.mark_changed();
            }
        }
    }

    /// Releases what has been delayed long enough.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.output_waits.is_some_and(|until| until <= now) {
            self.output_waits = None;
        }
        if self.input_waits.is_some_and(|until| until <= now) {
            self.input_waits = None;
            self.request_waited = true;
        }
    }

    /// Noops that were dropped since the last call; they will not be answered.
    pub(crate) fn take_lost_noops(&mut self) -> Vec<Opaque> {
        std::mem::take(&mut self.lost_noops)
    }

    /// What happens to a request.
    pub(crate) fn request(&mut self, now: Instant, frame: &Frame<'_>) -> RequestFault {
        if std::mem::take(&mut self.request_waited) {
            return RequestFault::None;
        }
        let Some((_, reaction)) = self.ask(Direction::ToServer, frame) else {
            return RequestFault::None;
        };
        match reaction {
            Reaction::Drop => RequestFault::Lose,
            Reaction::Delay(delay) => {
                self.input_waits = now.checked_add(delay);
                RequestFault::Wait
            }
            Reaction::HalfOpen => {
                self.cut_by_request = Some(Cut::HalfOpen);
                RequestFault::Wait
            }
            Reaction::Disconnect => {
                self.cut_by_request = Some(Cut::Close);
                RequestFault::Wait
            }
            Reaction::Answer(status) => RequestFault::Refuse(Refusal::Status(status)),
            Reaction::NotMyVbucket { map } => RequestFault::Refuse(Refusal::NotMyVbucket { map }),
            Reaction::Rollback(seqno) => RequestFault::Refuse(Refusal::Rollback(seqno)),
            Reaction::ItemsPastEnd(count) => RequestFault::MoveEnd(count),
            // Rules are validated: other reactions concern packets to the client.
            _ => RequestFault::None,
        }
    }

    /// The first rule that reacts, and its reaction.
    fn ask(&mut self, direction: Direction, frame: &Frame<'_>) -> Option<(usize, Reaction)> {
        let Self { rules, connection, .. } = self;
        let react = |(index, rule): (usize, &mut Asked)| {
            Some((index, rule.reaction(direction, frame, connection)?))
        };
        rules.iter_mut().enumerate().find_map(react)
    }

    /// Moves packets from the machines' output to the wire; returns whether there were any.
    pub(crate) fn pass(&mut self, now: Instant, output: &mut BytesMut) -> bool {
        let before = output.len();
        while self.wire.len() < WIRE_LIMIT && self.output_waits.is_none() && self.cut.is_none() {
            if self.untouched > 0 && !output.is_empty() {
                let old = output.split_to(self.untouched.min(output.len()));
                self.untouched -= old.len();
                self.put(&old);
                continue;
            }
            let Ok(len) = Frame::wanted(output, MAX_BODY_LEN) else { break };
            if output.len() < len {
                break;
            }
            let mut packet = output.split_to(len);
            if !self.packet(now, &packet) {
                // It waits together with what follows, and is not checked again.
                packet.unsplit(std::mem::take(output));
                *output = packet;
                self.untouched = len;
            }
        }
        if self.cut.is_none() && output.is_empty() {
            self.cut = self.cut_by_request.take();
        }
        if self.cut.is_some() {
            output.clear();
        }
        output.len() != before
    }

    /// Sends a packet, possibly altered by a fault; `false` if it must wait.
    fn packet(&mut self, now: Instant, packet: &[u8]) -> bool {
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else {
            self.put(packet);
            return true;
        };
        if self.is_lost_on_its_stream(&frame) {
            return true;
        }
        self.note_snapshot(&frame);
        let Some((rule, reaction)) = self.ask(Direction::ToClient, &frame) else {
            self.put(packet);
            return true;
        };
        let opaque = frame.header.opaque;
        match reaction {
            Reaction::Drop | Reaction::NoStreamEnd => {}
            // With nothing else in it, servers do not lose it.
            Reaction::NoSnapshotEnd if self.in_memory.get(&opaque) == Some(&true) => {}
            Reaction::NoNoop => self.lost_noops.push(opaque),
            Reaction::Delay(delay) => {
                self.output_waits = now.checked_add(delay);
                return false;
            }
            Reaction::HalfOpen => self.cut = Some(Cut::HalfOpen),
            Reaction::Disconnect => self.cut = Some(Cut::Close),
            Reaction::DisconnectAfter(bytes) => {
                self.bytes_left.get_or_insert(bytes);
                self.put(packet);
            }
            Reaction::MarkerWithoutItems => {
                self.streams.insert(opaque, StreamFault::Silent);
                self.put(packet);
            }
            Reaction::SeqnoAdvancedBeforeItem => {
                self.put_seqno_advanced(&frame);
                self.put(packet);
            }
            Reaction::OsoCut(items) => self.begin_oso_cut(items, &frame, packet),
            Reaction::Truncate(keep) => {
                let keep = keep.unwrap_or(packet.len() / 2).min(packet.len() - 1);
                self.put(packet.get(..keep).unwrap_or_default());
            }
            Reaction::Corrupt(offset) => self.put_corrupted(packet, offset, rule),
            // Rules are validated: other reactions concern requests.
            _ => self.put(packet),
        }
        true
    }

    /// Whether a fault triggered by an earlier message of the stream drops this one.
    fn is_lost_on_its_stream(&mut self, frame: &Frame<'_>) -> bool {
        let header = &frame.header;
        if self.streams.is_empty() || header.magic.is_response() || !header.opcode.is_dcp() {
            return false;
        }
        let ends = matches!(header.opcode, Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_STREAM_END);
        match self.streams.get_mut(&header.opaque) {
            Some(StreamFault::Silent) if !ends => header.opcode != Opcode::DCP_NOOP,
            Some(StreamFault::CutAfter(items)) if is_item(header.opcode) && *items > 0 => {
                *items -= 1;
                false
            }
            Some(StreamFault::CutAfter(_))
                if is_item(header.opcode) || header.opcode == Opcode::DCP_OSO_SNAPSHOT =>
            {
                self.cut = Some(Cut::Close);
                true
            }
            _ => {
                if ends {
                    self.streams.remove(&header.opaque);
                }
                false
            }
        }
    }

    /// Follows which streams are in a snapshot from memory.
    fn note_snapshot(&mut self, frame: &Frame<'_>) {
        let opaque = frame.header.opaque;
        match frame.header.opcode {
            Opcode::DCP_SNAPSHOT_MARKER => match SnapshotMarker::decode(frame) {
                Ok(marker) if marker.flags.contains(SnapshotFlags::MEMORY) => {
                    self.in_memory.insert(opaque, false);
                }
                _ => _ = self.in_memory.remove(&opaque),
            },
            Opcode::DCP_STREAM_END => _ = self.in_memory.remove(&opaque),
            opcode if is_item(opcode) => {
                if let Some(has_item) = self.in_memory.get_mut(&opaque) {
                    *has_item = true;
                }
            }
            _ => {}
        }
    }

    fn begin_oso_cut(&mut self, items: u64, frame: &Frame<'_>, packet: &[u8]) {
        if frame.extras == 1u32.to_be_bytes() {
            self.streams.insert(frame.header.opaque, StreamFault::CutAfter(items));
            self.put(packet);
        } else {
            self.cut = Some(Cut::Close);
        }
    }

    /// Sends a SEQNO_ADVANCED with the seqno of an item, on its stream.
    fn put_seqno_advanced(&mut self, item: &Frame<'_>) {
        let mut advanced =
            Frame { extras: item.extras.get(..8).unwrap_or_default(), ..item.envelope() };
        advanced.header.opcode = Opcode::DCP_SEQNO_ADVANCED;
        advanced.header.datatype = dcp_wire::Datatype::RAW;
        advanced.header.cas = dcp_wire::Cas(0);
        let mut packet = BytesMut::new();
        // No part is longer than that of the item it is copied from.
        if advanced.encode(&mut packet).is_ok() {
            self.put(&packet);
        }
    }

    fn put_corrupted(&mut self, packet: &[u8], offset: Option<usize>, rule: usize) {
        let mut packet = packet.to_vec();
        let offset = match (offset, self.rules.get_mut(rule)) {
            (Some(offset), _) => offset.min(packet.len() - 1),
            (None, Some(rule)) => rule.draw(packet.len()),
            (None, None) => 0,
        };
        if let Some(byte) = packet.get_mut(offset) {
            *byte = !*byte;
        }
        self.put(&packet);
    }

    /// Passes bytes to the socket, up to the remaining limit.
    fn put(&mut self, bytes: &[u8]) {
        let allowed = self.bytes_left.unwrap_or(usize::MAX);
        self.wire.put_slice(bytes.get(..allowed).unwrap_or(bytes));
        if let Some(left) = &mut self.bytes_left {
            *left = left.saturating_sub(bytes.len());
            if *left == 0 {
                self.cut = Some(Cut::Close);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::Vbid;
    use dcp_wire::message::{OsoSnapshot, SeqnoAdvanced, StreamAddress};

    use super::*;
    use crate::fault::parse_rules;

    /// What the tap makes of a start, `items` items and an end of an out-of-order snapshot.
    fn oso(rules: &str, items: u64) -> (Vec<Opcode>, bool) {
        let faults = Faults::default();
        faults.set(parse_rules(rules).unwrap()).unwrap();
        let mut tap = Tap::new(&faults, 0);
        tap.refresh(0);
        let to = StreamAddress { vbid: Vbid(3), opaque: Opaque(9), stream_id: None };
        let mut output = BytesMut::new();
        OsoSnapshot::Start.encode(to, &mut output).unwrap();
        for seqno in 1..=items {
            let item = Frame::request(Opcode::DCP_MUTATION).with_opaque(Opaque(9));
            item.with_extras(&[seqno.to_be_bytes(), [0; 8]].concat()).encode(&mut output).unwrap();
        }
        OsoSnapshot::End.encode(to, &mut output).unwrap();
        tap.pass(Instant::now(), &mut output);
        assert!(output.is_empty());
        let mut seen = Vec::new();
        let wire = tap.wire().split();
        let mut rest = &wire[..];
        while let Ok(Some((frame, len))) = Frame::parse(rest, MAX_BODY_LEN) {
            seen.push(frame.header.opcode);
            rest = &rest[len..];
        }
        (seen, tap.is_closing())
    }

    #[test]
    fn snapshot_end_is_lost_behind_items_from_memory_only() {
        let faults = Faults::default();
        faults.set(parse_rules(r#"[{"reaction": "no_snapshot_end"}]"#).unwrap()).unwrap();
        let mut tap = Tap::new(&faults, 0);
        tap.refresh(0);
        let to = StreamAddress { vbid: Vbid(3), opaque: Opaque(9), stream_id: None };
        let mut passes = |flags, items: u64| {
            let mut output = BytesMut::new();
            SnapshotMarker::new(Seqno(0), Seqno(9), flags).encode(to, &mut output).unwrap();
            for seqno in 1..=items {
                let item = Frame::request(Opcode::DCP_MUTATION).with_opaque(Opaque(9));
                let item_extras = [seqno.to_be_bytes(), [0; 8]].concat();
                item.with_extras(&item_extras).encode(&mut output).unwrap();
            }
            SeqnoAdvanced { seqno: Seqno(9) }.encode(to, &mut output).unwrap();
            let all = output.clone();
            tap.pass(Instant::now(), &mut output);
            tap.wire().split() == all
        };
        assert!(!passes(SnapshotFlags::MEMORY, 2));
        assert!(passes(SnapshotFlags::MEMORY, 0));
        assert!(passes(SnapshotFlags::DISK, 2));
        assert!(!passes(SnapshotFlags::MEMORY | SnapshotFlags::CHECKPOINT, 1));
    }

    #[test]
    fn snapshot_out_of_order_breaks_off_after_so_many_items_or_at_its_end() {
        const OSO: Opcode = Opcode::DCP_OSO_SNAPSHOT;
        const ITEM: Opcode = Opcode::DCP_MUTATION;
        let never = r#"[{"condition": {"vbucket": 7}, "reaction": "oso_cut"}]"#;
        assert_eq!(oso(never, 1), (vec![OSO, ITEM, OSO], false));
        let after = |n| format!(r#"[{{"reaction": {{"oso_cut": {{"items": {n}}}}}}}]"#);
        assert_eq!(oso(&after(0), 3), (vec![OSO], true));
        assert_eq!(oso(&after(2), 3), (vec![OSO, ITEM, ITEM], true));
        assert_eq!(oso(&after(9), 2), (vec![OSO, ITEM, ITEM], true));
    }
}
