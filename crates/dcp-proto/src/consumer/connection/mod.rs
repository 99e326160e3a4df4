//! One connection to a node: packets in, changes to the sink, requests out.

mod answers;
mod login;
mod mitigation;
mod requests;
mod run;
mod stream_request;
mod walk;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_wire::message::{BufferAck, CloseStream, StreamAddress, StreamEndReason};
use dcp_wire::{Frame, Opaque, Seqno, Status, Vbid};

use self::login::Login;
use self::requests::Requests;
use self::stream_request::RequestContext;
pub use self::stream_request::StreamFilter;
use super::delivery::{Delivery, Exclusions};
use super::opaque::Opaques;
use super::stream::{State, Stream};
use super::unpersisted::Unpersisted;
use super::window::Window;
use super::{
    ApiMisuse, ConnectionError, ConnectionStats, EndCause, Event, OpenStreamError, PositionUpdate,
    StreamPosition, noop,
};
use crate::OnRollback;

/// How a connection was set up.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// vBuckets of the bucket.
    pub num_vbuckets: u16,
    /// Whether keys carry their collection id.
    pub collections: bool,
    /// Flow-control buffer in bytes; 0 if flow control is off.
    pub window: u32,
    /// Interval of the producer's noops; `None` if they are off, in which case dead connections are
    /// not detected.
    pub noop_interval: Option<Duration>,
    /// What every stream requests.
    pub filter: StreamFilter,
    /// Whether the server accepts a purge seqno in stream requests (marker version 2.2).
    pub purge_seqno: bool,
    /// Whether the server sends STREAM_END for a stream that is closed here.
    pub stream_end_on_close: bool,
    /// Whether a stream whose position is below the server's purge seqno resumes, missing purged
    /// deletions, instead of being rolled back to the beginning.
    pub ignore_purged_tombstones: bool,
    /// What a rollback does to a stream.
    pub on_rollback: OnRollback,
    /// Which changes reach the sink, and when.
    pub delivery: Delivery,
    /// Longest packet body accepted, in bytes.
    pub max_body_len: usize,
}

/// How much one walk over the read buffer may give to the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Rows.
    pub rows: usize,
    /// Bytes of packets with rows; one packet may overshoot it.
    pub bytes: usize,
}

impl Limit {
    /// No limit.
    pub const NONE: Self = Self { rows: usize::MAX, bytes: usize::MAX };

    /// What remains of the limit.
    #[inline(always)]
    pub(super) const fn less(self, rows: usize, bytes: usize) -> Self {
        Self { rows: self.rows.saturating_sub(rows), bytes: self.bytes.saturating_sub(bytes) }
    }
}

/// What one walk over the read buffer did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walk {
    /// Bytes taken off the front: whole packets.
    pub consumed: usize,
    /// Rows given to the sink.
    pub rows: usize,
    /// Whether it stopped at the limit, not because a packet was incomplete.
    pub limited: bool,
}

