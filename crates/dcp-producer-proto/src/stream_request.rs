//! DCP_STREAM_REQ: every check between a request and its stream, in the server's order (DCP page
//! "stream-request").

use dcp_wire::message::{FailoverEntry, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::{Seqno, Status, StreamId, Vbuuid};
use tracing::debug;

use super::filter::{Filter, Missing, RequestValue};
use super::refusal::Refusal;
use super::rollback::{self, OutOfRange, RollbackQuery, Verdict};
use super::settings::{Settings, SyncWrites};
use super::{
    BucketSource, ConnectionConfig, Features, MemoryPressure, VBucketSource, VBucketState,
};
use dcp_proto::Snapshot;

/// Flags of requests this server knows.
const KNOWN_FLAGS: StreamRequestFlags = StreamRequestFlags::TAKE_OVER
    .union(StreamRequestFlags::DISK_ONLY)
    .union(StreamRequestFlags::TO_LATEST)
    .union(StreamRequestFlags::ACTIVE_VB_ONLY)
    .union(StreamRequestFlags::STRICT_VBUUID)
    .union(StreamRequestFlags::FROM_LATEST)
    .union(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES);

/// The contents of a request's packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checks<'a> {
    pub(super) settings: &'a Settings,
    pub(super) features: Features,
    pub(super) config: &'a ConnectionConfig,
}

/// A stream that may begin.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) stream_id: Option<StreamId>,
    pub(super) filter: Filter,
    pub(super) start_seqno: Seqno,
    pub(super) end_seqno: Seqno,
    pub(super) snapshot: Snapshot,
    pub(super) disk_only: bool,
    pub(super) takes_over: bool,
    pub(super) ignore_purged: bool,
    pub(super) client_purge_seqno: Seqno,
    pub(super) state: VBucketState,
    pub(super) incarnation: u64,
    pub(super) failover_log: Vec<FailoverEntry>,
}

impl Checks<'_> {
    /// Checks of the packet alone.
    pub(super) fn check_packet(&self, request: &StreamRequest<'_>) -> Result<(), Refusal> {
        if self.config.server_version.is_legacy() {
            // It ignores unknown flags and values.
            return Ok(());
        }
        let unknown = request.flags.difference(KNOWN_FLAGS);
        if !unknown.is_empty() {
            return Err(Refusal::UnknownFlags(unknown.bits()));
        }
        if !request.value.is_empty() && !self.features.collections {
            return Err(Refusal::invalid("request must not include value"));
        }
        Ok(())
    }

    /// Everything else. `is_live` tells whether the vBucket has a live stream with a stream id.
    pub(super) fn check<S: BucketSource>(
        &self,
        request: &StreamRequest<'_>,
        source: &S,
        is_live: impl Fn(Option<StreamId>) -> bool,
    ) -> Result<Accepted, Refusal> {
        if source.is_warming_up() {
            return Err(Refusal::Status(Status::ETMPFAIL));
        }
        let vbucket = source.vbucket(request.vbid).ok_or(Refusal::NotMyVbucket)?;
        let state = vbucket.state();
        check_state(state, request.flags)?;
        let request = &from_latest(request, &vbucket);
        self.check_noop()?;
        check_range(request, request.start_seqno, request.end_seqno)?;
        let legacy = self.config.server_version.is_legacy();
        let value = if legacy { &[] } else { request.value };
        let value = RequestValue::parse(value, self.config.server_version).map_err(|error| {
            debug!(vbid = %request.vbid, %error, "refused the value of a stream request");
            Refusal::Status(Status::EINVAL)
        })?;
        let filter = if self.features.collections {
            let tells_modifications = self.settings.flatbuffers_events;
            Filter::new(&value, source)
                .map(|filter| filter.telling_modifications(tells_modifications))
        } else {
            Filter::default_documents(&vbucket)
        };
        let unknown = |missing| unknown(missing, source, self.features);
        let filter = filter.map_err(unknown)?;
        check_privileges(&filter, source)?;
        self.check_stream_id(value.stream_id)?;
        if value.is_filtered() && self.settings.sync_writes != SyncWrites::Off {
            return Err(Refusal::Status(Status::NOT_SUPPORTED));
        }
        if is_live(value.stream_id) {
            return Err(Refusal::Status(Status::KEY_EEXISTS));
        }
        check_rollback(request, &value, &filter, &vbucket)?;
        let end_seqno = end_seqno(request, &filter, &vbucket).map_err(unknown)?;
        rollback::check_reachable(request.start_seqno, end_seqno, vbucket.high_seqno())
            .map_err(|violation| out_of_range(request, violation))?;
        check_capacity(source, &vbucket)?;
        let takes_over = request.flags.contains(StreamRequestFlags::TAKE_OVER);
        Ok(Accepted {
            takes_over,
            stream_id: value.stream_id,
            filter,
            start_seqno: request.start_seqno,
            end_seqno: if takes_over { Seqno::MAX } else { end_seqno },
            snapshot: self.snapshot(request, vbucket.high_seqno()),
            disk_only: request.flags.contains(StreamRequestFlags::DISK_ONLY),
            ignore_purged: request.flags.contains(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES),
            client_purge_seqno: value.purge_seqno,
            state,
            incarnation: vbucket.incarnation(),
            failover_log: vbucket.failover_table().entries().to_vec(),
        })
    }

    /// Features of version 5 need noops, so that a dead client is noticed.
    fn check_noop(&self) -> Result<(), Refusal> {
        let needed =
            self.features.collections || self.settings.flags.contains(OpenFlags::INCLUDE_XATTRS);
        if self.config.noop_mandatory && needed && !self.settings.noop_enabled {
            return Err(Refusal::Status(Status::NOT_SUPPORTED));
        }
        Ok(())
    }

    fn check_stream_id(&self, stream_id: Option<StreamId>) -> Result<(), Refusal> {
        if stream_id.is_some() != self.settings.stream_ids || stream_id == Some(StreamId(0)) {
            return Err(Refusal::Status(Status::DCP_STREAMID_INVALID));
        }
        Ok(())
    }

    /// The snapshot that the stream's first marker continues.
    fn snapshot(&self, request: &StreamRequest<'_>, high_seqno: Seqno) -> Snapshot {
        let mut snapshot = Snapshot { start: request.snapshot_start, end: request.snapshot_end };
        if self.features.collections
            && request.start_seqno == snapshot.start
            && snapshot.end > high_seqno
        {
            snapshot.end = snapshot.start;
        }
        snapshot
    }
}

