//! What a recording tells of the node it was made on, besides its documents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_producer::{ConnectionConfig, OsoBackfill, ProducerOptions, ServerVersion};
use dcp_test::traces::{Event, EventKind, Scenario};
use dcp_wire::message::{GetAllVbSeqnos, SnapshotMarker, StreamRequest, VbucketState};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status};

use super::shown::shown;

/// vBuckets of the largest bucket.
const MOST_VBUCKETS: u16 = 1024;

/// Bits of a snapshot marker: from disk; begins a checkpoint.
const DISK: u32 = 0x02;
const CHECKPOINT: u32 = 0x04;

/// What a recording tells of its node.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) version: ServerVersion,
    pub(super) ephemeral: bool,
    pub(super) passive_compression: bool,
    forces_oso: bool,
    idle_timeout: Option<Duration>,
    /// The node crashes when it closes a connection by itself.
    pub(super) crashes: bool,
    /// There are two nodes, and the second takes over.
    pub(super) fails_over: bool,
    pub(super) drops_bucket: bool,
    /// vBuckets there are; `None`: all.
    pub(super) vbuckets: Option<BTreeSet<u16>>,
    pub(super) replicas: BTreeSet<u16>,
    /// vBuckets with streams.
    pub(super) streamed: BTreeSet<u16>,
    /// Whether the node knows a cluster map from the beginning.
    pub(super) has_map: bool,
    /// Seqno of each vBucket after which everything left memory.
    pub(super) evictions: BTreeMap<u16, u64>,
    /// Seqno of each vBucket after which it was purged.
    pub(super) purges: BTreeMap<u16, u64>,
    pub(super) purge_seqno: u64,
}

/// A stream as far as setting the stage needs it.
#[derive(Debug)]
struct Stream {
    conn: u32,
    opaque: Opaque,
    vbid: u16,
    start: u64,
    /// Ends and flags of its first two markers.
    markers: Vec<(u64, u32)>,
}

impl Facts {
    pub(super) fn of(scenario: &Scenario) -> Self {
        let what = &scenario.what;
        let answers = answers(scenario);
        let streams = streams(scenario);
        let purge_seqno = scenario.expected["purge_seqno"].as_u64().unwrap_or_default();
        let high_seqno = scenario.expected["high_seqno"].as_u64();
        let purged = scenario.vbuckets.iter().filter(|_| purge_seqno != 0);
        let purged_after = |vbid: &u16| {
            let items = shown(scenario).remove(vbid).map(|shown| shown.items);
            let last = items.and_then(|items| items.keys().next_back().copied());
            (*vbid, high_seqno.or(last).unwrap_or_default())
        };
        Self {
            version: version(&scenario.server),
            ephemeral: what.contains("ephemeral bucket"),
            passive_compression: what.contains("compression_mode=passive"),
            forces_oso: what.contains("dcp_oso_backfill=enabled"),
            idle_timeout: number_after(what, "dcp_idle_timeout=").map(Duration::from_secs),
            crashes: what.contains("SIGKILL") && what.contains("restarted"),
            fails_over: what.contains("(failover)"),
            drops_bucket: what.contains("bucket deleted"),
            vbuckets: present(scenario, &answers),
            replicas: replicas(&answers),
            streamed: streams.iter().map(|stream| stream.vbid).collect(),
            has_map: has_map(&answers),
            evictions: evictions(&streams),
            purges: purged.map(purged_after).collect(),
            purge_seqno,
        }
    }

    /// The node closes connections that say nothing for long.
    pub(super) fn is_idle(&self) -> bool {
        self.idle_timeout.is_some()
    }

    /// How many vBuckets the bucket needs to have all that are streamed or there.
    pub(super) fn count(&self) -> u16 {
        let named = self.vbuckets.iter().flatten().chain(&self.streamed);
        let highest = named.copied().filter(|&vbid| vbid < MOST_VBUCKETS).max();
        let needed = highest.map_or(0, |highest| (highest + 1).next_power_of_two());
        needed.max(ProducerOptions::default().vbuckets)
    }

