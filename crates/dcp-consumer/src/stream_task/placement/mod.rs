//! Where vBuckets are placed: the state of each, its connection, and when it is opened next.

mod decisions;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::consumer::{EndCause, StreamPosition};
use dcp_proto::plan::VbucketRange;
use dcp_proto::topology::Address;
use dcp_wire::{Seqno, Vbid};
use rand::rngs::StdRng;

use self::decisions::{Decision, decide, failure};
use crate::connect::ConnectionId;
use crate::retry::Backoff;
use crate::stream_task::log::RECONCILER;
use crate::{Error, ErrorKind, StreamStats, VbucketState};

/// How long a stream must have lived so that its end does not count as a consecutive failure.
pub(crate) const SETTLED: Duration = Duration::from_secs(10);

/// State of a vBucket. Each is in exactly one of these states, and every state that is not final
/// has a connection or a time that ends it.
#[derive(Debug)]
enum State {
    /// Its stream is requested on a connection, or will be once that is open; in the second case
    /// `from` is what the request needs.
    Opening { on: ConnectionId, from: Option<Box<StreamPosition>> },
    /// It streams on a connection.
    Streaming { on: ConnectionId, since: Instant },
    /// It is reopened at a given time or, if all it awaits is a connection to its node, as soon as there
    /// is one.
    BackingOff { until: Instant, awaits_node: bool, from: Box<StreamPosition> },
    /// Its end was reached.
    Complete,
    /// It cannot be streamed; the stream ends with the error.
    Failed,
}

#[derive(Debug)]
struct Entry {
    state: State,
    end_seqno: Seqno,
    /// Failures in a row.
    attempts: u32,
    /// Whether it has ever streamed.
    was_open: bool,
    /// Whether its last request was refused because of the filter.
    is_refused: bool,
    /// Since when it has not been streaming.
    idle_since: Option<Instant>,
    /// The last failure since then; `None` during a first attempt.
    cause: Option<Arc<Error>>,
}

/// What to do after a stream ended.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Nothing: its end was reached.
    Complete,
    /// It will be reopened; with `fetch_map` the map may be outdated.
    Retry { fetch_map: bool },
    /// It will be reopened; the node does not know the filter's scope or collections.
    FilterRefused,
    /// The whole stream ends with this error.
    Fatal(Error),
}

/// A stream on a node on which its vBucket is no longer active.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misplaced {
    pub(super) vbid: Vbid,
    pub(super) on: ConnectionId,
    /// The node on which it is active.
    pub(super) to: Address,
}

/// All vBuckets of a stream.
#[derive(Debug)]
pub(crate) struct Placement {
    vbuckets: BTreeMap<Vbid, Entry>,
    /// How long a vBucket may be without a stream.
    retry_timeout: Duration,
    /// How long an attempt may take to fail: a first attempt is not cut short.
    attempt: Duration,
    /// Whether any vBucket has streamed, so the user may read the bucket.
    has_streamed: bool,
    randomness: StdRng,
}

impl Placement {
    /// A stream of these ranges; each is due at once.
    pub(crate) fn new(
        ranges: impl IntoIterator<Item = VbucketRange>,
        (retry_timeout, attempt): (Duration, Duration),
        now: Instant,
        randomness: StdRng,
    ) -> Self {
        let entry = |range: VbucketRange| {
            let state =
                State::BackingOff { until: now, awaits_node: false, from: Box::new(range.from) };
            (range.vbid, Entry { idle_since: Some(now), ..Entry::new(state, range.to) })
        };
        let vbuckets = ranges.into_iter().map(entry).collect();
        Self { vbuckets, retry_timeout, attempt, has_streamed: false, randomness }
    }

    /// Adds vBuckets that are already at their ends.
    pub(crate) fn add_complete(&mut self, vbids: impl IntoIterator<Item = Vbid>) {
        let end_seqno = Seqno::ZERO;
        for vbid in vbids {
            let state = State::Complete;
            self.vbuckets.insert(vbid, Entry::new(state, end_seqno));
        }
    }

