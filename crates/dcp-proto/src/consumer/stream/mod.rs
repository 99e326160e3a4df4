//! One vBucket's stream.

mod items;

use dcp_wire::message::{OsoSnapshot, SnapshotFlags, SnapshotMarker};
use dcp_wire::{DecodeError, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::unpersisted::UnpersistedQueue;
use super::{EndKind, Misbehaviour, PositionUpdate, ProtocolErrorKind, StreamPosition};
use crate::{CaughtUp, FailoverLog, History, Position, Rollback, SinkError, Snapshot};

/// How often the first load of a vBucket may begin again after purges. Each of these loads was
/// interrupted below the purge seqno, and so will be the next.
const MOST_LOADS: u32 = 3;

/// Why a stream message could not be taken.
#[derive(Debug)]
pub(super) enum Fault {
    /// The server's.
    Protocol(ProtocolErrorKind),
    /// The connection's: the server refuses every request on it.
    Invalidated { opcode: Opcode, status: Status },
    /// The sink's.
    Sink(SinkError),
}

impl From<DecodeError> for Fault {
    fn from(error: DecodeError) -> Self {
        Self::Protocol(error.into())
    }
}

impl From<Misbehaviour> for Fault {
    fn from(error: Misbehaviour) -> Self {
        Self::Protocol(error.into())
    }
}

impl From<SinkError> for Fault {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}

/// Where a stream is in its life.
///
/// ```text
/// Asking
///   │ high seqno
///   ▼        SUCCESS                 end reached
/// Requested ─────────► Streaming ──────────────────► Finished
///   ▲   │                 │ │ │      persisted           │
///   │   │                 │ │ └──────► Persisting ─────────┤
///   └───┘ ROLLBACK        │ └────────────┐ close         │
///   (at once, from the    │              ▼               │ STREAM_END, and the answer
///   restart point)        │ STREAM_END  Closing          ▼ to a close if one was sent
///                         └───────────► gone ◄───────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The server's high seqno is requested first, since the end may have been lost in a failover
    /// and would then never be reached ([`EndKind::Latest`]).
    Asking {
        /// Number of the request.
        request: u32,
    },
    /// Requested; only the answer may arrive.
    Requested,
    /// The server accepted the request and sends messages.
    Streaming,
    /// The end was reached, but newer versions that may have replaced changes up to it are not yet
    /// persisted on all copies; further messages are dropped.
    Persisting,
    /// The end was reached and reported; further messages are dropped. Goes once the server has
    /// ended the stream.
    Finished {
        /// Whether a close was sent that is not answered yet.
        awaits_answer: bool,
    },
    /// A close was sent; further messages are dropped.
    Closing,
}

/// The effects of an item on its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ItemEffects {
    /// It completed the marker's snapshot, and the marker must be acknowledged.
    pub(super) acknowledge_marker: bool,
    /// The requested end was reached.
    pub(super) reached_end: bool,
    /// The seqno was that of the SEQNO_ADVANCED before it.
    pub(super) repeated_seqno: bool,
    /// The sink was not given a row.
    pub(super) no_row: bool,
    /// It names a new scope or collection that is left out.
    pub(super) learned: bool,
    /// Everything was delivered that the vBucket had when it was first streamed.
    pub(super) caught_up: bool,
}

impl ItemEffects {
    /// Whether any effect needs handling.
    #[inline]
    pub(super) const fn is_notable(&self) -> bool {
        self.acknowledge_marker
            | self.reached_end
            | self.repeated_seqno
            | self.learned
            | self.caught_up
    }

    /// How many rows the sink was given.
    #[inline]
    pub(super) const fn rows(&self) -> usize {
        !self.no_row as usize
    }
}

/// Condition under which the end of a stream counts as persisted (`end_persisted`).
///
/// A change up to the end can be missing because its document has been written again since. The
/// stream must not end before that newer version is persisted on all copies: a failover that lost
/// it would restore the older version below the end, where nothing reads it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndPersisted {
    /// Once everything up to this seqno is persisted on all copies: the end of the snapshot that
    /// contains the end, or that begins beyond it.
    At(Seqno),
    /// The server ended the stream before it sent anything at or past the end, so no marker bounds
    /// the newer versions: once everything is persisted on all copies that the server had written
    /// when it answered this request for high seqnos.
    AtHighSeqno {
        /// Number of the request.
        request: u32,
    },
}

