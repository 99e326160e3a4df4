//! The server's side of one DCP connection.

mod requests;

use std::time::Instant;

use bytes::BytesMut;
use dcp_wire::message::StreamEndReason;
use dcp_wire::{Frame, Magic, Opcode, Status, StreamId, Vbid};
use tracing::debug;

use self::requests::{Handler, failover_log};
use super::message_format::Scratch;
use super::noop::Noop;
use super::open::{Role, check_open};
use super::output::Output;
use super::refusal::Refusal;
use super::replica::{self, NoReplicas};
use super::reply::{handle_response, refuse, refuse_and_close, succeed};
use super::settings::{Priority, Settings};
use super::streams::Streams;
use super::window::Window;
use super::{BucketSource, ConnectionConfig, Disconnect, Features, Privilege};

/// Bytes that a stream writes per turn: enough to make a turn cheap, few enough that no stream
/// waits long for the others.
const TURN: usize = 32 * 1024;

/// Most bytes that a server writes at once, however many messages a pass has.
const PASS_WRITE: usize = 16 * 1024;

/// Turns in one call of [`Connection::poll_transmit`]: streams that have nothing to send, or only
/// filtered-out items, use none of the budget.
const MAX_TURNS: usize = 256;

/// What one call of [`Connection::poll_transmit`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes appended.
    pub written: usize,
    /// Whether the budget or the end of a pass, not a lack of data or of credit, ended the call:
    /// call again as soon as the bytes are written out.
    pub more: bool,
}

/// The DCP part of one server connection.
///
/// Feed it every packet with a DCP opcode, [`notify`](Self::notify) it when a vBucket that it may
/// be streaming changed, and drain [`poll_transmit`](Self::poll_transmit) after either. Requests
/// are answered in order and immediately. Its state is bounded: streams by
/// [`ConnectionConfig::max_streams`], output by the budget of the caller, who should not feed
/// further requests while much output is unsent.
#[derive(Debug)]
pub struct Connection {
    config: ConnectionConfig,
    features: Features,
    opened: Option<Opened>,
}

/// State of an opened connection.
#[derive(Debug)]
struct Opened {
    name: Vec<u8>,
    /// The consumer's end, if the server is the consumer on this connection.
    replica: Option<replica::Connection>,
    settings: Settings,
    window: Window,
    noop: Noop,
    streams: Streams,
    scratch: Scratch,
    /// Since when the flow-control window holds back data.
    full_since: Option<Instant>,
    /// When backfills that make no progress were last looked for; `None` without streams.
    looked_for_slow_streams: Option<Instant>,
}

impl Connection {
    /// A connection that has not been opened for DCP yet.
    #[must_use]
    pub const fn new(config: ConnectionConfig) -> Self {
        Self { config, features: Features::NONE, opened: None }
    }

    /// Changes how long the connection may be silent.
    pub const fn set_idle_timeout(&mut self, timeout: core::time::Duration) {
        self.config.idle_timeout = timeout;
    }

    /// Name given by DCP_OPEN; `None` before. When a connection gets one, the caller closes the
    /// older connection of the same name.
    #[must_use]
    pub fn name(&self) -> Option<&[u8]> {
        self.opened.as_ref().map(|opened| opened.name.as_slice())
    }

    /// Streams of the connection, including ended ones whose end is still to be sent.
    #[must_use]
    pub fn stream_count(&self) -> usize {
        self.opened.as_ref().map_or(0, |opened| opened.streams.len())
    }

    /// Bytes sent and not acknowledged; 0 without flow control.
    #[must_use]
    pub fn unacked_bytes(&self) -> u64 {
        self.opened.as_ref().map_or(0, |opened| opened.window.outstanding())
    }

    /// Notes that a packet arrived that is handled elsewhere: the connection is not idle.
    pub const fn handle_received(&mut self, now: Instant) {
        if let Some(opened) = &mut self.opened {
            opened.noop.received(now);
        }
    }

