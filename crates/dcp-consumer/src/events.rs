//! What happened to a stream, for people and monitors.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dcp_proto::consumer::{EndCause, OpenStreamError};
use dcp_proto::{CaughtUp, Rollback};
use dcp_wire::{Seqno, Vbid};

use crate::ErrorKind;

/// How many events are kept for an application that does not take them: those of all vBuckets of
/// a bucket being opened several times.
const KEPT: usize = 8192;

/// Something that happened to a stream; nothing that an application must know in order to be
/// right.
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
    /// A vBucket's stream is over; unless its end was reached, it is opened again.
    Ended {
        /// The vBucket.
        vbid: Vbid,
        /// Why, for people.
        reason: String,
        /// Why, for programs: what the protocol calls the status or the reason, in lower case.
        cause: String,
    },
    /// A vBucket was rolled back. Its record comes with the changes.
    RolledBack(Rollback),
    /// Everything was delivered that a vBucket had when the stream was opened.
    CaughtUp(CaughtUp),
    /// The cluster map names another node for a vBucket: its stream is closed and opened there.
    Moved {
        /// The vBucket.
        vbid: Vbid,
        /// Address of the node.
        node: String,
    },
    /// A vBucket waits before it is opened again.
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
    /// The server has changes of a vBucket and does not send them, though the application waits
    /// for them. Told once, and again after it has moved.
    Lagging {
        /// The vBucket.
        vbid: Vbid,
        /// Last seqno received.
        seqno: Seqno,
        /// Highest seqno of the server.
        high_seqno: Seqno,
        /// How long it has stood there.
        still: Duration,
    },
    /// Changes of a vBucket have waited for long to be on the disks of all its copies: one of them
    /// does not persist, is not heard from, or is on another branch.
    Unpersisted {
        /// The vBucket.
        vbid: Vbid,
        /// How long they have waited.
        waits: Duration,
    },
    /// The bucket lives in memory only, so that changes are delivered without waiting for disks,
    /// although [`persisted_only`](crate::StreamOptions::persisted_only) is set.
    NothingPersisted,
    /// So many older events were dropped because nobody took them.
    Dropped(u64),
}

/// What programs call the cause of an end.
pub(crate) fn end_code(cause: &EndCause) -> String {
    match cause {
        EndCause::Complete => "complete".to_owned(),
        EndCause::Ended(reason) => reason.name().map_or_else(|| "ended".to_owned(), snake_case),
        EndCause::Refused(OpenStreamError::Refused { status, .. }) => {
            status.name().map_or_else(|| "status".to_owned(), str::to_ascii_lowercase)
        }
        EndCause::Refused(_) | EndCause::RolledBack(_) => "rollback".to_owned(),
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
    fn events_that_nobody_takes_are_bounded_and_their_loss_is_told() {
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
