//! What a consumer does about each status, at each step, and about each end of a stream.
//!
//! This is the only table of it: the machines and the client ask it, and the page *Servers* of the
//! reference is made from it.

use dcp_wire::message::StreamEndReason;
use dcp_wire::{Opcode, Status, StatusClass};

/// A request of a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// HELLO.
    Hello,
    /// SASL_LIST_MECHS.
    ListMechanisms,
    /// SASL_AUTH.
    Authenticate,
    /// SASL_STEP.
    ProveIdentity,
    /// SELECT_BUCKET.
    SelectBucket,
    /// GET_CLUSTER_CONFIG.
    ClusterMap,
    /// GET_COLLECTIONS_MANIFEST.
    Manifest,
    /// DCP_OPEN.
    Open,
    /// DCP_CONTROL of a setting without which the stream cannot do what it was asked for.
    RequiredControl,
    /// DCP_CONTROL of any other setting.
    OptionalControl,
    /// DCP_STREAM_REQ.
    StreamRequest,
    /// DCP_CLOSE_STREAM.
    CloseStream,
    /// DCP_GET_FAILOVER_LOG.
    FailoverLog,
    /// GET_ALL_VB_SEQNOS.
    HighSeqnos,
    /// GET_ALL_VB_SEQNOS of a collection.
    CollectionSeqnos,
    /// OBSERVE_SEQNO.
    ObserveSeqno,
    /// STAT, for purge seqnos.
    PurgeSeqnos,
}

impl Step {
    /// Every step, in the order in which a stream takes them.
    pub const ALL: [Self; 17] = [
        Self::Hello,
        Self::ListMechanisms,
        Self::Authenticate,
        Self::ProveIdentity,
        Self::SelectBucket,
        Self::ClusterMap,
        Self::Manifest,
        Self::Open,
        Self::RequiredControl,
        Self::OptionalControl,
        Self::FailoverLog,
        Self::HighSeqnos,
        Self::CollectionSeqnos,
        Self::PurgeSeqnos,
        Self::StreamRequest,
        Self::ObserveSeqno,
        Self::CloseStream,
    ];

    /// The step of a request that was refused and matters; `None` if no consumer sends it.
    #[must_use]
    pub const fn of(opcode: Opcode) -> Option<Self> {
        Some(match opcode {
            Opcode::HELLO => Self::Hello,
            Opcode::SASL_LIST_MECHS => Self::ListMechanisms,
            Opcode::SASL_AUTH => Self::Authenticate,
            Opcode::SASL_STEP => Self::ProveIdentity,
            Opcode::SELECT_BUCKET => Self::SelectBucket,
            Opcode::GET_CLUSTER_CONFIG => Self::ClusterMap,
            Opcode::GET_COLLECTIONS_MANIFEST => Self::Manifest,
            Opcode::DCP_OPEN => Self::Open,
            Opcode::DCP_CONTROL => Self::RequiredControl,
            Opcode::DCP_STREAM_REQ => Self::StreamRequest,
            Opcode::DCP_CLOSE_STREAM => Self::CloseStream,
            Opcode::DCP_GET_FAILOVER_LOG => Self::FailoverLog,
            Opcode::GET_ALL_VB_SEQNOS => Self::HighSeqnos,
            Opcode::OBSERVE_SEQNO => Self::ObserveSeqno,
            Opcode::STAT => Self::PurgeSeqnos,
            _ => return None,
        })
    }

    /// The request.
    #[must_use]
    pub const fn opcode(self) -> Opcode {
        match self {
            Self::Hello => Opcode::HELLO,
            Self::ListMechanisms => Opcode::SASL_LIST_MECHS,
            Self::Authenticate => Opcode::SASL_AUTH,
            Self::ProveIdentity => Opcode::SASL_STEP,
            Self::SelectBucket => Opcode::SELECT_BUCKET,
            Self::ClusterMap => Opcode::GET_CLUSTER_CONFIG,
            Self::Manifest => Opcode::GET_COLLECTIONS_MANIFEST,
            Self::Open => Opcode::DCP_OPEN,
            Self::RequiredControl | Self::OptionalControl => Opcode::DCP_CONTROL,
            Self::StreamRequest => Opcode::DCP_STREAM_REQ,
            Self::CloseStream => Opcode::DCP_CLOSE_STREAM,
            Self::FailoverLog => Opcode::DCP_GET_FAILOVER_LOG,
            Self::HighSeqnos | Self::CollectionSeqnos => Opcode::GET_ALL_VB_SEQNOS,
            Self::ObserveSeqno => Opcode::OBSERVE_SEQNO,
            Self::PurgeSeqnos => Opcode::STAT,
        }
    }
}