/// Properties that the following changes of the snapshot share, except for the last one.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunBounds {
    /// Seqnos are above this one.
    pub(super) last: Seqno,
    /// Seqnos are below this one.
    pub(super) before: Seqno,
    /// Branch that holds the changes.
    pub(super) vbuuid: Vbuuid,
    /// Their snapshot.
    pub(super) snapshot: Snapshot,
    /// Whether it keeps several versions of a key.
    pub(super) history: bool,
    /// Rollbacks seen.
    pub(super) epoch: u32,
}

/// The snapshot that contains the items.
#[derive(Clone, Copy, Debug)]
struct Marker {
    snapshot: Snapshot,
    purge_seqno: Option<Seqno>,
    /// It keeps several versions of a key.
    history: bool,
    /// It comes from memory, so that all of it is sent at once.
    from_memory: bool,
    /// No item has arrived: the snapshot is not part of the position yet.
    pending: bool,
    /// Opaque of its marker, if that must be acknowledged.
    acknowledge: bool,
}

/// The branch that holds the seqnos in `(above, up_to]`.
#[derive(Clone, Copy, Debug)]
struct Branch {
    vbuuid: Vbuuid,
    above: Seqno,
    up_to: Seqno,
}

impl Branch {
    /// Empty, so that the first item looks up its branch.
    const NONE: Self = Self { vbuuid: Vbuuid(0), above: Seqno::MAX, up_to: Seqno::ZERO };

    fn of(log: &FailoverLog, seqno: Seqno) -> Self {
        let entry = log.branch_of(seqno);
        let newer = log.entries().iter().take_while(|newer| newer.vbuuid != entry.vbuuid);
        Self {
            vbuuid: entry.vbuuid,
            above: if entry.seqno < seqno { entry.seqno } else { Seqno::ZERO },
            up_to: newer.map(|newer| newer.seqno).min().unwrap_or(Seqno::MAX),
        }
    }
}

/// Whether some but not all of the snapshot has been delivered: it becomes part of a position with
/// its first item.
fn has_part(position: &Position) -> bool {
    position.seqno > Seqno::ZERO && !position.is_snapshot_complete()
}

/// One vBucket's stream on one connection.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) vbid: Vbid,
    pub(super) opaque: Opaque,
    pub(super) state: State,
    /// Last seqno wanted; [`Seqno::MAX`] without an end.
    pub(super) end_seqno: Seqno,
    /// Last seqno that is delivered: the end if the stream is clamped, otherwise unlimited.
    clamp: Seqno,
    /// Seqno at which the position's snapshot or the whole stream is complete.
    stop: Seqno,
    /// Position of the vBucket.
    pub(super) position: Position,
    history: History,
    end_kind: EndKind,
    catch_up: Option<Seqno>,
    begins_again: bool,
    /// How often in a row the first load was overtaken by a purge.
    overtaken: u32,
    /// The newest branch when the first load was interrupted, until the server's answer shows
    /// whether another one has begun.
    interrupted_on: Option<Vbuuid>,
    /// Changes that are not yet persisted on all copies.
    pub(super) unpersisted: UnpersistedQueue,
    /// Whether the server has ended it.
    pub(super) ended: bool,
    /// When the end counts as persisted, once it was reached.
    pub(super) end_persisted: EndPersisted,
    /// Whether there is a position update to take.
    pub(super) dirty: bool,
    /// Whether to reopen it once it is closed.
    pub(super) reopen: bool,
    /// Whether it has been reopened for this request.
    pub(super) reopened: bool,
    /// Failover log from the server's answer. It becomes part of the position with the first item,
    /// like the snapshot: until then the position is that of an earlier stream.
    log: Option<FailoverLog>,
    marker: Option<Marker>,
    /// The snapshot that the stream resumed in. The rest may come in several snapshots, and what was
    /// left out in favour of newer versions is not made up for before the end of this one.
    resumed_in: Option<Snapshot>,
    /// Whether the position's snapshot keeps several versions of a key.
    keeps_versions: bool,
    /// Highest seqno of the out-of-sequence-order snapshot in progress.
    oso: Option<Seqno>,
    /// Whether the position's seqno is that of a SEQNO_ADVANCED.
    advanced: bool,
    branch: Branch,
}

