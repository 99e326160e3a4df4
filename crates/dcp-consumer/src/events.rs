//! Events of a stream, for people and monitoring.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dcp_proto::consumer::{EndCause, OpenStreamError};
use dcp_proto::{CaughtUp, Rollback};
use dcp_wire::{Seqno, Vbid};

use crate::ErrorKind;

/// How many events are kept for an application that does not take them: enough for all vBuckets of
/// a bucket to be opened several times.
const KEPT: usize = 8192;

/// An event of a stream; applications need none of them for correctness.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamEvent {
    /// A vBucket's stream was opened.
    Opened {
        /// The vBucket.
        vbid: Vbid,
        /// Address of its node.
        node: String,
    },
    /// A vBucket's stream ended; unless its end was reached, it is reopened.
    Ended {
        /// The vBucket.
        vbid: Vbid,
        /// Why, for people.
        reason: String,
        /// Why, for programs: the protocol's name of the status or reason, in lower case.
        cause: String,
    },
    /// A vBucket was rolled back. The record is delivered with the changes.
    RolledBack(Rollback),
    /// Everything that a vBucket had when the stream was opened has been delivered.
    CaughtUp(CaughtUp),
    /// The cluster map assigns a vBucket to another node: its stream is closed and opened there.
    Moved {
        /// The vBucket.
        vbid: Vbid,
        /// Address of the node.
        node: String,
    },
    /// A vBucket waits before it is reopened.
    BackingOff {
        /// The vBucket.
        vbid: Vbid,
        /// How long.
        wait: Duration,
        /// Why, for programs, as in [`Ended`](Self::Ended).
        cause: String,
    },
    /// A connection was lost, and all streams on it.
    ConnectionLost {
        /// Address of the node.
        node: String,
        /// Why, for people.
        error: String,
        /// Why, for programs.
        cause: ErrorKind,
    },
    /// The server has changes of a vBucket but does not send them, although the application waits
    /// for them. Reported once, and again after progress.
    Lagging {
        /// The vBucket.
        vbid: Vbid,
        /// Last seqno received.
        seqno: Seqno,
        /// Highest seqno of the server.
        high_seqno: Seqno,
        /// How long it has not made progress.
        still: Duration,
    },
    /// Changes of a vBucket have waited long to be persisted on all its copies: one of them does
    /// not persist, does not answer, or has diverged.
    Unpersisted {
        /// The vBucket.
        vbid: Vbid,
        /// How long they have waited.
        waits: Duration,
    },
    /// The bucket is ephemeral, so changes are delivered without waiting for persistence, although
    /// [`persisted_only`](crate::StreamOptions::persisted_only) is set.
    NothingPersisted,
    /// This many older events were dropped because they were not taken.
    Dropped(u64),
}

/// Name of the cause of an end for programs.
pub(crate) fn end_code(cause: &EndCause) -> String {
    match cause {
        EndCause::Complete => "complete".to_owned(),
        EndCause::Ended(reason) => reason.name().map_or_else(|| "ended".to_owned(), snake_case),
        EndCause::Refused(OpenStreamError::Refused { status, .. }) => {
            status.name().map_or_else(|| "status".to_owned(), str::to_ascii_lowercase)
        }
        EndCause::Refused(_) | EndCause::RolledBack { .. } => "rollback".to_owned(),
        EndCause::Closed => "closed".to_owned(),
        _ => "other".to_owned(),
    }
}

/// `StateChanged` as `state_changed`.
fn snake_case(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 2);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

/// Events that the application has not taken.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    inner: Mutex<(VecDeque<StreamEvent>, u64)>,
}

impl EventLog {
    pub(crate) fn push(&self, event: StreamEvent) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (events, dropped) = &mut *inner;
        if events.len() >= KEPT {
            events.pop_front();
            *dropped += 1;
        }
        events.push_back(event);
    }

    /// Takes all events, oldest first.
    pub(crate) fn take(&self) -> Vec<StreamEvent> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (events, dropped) = &mut *inner;
        let lost = std::mem::take(dropped);
        let first = (lost > 0).then_some(StreamEvent::Dropped(lost));
        first.into_iter().chain(events.drain(..)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_nobody_takes_are_bounded_and_their_loss_is_reported() {
        let log = EventLog::default();
        let event = |n: usize| StreamEvent::Ended {
            vbid: Vbid(0),
            reason: n.to_string(),
            cause: String::new(),
        };
        for n in 0..KEPT + 3 {
            log.push(event(n));
        }
        let events = log.take();
        assert_eq!(events[..2], [StreamEvent::Dropped(3), event(3)]);
        assert_eq!((events.len(), log.take().len()), (KEPT + 1, 0));
    }
}
