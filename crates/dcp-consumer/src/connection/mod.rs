//! A connection to a node: its machine, its socket, and the bytes between them.
//!
//! Whoever has it drives it: the task of a stream, a request that waits for its answer, or the pool.

mod renewal;

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::Poll;
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use dcp_proto::consumer::{
    Connection, ConnectionConfig, ConnectionError, Event, Limit, Reaction, Step, Token,
};
use dcp_proto::topology::Address;
use dcp_proto::{Change, ChangeSink, Rollback, SinkError};
use dcp_wire::{Opcode, Status};
use thiserror::Error;
use tokio::io::ReadBuf;

use self::renewal::Renewal;
use crate::ErrorKind;
use crate::connect::{Connector, since_1970};
use crate::read_buffer::{ReadBuffer, SMALL};
use crate::socket::{Gather, Socket};

/// Bytes of unsent output above which nothing is read: a peer that causes output without reading it
/// has to wait.
pub(crate) const MAX_UNWRITTEN: usize = 1 << 20;

/// A connection to a node that has been set up.
pub(crate) struct NodeConnection<IO = Socket> {
    /// The node.
    pub(crate) address: Address,
    pub(crate) machine: Connection,
    pub(crate) io: IO,
    pub(crate) buffer: ReadBuffer,
    /// Bytes to write.
    out: BytesMut,
    /// Whether written bytes may still be in the encryption layer.
    flush: bool,
    /// The last cluster map that was received while no stream was open, until it is taken.
    map: Option<Bytes>,
    /// If a token authenticates it.
    renewal: Option<Box<Renewal>>,
}

impl<IO> fmt::Debug for NodeConnection<IO> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeConnection").field("address", &self.address).finish_non_exhaustive()
    }
}

/// What a socket was ready for.
pub(crate) enum Io {
    /// So many bytes were read.
    Read(usize),
    /// All available data was read.
    Dry,
    Wrote,
}

/// How a socket is read.
#[derive(Clone, Copy)]
pub(crate) enum Reading {
    /// Not now.
    Not,
    /// Until no data is available.
    UntilDry,
    /// Whenever data is available.
    Ever,
}

/// Why a connection cannot be used any longer.
#[derive(Debug, Error)]
pub(crate) enum Lost {
    /// The socket failed.
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    /// The machine ended it.
    #[error(transparent)]
    Ended(#[from] ConnectionError),
}

impl Lost {
    /// The error of a request whose answer did not arrive.
    fn unanswered(self) -> crate::Error {
        let lost = ErrorKind::ConnectionLost;
        let broke = crate::Error::new(lost, "the connection broke before the answer");
        match self {
            Self::Broken(error) => broke.with_source(error),
            Self::Ended(ConnectionError::Invalidated { opcode, status }) => refused(opcode, status),
            Self::Ended(ConnectionError::Protocol(error)) => {
                let message = format!("the server's answer to {} is invalid", error.opcode);
                crate::Error::new(ErrorKind::Protocol, message).with_source(error.kind)
            }
            Self::Ended(error @ (ConnectionError::Idle | ConnectionError::CloseUnanswered(_))) => {
                broke.with_source(error)
            }
            Self::Ended(
                error @ (ConnectionError::TokenExpired | ConnectionError::TokenRefused { .. }),
            ) => broke.with_kind(ErrorKind::Authentication).with_source(error),
            Self::Ended(error) => crate::Error::new(ErrorKind::Protocol, error.to_string()),
        }
    }
}

/// The error of a request that the server refused.
pub(crate) fn refused(opcode: Opcode, status: Status) -> crate::Error {
    let reaction = Step::of(opcode).map(|step| Reaction::to(step, status));
    let kind = match reaction {
        Some(Reaction::Fail(failure) | Reaction::RetryOnceGranted(failure)) => failure.into(),
        _ => ErrorKind::Status,
    };
    crate::Error::new(kind, format!("the server refused {opcode} ({status})"))
        .with_status(status)
        .with_opcode(opcode)
}

/// Discards changes: no stream is open that has any.
struct NoSink;

impl ChangeSink for NoSink {
    fn change(&mut self, _: &Change<'_>) -> Result<(), SinkError> {
        Ok(())
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl<IO: Gather> NodeConnection<IO> {
    /// A connection whose set-up has just finished. `leftover` arrived after its last answer.
    pub(crate) fn new(address: Address, io: IO, leftover: &[u8], config: ConnectionConfig) -> Self {
        Self {
            address,
            io,
            buffer: ReadBuffer::new(leftover, SMALL, config.max_body_len),
            machine: Connection::new(config, now()),
            out: BytesMut::new(),
            flush: false,
            map: None,
            renewal: None,
        }
    }

    /// The same, authenticated with a token that is renewed from the source of `connector`.
    pub(crate) fn with_token(mut self, token: &Token, connector: Connector) -> Self {
        self.machine = self.machine.with_token(now(), since_1970(), token);
        self.renewal = Some(Box::new(Renewal::new(self.address.clone(), connector)));
        self
    }

    /// Makes requests, and returns their answers once all have arrived and the streams that were
    /// opened with them have ended. A cluster map is not among the answers, but can be
    /// [taken](Self::take_map).
    ///
    /// # Errors
    /// [`Error`] if a request outside of streams is refused, or the connection is lost. Drop it then.
    pub(crate) async fn ask(
        &mut self,
        request: impl FnOnce(&mut Connection),
    ) -> Result<Vec<Event>, crate::Error> {
        request(&mut self.machine);
        let mut answers = Vec::new();
        loop {
            self.handle_input().map_err(Lost::unanswered)?;
            while let Some(event) = self.poll_event() {
                match event {
                    Event::Refused { opcode, status } => return Err(refused(opcode, status)),
                    event => answers.push(event),
                }
            }
            if self.machine.is_unused() {
                break;
            }
            self.wait().await.map_err(Lost::unanswered)?;
        }
        // Nobody may wait for what is due while the connection is idle. If it is lost, its next use
        // shows it.
        self.machine.acknowledge_all();
        while (!self.is_idle() || self.flush) && self.ready(Reading::UntilDry).await.is_ok() {}
        Ok(answers)
    }

    /// Answers the server's noops until the connection is lost, and passes on cluster maps.
    /// Cancellation-safe.
    pub(crate) async fn keep_alive(
        &mut self,
        mut on_map: impl FnMut(&Address, &[u8]),
    ) -> Result<Infallible, Lost> {
        loop {
            self.handle_input()?;
            while self.poll_event().is_some() {}
            if let Some(map) = self.take_map() {
                on_map(&self.address, &map);
            }
            self.wait().await?;
        }
    }

    /// The last cluster map that was received with the answers, or pushed.
    pub(crate) const fn take_map(&mut self) -> Option<Bytes> {
        self.map.take()
    }

    /// Whether there is no stream, nothing to send and no answer outstanding.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.machine.poll_transmit(&mut self.out);
        self.out.is_empty() && self.machine.is_unused()
    }

    /// Handles what has arrived, without a stream that delivers changes.
    pub(crate) fn handle_input(&mut self) -> Result<(), Lost> {
        let (machine, now) = (&mut self.machine, now());
        let walk = machine.handle_input(now, self.buffer.filled(), Limit::NONE, &mut NoSink)?;
        self.buffer.consume(walk.consumed);
        let held = machine.take_held();
        machine.release(now, held);
        machine.take_positions();
        Ok(())
    }

    /// What happened, apart from cluster maps.
    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        loop {
            match self.machine.poll_event()? {
                Event::ClusterMap(json) => self.map = Some(json),
                event => return Some(event),
            }
        }
    }