    /// Handles one DCP packet (opcodes 0x50 to 0x67, requests and responses); the answer, if there
    /// is one, is appended to `out` at once.
    ///
    /// `source` is the bucket the connection has selected, `None` without one; `features` what
    /// its last HELLO negotiated.
    ///
    /// # Errors
    /// [`Disconnect`]: close the connection after writing what is in `out`.
    pub fn handle_frame<S: BucketSource>(
        &mut self,
        now: Instant,
        frame: &Frame<'_>,
        source: Option<&S>,
        features: Features,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        self.features = features;
        self.handle_received(now);
        let opcode = frame.header.opcode;
        match frame.header.magic {
            Magic::CLIENT_REQUEST | Magic::ALT_CLIENT_REQUEST => {}
            Magic::CLIENT_RESPONSE | Magic::ALT_CLIENT_RESPONSE => {
                return self.handle_response(frame, source, out);
            }
            _ => return Err(Disconnect::UnexpectedRequest(opcode)),
        }
        let outcome = match self.handle_request(now, frame, source, out)? {
            Ok(()) => return Ok(()),
            Err(refusal) => refusal,
        };
        if self.config.server_version.is_legacy() && outcome.is_of_packet(opcode) {
            refuse_and_close(frame, out)?;
            return Err(Disconnect::InvalidRequest(opcode));
        }
        debug!(%opcode, status = %outcome.status(), "refused a request");
        // An opened DCP connection may carry JSON regardless of its HELLO; older servers do not
        // mark the cluster map as JSON.
        let json = features.json || self.opened.is_some();
        let is_map = matches!(outcome, Refusal::NotMyVbucket);
        let json = json && !(is_map && self.config.server_version.is_legacy());
        let features = Features { json, ..features };
        let cluster_map = source.and_then(BucketSource::cluster_map);
        refuse(frame, &outcome, cluster_map.as_deref(), features, out)
    }

    fn handle_response<S: BucketSource>(
        &mut self,
        response: &Frame<'_>,
        source: Option<&S>,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        match &mut self.opened {
            Some(opened) => {
                if let Some(replica) = &mut opened.replica {
                    let store = source.map_or(&NoReplicas as _, BucketSource::replicas);
                    return replica.handle_frame(response, store, out);
                }
                if let Some(source) = source {
                    opened.streams.acknowledged(
                        response.header.opcode,
                        response.header.opaque,
                        source,
                    );
                }
                handle_response(response, &opened.settings, &mut opened.noop)
            }
            None => Err(Disconnect::UnexpectedResponse {
                opcode: response.header.opcode,
                status: response.header.status(),
            }),
        }
    }