/// How a consumer fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Failure {
    /// The user name, password or token is wrong.
    Authentication,
    /// The user lacks a privilege.
    AccessDenied,
    /// There is no such bucket.
    BucketNotFound,
    /// The server lacks something that is required.
    Unsupported,
    /// The server refused the request.
    Refused,
}

/// What a consumer does about an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reaction {
    /// Uses it: it is what was asked for.
    Use,
    /// Goes on without what was asked for.
    GoWithout,
    /// Goes back to the seqno that the answer names.
    RollBack,
    /// Goes back to the beginning. A stream that is there fails.
    BeginAgain,
    /// Follows the cluster map, then tries again.
    FollowMap,
    /// Compares the filter with the newest manifest, then tries again.
    CheckFilter,
    /// Closes the stream that the server still has of the vBucket, then tries again.
    CloseFirst,
    /// Tries again over a new connection.
    Reconnect,
    /// Tries again.
    Retry,
    /// Tries again, from the start after a longer wait.
    RetrySlowly,
    /// Tries again, except while a client connects for the first time: then it fails.
    RetryOnceConnected(Failure),
    /// Tries again if this was granted to the client before, and fails otherwise.
    RetryOnceGranted(Failure),
    /// Fails.
    Fail(Failure),
}

impl Reaction {
    /// What a consumer does at `step` about an answer with this status.
    #[must_use]
    pub const fn to(step: Step, status: Status) -> Self {
        match step {
            Step::Hello | Step::Open => to_hello_or_open(status),
            Step::ListMechanisms => in_set_up(status),
            Step::Authenticate | Step::ProveIdentity => to_login(step, status),
            Step::SelectBucket => to_bucket(status),
            Step::ClusterMap => to_map_request(status),
            Step::Manifest => to_manifest_request(status),
            Step::RequiredControl => to_required_control(status),
            Step::OptionalControl => to_optional_control(status),
            Step::StreamRequest => to_stream_request(status),
            Step::CloseStream => to_close(status),
            Step::FailoverLog | Step::ObserveSeqno => to_observation(step, status),
            Step::HighSeqnos | Step::CollectionSeqnos => to_seqno_request(step, status),
            Step::PurgeSeqnos => to_stat(status),
        }
    }

    /// Whether an answer on a connection that was set up concerns the connection and not the request:
    /// it has lost its login or its bucket, so that nothing requested on it succeeds. The server's
    /// error map gives these the attribute `conn-state-invalidated`. EINTERNAL has it too, but may
    /// concern one vBucket, which must not end the streams of the others.
    #[must_use]
    pub const fn is_to_reconnect(status: Status) -> bool {
        matches!(status.class(), StatusClass::Invalidated | StatusClass::LoginRefused)
            || matches!(status, Status::NOT_INITIALIZED)
    }
}

/// What a request of the set-up that servers always grant leads to: on a client's first connection,
/// only a server that says it is busy is waited for.
const fn in_set_up(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::Success => Reaction::Use,
        C::Temporary => Reaction::Retry,
        C::Unsupported => Reaction::Fail(Failure::Refused),
        C::Denied => Reaction::Fail(Failure::AccessDenied),
        C::Continues
        | C::Rollback
        | C::OutOfRange
        | C::NotFound
        | C::Exists
        | C::Moved
        | C::UnknownCollection
        | C::Manifest
        | C::LoginRefused
        | C::Invalidated
        | C::Failed
        | C::Unreadable
        | C::Elsewhere
        | C::Unknown => Reaction::RetryOnceConnected(Failure::Refused),
    }
}

/// A proxy, or a node that has just started and does not know the user's privileges yet, refuses what
/// was granted before.
const fn to_hello_or_open(status: Status) -> Reaction {
    match in_set_up(status) {
        Reaction::Fail(failure) | Reaction::RetryOnceConnected(failure) => {
            Reaction::RetryOnceGranted(failure)
        }
        other => other,
    }
}

/// A node that has just started may not have the user, or a new password, yet.
const fn to_login(step: Step, status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::Continues if matches!(step, Step::Authenticate) => Reaction::Use,
        C::LoginRefused | C::Denied | C::NotFound => {
            Reaction::RetryOnceConnected(Failure::Authentication)
        }
        _ => in_set_up(status),
    }
}