/// A stream that the user may not read in full is refused.
fn check_privileges<S: BucketSource>(filter: &Filter, source: &S) -> Result<(), Refusal> {
    if filter.may_be_read(source) {
        return Ok(());
    }
    Err(Refusal::Status(Status::EACCESS))
}

/// Whether the node has the resources for another stream.
fn check_capacity<S: BucketSource>(
    source: &S,
    vbucket: &impl VBucketSource,
) -> Result<(), Refusal> {
    let status = match source.memory_pressure() {
        MemoryPressure::None if vbucket.is_receiving_initial_snapshot() => Status::ETMPFAIL,
        MemoryPressure::None => return Ok(()),
        MemoryPressure::High => Status::ETMPFAIL,
        MemoryPressure::Full => Status::ENOMEM,
    };
    Err(Refusal::Status(status))
}

fn check_state(state: VBucketState, flags: StreamRequestFlags) -> Result<(), Refusal> {
    let active_only = flags.contains(StreamRequestFlags::ACTIVE_VB_ONLY);
    match state {
        VBucketState::Active => Ok(()),
        VBucketState::Replica if !active_only => Ok(()),
        _ => Err(Refusal::NotMyVbucket),
    }
}

/// The request with its start moved to the newest change, if its flags say so.
fn from_latest<'a>(request: &StreamRequest<'a>, vbucket: &impl VBucketSource) -> StreamRequest<'a> {
    let mut request = *request;
    if request.flags.contains(StreamRequestFlags::FROM_LATEST) {
        let high = vbucket.high_seqno();
        request.start_seqno = high;
        request.snapshot_start = high;
        request.snapshot_end = high;
        if request.vbuuid == Vbuuid(0) {
            request.vbuuid = vbucket.failover_table().newest().vbuuid;
        }
    }
    request
}

fn check_range(request: &StreamRequest<'_>, start: Seqno, end: Seqno) -> Result<(), Refusal> {
    let snapshot = Snapshot { start: request.snapshot_start, end: request.snapshot_end };
    rollback::check_range(start, end, snapshot)
        .map_err(|violation| out_of_range(request, violation))
}

fn out_of_range(request: &StreamRequest<'_>, violation: OutOfRange) -> Refusal {
    debug!(vbid = %request.vbid, %violation, "refused a stream request");
    Refusal::Status(Status::ERANGE)
}

fn check_rollback(
    request: &StreamRequest<'_>,
    value: &RequestValue,
    filter: &Filter,
    vbucket: &impl VBucketSource,
) -> Result<(), Refusal> {
    let flags = request.flags;
    let ignore_purged = flags.contains(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES);
    let query = RollbackQuery {
        table: vbucket.failover_table(),
        high_seqno: vbucket.high_seqno(),
        purge_seqno: if ignore_purged { Seqno::ZERO } else { vbucket.purge_seqno() },
        start_seqno: request.start_seqno,
        vbuuid: request.vbuuid,
        snapshot: Snapshot { start: request.snapshot_start, end: request.snapshot_end },
        strict_vbuuid: flags.contains(StreamRequestFlags::STRICT_VBUUID),
        client_purge_seqno: value.purge_seqno,
        collection_high_seqno: filter.high_seqno(vbucket).unwrap_or_default(),
    };
    match rollback::decide(&query) {
        Verdict::Rollback { seqno, reason } => {
            debug!(vbid = %request.vbid, %seqno, %reason, "stream request must roll back");
            Err(Refusal::Rollback(seqno))
        }
        Verdict::Continue(_) | Verdict::OutOfRange(_) => Ok(()),
    }
}

/// Where the stream ends, with "latest" and "on disk" resolved to current seqnos.
fn end_seqno(
    request: &StreamRequest<'_>,
    filter: &Filter,
    vbucket: &impl VBucketSource,
) -> Result<Seqno, Missing> {
    let mut end = request.end_seqno;
    if request.flags.contains(StreamRequestFlags::TO_LATEST) {
        end = filter.high_seqno(vbucket)?.unwrap_or_else(|| vbucket.high_seqno());
    }
    if request.flags.contains(StreamRequestFlags::DISK_ONLY) {
        end = vbucket.persisted_seqno();
    }
    Ok(end)
}

fn unknown<S: BucketSource>(missing: Missing, source: &S, features: Features) -> Refusal {
    let status = match missing {
        Missing::Scope => Status::UNKNOWN_SCOPE,
        // A client without collections cannot know this status.
        Missing::Collection if !features.collections && !features.xerror => Status::EINVAL,
        Missing::Collection => Status::UNKNOWN_COLLECTION,
    };
    if status == Status::EINVAL {
        return Refusal::Status(status);
    }
    Refusal::Unknown(status, source.manifest_uid())
}
