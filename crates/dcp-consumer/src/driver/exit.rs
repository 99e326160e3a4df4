//! How the task of a connection ends.

use std::io;

use dcp_proto::SinkError;
use dcp_proto::consumer::ConnectionError;
use dcp_proto::topology::Address;

use crate::connection::Lost;
use crate::{Error, ErrorKind};

/// How a connection's task ends.
pub(super) enum Exit {
    /// The connection cannot be used any longer.
    Lost(Error),
    /// The sink failed.
    Sink(SinkError),
    /// The task is no longer needed.
    Dismissed,
}

impl Exit {
    /// The connection to `peer` is lost.
    pub(super) fn of(peer: &Address, lost: Lost) -> Self {
        use ConnectionError as Ended;

        let broken = |message| Error::new(ErrorKind::ConnectionLost, message);
        let closed = |kind| Error::new(kind, format!("the connection to {peer} was closed"));
        Self::Lost(match lost {
            Lost::Broken(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                broken(format!("{peer} closed the connection"))
            }
            Lost::Broken(error) => {
                broken(format!("the connection to {peer} broke")).with_source(error)
            }
            Lost::Ended(Ended::Sink(error)) => return Self::Sink(error),
            Lost::Ended(error @ Ended::Invalidated { status, .. }) => {
                closed(ErrorKind::ConnectionLost).with_source(error).with_status(status)
            }
            Lost::Ended(error @ (Ended::TokenExpired | Ended::TokenRefused { .. })) => {
                closed(ErrorKind::Authentication).with_source(error)
            }
            Lost::Ended(error @ (Ended::Idle | Ended::CloseUnanswered(_))) => {
                closed(ErrorKind::ConnectionLost).with_source(error)
            }
            Lost::Ended(error) => closed(ErrorKind::Protocol).with_source(error),
        })
    }
}

impl From<SinkError> for Exit {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}