    /// How the recorded server was configured.
    pub(super) fn dcp_config(&self) -> ConnectionConfig {
        let usual = ConnectionConfig::default();
        let oso = if self.forces_oso { OsoBackfill::Enabled } else { OsoBackfill::Disabled };
        ConnectionConfig {
            idle_timeout: self.idle_timeout.unwrap_or(usual.idle_timeout),
            server_version: self.version,
            oso_backfill: oso,
            ..usual
        }
    }
}

/// The number that follows some words.
fn number_after(text: &str, words: &str) -> Option<u64> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

pub(super) fn version(server: &str) -> ServerVersion {
    let numbers = server.trim_start_matches(|c: char| !c.is_ascii_digit());
    let mut numbers = numbers.split('.').map(|part| part.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    ServerVersion { major: next(), minor: next(), patch: next() }
}

/// A request and how it was answered.
struct Answered<'a> {
    request: Frame<'a>,
    status: Status,
    value: &'a [u8],
}

fn frame(event: &Event) -> Option<Frame<'_>> {
    Frame::parse(event.packet()?, MAX_BODY_LEN).ok()?.map(|(frame, _)| frame)
}

fn answers(scenario: &Scenario) -> Vec<Answered<'_>> {
    let mut answered = Vec::new();
    let mut open: Vec<(u32, Frame<'_>)> = Vec::new();
    for event in &scenario.events {
        let Some(frame) = frame(event) else { continue };
        if matches!(event.kind, EventKind::ClientPacket(_)) {
            open.push((event.conn, frame));
        } else if frame.header.magic.is_response() {
            let asked = |(conn, request): &(u32, Frame<'_>)| {
                *conn == event.conn
                    && request.header.opaque == frame.header.opaque
                    && request.header.opcode == frame.header.opcode
            };
            if let Some(at) = open.iter().position(asked) {
                let (_, request) = open.remove(at);
                let (status, value) = (frame.header.status(), frame.value);
                answered.push(Answered { request, status, value });
            }
        }
    }
    answered
}