    /// Waits until something has arrived, was sent or is due. Cancellation-safe.
    pub(crate) async fn wait(&mut self) -> Result<(), Lost> {
        let deadline = self.machine.poll_timeout();
        tokio::select! {
            biased;
            ready = self.ready(Reading::Ever) => ready.map(drop),
            () = sleep_until(deadline) => Ok(self.machine.handle_timeout(now())?),
        }
    }

    /// Waits to read or write: a connection that is not read while it is written could deadlock
    /// with the server. Cancellation-safe.
    pub(crate) async fn ready(&mut self, reading: Reading) -> Result<Io, Lost> {
        let Self { machine, io, buffer, out, flush, renewal, .. } = self;
        machine.poll_transmit(out);
        let space = buffer.space().map_err(ConnectionError::Framing)?;
        let ready = poll_fn(|cx| {
            if let Some(renewal) = renewal
                && let Poll::Ready(written) = renewal.poll(cx, machine, io, out.is_empty())
            {
                *flush |= written?;
                return Poll::Ready(Ok(Io::Wrote));
            }
            let is_between = renewal.as_ref().is_none_or(|renewal| !renewal.is_writing());
            if is_between && !out.is_empty() {
                if let Poll::Ready(written) = Pin::new(&mut *io).poll_write(cx, out) {
                    let written = written?;
                    if written == 0 {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    out.advance(written);
                    *flush = true;
                    return Poll::Ready(Ok(Io::Wrote));
                }
                if out.len() > MAX_UNWRITTEN {
                    return Poll::Pending;
                }
            } else if *flush && let Poll::Ready(flushed) = Pin::new(&mut *io).poll_flush(cx) {
                flushed?;
                *flush = false;
            }
            if matches!(reading, Reading::Not) {
                return Poll::Pending;
            }
            let mut read = ReadBuf::new(&mut *space);
            match Pin::new(&mut *io).poll_read(cx, &mut read) {
                Poll::Pending if matches!(reading, Reading::UntilDry) => Poll::Ready(Ok(Io::Dry)),
                Poll::Pending => Poll::Pending,
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) if read.filled().is_empty() => {
                    Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
                }
                Poll::Ready(Ok(())) => Poll::Ready(Ok(Io::Read(read.filled().len()))),
            }
        })
        .await?;
        if let Io::Read(len) = ready {
            self.buffer.filled_by(len);
        }
        Ok(ready)
    }
}

/// Waits until a deadline, if there is one.
pub(crate) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// The time of tokio's clock.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests;
