//! Takeover of a vBucket by the client (DCP page "stream-request", flag take-over).
//!
//! ```text
//! items, every marker from memory to be acknowledged
//!   └► caught up, all acknowledged ─► SET_VBUCKET_STATE pending ─► answered: dead here
//!        └► the last items, acknowledged ─► SET_VBUCKET_STATE active ─► answered ─► STREAM_END
//! ```

use dcp_wire::Opcode;
use dcp_wire::message::VbucketState;

/// Progress of a takeover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// It is still active here.
    #[default]
    Before,
    /// The client was set to pending.
    SentPending,
    /// It is dead here; the last items are being sent.
    Dead,
    /// The client was set to active.
    SentActive,
    /// The client has taken over.
    Done,
}

/// A vBucket that is being taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Takeover {
    stage: Stage,
    /// Markers sent whose snapshots the client has not acknowledged.
    unacknowledged: u32,
}

/// What a takeover stream that has sent everything does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Wait for the client, or for changes.
    Wait,
    /// Send the client the state.
    SendState(VbucketState),
    /// End.
    End,
}

impl Takeover {
    /// Notes that a marker was sent that must be acknowledged.
    pub(super) const fn marker_sent(&mut self) {
        self.unacknowledged += 1;
    }

    /// The next step, now that everything is sent.
    pub(super) const fn next(&self) -> Next {
        match self.stage {
            Stage::Done => Next::End,
            Stage::Before if self.unacknowledged == 0 => Next::SendState(VbucketState::PENDING),
            Stage::Dead if self.unacknowledged == 0 => Next::SendState(VbucketState::ACTIVE),
            _ => Next::Wait,
        }
    }

    /// Notes that the state was sent to the client.
    pub(super) const fn state_sent(&mut self) {
        self.stage = match self.stage {
            Stage::Before => Stage::SentPending,
            Stage::Dead => Stage::SentActive,
            other => other,
        };
    }

    /// Handles an answer of the client, regardless of its status; returns whether the vBucket must
    /// become dead here.
    pub(super) const fn acknowledged(&mut self, opcode: Opcode) -> bool {
        match (opcode, self.stage) {
            (Opcode::DCP_SNAPSHOT_MARKER, _) => {
                self.unacknowledged = self.unacknowledged.saturating_sub(1);
            }
            (Opcode::DCP_SET_VBUCKET_STATE, Stage::SentPending) => {
                self.stage = Stage::Dead;
                return true;
            }
            (Opcode::DCP_SET_VBUCKET_STATE, Stage::SentActive) => self.stage = Stage::Done,
            _ => {}
        }
        false
    }
}
