//! One recording, replayed: its history is made on a cluster, its clients say what they said, and
//! what the cluster answers is held against what the server answered.

use std::collections::{BTreeMap, BTreeSet};

use dcp_producer::VBucketState;
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    FailoverEntries, SnapshotFlags, SnapshotMarker, StreamEnd, StreamEndReason, StreamRequest,
    StreamRequestFlags,
};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status};

use super::client::Client;
use super::history;
use super::ignored::Ignored;
use super::markers::{Counts, Source, Sources};
use super::moments::Moments;
use super::stage::Stage;
use super::twins::Twins;

/// A recording being replayed.
struct Replay<'a> {
    scenario: &'a Scenario,
    moments: Moments,
    /// What the history of each vBucket follows from.
    sources: BTreeMap<u16, Source>,
    /// How streams were opened, by the events that begin their first snapshots.
    opened: BTreeMap<usize, Opened>,
    stage: Stage,
    twins: Twins,
    clients: BTreeMap<u32, Client>,
    /// Connections with a request that is not answered yet.
    unsettled: BTreeSet<u32>,
    differences: Vec<String>,
}

/// How a stream was opened.
#[derive(Clone, Copy, Debug)]
struct Opened {
    /// Whether everything was written that its first snapshot holds.
    is_whole: bool,
    /// Whether it begins with what is on disk, which only its marker tells.
    is_untold: bool,
}

/// What came of a replay.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// What differs between the recorded server's packets and ours.
    pub(super) differs: Vec<String>,
    /// What was left out.
    pub(super) ignored: BTreeSet<Ignored>,
    pub(super) marker_fields: Counts,
}

/// Replays a recording.
pub(super) async fn replay(scenario: &Scenario) -> Replayed {
    let stage = Stage::set(scenario).await;
    let mut replay = Replay {
        scenario,
        moments: Moments::of(scenario),
        sources: history::sources(scenario),
        opened: BTreeMap::new(),
        stage,
        twins: Twins::default(),
        clients: BTreeMap::new(),
        unsettled: BTreeSet::new(),
        differences: Vec::new(),
    };
    replay.twins.ignore(Ignored::Branches, history::has_untold_branches(scenario));
    replay.stage.advance_unseen(&mut replay.twins).await;
    for at in 0..scenario.events.len() {
        replay.event(at).await;
    }
    let open: Vec<u32> = replay.clients.keys().copied().collect();
    for conn in open {
        replay.leave(conn).await;
    }
    replay.differences.append(&mut replay.stage.refused);
    replay.stage.producer.shutdown().await;
    let Twins { ignored, marker_fields, .. } = replay.twins;
    Replayed { differs: replay.differences, ignored, marker_fields }
}

fn frame(packet: &[u8]) -> Option<Frame<'_>> {
    Frame::parse(packet, MAX_BODY_LEN).ok()?.map(|(frame, _)| frame)
}