impl Stream {
    pub(super) fn new(
        vbid: Vbid,
        opaque: Opaque,
        end_seqno: Seqno,
        clamp: bool,
        from: StreamPosition,
    ) -> Self {
        let StreamPosition { position, history, end: end_kind, catch_up, begins_again, overtaken } =
            from;
        let clamp = if clamp { end_seqno } else { Seqno::MAX };
        Self {
            vbid,
            opaque,
            state: State::Requested,
            end_seqno,
            clamp,
            stop: position.snapshot.end.min(clamp),
            resumed_in: has_part(&position).then_some(position.snapshot),
            unpersisted: UnpersistedQueue::default(),
            ended: false,
            end_persisted: EndPersisted::At(Seqno::MAX),
            position,
            history,
            end_kind,
            catch_up,
            begins_again,
            overtaken,
            interrupted_on: None,
            dirty: false,
            reopen: false,
            reopened: false,
            log: None,
            marker: None,
            keeps_versions: false,
            oso: None,
            advanced: false,
            branch: Branch::NONE,
        }
    }

    /// The server accepted the request; the stream's changes are on the branches of `log`.
    pub(super) fn opened(&mut self, log: FailoverLog) {
        self.state = State::Streaming;
        self.reopened = false;
        self.end_kind = self.end_kind.after_a_try();
        self.branch = Branch::NONE;
        self.unpersisted = UnpersistedQueue::default();
        self.ended = false;
        if let Some(vbuuid) = self.interrupted_on.take() {
            // It rolled the load back although it has lost nothing: for the sake of a purge.
            let is_purge = log.newest().vbuuid == vbuuid;
            self.overtaken = if is_purge { self.overtaken.saturating_add(1) } else { 0 };
        }
        self.log = Some(log);
    }

    /// The newest branch in the server's answer.
    pub(super) fn newest_branch(&self) -> Option<Vbuuid> {
        Some(self.log.as_ref()?.newest().vbuuid)
    }

    /// The end to request.
    ///
    /// Inside a snapshot, the rest of it may hold newer versions of keys at or below the end, even if
    /// the position is past the end, or the end is below the snapshot's first item. The position can
    /// also be past the end because the server has lost changes since: then the answer is a rollback,
    /// whereas a request whose end is below its start is malformed.
    pub(super) fn requested_end(&self) -> Seqno {
        let position = &self.position;
        let needs_the_rest = self.clamp == Seqno::MAX && has_part(position);
        let least = if needs_the_rest { position.snapshot.end } else { position.seqno };
        self.end_seqno.max(least)
    }

    /// Position of the vBucket.
    pub(super) fn position_update(&self) -> PositionUpdate {
        let (position, history) = (self.kept_position(), self.history.clone());
        PositionUpdate { vbid: self.vbid, position, history }
    }

    /// Where its next stream resumes.
    pub(super) fn stream_position(&self) -> StreamPosition {
        let (position, history) = (self.kept_position(), self.history.clone());
        StreamPosition {
            position,
            history,
            end: self.end_kind,
            catch_up: self.catch_up,
            begins_again: self.begins_again || self.oso.is_some(),
            overtaken: self.overtaken,
        }
    }

    /// The position to resume from. If the vBucket starts again, the changes of an
    /// out-of-sequence-order snapshot delivered so far are void, which a new epoch shows.
    fn kept_position(&self) -> Position {
        let mut position = self.position.clone();
        position.epoch = position.epoch.saturating_add(self.oso.is_some().into());
        position
    }

    /// The rollback record for the delivered changes, if the stream starts again.
    pub(super) fn begin_again(&mut self) -> Option<Rollback> {
        std::mem::take(&mut self.begins_again).then(|| {
            self.dirty = true;
            Rollback {
                vbid: self.vbid,
                seqno: Seqno::ZERO,
                from_seqno: Seqno::ZERO,
                old_vbuuid: Vbuuid(0),
                new_vbuuid: Vbuuid(0),
                epoch: self.position.epoch,
            }
        })
    }

    /// The report that everything the vBucket had when it was first streamed has been delivered.
    pub(super) fn take_caught_up(&mut self) -> Option<CaughtUp> {
        let Position { seqno, epoch, .. } = self.position;
        self.catch_up.take().map(|_| CaughtUp { vbid: self.vbid, seqno, epoch })
    }

