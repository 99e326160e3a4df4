//! One stream of one vBucket.
//!
//! ```text
//!                 ┌──────────────────────────────────────────┐
//!                 │ snapshot done                            │
//!                 ▼                                          │
//! (accepted) ► Between ─ not in memory ► Disk snapshot ──────┤
//!                 │ └──── in memory ───► Memory snapshot ────┘
//!                 │
//!                 │ end reached, nothing can pass, vBucket changed, closed
//!                 ▼
//!              Ending ─ STREAM_END sent ► Ended
//! ```
//!
//! The marker of a snapshot is sent right before its first message, so a snapshot without items of
//! the stream costs no message.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_wire::message::{OpenFlags, SetVbucketState, StreamAddress, StreamEnd, StreamEndReason};
use dcp_wire::{EncodeError, Opaque, Opcode, Seqno, Vbid, Vbuuid};
use tracing::debug;

use super::filter::{Filter, View};
use super::message_format::MessageFormat;
use super::oso;
use super::output::Output;
use super::settings::{Settings, SyncWrites};
use super::snapshot::Sending;
use super::stream_request::Accepted;
use super::takeover::{self, Takeover};
use super::{BucketSource, Cursor, VBucketSource, VBucketState};
use dcp_proto::Snapshot;

/// Why a stream stopped writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// It has more to send, or may have.
    Ready,
    /// It has sent everything: wait until its vBucket changes.
    Idle,
    /// It has to read the disk, and may not yet.
    BeforeBackfill,
    /// Its end was sent.
    Ended,
}

/// Which of the optional fields markers carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MarkerFields {
    /// Disk snapshots count as checkpoints.
    pub(super) disk_checkpoint: bool,
    /// The first snapshot of a checkpoint in memory begins where the checkpoint does.
    pub(super) checkpoint_start: bool,
    pub(super) purge_seqno: bool,
    pub(super) replication: bool,
    /// Change history.
    pub(super) history: bool,
}

/// What a stream is doing.
#[derive(Debug)]
pub(super) enum Phase {
    Between,
    Sending(Sending),
    /// Sending a snapshot in key order.
    SendingByKey(oso::Sending),
    Ending(StreamEndReason),
    Ended,
}

/// One stream of one vBucket: from the answer to its request to its end.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) to: StreamAddress,
    pub(super) format: MessageFormat,
    pub(super) filter: Filter,
    pub(super) fields: MarkerFields,
    /// State and history branch of the vBucket; the stream ends when they change.
    pub(super) state: VBucketState,
    pub(super) vbuuid: Vbuuid,
    /// Incarnation of the vBucket that the stream belongs to.
    pub(super) incarnation: u64,
    pub(super) start_seqno: Seqno,
    pub(super) end_seqno: Seqno,
    /// Snapshot the client is in until the first marker.
    pub(super) snapshot: Snapshot,
    /// Whether that is one in key order, which no marker announced.
    pub(super) is_by_key: bool,
    pub(super) disk_only: bool,
    pub(super) ignore_purged: bool,
    pub(super) client_purge_seqno: Seqno,
    pub(super) oso: oso::Terms,
    /// Last seqno that was read, sent or not.
    pub(super) last_read: Seqno,
    /// End of the last marker sent; `None` before the first.
    pub(super) last_marker_end: Option<Seqno>,
    /// Whether the next marker from memory begins a checkpoint for the client.
    pub(super) at_checkpoint: bool,
    /// Start of the last checkpoint in memory that was begun.
    pub(super) checkpoint_start: Seqno,
    /// Its cursor in the vBucket's memory.
    pub(super) cursor: Option<Arc<Cursor>>,
    pub(super) is_droppable: bool,
    /// Progress of the takeover, if the stream is for one.
    pub(super) takeover: Option<Takeover>,
    /// When the current backfill last made progress.
    pub(super) progressed: Option<Instant>,
    pub(super) phase: Phase,
}

