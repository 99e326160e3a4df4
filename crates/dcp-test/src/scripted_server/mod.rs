//! A server that replays the server's side of a recording to a real client, over loopback.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use dcp_test::scripted_server::ScriptedServer;
//! use dcp_test::traces::Scenario;
//!
//! let scenario = Scenario::load("8.0.2-crash-rollback")?;
//! let server = ScriptedServer::start(&scenario).await?;
//! // Point a client at `server.connection_string()`: any user, password `password`, bucket
//! // `default`; stream `server.vbids()` only. Compare what it delivers with the recording.
//! let report = server.finish().await;
//! assert_eq!(report.streams_left, 0);
//! assert!(report.problems.is_empty(), "{:?}", report.problems);
//! # Ok(())
//! # }
//! ```
//!
//! Streams are replayed: each stream request of the client takes the next recorded stream of its
//! vBucket, in the order of the recording and across its connections. The client gets the recorded
//! response and messages, with the opaque of its own request. If the recorded server closed the
//! connection, this one does too, once every stream of that connection was replayed; the client is
//! expected to reconnect and continue with the next recorded connection. A vBucket without recorded
//! streams left gets an idle stream.
//!
//! The bootstrap is not replayed, because clients may differ in it. The server grants those
//! features of the recorded connection that the client requests, supports PLAIN and SCRAM,
//! generates a cluster map of one node, and takes its seqnos, failover logs and collections
//! manifest from the recording. Recorded responses to controls are used if key and value are equal.
//! A cluster map in a refusal is replaced by the generated one with a new revision, and stream ids
//! are removed for a client that did not enable them.
//!
//! The two recordings named `replication` begin after the bootstrap, so their features are unknown:
//! keys in the one of 8.0.2 contain collection ids although the client is not granted collections.
//!
//! Flow control is enforced: with `connection_buffer_size` set, the server stops at a full buffer
//! until the client acknowledges. A client that never does is reported after [`TIME_LIMIT`], which
//! ends everything.

mod answers;
mod conversation;
mod script;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dcp_wire::message::{StreamRequest, StreamRequestFlags};
use dcp_wire::{Seqno, Vbid, Vbuuid};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use crate::traces::Scenario;
use conversation::Conversation;
use script::{Part, Script};

/// How long a server lives at most.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Connections a server accepts at most, over its whole life.
const MAX_CONNECTIONS: usize = 256;

/// A server that plays a recording. Dropping it ends it.
#[derive(Debug)]
pub struct ScriptedServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// What has been played.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Connections the client opened.
    pub connections: usize,
    /// Recorded streams played.
    pub streams_played: usize,
    /// Recorded streams the client did not ask for.
    pub streams_left: usize,
    /// Stream messages that were sent.
    pub messages_sent: usize,
    /// The client's stream requests, in order.
    pub asked: Vec<Asked>,
    /// The recorded streams that were played, in order: connection, and which of the stream
    /// requests of that connection, counted from 0.
    pub played: Vec<(u32, usize)>,
    /// What the client did that no server would put up with.
    pub problems: Vec<String>,
}

/// A stream request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// vBucket to stream.
    pub vbid: Vbid,
    /// How it is to be produced.
    pub flags: StreamRequestFlags,
    /// Last seqno the client has.
    pub start_seqno: Seqno,
    /// Last seqno it wants.
    pub end_seqno: Seqno,
    /// History branch the start lies on.
    pub vbuuid: Vbuuid,
    /// First and last seqno of the snapshot the start lies in.
    pub snapshot: (Seqno, Seqno),
    /// Filter and stream id, as JSON.
    pub value: Vec<u8>,
}

impl Asked {
    /// A request without its opaque.
    #[must_use]
    pub fn new(request: &StreamRequest<'_>) -> Self {
        Self {
            vbid: request.vbid,
            flags: request.flags,
            start_seqno: request.start_seqno,
            end_seqno: request.end_seqno,
            vbuuid: request.vbuuid,
            snapshot: (request.snapshot_start, request.snapshot_end),
            value: request.value.to_vec(),
        }
    }