/// vBuckets the node had; `None` if the recording does not say.
fn present(scenario: &Scenario, answers: &[Answered<'_>]) -> Option<BTreeSet<u16>> {
    if scenario.vbuckets.is_empty() {
        return None;
    }
    let mut present: BTreeSet<u16> = scenario.vbuckets.iter().copied().collect();
    for answer in answers {
        let about = matches!(
            answer.request.header.opcode,
            Opcode::DCP_STREAM_REQ | Opcode::DCP_GET_FAILOVER_LOG
        );
        if about && matches!(answer.status, Status::SUCCESS | Status::ROLLBACK) {
            present.insert(answer.request.header.vbid().0);
        }
    }
    Some(present)
}

/// Whether an answer holds a cluster map before any is set.
fn has_map(answers: &[Answered<'_>]) -> bool {
    let set = |answer: &&Answered<'_>| {
        answer.request.header.opcode == Opcode::SET_CLUSTER_CONFIG && answer.status.is_success()
    };
    let before = answers.iter().take_while(|answer| !set(answer));
    before.into_iter().any(|answer| {
        let tells = answer.request.header.opcode == Opcode::GET_CLUSTER_CONFIG
            && answer.status.is_success();
        (tells || answer.status == Status::NOT_MY_VBUCKET) && !answer.value.is_empty()
    })
}

/// vBuckets that are replicas from the beginning: streams that want an active one are refused, or
/// the list of replicas names them.
fn replicas(answers: &[Answered<'_>]) -> BTreeSet<u16> {
    const ACTIVE_ONLY: u32 = 0x10;
    let mut replicas = BTreeSet::new();
    let streamed = |vbid| {
        answers.iter().any(|answer| {
            answer.request.header.opcode == Opcode::DCP_STREAM_REQ
                && answer.request.header.vbid() == vbid
                && answer.status.is_success()
        })
    };
    for answer in answers {
        if let Ok(request) = StreamRequest::decode(&answer.request)
            && request.flags.bits() & ACTIVE_ONLY != 0
            && answer.status == Status::NOT_MY_VBUCKET
            && streamed(request.vbid)
        {
            replicas.insert(request.vbid.0);
        }
        if let Ok(request) = GetAllVbSeqnos::decode(&answer.request)
            && request.state.flatten() == Some(VbucketState::REPLICA)
            && answer.status.is_success()
        {
            let entries = answer.value.chunks_exact(10);
            replicas.extend(entries.map(|entry| u16::from_be_bytes([entry[0], entry[1]])));
        }
    }
    replicas
}

fn streams(scenario: &Scenario) -> Vec<Stream> {
    let mut streams: Vec<Stream> = Vec::new();
    for event in &scenario.events {
        let Some(frame) = frame(event) else { continue };
        let opaque = frame.header.opaque;
        if let (EventKind::ClientPacket(_), Ok(request)) =
            (&event.kind, StreamRequest::decode(&frame))
        {
            let (vbid, start) = (request.vbid.0, request.start_seqno.0);
            streams.push(Stream { conn: event.conn, opaque, vbid, start, markers: Vec::new() });
        } else if let (EventKind::ServerPacket(_), Ok(marker)) =
            (&event.kind, SnapshotMarker::decode(&frame))
        {
            let mut streams = streams.iter_mut().rev();
            let stream = streams.find(|one| one.conn == event.conn && one.opaque == opaque);
            if let Some(stream) = stream {
                stream.markers.push((marker.end_seqno.0, marker.flags.bits()));
            }
        }
    }
    streams
}

/// Where memory was emptied: below what a stream got from memory after another got a disk
/// snapshot, and below the end of a disk snapshot that a begun checkpoint follows.
fn evictions(streams: &[Stream]) -> BTreeMap<u16, u64> {
    let mut evictions = BTreeMap::new();
    for (index, stream) in streams.iter().enumerate() {
        let Some(&(end, flags)) = stream.markers.first() else { continue };
        if flags & DISK == 0 {
            continue;
        }
        let mut at = end;
        if stream.markers.get(1).is_some_and(|(_, next)| next & (CHECKPOINT | DISK) == 0) {
            at = end - 1;
        }
        for later in &streams[index + 1..] {
            let from_memory = later.markers.first().is_some_and(|(_, flags)| flags & DISK == 0);
            if later.vbid == stream.vbid && from_memory && later.start < at {
                at = later.start;
            }
        }
        if at < end {
            evictions.entry(stream.vbid).or_insert(at);
        }
    }
    evictions
}

/// What a client's packet at `at` meets: the first marker of the stream it opens, if it gets one
/// before another stream of the same opaque is opened.
pub(super) fn first_marker(scenario: &Scenario, at: usize) -> Option<(u64, bool)> {
    let event = &scenario.events[at];
    let opaque = frame(event)?.header.opaque;
    let mut oso = None;
    for later in &scenario.events[at + 1..] {
        let Some(frame) =
            frame(later).filter(|frame| later.conn == event.conn && frame.header.opaque == opaque)
        else {
            continue;
        };
        if matches!(later.kind, EventKind::ClientPacket(_)) {
            return None;
        }
        if let Ok(marker) = SnapshotMarker::decode(&frame) {
            let from_disk = oso.is_some() || marker.flags.bits() & DISK != 0;
            return Some((oso.unwrap_or(marker.end_seqno.0), from_disk));
        }
        // A snapshot in the order of the keys tells no end: its highest seqno is it.
        if frame.header.opcode == Opcode::DCP_OSO_SNAPSHOT {
            oso.get_or_insert(0);
        } else if let (Some(end), Some(seqno)) = (&mut oso, frame.extras.first_chunk()) {
            *end = u64::from_be_bytes(*seqno).max(*end);
        }
    }
    oso.map(|end| (end, true))
}

/// End of the first snapshot of a vBucket that any stream announces; everything if none does.
pub(super) fn first_announced(scenario: &Scenario, vbid: u16) -> u64 {
    let announced = scenario.events.iter().find_map(|event| {
        let frame = frame(event)?;
        let marker =
            SnapshotMarker::decode(&frame).ok().filter(|_| frame.header.vbid().0 == vbid)?;
        Some(marker.end_seqno.0)
    });
    announced.unwrap_or(u64::MAX)
}