/// A node that has just started may not have the bucket yet.
const fn to_bucket(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::NotFound => Reaction::RetryOnceConnected(Failure::BucketNotFound),
        C::Denied => Reaction::RetryOnceConnected(Failure::AccessDenied),
        // The bucket has no collections, which HELLO has granted.
        C::Unsupported if matches!(status, Status::NOT_SUPPORTED) => {
            Reaction::RetryOnceGranted(Failure::Unsupported)
        }
        _ => in_set_up(status),
    }
}

/// A node that has just started has no map of the bucket yet.
const fn to_map_request(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::NotFound => Reaction::Retry,
        C::Invalidated if matches!(status, Status::NO_BUCKET) => Reaction::Retry,
        C::Unsupported => Reaction::RetryOnceConnected(Failure::Refused),
        C::Denied => Reaction::RetryOnceConnected(Failure::AccessDenied),
        _ => in_set_up(status),
    }
}

/// Servers before 7.0 have only the default collection.
const fn to_manifest_request(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::Manifest if matches!(status, Status::NO_COLLECTIONS_MANIFEST) => Reaction::GoWithout,
        C::Unsupported => Reaction::GoWithout,
        _ => in_set_up(status),
    }
}

/// Without the setting, the stream cannot do what it was asked for.
const fn to_required_control(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        C::Success => Reaction::Use,
        C::Temporary => Reaction::Retry,
        // Nothing is said about the setting.
        C::LoginRefused | C::Invalidated | C::Failed | C::Unreadable => {
            Reaction::RetryOnceConnected(Failure::Refused)
        }
        C::Continues
        | C::Rollback
        | C::OutOfRange
        | C::NotFound
        | C::Exists
        | C::Moved
        | C::UnknownCollection
        | C::Manifest
        | C::Denied
        | C::Unsupported
        | C::Elsewhere
        | C::Unknown => Reaction::Fail(Failure::Unsupported),
    }
}

/// Only a refusal that says that the server lacks the setting may be passed over: what another
/// refusal would hide is missing for as long as the connection lasts.
const fn to_optional_control(status: Status) -> Reaction {
    match to_required_control(status) {
        Reaction::Fail(_) => Reaction::GoWithout,
        other => other,
    }
}

const fn to_stream_request(status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        _ if Reaction::is_to_reconnect(status) => Reaction::Reconnect,
        C::Success => Reaction::Use,
        C::Rollback => Reaction::RollBack,
        // Requests are in range unless the position is past the server's high seqno, in which case
        // the server does not name a seqno to roll back to.
        C::OutOfRange => Reaction::BeginAgain,
        C::Exists => Reaction::CloseFirst,
        C::Moved => Reaction::FollowMap,
        // A node may learn of a new collection later than the client.
        C::UnknownCollection => Reaction::CheckFilter,
        C::NotFound => Reaction::RetryOnceGranted(Failure::Refused),
        C::Denied => Reaction::RetryOnceGranted(Failure::AccessDenied),
        C::Unsupported => Reaction::Fail(Failure::Refused),
        C::Unreadable => Reaction::RetrySlowly,
        C::Temporary
        | C::Manifest
        | C::Failed
        | C::Continues
        | C::LoginRefused
        | C::Invalidated
        | C::Elsewhere
        | C::Unknown => Reaction::Retry,
    }
}

/// Whatever a server answers, it has no such stream any more.
const fn to_close(status: Status) -> Reaction {
    match to_stream_request(status) {
        Reaction::Reconnect => Reaction::Reconnect,
        _ => Reaction::Use,
    }
}

/// Requests about vBuckets outside of streams.
const fn to_seqno_request(step: Step, status: Status) -> Reaction {
    use StatusClass as C;

    match status.class() {
        _ if Reaction::is_to_reconnect(status) => Reaction::Reconnect,
        C::Success => Reaction::Use,
        // The collection has nothing there.
        C::UnknownCollection if is_one_collection(step, status) => Reaction::Use,
        C::Denied => Reaction::Fail(Failure::AccessDenied),
        C::Unsupported => Reaction::Fail(Failure::Refused),
        C::Temporary
        | C::Continues
        | C::Rollback
        | C::OutOfRange
        | C::NotFound
        | C::Exists
        | C::Moved
        | C::UnknownCollection
        | C::Manifest
        | C::LoginRefused
        | C::Invalidated
        | C::Failed
        | C::Unreadable
        | C::Elsewhere
        | C::Unknown => Reaction::Retry,
    }
}

const fn is_one_collection(step: Step, status: Status) -> bool {
    matches!((step, status), (Step::CollectionSeqnos, Status::UNKNOWN_COLLECTION))
}