impl Stream {
    pub(super) fn new(
        to: StreamAddress,
        accepted: Accepted,
        format: MessageFormat,
        settings: &Settings,
        oso: oso::Terms,
    ) -> Self {
        let ended = accepted.start_seqno >= accepted.end_seqno;
        let mut filter = accepted.filter;
        let skips = settings.flags.contains(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL);
        let from_scratch = accepted.start_seqno == Seqno::ZERO;
        *filter.view_mut() = View {
            sync_writes: settings.sync_writes != SyncWrites::Off,
            skips_deletions: skips && from_scratch && filter.is_collection_aware(),
        };
        Self {
            to,
            format,
            filter,
            fields: MarkerFields {
                purge_seqno: settings.purge_seqno_markers,
                replication: settings.sync_writes == SyncWrites::Replication,
                history: settings.change_streams,
                disk_checkpoint: !settings.version.is_legacy(),
                checkpoint_start: settings.version.is_at_least(7, 1),
            },
            state: accepted.state,
            vbuuid: accepted.failover_log.first().map(|entry| entry.vbuuid).unwrap_or_default(),
            incarnation: accepted.incarnation,
            start_seqno: accepted.start_seqno,
            end_seqno: accepted.end_seqno,
            snapshot: accepted.snapshot,
            is_by_key: false,
            disk_only: accepted.disk_only,
            ignore_purged: accepted.ignore_purged,
            client_purge_seqno: accepted.client_purge_seqno,
            oso,
            last_read: accepted.start_seqno,
            last_marker_end: None,
            // Older servers set the flag only where a checkpoint begins.
            at_checkpoint: !settings.version.is_legacy(),
            checkpoint_start: Seqno::ZERO,
            cursor: None,
            is_droppable: settings.cursor_dropping,
            takeover: accepted.takes_over.then(Takeover::default),
            progressed: None,
            phase: if ended { Phase::Ending(StreamEndReason::OK) } else { Phase::Between },
        }
    }

    pub(super) const fn address(&self) -> StreamAddress {
        self.to
    }

    pub(super) const fn vbid(&self) -> Vbid {
        self.to.vbid
    }

    /// Highest seqno up to which everything it reads has been sent.
    pub(super) fn last_sent(&self) -> Seqno {
        match &self.phase {
            Phase::Sending(sending) => sending.last_sent.max(self.last_read),
            _ => self.last_read,
        }
    }

