//! What a recording tells of the node it was made on, besides its documents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_producer::{ConnectionConfig, OsoBackfill, ProducerOptions, ServerVersion, VBucketState};
use dcp_test::traces::{Event, EventKind, Scenario};
use dcp_wire::message::{GetAllVbSeqnos, StreamRequest, VbucketState};
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Status};

use super::moments::Moments;

/// vBuckets of the largest bucket.
const MOST_VBUCKETS: u16 = 1024;

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
    /// What a vBucket becomes while its stream is open.
    pub(super) becomes: Option<VBucketState>,
    /// vBuckets there are; `None`: all.
    pub(super) vbuckets: Option<BTreeSet<u16>>,
    pub(super) replicas: BTreeSet<u16>,
    /// vBuckets with streams.
    pub(super) streamed: BTreeSet<u16>,
    /// Whether the node knows a cluster map from the beginning.
    pub(super) has_map: bool,
    /// Whether streams begin with what is on disk, since nothing is left in memory.
    pub(super) begins_on_disk: bool,
    /// Seqno up to which nothing is left in memory.
    pub(super) on_disk: Option<u64>,
    /// Seqno up to which the flusher had come when the first stream began with what was on disk,
    /// while later changes were still in memory only.
    pub(super) flushed: Option<u64>,
    /// Seqno of each vBucket after which it was purged.
    pub(super) purges: BTreeMap<u16, u64>,
    pub(super) purge_seqno: u64,
}

impl Facts {
    pub(super) fn of(scenario: &Scenario) -> Self {
        let what = &scenario.what;
        let answers = answers(scenario);
        let purge_seqno = scenario.expected["purge_seqno"].as_u64().unwrap_or_default();
        let operations = scenario.expected["kv_ops"].as_array().into_iter().flatten();
        let last = operations.filter_map(|operation| operation["seqno"].as_u64()).max();
        let last = scenario.expected["high_seqno"].as_u64().or(last).unwrap_or_default();
        let purged = scenario.vbuckets.iter().filter(|_| purge_seqno != 0);
        let on_disk = number_before(what, " docs on disk");
        // Which writes the flusher had reached tells the first snapshot by its changes.
        let first = on_disk.and(scenario.vbuckets.first());
        let flushed = first.map(|&vbid| Moments::of(scenario).first_held(vbid));
        Self {
            version: version(&scenario.server),
            ephemeral: what.contains("ephemeral bucket"),
            passive_compression: what.contains("compression_mode=passive"),
            forces_oso: what.contains("dcp_oso_backfill=enabled"),
            idle_timeout: number_after(what, "dcp_idle_timeout=").map(Duration::from_secs),
            crashes: what.contains("SIGKILL") && what.contains("restarted"),
            fails_over: what.contains("(failover)"),
            drops_bucket: what.contains("bucket deleted"),
            becomes: becomes(scenario),
            vbuckets: present(scenario, &answers),
            replicas: replicas(&answers),
            streamed: streamed(scenario),
            has_map: has_map(&answers),
            begins_on_disk: begins_on_disk(scenario),
            on_disk,
            flushed,
            purges: purged.map(|vbid| (*vbid, last)).collect(),
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

/// What a vBucket becomes while its stream is open: a replica can be streamed again, one that is dead
/// or gone, which is the same to clients, cannot.
fn becomes(scenario: &Scenario) -> Option<VBucketState> {
    match scenario.expected["re_request_status"].as_u64() {
        Some(0) => Some(VBucketState::Replica),
        Some(_) => Some(VBucketState::Dead),
        None => scenario.what.contains("goes dead").then_some(VBucketState::Dead),
    }
}

/// The number that follows some words.
fn number_after(text: &str, words: &str) -> Option<u64> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// The number that precedes some words.
fn number_before(text: &str, words: &str) -> Option<u64> {
    let (before, _) = text.split_once(words)?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
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

pub(super) fn frame(event: &Event) -> Option<Frame<'_>> {
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

/// vBuckets of which a stream is asked for.
fn streamed(scenario: &Scenario) -> BTreeSet<u16> {
    let requests = scenario.events.iter().filter_map(|event| {
        let asked = frame(event).filter(|_| matches!(event.kind, EventKind::ClientPacket(_)))?;
        StreamRequest::decode(&asked).ok().map(|request| request.vbid.0)
    });
    requests.collect()
}

/// Whether line 1 says that streams begin with what is on disk.
fn begins_on_disk(scenario: &Scenario) -> bool {
    let mut words = scenario.title.split('-');
    words.any(|word| word == "disk")
        || scenario.what.contains("disk backfill")
        || scenario.what.ends_with("; disk")
}