    /// The outer error ends the connection, the inner one is answered.
    fn handle_request<S: BucketSource>(
        &mut self,
        now: Instant,
        request: &Frame<'_>,
        source: Option<&S>,
        out: &mut BytesMut,
    ) -> Result<Result<(), Refusal>, Disconnect> {
        let stream_id = match stream_id(request) {
            Ok(id) => id,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if self.features.unordered_execution {
            return Ok(Err(Refusal::Status(Status::NOT_SUPPORTED)));
        }
        let legacy = self.config.server_version.is_legacy();
        let opcode = request.header.opcode;
        if legacy && self.opened.is_none() && opcode == Opcode::DCP_GET_FAILOVER_LOG {
            return failover_log(request, source, out);
        }
        if legacy && self.opened.is_some() == (opcode == Opcode::DCP_OPEN) {
            return Err(Disconnect::UnexpectedRequest(opcode));
        }
        if opcode == Opcode::DCP_OPEN {
            return match self.handle_open(now, request, source) {
                Ok(()) => succeed(request, out).map(Ok),
                Err(refusal) => Ok(Err(refusal)),
            };
        }
        let Some(opened) = &mut self.opened else {
            return Ok(Err(Refusal::invalid("the connection is not opened for DCP")));
        };
        let Some(source) = source else {
            return Ok(Err(Refusal::Status(Status::NO_BUCKET)));
        };
        if let Some(replica) = &mut opened.replica {
            if stream_id.is_some() {
                return Ok(Err(Refusal::invalid("stream id on a consumer connection")));
            }
            return replica.handle_frame(request, source.replicas(), out).map(Ok);
        }
        let (config, features) = (&self.config, self.features);
        Handler { config, features, opened, request, stream_id, source, out }.handle()
    }

    fn handle_open<S: BucketSource>(
        &mut self,
        now: Instant,
        request: &Frame<'_>,
        source: Option<&S>,
    ) -> Result<(), Refusal> {
        let (open, role) = check_open(request, self.config.server_version)?;
        if self.opened.is_some() {
            return Err(Refusal::invalid("the connection is already opened for DCP"));
        }
        let Some(source) = source else {
            return Err(Refusal::Status(Status::NO_BUCKET));
        };
        let needed = match role {
            Role::Producer => Privilege::Produce,
            Role::Consumer(_) => Privilege::Consume,
        };
        if !source.has_privilege(needed) {
            return Err(Refusal::Status(Status::EACCESS));
        }
        let mut settings = Settings::new(open.flags, open.name, self.config.server_version);
        let (replica, noop) = match role {
            Role::Producer => (None, Noop::new(now)),
            Role::Consumer(_) if source.is_warming_up() => {
                return Err(Refusal::Status(Status::ETMPFAIL));
            }
            Role::Consumer(consumer_name) => {
                let server_version = self.config.server_version;
                // The producer sends noops: silence ends the connection.
                settings.noop_enabled = true;
                let config =
                    replica::Config { server_version, consumer_name, ..replica::Config::default() };
                (Some(replica::Connection::new(&config, self.features)), Noop::silent(now))
            }
        };
        self.opened = Some(Opened {
            name: open.name.to_vec(),
            replica,
            settings,
            window: Window::default(),
            noop,
            streams: Streams::default(),
            scratch: Scratch::default(),
            full_since: None,
            looked_for_slow_streams: None,
        });
        Ok(())
    }

    /// Notes that the vBucket has new items or another state, or was removed. Costs nothing if it
    /// is not streamed.
    pub fn notify(&mut self, vbid: Vbid) {
        if let Some(opened) = &mut self.opened {
            opened.streams.wake(vbid);
        }
    }

    /// Ends the vBucket's streams with `reason`, as an operator or a fault would.
    pub fn end_streams(&mut self, vbid: Vbid, reason: StreamEndReason) {
        if let Some(opened) = &mut self.opened {
            opened.streams.end_all(vbid, reason);
        }
    }

    /// The most bytes that are written to the socket at once, all of them before
    /// [`poll_transmit`](Self::poll_transmit) is called again; `None` for as many as it takes.
    ///
    /// Clients that have asked for a priority get writes like those of a server, whose size and
    /// number they are meant to choose.
    #[must_use]
    pub fn write_limit(&self) -> Option<usize> {
        self.opened.as_ref()?.settings.priority.map(|_| PASS_WRITE)
    }

    /// Appends noops and stream messages to `out` until `budget` bytes are written (one message
    /// may exceed it), the flow-control window is used up, or there is nothing to send; for a
    /// client that has asked for a priority, only the messages of one pass.
    pub fn poll_transmit<S: BucketSource>(
        &mut self,
        now: Instant,
        source: &S,
        out: &mut BytesMut,
        budget: usize,
    ) -> Transmit {
        let Some(opened) = &mut self.opened else {
            return Transmit::default();
        };
        let before = out.len();
        if let Some(replica) = &mut opened.replica {
            if let Err(error) = replica.poll_transmit(source.replicas(), out) {
                debug!(%error, "cannot ask for changes");
            }
            return Transmit { written: out.len() - before, more: false };
        }
        if opened.window.is_open() {
            opened.full_since = None;
        }
        opened.write_noop(now, out);
        opened.end_slow_streams(now, &self.config, source);
        let limit = before.saturating_add(budget);
        let mut messages = opened.settings.priority.map_or(usize::MAX, Priority::messages);
        let sequential = opened.settings.sequential_backfills;
        let mut more = false;
        for turn in 0.. {
            if !opened.streams.has_ready() || !opened.window.is_open() {
                break;
            }
            if turn == MAX_TURNS || out.len() >= limit || messages == 0 {
                more = true;
                break;
            }
            let limit = out.len().saturating_add(TURN).min(limit);
            let Opened { streams, window, scratch, .. } = &mut *opened;
            let mut output = Output::new(out, window, scratch, (limit, messages), now);
            streams.take_turn(source, sequential, &mut output);
            messages = output.messages();
        }
        let is_full = opened.streams.has_ready() && !opened.window.is_open();
        opened.full_since = is_full.then(|| opened.full_since.unwrap_or(now));
        Transmit { written: out.len() - before, more }
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called; `None` never.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let opened = self.opened.as_ref()?;
        let looked = opened.looked_for_slow_streams;
        let slow = looked.and_then(|at| at.checked_add(self.config.backfill_idle_limit / 4));
        let stuck = opened.stuck_since(&self.config);
        let stuck = stuck.and_then(|(since, timeout)| since.checked_add(timeout));
        let slow = [slow, stuck].into_iter().flatten().min();
        if !opened.settings.noop_enabled {
            return slow;
        }
        let noop = opened.noop.deadline(opened.settings.noop_interval, self.config.idle_timeout);
        [noop, slow].into_iter().flatten().min()
    }

    /// Lets time pass. A noop that is due is written by the next
    /// [`poll_transmit`](Self::poll_transmit).
    ///
    /// # Errors
    /// [`Disconnect::Idle`] if nothing was received for too long, [`Disconnect::Stuck`] if nothing
    /// was acknowledged.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Disconnect> {
        let stuck = self.opened.as_ref().and_then(|opened| opened.stuck_since(&self.config));
        if let Some((since, timeout)) = stuck
            && now.saturating_duration_since(since) >= timeout
        {
            return Err(Disconnect::Stuck(now.saturating_duration_since(since)));
        }
        match &self.opened {
            Some(opened)
                if opened.settings.noop_enabled
                    && opened.noop.silence(now) >= self.config.idle_timeout =>
            {
                Err(Disconnect::Idle(opened.noop.silence(now)))
            }
            _ => Ok(()),
        }
    }