    /// Whether it still prevents another stream with its stream id.
    pub(super) const fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ending(_) | Phase::Ended)
    }

    /// Stops; only the end itself is still to be sent.
    pub(super) fn end(&mut self, reason: StreamEndReason) {
        if !self.is_live() {
            return;
        }
        debug!(vbid = %self.to.vbid, %reason, last_read = %self.last_read, "stream ends");
        let end_reason = match reason {
            // Internal reasons, which clients see as a change of the vBucket.
            StreamEndReason::ROLLBACK => StreamEndReason::STATE_CHANGED,
            // Clients without collections know neither filters nor privileges of collections.
            StreamEndReason::FILTER_EMPTY | StreamEndReason::LOST_PRIVILEGES
                if !self.filter.is_collection_aware() =>
            {
                StreamEndReason::OK
            }
            other => other,
        };
        self.phase = Phase::Ending(end_reason);
    }

    /// Writes messages until there are no more or the output is full. The output must accept one
    /// when this is called. It begins to read the disk only if it `may_backfill`.
    pub(super) fn write<S: BucketSource>(
        &mut self,
        source: &S,
        vbucket: Option<&S::VBucket<'_>>,
        may_backfill: bool,
        output: &mut Output<'_>,
    ) -> Pause {
        match vbucket {
            Some(vbucket) if self.is_same(vbucket) => {
                self.write_from(source, vbucket, may_backfill, output)
            }
            _ => {
                self.end(StreamEndReason::STATE_CHANGED);
                self.write_end(output)
            }
        }
    }

    fn write_from<S: BucketSource>(
        &mut self,
        source: &S,
        vbucket: &S::VBucket<'_>,
        may_backfill: bool,
        output: &mut Output<'_>,
    ) -> Pause {
        loop {
            match core::mem::replace(&mut self.phase, Phase::Between) {
                Phase::Between => match self.begin_snapshot(vbucket, may_backfill) {
                    None => {
                        self.check_privileges(source);
                        self.progressed = Some(output.now());
                    }
                    Some(Pause::Idle) => {
                        if let Some(pause) = self.write_handover(output) {
                            return pause;
                        }
                    }
                    Some(pause) => return pause,
                },
                Phase::Sending(sending) => {
                    if let Some(pause) = self.write_snapshot(sending, output) {
                        return pause;
                    }
                }
                Phase::SendingByKey(sending) => {
                    if let Some(pause) = self.write_by_key(sending, output) {
                        return pause;
                    }
                }
                end @ (Phase::Ending(_) | Phase::Ended) => {
                    self.phase = end;
                    return self.write_end(output);
                }
            }
        }
    }

    /// Whether the vBucket is still the one the stream was opened on: a change of its state, a move
    /// or a new history branch (for example after a rollback) ends the stream, even if it was
    /// undone since.
    pub(super) fn is_same(&self, vbucket: &impl VBucketSource) -> bool {
        vbucket.incarnation() == self.incarnation
            && vbucket.state() == self.state
            && vbucket.failover_table().newest().vbuuid == self.vbuuid
    }

    /// Before a snapshot is announced: a client that lost the privilege gets the end of the stream
    /// instead.
    fn check_privileges<S: BucketSource>(&mut self, source: &S) {
        if !self.filter.may_be_read(source) {
            self.end(StreamEndReason::LOST_PRIVILEGES);
        }
    }

    /// Continues the takeover now that everything is sent; `None` if the stream must end.
    fn write_handover(&mut self, output: &mut Output<'_>) -> Option<Pause> {
        let state = match self.takeover.map(|takeover| takeover.next()) {
            None | Some(takeover::Next::Wait) => return Some(Pause::Idle),
            Some(takeover::Next::End) => {
                self.end(StreamEndReason::OK);
                return None;
            }
            Some(takeover::Next::SendState(state)) => state,
        };
        if !output.may_send() {
            return Some(Pause::Ready);
        }
        let to = self.to;
        let sent: Result<(), EncodeError> =
            output.send(|out, _| SetVbucketState { state }.encode(to, out));
        debug_assert!(sent.is_ok(), "a state has a fixed size");
        if let Some(takeover) = &mut self.takeover {
            takeover.state_sent();
        }
        Some(Pause::Idle)
    }

    /// Whether it is a takeover stream with this opaque.
    pub(super) fn hands_over_as(&self, opaque: Opaque) -> bool {
        self.takeover.is_some() && self.to.opaque == opaque && self.is_live()
    }

    /// Handles the client's answer to a message of a takeover stream; returns whether the vBucket
    /// must become dead.
    pub(super) fn acknowledged(&mut self, opcode: Opcode) -> bool {
        self.takeover.as_mut().is_some_and(|takeover| takeover.acknowledged(opcode))
    }

    /// Continues with the vBucket although its incarnation changed.
    pub(super) fn follow(&mut self, vbucket: &impl VBucketSource) {
        self.state = vbucket.state();
        self.incarnation = vbucket.incarnation();
    }

    /// Whether it is reading the disk.
    pub(super) fn is_backfilling(&self) -> bool {
        match &self.phase {
            Phase::Sending(sending) => sending.is_from_disk(),
            Phase::SendingByKey(_) => true,
            _ => false,
        }
    }

    /// Whether its backfill has made no progress for `limit`. A takeover never counts as stuck.
    pub(super) fn is_stuck(&self, now: Instant, limit: Duration) -> bool {
        let idle = |since| now.saturating_duration_since(since) >= limit;
        self.is_backfilling() && self.takeover.is_none() && self.progressed.is_some_and(idle)
    }

    fn write_end(&mut self, output: &mut Output<'_>) -> Pause {
        let Phase::Ending(reason) = self.phase else {
            return Pause::Ended;
        };
        if !output.may_send() {
            return Pause::Ready;
        }
        let to = self.to;
        let sent: Result<(), EncodeError> =
            output.send(|out, _| StreamEnd { reason }.encode(to, out));
        debug_assert!(sent.is_ok(), "a stream end has a fixed size");
        self.phase = Phase::Ended;
        Pause::Ended
    }
}
