//! How the task of a connection ends.

use std::io;

use dcp_proto::SinkError;
use dcp_proto::consumer::ConnectionError;
use dcp_proto::topology::Address;

use crate::{Error, ErrorKind};

/// How a connection's task ends.
pub(super) enum Over {
    /// The connection cannot be used any longer.
    Lost(Error),
    /// The sink failed.
    Sink(SinkError),
    /// The task is no longer needed.
    Dismissed,
}

impl Over {
    /// The machine ended the connection.
    pub(super) fn given_up(peer: &Address, error: ConnectionError) -> Self {
        let kind = match &error {
            ConnectionError::Sink(error) => return Self::Sink(error.clone()),
            ConnectionError::Idle | ConnectionError::Invalidated(_) => ErrorKind::ConnectionLost,
            _ => ErrorKind::Protocol,
        };
        let message = format!("the connection to {peer} was closed");
        let status = match error {
            ConnectionError::Invalidated(status) => Some(status),
            _ => None,
        };
        let lost = Error::new(kind, message).with_source(error);
        Self::Lost(match status {
            Some(status) => lost.with_status(status),
            None => lost,
        })
    }

    /// The socket failed.
    pub(super) fn broken(peer: &Address, error: io::Error) -> Self {
        let lost = |message| Error::new(ErrorKind::ConnectionLost, message);
        Self::Lost(match error.kind() {
            io::ErrorKind::UnexpectedEof => lost(format!("{peer} closed the connection")),
            _ => lost(format!("the connection to {peer} broke")).with_source(error),
        })
    }
}

impl From<SinkError> for Over {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}