    /// Whether everything has been delivered. Inside a snapshot, a change may be missing because a
    /// newer version follows.
    pub(super) fn is_caught_up(&self) -> bool {
        let seqno = self.position.seqno;
        let is_whole = self.position.is_snapshot_complete() || seqno >= self.clamp;
        is_whole && self.oso.is_none() && self.catch_up.is_some_and(|target| seqno >= target)
    }

    /// Whether everything has been delivered once the server has ended the stream at its end.
    pub(super) fn is_caught_up_at_end(&self) -> bool {
        self.catch_up.is_some_and(|target| target <= self.end_seqno)
    }

    /// The server has only changes up to `high`: later ones were lost in a failover.
    pub(super) fn lower_catch_up(&mut self, high: Seqno) {
        self.catch_up = self.catch_up.map(|target| target.min(high));
    }

    /// How often the first load began again, if a rollback to `to` interrupts it once too often.
    pub(super) fn is_overtaken(&self, to: Seqno) -> Option<u32> {
        let is_due = to == Seqno::ZERO && self.is_loading() && self.overtaken >= MOST_LOADS;
        is_due.then_some(self.overtaken)
    }

    /// Whether it is in its first load: no snapshot is complete yet.
    fn is_loading(&self) -> bool {
        self.history.points().is_empty() && !self.position.is_snapshot_complete()
    }

    /// Rolls back on the server's request and returns the rollback record; the stream must be
    /// requested again. `from_zero` goes back to the beginning regardless of earlier points.
    pub(super) fn roll_back(&mut self, to: Seqno, from_zero: bool) -> Rollback {
        let left = &self.position;
        let (from_seqno, old_vbuuid, epoch) =
            (left.seqno, left.vbuuid(), left.epoch.saturating_add(1));
        let was_loading = to == Seqno::ZERO && self.is_loading();
        let newest = self.position.failover_log.as_ref().map(|log| log.newest().vbuuid);
        self.interrupted_on = newest.filter(|_| was_loading);
        let to = if from_zero { Seqno::ZERO } else { to };
        let mut position = self.history.roll_back(to, from_seqno);
        position.epoch = epoch;
        let rollback = Rollback {
            vbid: self.vbid,
            seqno: position.seqno,
            from_seqno,
            old_vbuuid,
            new_vbuuid: position.vbuuid(),
            epoch,
        };
        self.stop = position.snapshot.end.min(self.clamp);
        self.position = position;
        self.end_kind = self.end_kind.after_a_rollback();
        self.dirty = true;
        rollback
    }

    /// Whether its end was reached and reported.
    pub(super) const fn is_finished(&self) -> bool {
        matches!(self.state, State::Finished { .. })
    }

    /// Whether the server has announced changes past those delivered.
    pub(super) fn is_inside_snapshot(&self) -> bool {
        self.announced() > self.position.seqno
    }

    /// Whether some but not all of a snapshot from memory has arrived.
    pub(super) fn awaits_snapshot_end(&self) -> bool {
        let last = self.position.seqno;
        let is_open =
            |marker: &Marker| marker.from_memory && !marker.pending && last < marker.snapshot.end;
        self.state == State::Streaming
            && self.unpersisted.is_empty()
            && self.marker.as_ref().is_some_and(is_open)
    }

    /// Whether the stream waits for the answer to this request for high seqnos.
    pub(super) const fn asks(&self, request: u32) -> bool {
        matches!(self.state, State::Asking { request: asked } if request >= asked)
    }

    /// Whether the end may have been lost in a failover.
    pub(super) const fn may_have_lost_end(&self) -> bool {
        matches!(self.end_kind, EndKind::Latest) && self.end_seqno.0 != Seqno::MAX.0
    }

    /// Requests the stream again, with a new opaque, from its position.
    pub(super) fn restart(&mut self, opaque: Opaque) {
        self.opaque = opaque;
        self.log = None;
        self.marker = None;
        self.resumed_in = has_part(&self.position).then_some(self.position.snapshot);
        self.oso = None;
        self.advanced = false;
        self.branch = Branch::NONE;
    }