/// One connection to a node after its set-up (public DCP pages "flow-control", "dead-connections"
/// and those of the messages), whether it streams, is only asked, or is idle. On a connection without
/// DCP, the window is 0, noops are off, and no stream can be opened.
///
/// # Driving it
///
/// * inputs: [`handle_input`](Self::handle_input), [`handle_timeout`](Self::handle_timeout);
/// * commands: [`open_stream`](Self::open_stream), [`close_stream`](Self::close_stream),
///   [`release`](Self::release), and those that begin with `request_`, which need no stream;
/// * a token that expires: [`with_token`](Self::with_token),
///   [`poll_token_wanted`](Self::poll_token_wanted), [`renew_token`](Self::renew_token),
///   [`poll_transmit_token`](Self::poll_transmit_token);
/// * outputs: [`poll_transmit`](Self::poll_transmit), [`poll_event`](Self::poll_event),
///   [`take_positions`](Self::take_positions), [`take_held`](Self::take_held),
///   [`poll_timeout`](Self::poll_timeout).
///
/// A connection that returned an error has ended: take its streams with
/// [`into_streams`](Self::into_streams) and drop it.
///
/// # Flow control
///
/// Every byte that counts is *held* from the moment it is received until the driver takes it with
/// `take_held`. Once the application has processed the changes in these bytes, the driver returns
/// them with `release`. A caller that never releases stalls the producer after one window. A
/// producer that sends more than the window and one packet is disconnected, which bounds memory.
#[derive(Debug)]
pub struct Connection {
    pub(super) config: ConnectionConfig,
    /// By vBucket.
    pub(super) streams: Vec<Option<Box<Stream>>>,
    /// vBuckets with a position update since positions were last taken.
    pub(super) dirty: Vec<Vbid>,
    /// Last positions of removed streams, not yet taken.
    final_positions: Vec<PositionUpdate>,
    pub(super) opaques: Opaques,
    pub(super) window: Window,
    /// Counted bytes received, not yet taken by the driver.
    pub(super) held: u64,
    /// Changes that are not yet persisted on all copies; not part of `held`.
    pub(super) unpersisted: Unpersisted,
    /// vBuckets with changes that are now persisted but not yet given to the sink.
    pub(super) newly_persisted: VecDeque<Vbid>,
    pub(super) transmit: BytesMut,
    pub(super) events: VecDeque<Event>,
    /// When the last bytes from the server arrived.
    pub(super) heard_at: Instant,
    /// Bytes of the packet that was incomplete at that moment.
    pub(super) incomplete: usize,
    /// When the bytes arrived that are being handled.
    pub(super) handled_at: Instant,
    /// Closes of streams that are to go on elsewhere, oldest first: when each was sent. Those that
    /// were answered may be among them.
    closes: VecDeque<(Instant, Vbid, Opaque)>,
    pub(super) stats: ConnectionStats,
    requests: Requests,
    /// If a token authenticates the connection.
    login: Option<Box<Login>>,
}

impl Connection {
    /// A connection whose set-up has just finished.
    #[must_use]
    pub fn new(config: ConnectionConfig, now: Instant) -> Self {
        Self {
            streams: (0..config.num_vbuckets).map(|_| None).collect(),
            dirty: Vec::new(),
            final_positions: Vec::new(),
            opaques: Opaques::default(),
            window: Window::new(config.window),
            held: 0,
            unpersisted: Unpersisted::default(),
            newly_persisted: VecDeque::new(),
            transmit: BytesMut::new(),
            events: VecDeque::new(),
            heard_at: now,
            incomplete: 0,
            handled_at: now,
            closes: VecDeque::new(),
            stats: ConnectionStats::default(),
            requests: Requests::default(),
            login: None,
            config,
        }
    }

    /// The same connection for another use, with other settings of streams: all that is left of the
    /// earlier use is what the server has to be sent or has sent.
    #[must_use]
    pub fn reuse(self, config: ConnectionConfig, now: Instant) -> Self {
        debug_assert!(self.is_unused(), "a connection in use was given away");
        let Self { opaques, window, transmit, requests, login, .. } = self;
        Self { opaques, window, transmit, requests, login, ..Self::new(config, now) }
    }

    /// How the connection was set up, and what its streams request.
    #[must_use]
    pub const fn config(&self) -> &ConnectionConfig {
        &self.config
    }

    /// Command: sets the filter of future stream requests; open streams keep theirs.
    pub fn set_filter(&mut self, filter: StreamFilter) {
        self.config.filter = filter;
    }

    /// Command: leaves these documents out too, from now on.
    pub fn exclude(&mut self, exclusions: &Exclusions) {
        self.config.delivery.exclusions.merge(exclusions);
    }

