//! A client's socket, with or without TLS, that never blocks.

use std::io::{self, BufRead, Read, Write};

use bytes::BytesMut;
use rustls::ServerConnection;
use tokio::net::TcpStream;

use super::memory::MemorySocket;

/// A client's socket.
#[derive(Debug)]
pub(super) enum Socket {
    Plain(TcpStream),
    /// After the handshake.
    Tls(Box<TlsSocket>),
    /// In a cluster without ports.
    Memory(MemorySocket),
}

/// A TLS session and the socket under it.
#[derive(Debug)]
pub(super) struct TlsSocket {
    socket: TcpStream,
    session: ServerConnection,
}

/// Adapter for rustls: returns "would block" instead of waiting.
struct NonBlocking<'a>(&'a TcpStream);

impl Read for NonBlocking<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl Write for NonBlocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    pub(super) fn tls(socket: TcpStream, session: ServerConnection) -> Self {
        Self::Tls(Box::new(TlsSocket { socket, session }))
    }

    /// Appends received data; returns 0 once the client has closed its end.
    pub(super) fn try_read_buf(&mut self, input: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.try_read_buf(input),
            Self::Tls(tls) => tls.try_read_buf(input),
            Self::Memory(socket) => socket.try_read_buf(input),
        }
    }

    /// Accepts some of `bytes`; returns how many.
    pub(super) fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.try_write(bytes),
            Self::Tls(tls) => tls.try_write(bytes),
            Self::Memory(socket) => socket.try_write(bytes),
        }
    }

    /// Sends accepted bytes that are still buffered; returns whether any were sent.
    pub(super) fn try_flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) | Self::Memory(_) => Ok(false),
            Self::Tls(tls) => tls.try_flush(),
        }
    }

    /// Whether accepted bytes are still buffered.
    pub(super) fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Memory(_) => false,
            Self::Tls(tls) => tls.session.wants_write(),
        }
    }

    /// Waits until more may have arrived.
    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.readable().await,
            Self::Tls(tls) => tls.socket.readable().await,
            Self::Memory(socket) => {
                socket.readable().await;
                Ok(())
            }
        }
    }

    /// Waits until the system may accept more.
    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.writable().await,
            Self::Tls(tls) => tls.socket.writable().await,
            Self::Memory(socket) => {
                socket.writable().await;
                Ok(())
            }
        }
    }

    /// Sends a close notification if that is possible without waiting.
    pub(super) fn close(&mut self) {
        if let Self::Tls(tls) = self {
            tls.session.send_close_notify();
            if let Err(error) = tls.try_flush() {
                tracing::trace!(%error, "the client left first");
            }
        }
    }
}

impl TlsSocket {
    fn try_read_buf(&mut self, input: &mut BytesMut) -> io::Result<usize> {
        loop {
            let mut reader = self.session.reader();
            match reader.fill_buf() {
                Ok(bytes) => {
                    let len = bytes.len();
                    input.extend_from_slice(bytes);
                    reader.consume(len);
                    return Ok(len);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            // At the end rustls reads 0 bytes, and its reader later reports whether the close was
            // clean.
            self.session.read_tls(&mut NonBlocking(&self.socket))?;
            if let Err(error) = self.session.process_new_packets() {
                // Sends the TLS alert to the client.
                self.try_flush()?;
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }

    fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.try_flush()?;
        if self.session.wants_write() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // Accepts as much as fits into the buffer of rustls.
        let taken = self.session.writer().write(bytes)?;
        self.try_flush()?;
        Ok(taken)
    }

    fn try_flush(&mut self) -> io::Result<bool> {
        let mut left = false;
        while self.session.wants_write() {
            match self.session.write_tls(&mut NonBlocking(&self.socket)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => left = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }
}
