//! One client connection: reads requests, and writes answers and stream messages.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use dcp_producer_proto as proto;
use dcp_wire::message::{ClusterMapChange, ConfigVersion, PushedVersion};
use dcp_wire::{DecodeError, Frame, MAX_BODY_LEN, Opaque};
use tokio_util::sync::CancellationToken;

use super::dcp_names::DcpNames;
use super::faulty;
use super::socket::Socket;
use crate::bucket::Subscriber;
use crate::cluster::{Follower, NodeBucket, ServedBucket};
use crate::fault::{Faults, RequestFault, Tap};
use crate::kv::{Flow, MapPush, Session};

/// Bytes of output above which no more requests are handled and no more stream messages are
/// produced; large, so that each write is a large one.
const OUTPUT_LIMIT: usize = 512 << 10;
/// Stream messages are produced once fewer bytes than this wait for the socket.
const OUTPUT_LOW: usize = 64 << 10;
/// How long a client may take to read the output of a connection that is being closed.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the machine's timers are checked while the socket is blocked.
const STUCK_TICK: Duration = Duration::from_secs(1);
/// How long to wait before a waiting request is retried, or a durable write looked at again.
const RETRY_TICK: Duration = Duration::from_millis(10);
/// Bytes to read from the socket at a time.
const READ_SIZE: usize = 64 << 10;
/// Most bytes to discard from a client before its connection is closed.
const MAX_DISCARDED: usize = 1 << 20;
/// Longest body of a client that has not authenticated, in bytes.
const MAX_ANONYMOUS_BODY_LEN: usize = 64 << 10;
/// One client connection.
pub(super) struct Connection {
    socket: Socket,
    session: Session,
    dcp: proto::Connection,
    /// Changes that the connection follows since it was opened for DCP.
    following: Option<Following>,
    map_version: Follower,
    /// The newest version when the connection was made, or pushed since.
    map_known: ConfigVersion,
    input: BytesMut,
    output: BytesMut,
    /// Injects faults between `output` and the socket.
    tap: Tap,
    /// Since when the connection is closing: nothing is read, and the output is flushed.
    closing: Option<Instant>,
    /// When the waiting request is retried.
    retry_at: Option<Instant>,
    limits: TimeLimits,
    /// When the connection was made.
    since: Instant,
    /// When bytes were last read or written.
    moved: Instant,
    names: Arc<DcpNames>,
    id: u64,
    /// Ends the connection: the cluster stops, or a newer connection has its name.
    evicted: CancellationToken,
}

/// Timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimits {
    /// To authenticate.
    pub(super) authentication: Duration,
    /// How long no byte may be read or written.
    pub(super) idle: Duration,
}

/// A DCP connection's name and its subscription to changes.
struct Following {
    served: Arc<ServedBucket>,
    /// The name, which is unique on a node among the connections to a bucket.
    key: Vec<u8>,
    subscriber: Arc<Subscriber>,
}