const fn to_observation(step: Step, status: Status) -> Reaction {
    use StatusClass as C;

    match (step, status.class()) {
        (_, C::Moved) => Reaction::FollowMap,
        // The copy is on another branch, so nothing of this one counts as persisted.
        (Step::ObserveSeqno, C::NotFound) => Reaction::Use,
        (Step::ObserveSeqno, C::Denied) => Reaction::RetryOnceGranted(Failure::AccessDenied),
        (Step::ObserveSeqno, C::Unsupported) => Reaction::RetryOnceGranted(Failure::Unsupported),
        _ => to_seqno_request(step, status),
    }
}

/// Users who may only read may not read statistics.
const fn to_stat(status: Status) -> Reaction {
    match (to_seqno_request(Step::PurgeSeqnos, status), status.is_temporary()) {
        (reaction @ (Reaction::Use | Reaction::Reconnect), _) | (reaction, true) => reaction,
        _ => Reaction::GoWithout,
    }
}

/// What a consumer does about the end of a stream that it has not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AfterEnd {
    /// Nothing: the vBucket is complete.
    Complete,
    /// Follows the cluster map, then requests the stream again.
    FollowMap,
    /// Requests the stream again.
    Retry,
    /// Requests the stream again, from the start after a longer wait.
    RetrySlowly,
    /// Fails.
    Fail(Failure),
}

impl AfterEnd {
    /// What a consumer does after an end with this reason, before the end that it asked for.
    #[must_use]
    pub const fn of(reason: StreamEndReason) -> Self {
        match reason {
            StreamEndReason::OK
            | StreamEndReason::CLOSED
            | StreamEndReason::DISCONNECTED
            | StreamEndReason::SLOW => Self::Retry,
            StreamEndReason::STATE_CHANGED | StreamEndReason::ROLLBACK => Self::FollowMap,
            StreamEndReason::FILTER_EMPTY => Self::Complete,
            StreamEndReason::LOST_PRIVILEGES => Self::Fail(Failure::AccessDenied),
            StreamEndReason::BACKFILL_FAIL => Self::RetrySlowly,
            // A reason that a newer server has.
            _ => Self::RetrySlowly,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reaction_to_success_is_to_use_it_and_nothing_else_is_mistaken_for_it() {
        for step in Step::ALL {
            assert_eq!(Reaction::to(step, Status::SUCCESS), Reaction::Use, "{step:?}");
            let used: Vec<_> = (1..=0xff)
                .map(Status)
                .filter(|&status| Reaction::to(step, status) == Reaction::Use)
                .collect();
            match step {
                Step::Authenticate => assert_eq!(used, [Status::AUTH_CONTINUE]),
                Step::ObserveSeqno => assert_eq!(used, [Status::KEY_ENOENT]),
                Step::CollectionSeqnos => assert_eq!(used, [Status::UNKNOWN_COLLECTION]),
                Step::CloseStream => assert!(used.len() > 200),
                _ => assert_eq!(used, [], "{step:?}"),
            }
        }
    }

    #[test]
    fn step_belongs_to_its_opcode() {
        for step in Step::ALL {
            let of = Step::of(step.opcode()).unwrap();
            assert_eq!(of.opcode(), step.opcode(), "{step:?}");
        }
        assert_eq!(Step::of(Opcode::GET), None);
    }

    /// Whatever is refused for a while is granted in the end, so no step may end a stream for it.
    #[test]
    fn reaction_to_a_busy_server_is_never_a_failure() {
        for step in Step::ALL {
            for status in Status::KNOWN.iter().filter(|status| status.is_temporary()) {
                let reaction = Reaction::to(step, *status);
                let waits = matches!(reaction, Reaction::Retry | Reaction::Reconnect);
                assert!(waits || step == Step::CloseStream, "{step:?} {status}: {reaction:?}");
            }
        }
    }

    /// No status of a newer server ends a stream at a step that needs no setting.
    #[test]
    fn reaction_to_a_status_that_is_unknown_is_to_try_again() {
        for step in Step::ALL {
            let reaction = Reaction::to(step, Status(0x5555));
            let waits = matches!(
                reaction,
                Reaction::Retry
                    | Reaction::RetryOnceConnected(_)
                    | Reaction::RetryOnceGranted(_)
                    | Reaction::Use
                    | Reaction::GoWithout
            );
            assert!(waits || step == Step::RequiredControl, "{step:?}: {reaction:?}");
        }
    }
}