    /// Whether both ask for the same range of seqnos, from the same point of the same history.
    #[must_use]
    pub fn is_same_range(&self, other: &Self) -> bool {
        let range = |asked: &Self| {
            (asked.vbid, asked.start_seqno, asked.end_seqno, asked.vbuuid, asked.snapshot)
        };
        range(self) == range(other)
    }

    /// The value without its stream id, in one order; `None` if it is no JSON.
    #[must_use]
    pub fn filter(&self) -> Option<Value> {
        let text: &[u8] = if self.value.is_empty() { b"{}" } else { &self.value };
        let mut filter: Value = serde_json::from_slice(text).ok()?;
        if let Value::Object(members) = &mut filter {
            members.remove("sid");
            if let Some(Value::Array(collections)) = members.get_mut("collections") {
                collections.sort_unstable_by_key(Value::to_string);
            }
        }
        Some(filter)
    }
}

#[derive(Debug)]
struct Shared {
    script: Mutex<Script>,
}

impl Shared {
    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ScriptedServer {
    /// Starts a server that plays every connection of a recording.
    ///
    /// # Errors
    /// If no loopback port is to be had.
    pub async fn start(scenario: &Scenario) -> io::Result<Self> {
        Self::start_script(Script::new(scenario, Part::All)).await
    }

    /// Starts a server that plays one connection of a recording and ignores the others.
    ///
    /// # Errors
    /// If no loopback port is to be had.
    pub async fn start_connection(scenario: &Scenario, conn: u32) -> io::Result<Self> {
        Self::start_script(Script::new(scenario, Part::Connection(conn))).await
    }

    /// Starts a server that plays one stream request of a recording, the `number`th of connection
    /// `conn` counted from 0, and what the client does about its answer: further requests get the
    /// recorded streams that were asked for in the same way, or idle ones.
    ///
    /// # Errors
    /// If no loopback port is to be had.
    ///
    /// # Panics
    /// If the recording has no such request.
    pub async fn start_request(scenario: &Scenario, conn: u32, number: usize) -> io::Result<Self> {
        Self::start_script(Script::new(scenario, Part::Request(conn, number))).await
    }

    async fn start_script(script: Script) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared { script: Mutex::new(script) });
        let (stop, stopped) = watch::channel(false);
        let deadline = Instant::now() + TIME_LIMIT;
        let serving = serve(listener, addr, Arc::clone(&shared), stopped);
        let task = tokio::spawn(async move {
            // Elapsing drops every connection with it.
            let _ = timeout_at(deadline, serving).await;
        });
        Ok(Self { addr, shared, stop, task })
    }

    /// Where the server listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address as clients take it.
    #[must_use]
    pub fn connection_string(&self) -> String {
        format!("couchbase://{}", self.addr)
    }

    /// vBuckets the recording has streams of.
    #[must_use]
    pub fn vbids(&self) -> Vec<Vbid> {
        self.shared.script().vbids()
    }

    /// What has been played so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.script().report()
    }

    /// Ends the server: no connection is accepted any more, open ones are closed.
    pub async fn finish(mut self) -> Report {
        self.stop.send_replace(true);
        // Its only way to fail is to have been cancelled.
        let _ = (&mut self.task).await;
        self.report()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts connections until told to stop.
async fn serve(
    listener: TcpListener,
    addr: SocketAddr,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut conversations = JoinSet::new();
    for _ in 0..MAX_CONNECTIONS {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        let Ok((socket, _)) = accepted else { return };
        // Replay must not wait for acknowledgements of small packets.
        if socket.set_nodelay(true).is_err() {
            continue;
        }
        shared.script().connections += 1;
        let conversation = Conversation::new(addr, Arc::clone(&shared));
        conversations.spawn(conversation.run(socket));
    }
    let _ = stopped.changed().await;
}
