//! The socket of a client, plain or TLS.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::{ServerConfig, ServerConnection};

use crate::Error;

/// TLS configuration of a server.
#[derive(Clone, Debug)]
pub(super) struct Tls(Arc<ServerConfig>);

impl Tls {
    /// With a self-signed certificate for 127.0.0.1; also returns its PEM.
    pub(super) fn new() -> Result<(Self, String), Error> {
        let mut certificate = CertificateParams::default();
        certificate.subject_alt_names.push(SanType::IpAddress(Ipv4Addr::LOCALHOST.into()));
        let key = KeyPair::generate()?;
        let certificate = certificate.self_signed(&key)?;
        let config =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_no_client_auth()
                .with_single_cert(
                    vec![certificate.der().clone()],
                    rustls::pki_types::PrivateKeyDer::Pkcs8(key.serialize_der().into()),
                )?;
        Ok((Self(Arc::new(config)), certificate.pem()))
    }
}

/// A connection from a client. Clones share it, so that one thread can read while others write.
#[derive(Debug)]
pub(super) struct Socket {
    socket: TcpStream,
    session: Option<Arc<Mutex<ServerConnection>>>,
}

impl Socket {
    pub(super) fn new(socket: TcpStream, tls: Option<&Tls>) -> Result<Self, Error> {
        socket.set_nodelay(true)?;
        let session = |tls: &Tls| -> Result<_, Error> {
            let mut session = ServerConnection::new(Arc::clone(&tls.0))?;
            session.set_buffer_limit(None);
            Ok(Arc::new(Mutex::new(session)))
        };
        Ok(Self { socket, session: tls.map(session).transpose()? })
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()?, session: self.session.clone() })
    }

    pub(super) fn shutdown(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn lock(session: &Mutex<ServerConnection>) -> MutexGuard<'_, ServerConnection> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn flush(session: &mut ServerConnection, mut socket: &TcpStream) -> io::Result<()> {
    while session.wants_write() {
        session.write_tls(&mut socket)?;
    }
    Ok(())
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(shared) = &self.session else { return self.socket.read(bytes) };
        // The session takes no more while what it has decrypted is not read.
        let mut chunk = [0; 4096];
        loop {
            match lock(shared).reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            // Other threads write meanwhile.
            let len = self.socket.read(&mut chunk)?;
            let mut session = lock(shared);
            let mut records = &chunk[..len];
            // An empty read signals the end to the session.
            loop {
                session.read_tls(&mut records)?;
                session.process_new_packets().map_err(io::Error::other)?;
                if records.is_empty() {
                    break;
                }
            }
            flush(&mut session, &self.socket)?;
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(shared) = &self.session else { return self.socket.write_vectored(parts) };
        let mut session = lock(shared);
        let len = session.writer().write_vectored(parts)?;
        flush(&mut session, &self.socket)?;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
