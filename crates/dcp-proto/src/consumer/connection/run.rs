//! Runs of mutations, which make up most of a stream, handled together.
//!
//! The mutations of a snapshot usually follow each other directly. They are checked here in a loop
//! that keeps its state in registers; the stream and the window are updated once, after the run.
//! Any unusual packet ends the run and is handled by [`walk`](super::walk), which knows all cases.

use dcp_wire::Seqno;
use dcp_wire::message::MutationView;

use super::{Connection, Limit};
use crate::consumer::stream::{RunBounds, State};
use crate::consumer::unpersisted::Unpersisted;
use crate::{ChangeSink, MutationRun, RunError, SinkError};

/// Most mutations of one run, so that staged ones stay in the L1 cache.
pub(super) const MAX_LEN: usize = 64;

/// Buffer for the mutations of a run.
pub(super) type Staged<'a> = [MutationView<'a>; MAX_LEN];

/// Where the packets of a run lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// In the read buffer.
    Arrived,
    /// In the queue of unpersisted packets, already counted.
    Unpersisted,
}

/// What one run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

impl Connection {
    /// Gives the sink the ordinary mutations at the front of `input`, as many as fit into a run and
    /// `limit` allows; possibly none.
    #[inline(always)]
    pub(super) fn run<'a, S: ChangeSink>(
        &mut self,
        input: &'a [u8],
        limit: Limit,
        origin: Origin,
        staged: &mut Staged<'a>,
        sink: &mut S,
    ) -> Result<Ran, SinkError> {
        let config = &self.config;
        let (max_body, collections) = (config.max_body_len, config.collections);
        // Then each change is checked individually.
        if !config.delivery.rows.is_all() || config.delivery.exclusions.matched().is_some() {
            return Ok(Ran::default());
        }
        let Some((first, _)) = MutationView::parse(input, max_body, collections) else {
            return Ok(Ran::default());
        };
        let (vbid, opaque) = (first.vbid(), first.opaque());
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else {
            return Ok(Ran::default());
        };
        if stream.opaque != opaque || stream.state != State::Streaming {
            return Ok(Ran::default());
        }
        let passes = if config.delivery.persisted_only {
            stream.unpersisted.takes_up_to()
        } else {
            Seqno::MAX
        };
        let Some(RunBounds { mut last, before, vbuuid, snapshot, history, epoch }) =
            stream.run_bounds(first.seqno(), passes)
        else {
            return Ok(Ran::default());
        };
        let exclusions = config.delivery.exclusions.of_system_documents();
        let room = if origin == Origin::Arrived { self.window.room() } else { u64::MAX };
        if room == 0 {
            return Ok(Ran::default());
        }
        // The run ends with the packet that reaches either limit: the next one is handled
        // individually.
        let most_bytes = limit.bytes.min(usize::try_from(room).unwrap_or(usize::MAX));
        let staged = staged.get_mut(..limit.rows.min(MAX_LEN)).unwrap_or_default();
        let (mut rest, mut rows, mut bytes) = (input, 0, 0);
        while let Some(place) = staged.get_mut(rows)
            && let Some((mutation, after)) = MutationView::parse(rest, max_body, collections)
        {
            let seqno = mutation.seqno();
            // The last change of a snapshot completes it, which is another special case.
            if mutation.vbid() != vbid
                || mutation.opaque() != opaque
                || seqno <= last
                || seqno >= before
                || exclusions.is_some_and(|exclusions| {
                    exclusions.excludes_system(mutation.collection_id(), mutation.key())
                })
            {
                break;
            }
            *place = mutation;
            last = seqno;
            rest = after;
            rows += 1;
            bytes += mutation.packet_len();
            if bytes >= most_bytes {
                break;
            }
        }
        let Some(mutations) = staged.get(..rows).filter(|mutations| !mutations.is_empty()) else {
            return Ok(Ran::default());
        };
        let run = MutationRun { vbid, vbuuid, epoch, snapshot, history, mutations };
        let outcome = sink.mutations(&run);
        if let Err(RunError { taken, .. }) = &outcome {
            let taken = mutations.get(..*taken).unwrap_or(mutations);
            bytes = taken.iter().map(MutationView::packet_len).sum();
            rows = taken.len();
            let Some(of_last) = taken.last().map(MutationView::seqno) else {
                return outcome.map(|()| Ran::default()).map_err(|error| error.error);
            };
            last = of_last;
        }
        stream.finish_run(last);
        if !stream.dirty {
            stream.dirty = true;
            self.dirty.push(vbid);
        }
        match origin {
            Origin::Arrived => {
                // There is room: it was checked for each mutation.
                self.window.receive(bytes as u64);
                self.held += bytes as u64;
            }
            Origin::Unpersisted => {
                self.count_out(Unpersisted { rows: rows as u64, bytes: bytes as u64 });
            }
        }
        outcome.map(|()| Ran { rows, bytes }).map_err(|error| error.error)
    }
}