    /// The vBuckets whose wait is over.
    pub(crate) fn due(&self, now: Instant) -> Vec<Vbid> {
        let due =
            |entry: &Entry| matches!(entry.state, State::BackingOff { until, .. } if until <= now);
        self.vbuckets.iter().filter(|(_, entry)| due(entry)).map(|(&vbid, _)| vbid).collect()
    }

    /// When the next vBucket is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let waits = self.vbuckets.values().filter_map(|entry| match entry.state {
            State::BackingOff { until, .. } => Some(until),
            _ => None,
        });
        let limit = |entry: &Entry| entry.idle_since?.checked_add(self.limit(entry));
        let limits = self.vbuckets.values().filter_map(limit);
        waits.chain(limits).min()
    }

    /// Delays vBuckets that wait to be opened, without counting it as a failure.
    pub(crate) fn hold_up(&mut self, now: Instant, until: Instant) {
        for entry in self.vbuckets.values_mut() {
            if let State::BackingOff { until: moment, .. } = &mut entry.state {
                *moment = (*moment).max(until);
                entry.idle_since = Some(now);
            }
        }
    }

    /// Assigns a vBucket to a connection; it is opened as soon as that is up.
    pub(crate) fn assign(&mut self, vbid: Vbid, on: ConnectionId) {
        let Some(entry) = self.vbuckets.get_mut(&vbid) else { return };
        let state = std::mem::replace(&mut entry.state, State::Failed);
        entry.state = match state {
            State::BackingOff { from, .. } => State::Opening { on, from: Some(from) },
            other => other,
        };
    }

    /// The cluster map has changed. `home` gives the node on which a vBucket is active and its
    /// connection, if it has one. vBuckets that were not requested from the wrong node yet are due
    /// at once; returns those whose streams must be closed there, which are reopened once they have
    /// ended.
    pub(super) fn follow_map(
        &mut self,
        home: impl Fn(Vbid) -> Option<(Address, Option<ConnectionId>)>,
        now: Instant,
    ) -> Vec<Misplaced> {
        let mut misplaced = Vec::new();
        for (vbid, on) in self.placed() {
            let Some((to, right)) = home(vbid) else { continue };
            if right != Some(on) && !self.recall(vbid, now) {
                misplaced.push(Misplaced { vbid, on, to });
            }
        }
        misplaced
    }

    /// Takes a vBucket back from a connection on which its stream was not requested yet, so that it
    /// is due at once; `false` if it was requested.
    fn recall(&mut self, vbid: Vbid, now: Instant) -> bool {
        let Some(entry) = self.vbuckets.get_mut(&vbid) else { return false };
        let State::Opening { from, .. } = &mut entry.state else { return false };
        let Some(from) = from.take() else { return false };
        entry.state = State::BackingOff { until: now, awaits_node: false, from };
        true
    }

    /// Connections over which streams must be requested.
    pub(crate) fn requesting(&self) -> BTreeSet<ConnectionId> {
        let waiting = |entry: &Entry| match entry.state {
            State::Opening { on, from: Some(_) } => Some(on),
            _ => None,
        };
        self.vbuckets.values().filter_map(waiting).collect()
    }

    /// The streams that a newly opened connection must request.
    pub(crate) fn take_requests(
        &mut self,
        up: ConnectionId,
    ) -> Vec<(Vbid, Seqno, Box<StreamPosition>)> {
        let mut requests = Vec::new();
        for (&vbid, entry) in &mut self.vbuckets {
            if let State::Opening { on, from } = &mut entry.state
                && *on == up
                && let Some(from) = from.take()
            {
                requests.push((vbid, entry.end_seqno, from));
            }
        }
        requests
    }

    /// A vBucket cannot be assigned for now, because of `cause`: the cluster map has no node for it, or
    /// the node is not tried yet.
    pub(crate) fn postpone(
        &mut self,
        vbid: Vbid,
        cause: Option<Arc<Error>>,
        has_node: bool,
        now: Instant,
    ) {
        let Some(entry) = self.vbuckets.get_mut(&vbid) else { return };
        entry.cause = cause.or(entry.cause.take());
        if let State::BackingOff { until, awaits_node, .. } = &mut entry.state {
            *until = now + Backoff::SHORT.wait(entry.attempts, &mut self.randomness);
            *awaits_node = has_node;
            entry.attempts = entry.attempts.saturating_add(1);
        }
    }

    /// A node has a connection again: the vBuckets that waited for one, of those that `is_there`, are due
    /// at once.
    pub(crate) fn reached(&mut self, is_there: impl Fn(Vbid) -> bool, now: Instant) {
        for (&vbid, entry) in &mut self.vbuckets {
            if let State::BackingOff { until, awaits_node: true, .. } = &mut entry.state
                && is_there(vbid)
            {
                *until = now.min(*until);
            }
        }
    }

    /// A connection could not be made: its vBuckets wait again.
    pub(crate) fn unreachable(&mut self, lost: ConnectionId, cause: &Arc<Error>, now: Instant) {
        for entry in self.vbuckets.values_mut() {
            if let State::Opening { on, from } = &mut entry.state
                && *on == lost
                && let Some(from) = from.take()
            {
                entry.cause = Some(Arc::clone(cause));
                entry.await_node(from, now, &mut self.randomness);
            }
        }
    }

    /// A stream was opened.
    pub(crate) fn opened(&mut self, vbid: Vbid, on: ConnectionId, now: Instant) {
        let Some(entry) = self.vbuckets.get_mut(&vbid) else { return };
        if entry.is_on(on) {
            entry.state = State::Streaming { on, since: now };
            (entry.idle_since, entry.cause) = (None, None);
            (entry.was_open, entry.is_refused) = (true, false);
            self.has_streamed = true;
        }
    }

    /// A connection ended, and its streams with it.
    pub(crate) fn lost(
        &mut self,
        on: ConnectionId,
        streams: Vec<(Vbid, StreamPosition)>,
        cause: &Arc<Error>,
        now: Instant,
    ) {
        for (vbid, from) in streams {
            let Some(entry) = self.vbuckets.get_mut(&vbid) else { continue };
            if entry.is_on(on) {
                entry.settle(now);
                entry.cause = Some(Arc::clone(cause));
                // Not all at once, which may be what ended it.
                let from = Box::new(from);
                entry.back_off(Backoff::SHORT, from, now, &mut self.randomness);
            }
        }
        self.unreachable(on, cause, now);
    }

    /// A stream ended: decides what follows.
    pub(crate) fn ended(
        &mut self,
        vbid: Vbid,
        on: ConnectionId,
        cause: EndCause,
        from: Box<StreamPosition>,
        now: Instant,
    ) -> Verdict {
        let Some(entry) = self.vbuckets.get_mut(&vbid) else {
            return Verdict::Retry { fetch_map: false };
        };
        if !entry.is_on(on) {
            return Verdict::Retry { fetch_map: false };
        }
        entry.settle(now);
        entry.cause = failure(vbid, &cause).map(Arc::new);
        let (backoff, fetch_map) = match decide(vbid, &cause, self.has_streamed) {
            Decision::Complete => {
                entry.state = State::Complete;
                entry.idle_since = None;
                return Verdict::Complete;
            }
            Decision::Fatal(error) => {
                entry.state = State::Failed;
                entry.idle_since = None;
                return Verdict::Fatal(error);
            }
            Decision::Retry(backoff) => (backoff, false),
            Decision::FilterRefused => {
                entry.is_refused = true;
                entry.back_off(Backoff::SHORT, from, now, &mut self.randomness);
                return Verdict::FilterRefused;
            }
            Decision::Moved => (Backoff::SHORT, true),
        };
        tracing::debug!(target: RECONCILER, vbucket = vbid.0, ?cause, attempts = entry.attempts,
            "a stream will be opened again");
        entry.back_off(backoff, from, now, &mut self.randomness);
        Verdict::Retry { fetch_map }
    }

    /// The filter's scope or collections were dropped: completes the vBuckets whose requests were
    /// refused because of that. `false` if none has ever streamed.
    pub(crate) fn complete_refused(&mut self) -> bool {
        for entry in self.vbuckets.values_mut() {
            if entry.is_refused && matches!(entry.state, State::BackingOff { .. }) {
                entry.state = State::Complete;
                entry.idle_since = None;
            }
        }
        self.vbuckets.values().any(|entry| entry.was_open)
    }

    /// The connection that a vBucket is assigned to.
    pub(crate) fn connection_of(&self, vbid: Vbid) -> Option<ConnectionId> {
        match self.vbuckets.get(&vbid)?.state {
            State::Opening { on, .. } | State::Streaming { on, .. } => Some(on),
            _ => None,
        }
    }

    /// The vBuckets that are on a connection.
    pub(crate) fn placed(&self) -> Vec<(Vbid, ConnectionId)> {
        let placed = |&vbid| Some((vbid, self.connection_of(vbid)?));
        self.vbuckets.keys().filter_map(placed).collect()
    }

    /// Whether every vBucket has reached its end.
    pub(crate) fn is_complete(&self) -> bool {
        self.vbuckets.values().all(|entry| matches!(entry.state, State::Complete))
    }

    /// Whether any vBucket has no end.
    pub(crate) fn is_endless(&self) -> bool {
        self.vbuckets.values().any(|entry| entry.end_seqno == Seqno::MAX)
    }

    /// Whether any vBucket is neither streaming nor complete.
    pub(crate) fn has_idle(&self) -> bool {
        self.vbuckets.values().any(|entry| entry.idle_since.is_some())
    }

    /// Whether any vBucket has been without a stream for this long.
    pub(crate) fn has_waited(&self, now: Instant, wait: Duration) -> bool {
        let has_waited = |since| now.saturating_duration_since(since) >= wait;
        self.vbuckets.values().any(|entry| entry.idle_since.is_some_and(has_waited))
    }

    /// A vBucket that has been without a stream for too long, for how long, and its last failure.
    pub(crate) fn stalled(&self, now: Instant) -> Option<(Vbid, Duration, Option<Arc<Error>>)> {
        self.vbuckets.iter().find_map(|(&vbid, entry)| {
            let idle = now.saturating_duration_since(entry.idle_since?);
            (idle >= self.limit(entry)).then(|| (vbid, idle, entry.cause.clone()))
        })
    }

    /// How long a vBucket may be without a stream.
    pub(crate) const fn retry_timeout(&self) -> Duration {
        self.retry_timeout
    }

    fn limit(&self, entry: &Entry) -> Duration {
        match entry.cause {
            Some(_) => self.retry_timeout,
            None => self.retry_timeout.max(self.attempt),
        }
    }

    /// Checks that no vBucket is lost: one that is not final must have a time at which it is
    /// opened, or a connection that `is_alive`.
    ///
    /// # Errors
    /// [`ErrorKind::StreamEnded`] for one that has neither, which is a bug in this crate.
    pub(crate) fn check(&mut self, is_alive: impl Fn(ConnectionId) -> bool) -> Result<(), Error> {
        for (&vbid, entry) in &mut self.vbuckets {
            let (State::Opening { on, .. } | State::Streaming { on, .. }) = entry.state else {
                continue;
            };
            if is_alive(on) {
                continue;
            }
            debug_assert!(false, "{vbid} is on a connection that no longer exists");
            entry.state = State::Failed;
            let message = format!("the client lost track of {vbid}: please report this");
            return Err(Error::new(ErrorKind::StreamEnded, message).with_vbid(vbid));
        }
        Ok(())
    }

    /// The state of every vBucket, ascending, and since when it has not been streaming.
    pub(crate) fn states(&self) -> impl Iterator<Item = (Vbid, VbucketState, Option<Instant>)> {
        self.vbuckets.iter().map(|(&vbid, entry)| (vbid, entry.state(), entry.idle_since))
    }

    /// The same of one vBucket.
    pub(crate) fn state_of(&self, vbid: Vbid) -> Option<(Vbid, VbucketState, Option<Instant>)> {
        self.vbuckets.get(&vbid).map(|entry| (vbid, entry.state(), entry.idle_since))
    }

    /// The seqno at which a vBucket ends; [`Seqno::MAX`] if it has no end.
    pub(crate) fn end_seqno(&self, vbid: Vbid) -> Seqno {
        self.vbuckets.get(&vbid).map_or(Seqno::MAX, |entry| entry.end_seqno)
    }

    /// Whether any vBucket is streaming.
    pub(crate) fn has_streaming(&self) -> bool {
        self.vbuckets.values().any(|entry| matches!(entry.state, State::Streaming { .. }))
    }

    /// How long a vBucket waits before it is reopened.
    pub(crate) fn wait_of(&self, vbid: Vbid, now: Instant) -> Option<Duration> {
        match self.vbuckets.get(&vbid)?.state {
            State::BackingOff { until, .. } => Some(until.saturating_duration_since(now)),
            _ => None,
        }
    }

    /// Checks that a vBucket still has an end that existed.
    ///
    /// # Errors
    /// [`ErrorKind::Rollback`] if the server has less.
    pub(crate) fn check_end(&self, vbid: Vbid, high_seqno: Seqno) -> Result<(), Error> {
        match self.vbuckets.get(&vbid) {
            Some(entry) if entry.end_seqno != Seqno::MAX => {
                check_end(vbid, entry.end_seqno, high_seqno)
            }
            _ => Ok(()),
        }
    }

    /// Counts vBuckets by state.
    pub(crate) fn count(&self, stats: &mut StreamStats) {
        (stats.opening, stats.streaming, stats.backing_off) = (0, 0, 0);
        (stats.complete, stats.failed) = (0, 0);
        for entry in self.vbuckets.values() {
            let count = match entry.state() {
                VbucketState::Opening => &mut stats.opening,
                VbucketState::Streaming => &mut stats.streaming,
                VbucketState::BackingOff => &mut stats.backing_off,
                VbucketState::Complete => &mut stats.complete,
                VbucketState::Failed => &mut stats.failed,
            };
            *count += 1;
        }
    }
}