    /// Forgets everything: the connection is closed, its name is free.
    pub fn handle_closed(&mut self) {
        self.opened = None;
    }
}

impl Opened {
    /// Since when the client has acknowledged nothing although changes wait, and how long it may do
    /// so, if it is one that is disconnected for it.
    fn stuck_since(&self, config: &ConnectionConfig) -> Option<(Instant, core::time::Duration)> {
        let stuck = config.stuck.as_ref().filter(|stuck| stuck.contains(&self.name))?;
        let since = self.full_since.filter(|_| !self.window.is_open())?;
        Some((since, stuck.timeout))
    }

    /// Ends streams whose backfill has made no progress for too long while the disk is nearly full:
    /// the files they hold open cannot be compacted.
    fn end_slow_streams<S: BucketSource>(
        &mut self,
        now: Instant,
        config: &ConnectionConfig,
        source: &S,
    ) {
        if self.streams.is_empty() {
            self.looked_for_slow_streams = None;
            return;
        }
        let looked = *self.looked_for_slow_streams.get_or_insert(now);
        let limit = config.backfill_idle_limit;
        if now.saturating_duration_since(looked) < limit / 4 {
            return;
        }
        self.looked_for_slow_streams = Some(now);
        if source.disk_usage_percent() >= config.backfill_idle_disk_percent {
            self.streams.end_stuck(now, limit);
        }
    }

    fn write_noop(&mut self, now: Instant, out: &mut BytesMut) {
        if !self.settings.noop_enabled {
            return;
        }
        if let Some(opaque) = self.noop.take_due(now, self.settings.noop_interval) {
            let written = Frame::request(Opcode::DCP_NOOP).with_opaque(opaque).encode(out);
            debug_assert!(written.is_ok(), "a noop has a fixed size");
        }
    }
}

/// The stream id of a request; other known framing extras mean nothing to DCP.
fn stream_id(request: &Frame<'_>) -> Result<Option<StreamId>, Refusal> {
    /// Highest request object a server knows.
    const LAST_KNOWN: u16 = 7;
    for info in request.frame_infos() {
        if info?.id > LAST_KNOWN {
            return Err(Refusal::Status(Status::UNKNOWN_FRAME_INFO));
        }
    }
    Ok(request.stream_id()?)
}
