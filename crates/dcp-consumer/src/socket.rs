//! A TCP connection, encrypted or not.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::Transport;

/// A connection to a node.
#[derive(Debug)]
#[non_exhaustive]
pub enum Socket {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
    /// Made by a [`Dial`](crate::Dial).
    Dialed(Box<dyn Transport>),
}

impl Socket {
    /// Whether the connection is encrypted.
    #[must_use]
    pub const fn is_tls(&self) -> bool {
        matches!(self, Self::Tls(_))
    }
}

/// A transport of a connection that can let data gather.
pub(crate) trait Gather: AsyncRead + AsyncWrite + Unpin + Send {
    /// Makes the transport ready only from this many bytes on, unless the other end has closed;
    /// `false` if the transport does not support it.
    fn ready_from(&self, bytes: usize) -> bool;
}

impl Gather for Socket {
    fn ready_from(&self, bytes: usize) -> bool {
        match self {
            Self::Plain(stream) => low_mark::set(stream, bytes),
            Self::Tls(stream) => low_mark::set(stream.get_ref().0, bytes),
            Self::Dialed(_) => false,
        }
    }
}

/// Linux does not wake readers below the mark, and wakes them when it is lowered to the available
/// bytes. It enlarges the receive buffer to fit the mark.
#[cfg(target_os = "linux")]
mod low_mark {
    use nix::libc;
    use nix::sys::socket::SetSockOpt;
    use tokio::net::TcpStream;

    #[derive(Clone, Copy, Debug)]
    struct ReceiveLowMark;

    nix::setsockopt_impl!(
        ReceiveLowMark,
        libc::SOL_SOCKET,
        libc::SO_RCVLOWAT,
        usize,
        nix::sys::socket::sockopt::SetUsize
    );

    pub(super) fn set(stream: &TcpStream, bytes: usize) -> bool {
        ReceiveLowMark.set(stream, &bytes).is_ok()
    }
}

#[cfg(not(target_os = "linux"))]
mod low_mark {
    use tokio::net::TcpStream;

    pub(super) const fn set(_: &TcpStream, _: usize) -> bool {
        false
    }
}

macro_rules! forward {
    ($self:ident, $method:ident($($arg:expr),*)) => {
        match $self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).$method($($arg),*),
            Self::Tls(stream) => Pin::new(stream.as_mut()).$method($($arg),*),
            Self::Dialed(stream) => Pin::new(stream.as_mut()).$method($($arg),*),
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, poll_read(cx, buf))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self, poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        forward!(self, poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
            Self::Dialed(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_shutdown(cx))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    const MARK: usize = 100_000;

    async fn pair() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Socket::Plain(near), listener.accept().await.unwrap().0)
    }

    async fn read(socket: &mut Socket, limit: Duration) -> Option<usize> {
        let mut bytes = vec![0; 2 * MARK];
        timeout(limit, socket.read(&mut bytes)).await.ok().map(Result::unwrap)
    }

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn socket_wakes_nobody_below_its_low_water_mark() {
        let (mut near, mut far) = pair().await;
        assert!(near.ready_from(MARK));
        far.write_all(&[7; 1000]).await.unwrap();
        assert_eq!(read(&mut near, SHORT).await, None);
        assert!(near.ready_from(1));
        assert_eq!(read(&mut near, LONG).await, Some(1000));
        far.write_all(&[7; 1000]).await.unwrap();
        assert_eq!(read(&mut near, LONG).await, Some(1000), "the first of the next ones");
    }

    #[tokio::test]
    async fn socket_wakes_at_once_at_its_low_water_mark_and_at_its_end() {
        let (mut near, mut far) = pair().await;
        assert!(near.ready_from(MARK));
        far.write_all(&[7; MARK]).await.unwrap();
        assert!(read(&mut near, LONG).await.is_some_and(|len| len >= MARK));
        far.write_all(&[7; 10]).await.unwrap();
        assert_eq!(read(&mut near, SHORT).await, None);
        far.shutdown().await.unwrap();
        assert_eq!(read(&mut near, LONG).await, Some(10));
    }
}