    /// A snapshot begins.
    pub(super) fn snapshot_marker(&mut self, frame: &Frame<'_>) -> Result<(), Fault> {
        let marker = SnapshotMarker::decode(frame)?;
        if self.oso.is_some() {
            return Err(Misbehaviour::MisplacedOso.into());
        }
        let last = self.position.seqno;
        let snapshot = Snapshot { start: marker.start_seqno, end: marker.end_seqno };
        let Snapshot { start, end } = snapshot;
        let exceeds_end = |seqno: Option<Seqno>| seqno.is_some_and(|seqno| seqno > end);
        if start > end
            || (start < last && end <= last)
            || exceeds_end(marker.max_visible_seqno)
            || exceeds_end(marker.purge_seqno)
            || exceeds_end(marker.high_prepared_seqno)
        {
            return Err(Misbehaviour::InvalidMarker { snapshot, last }.into());
        }
        self.marker = Some(Marker {
            snapshot,
            purge_seqno: marker.purge_seqno,
            history: marker.flags.contains(SnapshotFlags::HISTORY),
            from_memory: marker.flags.contains(SnapshotFlags::MEMORY),
            pending: true,
            acknowledge: marker.flags.contains(SnapshotFlags::ACK),
        });
        Ok(())
    }

    /// An out-of-sequence-order snapshot begins or ends.
    pub(super) fn oso_snapshot(&mut self, frame: &Frame<'_>) -> Result<ItemEffects, Fault> {
        match (OsoSnapshot::decode(frame)?, self.oso) {
            // If one above 0 were interrupted, the changes before it would be void but not sent
            // again: the stream resumes above them.
            (OsoSnapshot::Start, None) if self.position.seqno == Seqno::ZERO => {
                self.oso = Some(Seqno::ZERO);
                self.marker = None;
                self.keeps_versions = false;
                Ok(ItemEffects::default())
            }
            (OsoSnapshot::End, Some(highest)) => {
                self.oso = None;
                // If the stream is clamped below it, the snapshot is not complete.
                let start = if highest > self.clamp { self.position.seqno } else { highest };
                self.position.snapshot = Snapshot { start, end: highest };
                self.position.failover_log.clone_from(&self.log);
                self.stop = highest.min(self.clamp);
                Ok(self.processed(self.stop))
            }
            _ => Err(Misbehaviour::MisplacedOso.into()),
        }
    }

    /// Checks an item's seqno and takes a pending marker into the position; `true` if the seqno
    /// is that of the SEQNO_ADVANCED before it.
    #[inline(always)]
    fn check_item(&mut self, seqno: Seqno) -> Result<bool, Misbehaviour> {
        if self.oso.is_some() {
            return Ok(false);
        }
        let last = self.position.seqno;
        let mut repeated = false;
        if seqno <= last {
            repeated = seqno == last && self.advanced;
            if !repeated {
                return Err(Misbehaviour::SeqnoNotAscending { seqno, last });
            }
        }
        self.enter_snapshot(seqno)?;
        Ok(repeated)
    }

    #[inline(always)]
    fn enter_snapshot(&mut self, seqno: Seqno) -> Result<(), Misbehaviour> {
        let Some(marker) = &self.marker else {
            return Err(Misbehaviour::NoSnapshot);
        };
        if !marker.snapshot.contains(seqno) {
            return Err(Misbehaviour::OutsideSnapshot { seqno, snapshot: marker.snapshot });
        }
        if marker.pending {
            self.promote();
        }
        Ok(())
    }

    /// The first item of the pending marker arrived: the snapshot becomes part of the position.
    #[cold]
    fn promote(&mut self) {
        let Some(marker) = &mut self.marker else { return };
        marker.pending = false;
        let Snapshot { start, end } = marker.snapshot;
        self.position.snapshot =
            match self.resumed_in.filter(|snapshot| self.position.seqno < snapshot.end) {
                Some(resumed) => {
                    Snapshot { start: resumed.start.min(start), end: resumed.end.max(end) }
                }
                None => marker.snapshot,
            };
        self.keeps_versions = marker.history;
        self.stop = self.position.snapshot.end.min(self.clamp);
        self.position.failover_log.clone_from(&self.log);
        if let Some(purge_seqno) = marker.purge_seqno {
            self.position.purge_seqno = purge_seqno;
        }
    }

