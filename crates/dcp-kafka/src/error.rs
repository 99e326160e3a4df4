//! What can go wrong.

/// What kind of error it is, which decides what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The library cannot be loaded, or lacks a function.
    Library,
    /// An option of librdkafka is unknown, or its value is wrong.
    Config,
    /// Another producer has the same `transactional.id`, or the transaction lasted too long.
    Fenced,
    /// The broker refuses who it is.
    Authentication,
    /// The broker refuses what it does.
    Authorization,
    /// No broker answers.
    Unreachable,
    /// It was not done in time.
    Timeout,
    /// A record is larger than the broker takes.
    TooLarge,
    /// There is no such topic or partition.
    NoTopic,
    /// Records do not have the columns that they must.
    Records,
    /// Anything else.
    Other,
}

/// An error of librdkafka.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({name})")]
pub struct Error {
    /// What kind of error it is.
    pub kind: Kind,
    /// Its name in librdkafka, such as `_TIMED_OUT`.
    pub name: String,
    /// What librdkafka says.
    pub text: String,
    /// Whether the same call may succeed later.
    pub is_retriable: bool,
    /// Whether the transaction has to be aborted.
    pub needs_abort: bool,
    /// Whether the producer is of no use any more.
    pub is_fatal: bool,
}

impl Error {
    pub(crate) fn own(kind: Kind, name: &str, text: impl Into<String>) -> Self {
        Self {
            kind,
            name: name.to_owned(),
            text: text.into(),
            is_retriable: false,
            needs_abort: false,
            is_fatal: false,
        }
    }
}

/// The kind of an error by its name in librdkafka, where names of its own have an underscore.
pub(crate) fn kind(name: &str) -> Kind {
    match name {
        "_FENCED"
        | "INVALID_PRODUCER_EPOCH"
        | "PRODUCER_FENCED"
        | "INVALID_PRODUCER_ID_MAPPING" => Kind::Fenced,
        "_AUTHENTICATION" | "SASL_AUTHENTICATION_FAILED" => Kind::Authentication,
        "TOPIC_AUTHORIZATION_FAILED"
        | "GROUP_AUTHORIZATION_FAILED"
        | "CLUSTER_AUTHORIZATION_FAILED"
        | "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" => Kind::Authorization,
        "_TRANSPORT" | "_ALL_BROKERS_DOWN" | "_RESOLVE" | "_SSL" => Kind::Unreachable,
        "_TIMED_OUT" | "_TIMED_OUT_QUEUE" | "_MSG_TIMED_OUT" | "REQUEST_TIMED_OUT" => Kind::Timeout,
        "MSG_SIZE_TOO_LARGE" | "RECORD_LIST_TOO_LARGE" | "INVALID_MSG_SIZE" => Kind::TooLarge,
        "_UNKNOWN_TOPIC" | "_UNKNOWN_PARTITION" | "UNKNOWN_TOPIC_OR_PART" => Kind::NoTopic,
        "_INVALID_ARG" | "INVALID_TRANSACTION_TIMEOUT" => Kind::Config,
        _ => Kind::Other,
    }
}