impl Entry {
    const fn new(state: State, end_seqno: Seqno) -> Self {
        Self {
            state,
            end_seqno,
            attempts: 0,
            was_open: false,
            is_refused: false,
            idle_since: None,
            cause: None,
        }
    }

    const fn state(&self) -> VbucketState {
        match self.state {
            State::Opening { .. } => VbucketState::Opening,
            State::Streaming { .. } => VbucketState::Streaming,
            State::BackingOff { .. } => VbucketState::BackingOff,
            State::Complete => VbucketState::Complete,
            State::Failed => VbucketState::Failed,
        }
    }

    const fn is_on(&self, connection: ConnectionId) -> bool {
        match self.state {
            State::Opening { on, .. } | State::Streaming { on, .. } => on.0 == connection.0,
            _ => false,
        }
    }

    /// Failures are consecutive only if the stream did not last for a while in between.
    fn settle(&mut self, now: Instant) {
        if let State::Streaming { since, .. } = self.state
            && now.saturating_duration_since(since) >= SETTLED
        {
            self.attempts = 0;
        }
    }

    fn back_off(
        &mut self,
        backoff: Backoff,
        mut from: Box<StreamPosition>,
        now: Instant,
        randomness: &mut StdRng,
    ) {
        from.end = from.end.after_a_try();
        let until = now + backoff.wait(self.attempts, randomness);
        self.state = State::BackingOff { until, awaits_node: false, from };
        self.attempts = self.attempts.saturating_add(1);
        self.idle_since.get_or_insert(now);
    }

    /// Waits, because the connection could not be made.
    fn await_node(&mut self, from: Box<StreamPosition>, now: Instant, randomness: &mut StdRng) {
        self.back_off(Backoff::SHORT, from, now, randomness);
        if let State::BackingOff { awaits_node, .. } = &mut self.state {
            *awaits_node = true;
        }
    }
}

/// Checks that the server has the end of a read, which existed.
///
/// # Errors
/// [`ErrorKind::Rollback`] if it has less.
pub(crate) fn check_end(vbid: Vbid, end: Seqno, high: Seqno) -> Result<(), Error> {
    if high >= end {
        return Ok(());
    }
    let message = format!(
        "{vbid} was rolled back to seqno {high} or below: the end of the read, seqno {end}, no \
         longer exists"
    );
    let error = Error::new(ErrorKind::Rollback, message).with_vbid(vbid);
    Err(error.with_rollback_seqno(high))
}

#[cfg(test)]
mod tests;