    /// The properties of a change with `seqno` that the following ones up to `passes` share, unless
    /// it is a special case.
    #[inline(always)]
    pub(super) fn run_bounds(&mut self, seqno: Seqno, passes: Seqno) -> Option<RunBounds> {
        let Snapshot { start, end } =
            self.marker.as_ref().filter(|marker| !marker.pending)?.snapshot;
        let last = self.position.seqno;
        if self.oso.is_some()
            || seqno <= last
            || seqno < start
            || seqno >= self.stop
            || seqno > passes
        {
            return None;
        }
        let vbuuid = self.branch_of(seqno);
        let up_to = self.branch.up_to.min(end).min(self.clamp).min(passes);
        Some(RunBounds {
            last: last.max(self.branch.above),
            before: self.stop.min(Seqno(up_to.0.saturating_add(1))),
            vbuuid,
            snapshot: self.position.snapshot,
            history: self.keeps_versions,
            epoch: self.position.epoch,
        })
    }

    /// Moves the position over changes that [`run_bounds`](Self::run_bounds) holds for.
    #[inline(always)]
    pub(super) const fn finish_run(&mut self, seqno: Seqno) {
        self.advanced = false;
        self.position.seqno = seqno;
    }

    /// Moves the position over `seqno`.
    #[inline(always)]
    fn processed(&mut self, seqno: Seqno) -> ItemEffects {
        if let Some(highest) = &mut self.oso {
            *highest = seqno.max(*highest);
            return ItemEffects::default();
        }
        self.advanced = false;
        self.position.seqno = seqno;
        if seqno >= self.stop { self.stopped() } else { ItemEffects::default() }
    }

    /// The snapshot is complete, or as much of it as the stream wants.
    #[cold]
    fn stopped(&mut self) -> ItemEffects {
        self.history.push(&self.position);
        let is_complete = self.position.is_snapshot_complete();
        if is_complete {
            self.overtaken = 0;
        }
        let owed = is_complete
            && self.marker.as_mut().is_some_and(|marker| std::mem::take(&mut marker.acknowledge));
        ItemEffects {
            acknowledge_marker: owed,
            reached_end: self.position.seqno >= self.end_seqno,
            caught_up: self.is_caught_up(),
            ..ItemEffects::default()
        }
    }

    /// An item is past the end of a clamped stream, and so is everything after it.
    #[cold]
    fn past_end(&mut self, seqno: Seqno) -> Result<ItemEffects, Misbehaviour> {
        let no_row = ItemEffects { no_row: true, ..ItemEffects::default() };
        if let Some(highest) = &mut self.oso {
            // Not in order: later items may be wanted.
            *highest = seqno.max(*highest);
            return Ok(no_row);
        }
        let Some(Marker { snapshot, pending, .. }) = self.marker else {
            return Err(Misbehaviour::NoSnapshot);
        };
        if !snapshot.contains(seqno) {
            return Err(Misbehaviour::OutsideSnapshot { seqno, snapshot });
        }
        if !pending {
            // Everything in the snapshot up to the end has arrived.
            self.position.seqno = self.clamp.max(self.position.seqno);
        }
        Ok(ItemEffects { reached_end: true, caught_up: self.is_caught_up_at_end(), ..no_row })
    }

    /// The end was reached, by an item or because the server ended the stream: returns the seqno up
    /// to which newer versions of missing changes may lie; `None` if no marker shows it.
    pub(super) fn replaced_up_to(&self, by_server: bool) -> Option<Seqno> {
        if by_server && self.position.seqno < self.end_seqno {
            return None;
        }
        Some(self.announced())
    }

    /// End of the newest snapshot that the server has announced.
    fn announced(&self) -> Seqno {
        let announced = self.marker.map_or(Seqno::ZERO, |marker| marker.snapshot.end);
        announced.max(self.position.snapshot.end)
    }

    /// The snapshot reported with a row. The end of an out-of-sequence-order snapshot is not known
    /// before it ends, so its rows report their own seqno.
    #[inline(always)]
    fn row_snapshot(&self, seqno: Seqno) -> Snapshot {
        if self.oso.is_some() {
            return Snapshot { start: self.position.seqno, end: seqno };
        }
        self.position.snapshot
    }

    /// The branch that holds `seqno`, looked up if it is not the last one found.
    #[inline(always)]
    fn branch_of(&mut self, seqno: Seqno) -> Vbuuid {
        if seqno <= self.branch.above || seqno > self.branch.up_to {
            self.find_branch(seqno);
        }
        self.branch.vbuuid
    }

    #[cold]
    fn find_branch(&mut self, seqno: Seqno) {
        if let Some(log) = &self.log {
            self.branch = Branch::of(log, seqno);
        }
    }
}