impl Replay<'_> {
    async fn event(&mut self, at: usize) {
        let event = &self.scenario.events[at];
        if !self.clients.contains_key(&event.conn) {
            let address = self.stage.address(event.conn);
            let mut client = Client::connect(&self.stage.producer, address);
            client.sides.has_map = self.stage.facts.has_map;
            self.clients.insert(event.conn, client);
        }
        match &event.kind {
            EventKind::ClientPacket(packet) => self.client_packet(at, event.conn, packet).await,
            EventKind::ServerPacket(packet) => self.server_packet(at, event.conn, packet).await,
            EventKind::ServerClosed => self.server_closed(event.conn).await,
        }
        let is_last = self.scenario.events[at + 1..].iter().all(|later| later.conn != event.conn);
        if is_last && self.scenario.events.len() > at + 1 {
            self.leave(event.conn).await;
        }
    }

    async fn client_packet(&mut self, at: usize, conn: u32, packet: &[u8]) {
        let Some(frame) = frame(packet) else {
            self.clients.get_mut(&conn).unwrap().send(packet).await;
            return;
        };
        if let Ok(request) = StreamRequest::decode(&frame) {
            self.prepare_stream(at, &request).await;
        }
        if frame.header.opcode == Opcode::DCP_GET_FAILOVER_LOG {
            self.prepare_log(at, frame.header.vbid().0).await;
        }
        if frame.header.opcode == Opcode::SET_CLUSTER_CONFIG
            && self.answer_of(at).is_some_and(|(status, _)| status.is_success())
        {
            // No client's: it is what the cluster manager does to a node.
            self.settle().await;
            self.stage.facts.has_map = true;
            self.clients.values_mut().for_each(|client| client.sides.has_map = true);
            return;
        }
        self.change_state_before_credit(at, conn, &frame).await;
        let mut packet = self.translated(packet, &frame);
        let client = self.clients.get_mut(&conn).unwrap();
        let opaque = frame.header.opaque.0;
        if !frame.header.magic.is_response() {
            client.sides.ask(opaque, frame.header.vbid().0);
        } else if let Some(ours) = client.sides.our_noop(opaque) {
            packet[12..16].copy_from_slice(&ours.to_be_bytes());
        }
        if frame.header.opcode == Opcode::DCP_CONTROL && frame.key == b"connection_buffer_size" {
            client.sides.limit();
        }
        let scram = client.scram(&packet);
        self.twins.ignore(Ignored::Login, scram.is_some());
        client.send(&scram.unwrap_or(packet)).await;
        self.unsettled.insert(conn);
    }

    /// A client's packet with our numbers in the place of the recorded ones.
    fn translated(&self, packet: &[u8], frame: &Frame<'_>) -> Vec<u8> {
        let mut packet = packet.to_vec();
        let body = packet.len() - frame.value.len();
        let at = match frame.header.opcode {
            Opcode::DCP_STREAM_REQ if frame.extras.len() == 48 => Some(24 + 24),
            Opcode::OBSERVE_SEQNO if frame.value.len() == 8 => Some(body),
            _ => None,
        };
        if let Some(at) = at
            && let Some(number) = packet[at..].first_chunk_mut()
        {
            *number = self.twins.vbuuids.ours(u64::from_be_bytes(*number)).to_be_bytes();
        }
        let vbid = frame.header.vbid_or_status;
        if let (Some(cas), Some(pairs)) =
            (packet[16..].first_chunk_mut(), self.twins.cas.get(&vbid))
        {
            *cas = pairs.ours(u64::from_be_bytes(*cas)).to_be_bytes();
        }
        packet
    }

    /// Brings a vBucket to where it was when a stream of it was asked for.
    async fn prepare_stream(&mut self, at: usize, request: &StreamRequest<'_>) {
        let vbid = request.vbid.0;
        if self.answer_of(at).is_some_and(|(status, _)| status.is_success()) {
            self.stage.revive(vbid);
        }
        self.prepare_log(at, vbid).await;
        let first = self.moments.first(at);
        let is_whole = self.write_before(at, request, first).await;
        let is_told = self.stage.facts.begins_on_disk
            || request.flags.contains(StreamRequestFlags::DISK_ONLY);
        // A server empties its memory without telling anybody.
        let is_untold = !is_told
            && !self.stage.is_emptied(vbid, request.start_seqno.0)
            && first.is_some_and(|first| self.is_from_disk(first));
        if (is_told || is_untold) && self.stage.facts.on_disk.is_none() {
            self.stage.producer.persist();
        }
        if let Some(first) = first {
            self.opened.insert(first, Opened { is_whole, is_untold });
        }
    }

    /// Writes what was there when a stream was asked for, whose first snapshot begins at `first`.
    /// Returns whether everything was that the snapshot holds; else the stream was open when a burst
    /// was written.
    async fn write_before(
        &mut self,
        at: usize,
        request: &StreamRequest<'_>,
        first: Option<usize>,
    ) -> bool {
        let vbid = request.vbid.0;
        let (_, most) = self.stage.burst_end(vbid, u64::MAX);
        // Clients ask for more than there is.
        let told = [request.start_seqno.0, self.moments.came_before(at, vbid)];
        let known = told.into_iter().filter(|seqno| *seqno <= most).max().unwrap_or_default();
        let is_begun = known > 0 || self.stage.done(vbid) > 0;
        let (mut done, high) = match is_begun {
            true => self.stage.burst_end(vbid, known),
            false => (0, 0),
        };
        let mut is_whole = true;
        match first.and_then(|first| self.moments.held(first)) {
            Some(held) if held > high => {
                let (end, reached) = self.stage.burst_end(vbid, held);
                is_whole = !is_begun || reached <= held;
                done = if is_whole { end } else { done };
            }
            None if !is_begun => {
                let held = self.moments.first_held(vbid);
                (done, _) = self.stage.burst_end(vbid, held);
            }
            _ => {}
        }
        self.stage.advance_to(vbid, done, &mut self.twins).await;
        is_whole
    }

    /// Whether a snapshot that begins at an event is read from disk, as the server says.
    fn is_from_disk(&self, at: usize) -> bool {
        let Some(frame) = self.scenario.events[at].packet().and_then(frame) else { return false };
        let marker = SnapshotMarker::decode(&frame).ok();
        // Those in the order of the keys always are.
        marker.is_none_or(|marker| marker.flags.contains(SnapshotFlags::DISK))
    }

    /// Writes what a snapshot holds that a stream gets while it is open, as far as it is not written,
    /// and says what the fields of its marker follow from.
    async fn write_until(&mut self, at: usize, vbid: u16, marker: &SnapshotMarker) -> Sources {
        let held = self.moments.held(at);
        let until = held.unwrap_or(marker.end_seqno.0);
        let is_live = self.stage.lacks(vbid, until);
        if is_live {
            // Before it the stream had said all it had to say.
            self.settle().await;
            while self.stage.lacks(vbid, until)
                && self.stage.advance_burst(vbid, until, &mut self.twins).await
            {
                self.settle().await;
            }
        }
        let opened = self.opened.get(&at);
        let is_whole = opened.map_or(self.stage.ends_burst(vbid, until), |opened| opened.is_whole);
        let end = match self.sources.get(&vbid) {
            Some(Source::Operations) if is_live && held.is_none() => Source::Itself,
            Some(Source::Operations) if is_whole => Source::Operations,
            Some(Source::Itself) => Source::Itself,
            _ => Source::Changes,
        };
        self.twins.ignore(Ignored::MomentOfWrite, end == Source::Changes && !is_whole);
        let is_untold = opened.is_some_and(|opened| opened.is_untold);
        Sources { end, place: if is_untold { Source::Itself } else { Source::Operations } }
    }

    /// Lets the branches begin that the recorded answer tells of.
    async fn prepare_log(&mut self, at: usize, vbid: u16) {
        let Some((Status::SUCCESS, value)) = self.answer_of(at) else { return };
        let Ok(mut log) = FailoverEntries::decode(&value) else { return };
        if let Some(newest) = log.next() {
            self.stage.advance_to_branch(vbid, newest.vbuuid.0, &mut self.twins).await;
        }
    }

    /// The recorded answer to a request.
    fn answer_of(&self, at: usize) -> Option<(Status, Vec<u8>)> {
        let event = &self.scenario.events[at];
        let asked = frame(event.packet()?)?.header;
        self.scenario.events[at + 1..].iter().filter(|later| later.conn == event.conn).find_map(
            |later| {
                let EventKind::ServerPacket(packet) = &later.kind else { return None };
                let header = frame(packet)?.header;
                let answers = header.magic.is_response()
                    && (header.opcode, header.opaque) == (asked.opcode, asked.opaque);
                answers.then(|| (header.status(), frame(packet).unwrap().value.to_vec()))
            },
        )
    }

    /// A stream's end that waits for credit is due before the credit comes.
    async fn change_state_before_credit(&mut self, at: usize, conn: u32, frame: &Frame<'_>) {
        if frame.header.opcode != Opcode::DCP_BUFFER_ACK {
            return;
        }
        let mut later = (at + 1..self.scenario.events.len())
            .filter(|&later| self.scenario.events[later].conn == conn);
        if let Some(vbid) = later.next().and_then(|next| self.state_changed(next)) {
            self.change_state(vbid);
            self.settle().await;
        }
    }

    fn change_state(&mut self, vbid: u16) {
        self.stage.set_state(vbid, self.stage.facts.becomes.unwrap_or(VBucketState::Dead));
    }

    /// The vBucket of a stream that ends because its vBucket changed: where line 1 says that one
    /// does, that of any endless stream.
    fn state_changed(&self, at: usize) -> Option<u16> {
        let event = &self.scenario.events[at];
        let EventKind::ServerPacket(packet) = &event.kind else { return None };
        let frame = frame(packet)?;
        let end = StreamEnd::decode(&frame).ok()?;
        let is_due = match self.stage.facts.becomes {
            Some(_) => self.is_endless(at, event.conn, frame.header.opaque),
            None => end.reason == StreamEndReason::STATE_CHANGED,
        };
        is_due.then(|| frame.header.vbid().0)
    }

    /// Whether a stream was asked for without an end, before an event.
    fn is_endless(&self, before: usize, conn: u32, opaque: Opaque) -> bool {
        let events = self.scenario.events[..before].iter().rev();
        let mut asked = events.filter(|event| event.conn == conn).filter_map(|event| {
            let frame = event.packet().and_then(frame)?;
            let request = StreamRequest::decode(&frame).ok();
            request.filter(|request| request.opaque == opaque).map(|request| request.end_seqno)
        });
        asked.next() == Some(Seqno::MAX)
    }

    async fn server_packet(&mut self, at: usize, conn: u32, packet: &[u8]) {
        let Some(frame) = frame(packet) else {
            self.differences.push(format!("connection {conn}: the recorded server sent no packet"));
            return;
        };
        let vbid = frame.header.vbid().0;
        let sources = match SnapshotMarker::decode(&frame) {
            Ok(marker) => Some(self.write_until(at, vbid, &marker).await),
            Err(_) => None,
        };
        if let Some(vbid) = self.state_changed(at)
            && self.stage.is_alive(vbid)
        {
            self.settle().await;
            self.change_state(vbid);
            self.settle().await;
        }
        let client = self.clients.get_mut(&conn).unwrap();
        client.sides.push_recorded(packet, sources);
        if frame.header.opcode == Opcode::DCP_NOOP {
            client.await_packets(client.sides.recorded_count()).await;
        }
        let more = self.scenario.events.get(at + 1);
        let turns = more.is_none_or(|next| matches!(next.kind, EventKind::ClientPacket(_)));
        if turns && self.unsettled.contains(&conn) {
            self.settle().await;
        }
    }

    async fn server_closed(&mut self, conn: u32) {
        let facts = &self.stage.facts;
        if facts.crashes || facts.fails_over {
            self.settle().await;
            self.stage.fail(&mut self.twins).await;
        } else if facts.drops_bucket {
            self.settle().await;
            self.stage.producer.drop_bucket().unwrap();
        } else if facts.is_idle() {
            self.clients.get_mut(&conn).unwrap().drain().await;
        }
        self.clients.get_mut(&conn).unwrap().sides.end_recorded();
        self.settle().await;
    }

    /// Waits until every connection has said what it has to say.
    async fn settle(&mut self) {
        for client in self.clients.values_mut() {
            client.settle().await;
            client.sides.compare(&mut self.twins);
        }
        self.unsettled.clear();
    }

    /// The client of a connection leaves.
    async fn leave(&mut self, conn: u32) {
        self.settle().await;
        let client = self.clients.remove(&conn).unwrap();
        let found = client.sides.finish(&mut self.twins);
        self.differences.extend(found.into_iter().map(|what| format!("connection {conn}, {what}")));
    }
}
