//! A stream that is open, and what it says of itself.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_consumer::{ChangeStream, Delivered, StreamEvent, StreamOptions, StreamStats};
use tokio::time::{Instant, sleep, timeout};

use super::{Process, Shared, Stop};
use crate::rows::Item;

/// How long what a stream has said of itself is taken for what it would say now: it is asked at
/// least every second.
const FRESH: Duration = Duration::from_secs(2);

/// What the streams that are open have said last.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    opened: u64,
    /// By number: the client, when it was asked, and the bytes not acknowledged. Not known of one
    /// that is complete or has failed: it has no connections, and may hold rows all the same.
    said: BTreeMap<u64, (u64, Instant, Option<u64>)>,
}

impl Streams {
    /// Bytes that the streams of a client have not acknowledged; `None` if that is not known of one.
    pub(crate) fn unacknowledged(&self, client: u64) -> Option<u64> {
        let of_client = self.said.values().filter(|(of, ..)| *of == client);
        let bytes = of_client.map(|(_, at, bytes)| bytes.filter(|_| at.elapsed() < FRESH));
        bytes.sum()
    }
}

/// A stream, looked at while it is read.
pub(super) struct Watched {
    pub(super) stream: ChangeStream<Vec<Item>>,
    shared: Shared,
    /// The number of its reader, that of its reader's client, and its own.
    reader: u64,
    client: u64,
    number: u64,
    /// Nodes that it has ever had a vBucket open on.
    nodes: RefCell<BTreeSet<String>>,
}

impl Watched {
    pub(super) fn new(process: &Process, stream: ChangeStream<Vec<Item>>) -> Self {
        let mut streams = process.shared.streams.borrow_mut();
        streams.opened += 1;
        let number = streams.opened;
        drop(streams);
        let shared = process.shared.clone();
        let watched = Self {
            stream,
            shared,
            reader: process.plan.number,
            client: process.plan.client,
            number,
            nodes: RefCell::default(),
        };
        watched.note();
        watched
    }

    /// The next batch.
    pub(super) async fn next(&mut self) -> Result<Option<Delivered<Vec<Item>>>, Stop> {
        loop {
            let next = timeout(Duration::from_secs(1), self.stream.next()).await;
            self.look()?;
            if let Ok(next) = next {
                return next.transpose().map_err(Stop::Running);
            }
        }
    }

    /// Waits until a pause of its reader is over.
    pub(super) async fn rest(&self, process: &Process) -> Result<(), Stop> {
        while process.is_paused() {
            sleep(Duration::from_millis(100)).await;
            self.look()?;
        }
        Ok(())
    }

    fn note(&self) -> StreamStats {
        let stats = self.stream.stats();
        let is_under_way = stats.opening + stats.streaming + stats.backing_off > 0;
        let is_over = !is_under_way || stats.failed > 0 || stats.connections == 0;
        let bytes = (!is_over).then_some(stats.buffered_bytes - stats.leftover_bytes);
        let said = (self.client, Instant::now(), bytes);
        self.shared.streams.borrow_mut().said.insert(self.number, said);
        stats
    }

    /// Counts what the stream says has happened, and looks at its bounds.
    pub(super) fn look(&self) -> Result<(), Stop> {
        for event in self.stream.take_events() {
            let text = format!("{event:?}");
            self.shared.network.event(text.as_bytes());
            match event {
                StreamEvent::Opened { node, .. } => _ = self.nodes.borrow_mut().insert(node),
                _ => self.shared.trace.add(format!("reader {}: {text}", self.reader)),
            }
            let name = text.split([' ', '(']).next().unwrap_or_default();
            self.shared.count(format!("event {name}"));
        }
        for vbucket in self.stream.vbucket_stats() {
            self.shared.count(format!("state {:?}", vbucket.state));
        }
        let stats = self.note();
        // A server sends until it believes the window to be full, so that the last packet may exceed
        // it; each connection has a window of its own. Those that are gone may have left one each,
        // and half a one that was left before.
        let window = u64::from(StreamOptions::MIN_BUFFER_SIZE) + self.shared.network.longest();
        let nodes = self.nodes.borrow().len() as u64;
        for (bytes, most) in [
            (stats.buffered_bytes - stats.leftover_bytes, stats.connections as u64 * window),
            (stats.leftover_bytes, nodes * window + window / 2),
        ] {
            if bytes > most {
                let wrong = format!("{bytes} bytes are buffered, at most {most} may be: {stats:?}");
                return Err(Stop::Violation(wrong));
            }
        }
        if stats.leftover_bytes > 0 {
            self.shared.count("rows of connections that are gone");
        }
        if stats.unpersisted_rows > 0 {
            self.shared.count("rows held for persistence");
        }
        Ok(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.shared.streams.borrow_mut().said.remove(&self.number);
    }
}