    /// Input: time has passed.
    ///
    /// # Errors
    /// [`ConnectionError::Idle`] if the connection is dead, [`ConnectionError::CloseUnanswered`] if the
    /// server does not answer the close of a stream, [`ConnectionError::TokenExpired`] if it got no
    /// newer token.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), ConnectionError> {
        if self.dead_at().is_some_and(|at| now >= at) {
            return Err(ConnectionError::Idle);
        }
        if let Some((at, vbid)) = self.close_overdue_at()
            && now >= at
        {
            return Err(ConnectionError::CloseUnanswered(vbid));
        }
        self.advance_login(now)?;
        self.acknowledge(now);
        Ok(())
    }

    /// Command: requests a stream that resumes at `from` and ends with the snapshot that holds
    /// `end_seqno` ([`Seqno::MAX`]: endless).
    ///
    /// # Errors
    /// [`ApiMisuse`] if there is no such vBucket, or it has a stream here.
    pub fn open_stream(
        &mut self,
        vbid: Vbid,
        end_seqno: Seqno,
        from: StreamPosition,
    ) -> Result<(), ApiMisuse> {
        let slot = self.streams.get_mut(vbid.index()).ok_or(ApiMisuse::UnknownVbucket(vbid))?;
        if slot.is_some() {
            return Err(ApiMisuse::AlreadyOpen(vbid));
        }
        let stream = Stream::new(
            vbid,
            self.opaques.vbucket(vbid),
            end_seqno,
            self.config.delivery.clamp,
            from,
        );
        *slot = Some(Box::new(stream));
        self.request(vbid);
        Ok(())
    }

    /// Requests a stream, or first the seqno at which it ends.
    pub(super) fn request(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if !stream.may_have_lost_end() {
            stream.state = State::Requested;
            return RequestContext::new(&self.config).encode(stream, &mut self.transmit);
        }
        let request = self.next_high_seqnos();
        if let Some(Some(stream)) = self.streams.get_mut(vbid.index()) {
            stream.state = State::Asking { request };
        }
    }

    /// The node has answered request number `request` for its high seqnos: streams whose ends may
    /// have been lost end with what there is.
    pub(super) fn ask_up_to(&mut self, request: u32, seqnos: &[(Vbid, Seqno)]) {
        for &(vbid, high) in seqnos {
            if let Some(Some(stream)) = self.streams.get_mut(vbid.index())
                && stream.asks(request)
            {
                stream.end_seqno = stream.end_seqno.min(high);
            }
        }
        // The stream request itself shows which vBuckets the node does not have.
        for stream in self.streams.iter_mut().flatten().filter(|stream| stream.asks(request)) {
            stream.state = State::Requested;
            RequestContext::new(&self.config).encode(stream, &mut self.transmit);
        }
    }

    /// The node has refused request number `request` for its high seqnos.
    pub(super) fn high_seqnos_refused(&mut self, request: u32, status: Status) {
        let asking = self.streams.iter().flatten().filter(|stream| stream.asks(request));
        for vbid in asking.map(|stream| stream.vbid).collect::<Vec<_>>() {
            let refused = OpenStreamError::Refused { status, manifest_uid: None };
            self.end(vbid, EndCause::Refused(refused));
        }
    }

    /// Command: closes a stream, if there is one. [`Event::StreamEnded`] follows, unless it has
    /// been reported. A server that has not answered after the time in which a silent connection is
    /// found dead never will: it may answer noops and nothing else, and a vBucket that waits for it
    /// would wait for ever.
    pub fn close_stream(&mut self, now: Instant, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        // A stream that is being closed in order to be reopened stays closed.
        stream.reopen = false;
        match stream.state {
            // The server does not know it.
            State::Asking { .. } => self.end(vbid, EndCause::Closed),
            // Its end is reported already.
            State::Closing | State::Finished { .. } => {}
            State::Requested | State::Streaming | State::Persisting => {
                stream.state = State::Closing;
                send_close(stream, &mut self.transmit);
                let opaque = stream.opaque;
                self.await_close(now, vbid, opaque);
                self.discard(vbid);
            }
        }
    }

    /// Notes that a close was sent whose answer a vBucket waits for.
    pub(super) fn await_close(&mut self, now: Instant, vbid: Vbid, opaque: Opaque) {
        while self.closes.front().is_some_and(|close| !self.awaits(close)) {
            self.closes.pop_front();
        }
        self.closes.push_back((now, vbid, opaque));
    }

    /// Whether a close has not been answered.
    fn awaits(&self, &(_, vbid, opaque): &(Instant, Vbid, Opaque)) -> bool {
        let stream = self.streams.get(vbid.index()).and_then(Option::as_deref);
        stream.is_some_and(|stream| stream.opaque == opaque && stream.state == State::Closing)
    }

    /// When the oldest close that has not been answered is overdue, and its vBucket.
    fn close_overdue_at(&self) -> Option<(Instant, Vbid)> {
        let interval = self.config.noop_interval?;
        let (sent_at, vbid, _) = *self.closes.iter().find(|close| self.awaits(close))?;
        Some((noop::dead_at(sent_at, interval), vbid))
    }

    /// Command: the application has processed `bytes` of what was held.
    pub fn release(&mut self, now: Instant, bytes: u64) {
        self.window.release(now, bytes);
        self.acknowledge(now);
    }

    /// Output: moves the bytes to send to the end of `out`; `false` if there are none, or if a token
    /// is to be sent first ([`poll_transmit_token`](Self::poll_transmit_token)).
    pub fn poll_transmit(&mut self, out: &mut BytesMut) -> bool {
        if self.transmit.is_empty() || self.is_held_back() {
            return false;
        }
        out.extend_from_slice(&self.transmit);
        self.transmit.clear();
        self.requests.sent();
        true
    }

    /// Output: what happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Output: position updates since the last call, each after the last item of its vBucket that
    /// was given to the sink.
    pub fn take_positions(&mut self) -> Vec<PositionUpdate> {
        let streams = &mut self.streams;
        let mut positions = std::mem::take(&mut self.final_positions);
        positions.reserve(self.dirty.len());
        for vbid in self.dirty.drain(..) {
            if let Some(Some(stream)) = streams.get_mut(vbid.index())
                && std::mem::take(&mut stream.dirty)
            {
                positions.push(stream.position_update());
            }
        }
        positions
    }

    /// Output: bytes received since the last call that count towards the window; return them with
    /// [`release`](Self::release).
    pub const fn take_held(&mut self) -> u64 {
        std::mem::replace(&mut self.held, 0)
    }

    /// Output: when [`handle_timeout`](Self::handle_timeout) wants to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let close = self.close_overdue_at().map(|(at, _)| at);
        let deadlines = [self.dead_at(), self.window.deadline(), close, self.login_deadline()];
        deadlines.into_iter().flatten().min()
    }

    /// The last seqno of a vBucket that was given to the sink; `None` unless it streams here.
    #[must_use]
    pub fn seqno(&self, vbid: Vbid) -> Option<Seqno> {
        let stream = self.streams.get(vbid.index())?.as_deref()?;
        (stream.state == State::Streaming).then_some(stream.position.seqno)
    }

    /// Whether a stream has some but not all of a snapshot from memory, which servers send at once.
    /// If nothing more comes, close the stream: reopened from [`Event::StreamEnded`], it is told what
    /// is left of the snapshot.
    #[must_use]
    pub fn awaits_snapshot_end(&self, vbid: Vbid) -> bool {
        let stream = self.streams.get(vbid.index()).and_then(Option::as_ref);
        stream.is_some_and(|stream| stream.awaits_snapshot_end())
    }

    /// Whether a stream waits for an end that the server no longer has, if `high` is its high seqno.
    /// The server then lost changes after the end was chosen, or after it was last asked for its high
    /// seqno, and before it accepted the stream. Close the stream: reopened from
    /// [`Event::StreamEnded`], it ends with what there is.
    #[must_use]
    pub fn has_lost_end(&self, vbid: Vbid, high: Seqno) -> bool {
        let stream = self.streams.get(vbid.index()).and_then(Option::as_deref);
        stream.is_some_and(|stream| {
            stream.state == State::Streaming
                && stream.may_have_lost_end()
                && stream.end_seqno > high
        })
    }

    /// Bytes received that [`take_held`](Self::take_held) would return.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.held
    }

    /// Whether there are position updates to take.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        !self.dirty.is_empty() || !self.final_positions.is_empty()
    }

    /// Whether the producer is stalled until bytes are released.
    #[must_use]
    pub const fn is_window_full(&self) -> bool {
        self.window.is_full()
    }

    /// Bytes received and not acknowledged to the producer.
    #[must_use]
    pub const fn unacknowledged(&self) -> u64 {
        self.window.outstanding()
    }

    /// Whether all streams were completed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.streams.iter().flatten().all(|stream| stream.is_finished())
    }

    /// Whether there is no stream, and nothing outstanding from the server: neither of an earlier
    /// stream nor the answer to a request.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.streams.iter().all(Option::is_none) && self.requests.is_empty()
    }

    /// Command: acknowledges everything that was received, before the connection is reused. Bytes
    /// that the application still holds must not be released afterwards.
    pub fn acknowledge_all(&mut self) {
        self.held = 0;
        while let Some(bytes) = self.window.take_all() {
            self.send_ack(bytes);
        }
    }

    /// Counters since the connection began.
    #[must_use]
    pub const fn stats(&self) -> &ConnectionStats {
        &self.stats
    }

    /// Everything the streams need to resume on other connections.
    #[must_use]
    pub fn into_streams(self) -> Vec<(Vbid, StreamPosition)> {
        let streams = self.streams.into_iter().flatten().filter(|stream| !stream.is_finished());
        streams.map(|stream| (stream.vbid, stream.stream_position())).collect()
    }

    fn dead_at(&self) -> Option<Instant> {
        // Whose noop is not answered sends no other: the login has a deadline of its own.
        if self.is_without_token() {
            return None;
        }
        Some(noop::dead_at(self.heard_at, self.config.noop_interval?))
    }

    fn acknowledge(&mut self, now: Instant) {
        if let Some(bytes) = self.window.take_ack(now) {
            self.send_ack(bytes);
        }
    }

    fn send_ack(&mut self, bytes: u32) {
        self.stats.acks += 1;
        if self.login.is_some() {
            return self.send_ack_that_may_be_refused(bytes);
        }
        // Every part has a fixed size, so that encoding cannot fail.
        let _ = BufferAck { bytes }.encode(&mut self.transmit);
    }

    /// The server ended a stream.
    pub(super) fn stream_ended(&mut self, vbid: Vbid, reason: StreamEndReason) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        if reason == StreamEndReason::OK && stream.end_seqno != Seqno::MAX {
            self.reached_end(vbid, true);
        } else {
            self.end(vbid, EndCause::Ended(reason));
        }
    }

    /// Removes a stream and reports its end.
    pub(super) fn end(&mut self, vbid: Vbid, cause: EndCause) {
        if let Some(stream) = self.remove(vbid) {
            let from = Box::new(stream.stream_position());
            self.events.push_back(Event::StreamEnded { vbid, cause, from });
        }
    }

    /// Removes a stream. Its position still goes with the next batch.
    pub(super) fn remove(&mut self, vbid: Vbid) -> Option<Box<Stream>> {
        self.discard(vbid);
        let stream = self.streams.get_mut(vbid.index())?.take()?;
        if stream.dirty {
            self.final_positions.push(stream.position_update());
        }
        Some(stream)
    }
}

/// Queues a packet of fixed small parts, whose encoding cannot fail.
pub(super) fn send(frame: &Frame<'_>, transmit: &mut BytesMut) {
    let encoded = frame.encode(transmit);
    debug_assert!(encoded.is_ok(), "a packet of small parts fits");
}

pub(super) fn send_close(stream: &Stream, transmit: &mut BytesMut) {
    let to = StreamAddress { vbid: stream.vbid, opaque: stream.opaque, stream_id: None };
    let encoded = CloseStream.encode(to, transmit);
    debug_assert!(encoded.is_ok(), "a packet of small parts fits");
}
