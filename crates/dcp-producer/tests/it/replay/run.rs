//! One recording, replayed: its history is made on a cluster, its clients say what they said, and
//! what the cluster answers is held against what the server answered.

use std::collections::{BTreeMap, BTreeSet};

use dcp_producer::VBucketState;
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    FailoverEntries, SnapshotMarker, StreamEnd, StreamEndReason, StreamRequest,
};
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Status};

use super::client::Client;
use super::facts;
use super::hidden::Hidden;
use super::stage::Stage;
use super::twins::Twins;

/// A recording being replayed.
struct Replay<'a> {
    scenario: &'a Scenario,
    stage: Stage,
    twins: Twins,
    clients: BTreeMap<u32, Client>,
    /// Connections with a request that is not answered yet.
    unsettled: BTreeSet<u32>,
    differences: Vec<String>,
}

/// What differs between the recorded server's packets and ours, and what was left out.
pub(super) async fn replay(scenario: &Scenario) -> (Vec<String>, BTreeSet<Hidden>) {
    let stage = Stage::set(scenario).await;
    let mut replay = Replay {
        scenario,
        stage,
        twins: Twins::default(),
        clients: BTreeMap::new(),
        unsettled: BTreeSet::new(),
        differences: Vec::new(),
    };
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
    (replay.differences, replay.twins.hidden)
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
        self.twins.hide(Hidden::Login, scram.is_some());
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
        let first = facts::first_marker(self.scenario, at);
        let seqno = match first {
            Some((seqno, _)) => seqno,
            None => facts::first_announced(self.scenario, vbid),
        };
        self.stage.advance(vbid, seqno, &mut self.twins).await;
        if let Some((seqno, true)) = first
            && self.stage.high_seqno(vbid) == seqno
            && !self.stage.facts.evictions.contains_key(&vbid)
        {
            self.stage.producer.persist();
        }
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
        let mut later = self.scenario.events[at + 1..].iter().filter(|later| later.conn == conn);
        let next = later.next().and_then(|next| match &next.kind {
            EventKind::ServerPacket(packet) => Some(packet.clone()),
            _ => None,
        });
        if let Some(vbid) = next.and_then(|packet| state_changed(&packet)) {
            self.change_state(at, vbid);
            self.settle().await;
        }
    }

    /// A vBucket became what a later request says: a replica can be streamed, one that is dead or
    /// gone cannot.
    fn change_state(&mut self, at: usize, vbid: u16) {
        let mut later = (at + 1..self.scenario.events.len()).filter(|&later| {
            let packet = self.scenario.events[later].packet();
            let request = packet.and_then(frame);
            request.is_some_and(|frame| {
                StreamRequest::decode(&frame).is_ok_and(|request| request.vbid.0 == vbid)
            })
        });
        let answer = later.next().and_then(|asked| self.answer_of(asked));
        match answer {
            Some((status, _)) if status.is_success() => {
                self.stage.set_state(vbid, VBucketState::Replica);
            }
            // To clients one that is gone is the same.
            _ => self.stage.set_state(vbid, VBucketState::Dead),
        }
    }

    async fn server_packet(&mut self, at: usize, conn: u32, packet: &[u8]) {
        let Some(frame) = frame(packet) else {
            self.differences.push(format!("connection {conn}: the recorded server sent no packet"));
            return;
        };
        let vbid = frame.header.vbid().0;
        if let Ok(marker) = SnapshotMarker::decode(&frame)
            && self.stage.lacks(vbid, marker.end_seqno.0)
        {
            self.twins.hide(Hidden::MomentOfWrite, true);
            // Before it the stream had said all it had to say.
            self.settle().await;
            self.stage.advance(vbid, marker.end_seqno.0, &mut self.twins).await;
            self.settle().await;
        }
        if let Some(vbid) = state_changed(packet)
            && self.stage.is_alive(vbid)
        {
            self.settle().await;
            self.change_state(at, vbid);
            self.settle().await;
        }
        let client = self.clients.get_mut(&conn).unwrap();
        client.sides.push_recorded(packet);
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

/// The vBucket of a stream that ends because its vBucket changed.
fn state_changed(packet: &[u8]) -> Option<u16> {
    let frame = frame(packet)?;
    let end = StreamEnd::decode(&frame).ok()?;
    (end.reason == StreamEndReason::STATE_CHANGED).then(|| frame.header.vbid().0)
}
