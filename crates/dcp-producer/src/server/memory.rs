//! Connections of two buffers instead of a socket, for clusters without ports.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes one direction holds before the writer has to wait, as a socket's buffer does.
const CAPACITY: usize = 64 << 10;

/// A client's end of a connection to a node of a cluster without ports.
///
/// Dropping it closes the connection.
#[derive(Debug)]
pub struct MemoryStream {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

/// The node's end.
#[derive(Debug)]
pub(super) struct MemorySocket {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

/// One direction.
#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: BytesMut,
    /// Whether either end was closed.
    is_closed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// Both ends of a new connection.
pub(super) fn pair() -> (MemoryStream, MemorySocket) {
    let (up, down) = (Arc::<Pipe>::default(), Arc::<Pipe>::default());
    let client = MemoryStream { incoming: Arc::clone(&down), outgoing: Arc::clone(&up) };
    (client, MemorySocket { incoming: up, outgoing: down })
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes received data, up to `limit` bytes, to `take`; 0 at the end.
    fn try_read(&self, limit: usize, take: impl FnOnce(&[u8])) -> io::Result<usize> {
        let mut state = self.lock();
        if state.bytes.is_empty() {
            let end = if state.is_closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
            return end;
        }
        let len = state.bytes.len().min(limit);
        take(state.bytes.get(..len).unwrap_or_default());
        state.bytes.advance(len);
        wake(&mut state.writer);
        Ok(len)
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len = bytes.len().min(CAPACITY.saturating_sub(state.bytes.len()));
        if len == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        state.bytes.extend_from_slice(bytes.get(..len).unwrap_or_default());
        wake(&mut state.reader);
        Ok(len)
    }

    fn poll_readable(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if !state.bytes.is_empty() || state.is_closed {
            return Poll::Ready(());
        }
        state.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    fn poll_writable(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.bytes.len() < CAPACITY || state.is_closed {
            return Poll::Ready(());
        }
        state.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        wake(&mut state.reader);
        wake(&mut state.writer);
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

impl MemorySocket {
    pub(super) fn try_read_buf(&self, input: &mut BytesMut) -> io::Result<usize> {
        self.incoming.try_read(CAPACITY, |bytes| input.extend_from_slice(bytes))
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.try_write(bytes)
    }

    pub(super) async fn readable(&self) {
        std::future::poll_fn(|cx| self.incoming.poll_readable(cx)).await;
    }

    pub(super) async fn writable(&self) {
        std::future::poll_fn(|cx| self.outgoing.poll_writable(cx)).await;
    }
}

impl Drop for MemorySocket {
    fn drop(&mut self) {
        self.incoming.close();
        self.outgoing.close();
    }
}

impl Drop for MemoryStream {
    fn drop(&mut self) {
        self.incoming.close();
        self.outgoing.close();
    }
}

impl AsyncRead for MemoryStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.incoming.poll_readable(cx).is_pending() {
            return Poll::Pending;
        }
        let read = self.incoming.try_read(buf.remaining(), |bytes| buf.put_slice(bytes));
        Poll::Ready(read.map(|_| ()))
    }
}

impl AsyncWrite for MemoryStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.outgoing.poll_writable(cx).is_pending() {
            return Poll::Pending;
        }
        Poll::Ready(self.outgoing.try_write(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.outgoing.close();
        Poll::Ready(Ok(()))
    }
}