/// Why a connection ends.
enum End {
    /// As agreed.
    Done,
    /// The socket failed or the client left.
    Io(io::Error),
    /// The client violated the protocol.
    Protocol(DecodeError),
    /// The DCP machine closed the connection.
    Dcp(proto::Disconnect),
    /// The client took too long.
    Idle,
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Connection {
    pub(super) fn new(
        socket: Socket,
        session: Session,
        names: Arc<DcpNames>,
        faults: &Faults,
        limits: TimeLimits,
        stop: &CancellationToken,
    ) -> Self {
        let now = now();
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let map_version = session.cluster().follow_map();
        let map_known = session.cluster().map().version;
        let tap = Tap::new(faults, session.node());
        let dcp = proto::Connection::new(session.cluster().dcp_config());
        Self {
            socket,
            session,
            dcp,
            following: None,
            map_version,
            map_known,
            input: BytesMut::new(),
            output: BytesMut::new(),
            tap,
            closing: None,
            retry_at: None,
            limits,
            since: now,
            moved: now,
            names,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            evicted: stop.child_token(),
        }
    }

    /// Serves the connection until it ends.
    pub(super) async fn run(mut self) {
        match self.serve().await {
            End::Done => {}
            End::Io(error) => tracing::debug!(id = self.id, %error, "connection lost"),
            End::Protocol(error) => tracing::debug!(id = self.id, %error, "connection closed"),
            End::Idle => tracing::debug!(id = self.id, "closing a stalled connection"),
            End::Dcp(reason) => tracing::debug!(id = self.id, %reason, "connection closed"),
        }
        self.socket.close();
        self.dcp.handle_closed();
        if let Some(following) = self.following.take() {
            self.names.release(&following.key, self.id);
            following.served.bucket.changes().unsubscribe(&following.subscriber);
        }
    }

    async fn serve(&mut self) -> End {
        loop {
            match self.turn() {
                Ok(true) => tokio::task::yield_now().await,
                Ok(false) => {
                    if self.closing.is_some() && self.output.is_empty() && !self.has_unsent() {
                        self.discard_input();
                        return End::Done;
                    }
                    if let Err(end) = self.wait().await {
                        return end;
                    }
                }
                Err(end) => return end,
            }
            if self.deadline().is_some_and(|at| at <= now()) {
                return End::Idle;
            }
            if self.evicted.is_cancelled() || self.lost_bucket() {
                return End::Done;
            }
        }
    }

    /// Reads what has arrived: closing a socket with unread bytes resets the connection, and the
    /// client would lose unread output.
    fn discard_input(&mut self) {
        for _ in 0..MAX_DISCARDED / READ_SIZE {
            self.input.clear();
            self.input.reserve(READ_SIZE);
            if !matches!(self.socket.try_read_buf(&mut self.input), Ok(1..)) {
                return;
            }
        }
    }

    /// Does everything that is possible without waiting; `false` if there was nothing to do.
    fn turn(&mut self) -> Result<bool, End> {
        self.tap.refresh(self.output.len());
        if self.tap.is_active() {
            self.tap.tick(now());
            if self.tap.is_half_open() {
                return Ok(false);
            }
        }
        let read = self.read()?;
        // Faults that were set before a request was sent or a document was written must apply to
        // it: rules are refreshed after changes were seen.
        let before = self.output.len();
        self.tap.refresh(before);
        let answered = self.answer_deferred();
        let handled = self.handle_input()?;
        self.push_map();
        let produced = self.produce();
        if self.lost_bucket() {
            // The machine may have noticed the removal of the vBuckets; a server sends nothing
            // about it.
            return Err(End::Done);
        }
        self.tap.refresh(before);
        let passed = self.tap.is_active() && self.pass_tap()?;
        let written = self.write()?;
        Ok(read || answered || handled || produced || passed || written)
    }

    /// Whether the selected bucket was dropped.
    fn lost_bucket(&self) -> bool {
        self.session.bucket_life().is_some_and(CancellationToken::is_cancelled)
    }

    /// Passes the output through the tap.
    fn pass_tap(&mut self) -> Result<bool, End> {
        let now = now();
        let passed = self.tap.pass(now, &mut self.output);
        for opaque in self.tap.take_lost_noops() {
            self.handle_dcp(&faulty::noop_answer(opaque))?;
        }
        if self.tap.is_closing() && self.closing.is_none() {
            self.closing = Some(now);
        }
        Ok(passed)
    }

    /// Whether there is unsent output.
    fn has_unsent(&self) -> bool {
        let ready =
            if self.tap.is_active() { self.tap.has_wire() } else { !self.output.is_empty() };
        ready || self.socket.has_unsent()
    }

    /// When the connection is closed unless something happens; DCP has its own timers.
    fn deadline(&self) -> Option<Instant> {
        if !self.session.is_authenticated() {
            return self.since.checked_add(self.limits.authentication);
        }
        if self.following.is_some() || self.session.is_waiting() {
            return None;
        }
        self.moved.checked_add(self.limits.idle)
    }

    /// Whether requests are handled: not while the client does not read its answers, and not while
    /// one waits.
    fn takes_input(&self) -> bool {
        self.has_room() && self.retry_at.is_none_or(|at| at <= now())
    }

    /// Whether there is room for answers.
    fn has_room(&self) -> bool {
        self.closing.is_none() && self.output.len() < OUTPUT_LIMIT && self.tap.takes_input()
    }

    /// Whether stream messages are produced: in passes, after everything else is written.
    fn streams(&self) -> bool {
        let low = self.dcp.write_limit().map_or(OUTPUT_LOW, |_| 1);
        self.closing.is_none() && self.output.len() < low
    }

    /// Reads from the socket.
    fn read(&mut self) -> Result<bool, End> {
        if !self.takes_input() {
            return Ok(false);
        }
        // Grows with received data, never by a length that the client only claims.
        self.input.reserve(READ_SIZE);
        match self.socket.try_read_buf(&mut self.input) {
            Ok(0) => Err(End::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {
                self.moved = now();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the answers that durable writes have held up; `false` if there are none yet.
    fn answer_deferred(&mut self) -> bool {
        if !self.session.is_deferring() || !self.has_room() {
            return false;
        }
        let wall = self.session.cluster().chance().now();
        let before = self.output.len();
        if self.session.answer_deferred(wall, &mut self.output) == Flow::Close {
            self.closing = Some(now());
        }
        let answered = self.output.len() > before;
        if answered && let Some(at) = &mut self.retry_at {
            // The request that waits for them may be handled now.
            *at = now();
        }
        answered
    }

    /// Handles the whole requests that have arrived.
    fn handle_input(&mut self) -> Result<bool, End> {
        let mut input = std::mem::take(&mut self.input);
        let mut used = 0;
        let result = self.handle_requests(&input, &mut used);
        input.advance(used);
        if input.is_empty() {
            let_go(&mut input);
        }
        self.input = input;
        result.map(|()| used > 0)
    }

    fn handle_requests(&mut self, input: &[u8], used: &mut usize) -> Result<(), End> {
        while self.takes_input() {
            let limit =
                if self.session.is_authenticated() { MAX_BODY_LEN } else { MAX_ANONYMOUS_BODY_LEN };
            let rest = input.get(*used..).unwrap_or_default();
            let Some((frame, len)) = Frame::parse(rest, limit).map_err(End::Protocol)? else {
                return Ok(());
            };
            let is_new = self.retry_at.is_none();
            if self.tap.is_active() && is_new && !self.meets_no_fault(&frame)? {
                if self.tap.takes_input() {
                    *used += len;
                }
                continue;
            }
            self.retry_at = None;
            self.handle(&frame)?;
            if self.retry_at.is_some() {
                return Ok(());
            }
            *used += len;
        }
        Ok(())
    }

    /// Whether to handle a request; otherwise a fault handled it, or it must wait.
    fn meets_no_fault(&mut self, frame: &Frame<'_>) -> Result<bool, End> {
        match self.tap.request(now(), frame) {
            RequestFault::None => return Ok(true),
            RequestFault::Lose | RequestFault::Wait => {}
            RequestFault::Refuse(refusal) => {
                faulty::refuse(&self.session, frame, refusal, &mut self.output);
            }
            RequestFault::MoveEnd(count) => {
                match faulty::with_later_end(&self.session, frame, count) {
                    Some(extras) => self.handle(&frame.with_extras(&extras))?,
                    None => return Ok(true),
                }
            }
        }
        Ok(false)
    }

    fn handle(&mut self, frame: &Frame<'_>) -> Result<(), End> {
        let dcp_open = self.following.is_some();
        let wall = self.session.cluster().chance().now();
        match self.session.handle(wall, frame, dcp_open, &mut self.output) {
            Flow::Continue => self.dcp.handle_received(now()),
            Flow::Close => self.closing = Some(now()),
            Flow::Later => self.retry_at = Some(now() + RETRY_TICK),
            Flow::Dcp => self.handle_dcp(frame)?,
        }
        Ok(())
    }

    fn handle_dcp(&mut self, frame: &Frame<'_>) -> Result<(), End> {
        let served = self.session.served().cloned();
        let map = served.as_ref().map(|served| served.map());
        let (node, rights) = (self.session.node(), self.session.rights());
        let source = served.as_deref().zip(map.as_deref());
        let source = source.map(|(served, map)| NodeBucket { served, map, node, rights });
        let features = self.session.features().dcp;
        let handled =
            self.dcp.handle_frame(now(), frame, source.as_ref(), features, &mut self.output);
        if let Err(reason) = handled {
            tracing::debug!(id = self.id, %reason, "closing the connection");
            self.closing = Some(now());
        }
        if self.following.is_none()
            && let (Some(name), Some(served)) = (self.dcp.name(), served)
        {
            self.tap.name_connection(name);
            let key = [served.name().as_bytes(), name].join(&b'/');
            self.names.claim(&key, self.id, self.evicted.clone());
            let subscriber = served.bucket.changes().subscribe();
            self.following = Some(Following { served, key, subscriber });
        }
        Ok(())
    }

    /// Whether new cluster maps are pushed to the client.
    fn pushes(&self) -> bool {
        self.session.features().map_push != MapPush::Off
            && self.session.is_authenticated()
            && self.takes_input()
    }

    /// Pushes a new cluster map to a client that wants it.
    fn push_map(&mut self) {
        if self.pushes() && self.map_version.has_changed() {
            self.map_version.mark_seen();
            self.map_known = push_map(&self.session, self.map_known, &mut self.output);
        }
    }

    /// Appends stream messages; `false` if there are no more for now.
    fn produce(&mut self) -> bool {
        let Some(following) = self.following.as_ref().filter(|_| self.streams()) else {
            return false;
        };
        following.subscriber.changed.take(|vbid| self.dcp.notify(vbid));
        let budget = OUTPUT_LIMIT.saturating_sub(self.output.len());
        let (served, map) = (&*following.served, following.served.map());
        let (node, rights) = (self.session.node(), self.session.rights());
        let source = NodeBucket { served, map: &map, node, rights };
        let sent = self.dcp.poll_transmit(now(), &source, &mut self.output, budget);
        sent.written > 0 || sent.more
    }

    /// Writes as much as the socket accepts.
    fn write(&mut self) -> Result<bool, End> {
        let wire = if self.tap.is_active() { self.tap.wire() } else { &mut self.output };
        if wire.is_empty() {
            return Ok(self.socket.try_flush()?);
        }
        let limit = self.dcp.write_limit().unwrap_or(usize::MAX);
        match self.socket.try_write(wire.get(..limit).unwrap_or(wire)) {
            Ok(written) => {
                wire.advance(written);
                self.moved = now();
                if wire.is_empty() {
                    let_go(wire);
                }
                Ok(written > 0)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until there may be something to do.
    async fn wait(&mut self) -> Result<(), End> {
        if self.tap.is_half_open() {
            self.evicted.cancelled().await;
            return Err(End::Done);
        }
        let now = now();
        let (reads, writes) = (self.takes_input(), self.has_unsent());
        let (streams, pushes) = (self.streams(), self.pushes());
        // While the socket is blocked, a due noop cannot be written: do not spin.
        let timeout = self.dcp.poll_timeout();
        let timeout = timeout.map(|at| if streams { at } else { at.max(now + STUCK_TICK) });
        let given_up = self.closing.map(|since| since + CLOSING_TIMEOUT);
        let tick = self.session.is_deferring().then(|| now + RETRY_TICK);
        let retry_at = self.retry_at.into_iter().chain(tick).min().filter(|_| self.has_room());
        let deadline = self.deadline();
        let changed = self.following.as_ref().map(|following| &following.subscriber.notify);
        tokio::select! {
            biased;
            () = self.evicted.cancelled() => Err(End::Done),
            () = optional(self.session.bucket_life().map(CancellationToken::cancelled)) => {
                Err(End::Done)
            }
            ready = self.socket.writable(), if writes => Ok(ready?),
            ready = self.socket.readable(), if reads => Ok(ready?),
            () = optional(changed.map(tokio::sync::Notify::notified)), if streams => Ok(()),
            () = optional(given_up.map(|at| tokio::time::sleep_until(at.into()))) => Err(End::Done),
            () = self.tap.wait(), if self.tap.waits() => Ok(()),
            () = optional(retry_at.map(|at| tokio::time::sleep_until(at.into()))) => Ok(()),
            () = optional(deadline.map(|at| tokio::time::sleep_until(at.into()))) => {
                Err(End::Idle)
            }
            () = optional(timeout.map(|at| tokio::time::sleep_until(at.into()))) => {
                self.dcp.handle_timeout(tokio::time::Instant::now().into_std()).map_err(End::Dcp)
            }
            () = self.map_version.changed(), if pushes => Ok(()),
        }
    }
}

/// The current time, which stops in a paused runtime.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Waits for a future; forever if there is none.
async fn optional(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Appends the newest map, or its version, as negotiated, unless the client `knows` it; returns the
/// newest version that it knows then.
fn push_map(session: &Session, knows: ConfigVersion, out: &mut BytesMut) -> ConfigVersion {
    let node = session.node();
    let (version, view) = match session.served() {
        Some(served) => {
            let map = served.map();
            (map.version, map.view(node).cloned())
        }
        None => {
            let map = session.cluster().map();
            (map.version, map.view(node).cloned())
        }
    };
    if version <= knows {
        return knows;
    }
    let name = session.served().map_or(&[][..], |served| served.name().as_bytes());
    let config = view.filter(|_| session.features().map_push == MapPush::Full).unwrap_or_default();
    let version_sent = PushedVersion::EpochAndRev(version);
    let change = ClusterMapChange { version: version_sent, bucket: name, config: &config };
    let pushed = change.encode(Opaque(0), out);
    if let Err(error) = pushed {
        tracing::warn!(name: "cluster_map_not_pushed", %error, "cannot push the cluster map");
    }
    version
}

/// Empty buffers larger than this are freed, in bytes.
const KEPT_CAPACITY: usize = 2 << 20;

/// Frees an empty buffer's memory if it has grown large. Bytes split off its front count as well,
/// which its capacity does not include.
fn let_go(buffer: &mut BytesMut) {
    if buffer.try_reclaim(KEPT_CAPACITY + 1) {
        *buffer = BytesMut::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_that_grew_is_freed_however_it_was_emptied() {
        for (len, is_kept) in [(64 << 10, true), (KEPT_CAPACITY * 2, false)] {
            let mut buffer = BytesMut::zeroed(len);
            buffer.advance(len - 10);
            buffer.advance(10);
            let_go(&mut buffer);
            assert_eq!(buffer.try_reclaim(1), is_kept, "{len} bytes");
        }
    }
}
