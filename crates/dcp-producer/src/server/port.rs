//! A port of a node: closed while the node does not run.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::cluster::NodePower;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A port of a node, which refuses connections while the node does not run.
#[derive(Debug)]
pub(super) struct Port {
    address: SocketAddr,
    /// `None` while the node does not run.
    listener: Option<TcpListener>,
    /// Reserves the port meanwhile.
    reserved: Option<Socket>,
    /// As chosen for the first listener; empty for the system's default.
    congestion_control: Vec<u8>,
    power: Arc<NodePower>,
    is_on: watch::Receiver<bool>,
}

impl Port {
    pub(super) fn new(address: SocketAddr, listener: TcpListener, power: Arc<NodePower>) -> Self {
        power.add_port();
        let is_on = power.follow();
        let congestion_control = super::listeners::congestion_control(&listener);
        let listener = Some(listener);
        Self { address, listener, reserved: None, congestion_control, power, is_on }
    }

    /// The next connection; none comes while the node does not run.
    pub(super) async fn accept(&mut self) -> io::Result<TcpStream> {
        loop {
            let is_on = *self.is_on.borrow_and_update();
            match self.listener.take() {
                Some(listener) if is_on => {
                    let listener = self.listener.insert(listener);
                    tokio::select! {
                        biased;
                        changed = self.is_on.changed() => drop(changed),
                        accepted = listener.accept() => return Ok(accepted?.0),
                    }
                }
                Some(listener) => self.close(listener),
                None if is_on => self.open()?,
                // The sender lives as long as `self`.
                None => drop(self.is_on.changed().await),
            }
        }
    }

    fn close(&mut self, listener: TcpListener) {
        drop(listener);
        match self.reserve() {
            Ok(socket) => self.reserved = Some(socket),
            Err(error) => tracing::debug!(%error, "cannot keep the port of a stopped node"),
        }
        self.power.note_port(false);
    }

    fn open(&mut self) -> io::Result<()> {
        let socket = match self.reserved.take() {
            Some(socket) => socket,
            None => self.reserve()?,
        };
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        self.listener = Some(TcpListener::from_std(socket.into())?);
        self.power.note_port(true);
        Ok(())
    }

    /// A socket that has the port but refuses connections.
    fn reserve(&self) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM, None)?;
        // Connections of the node's last run may still be closing.
        socket.set_reuse_address(true)?;
        super::listeners::set_congestion_control(&socket, &self.congestion_control)?;
        socket.bind(&self.address.into())?;
        Ok(socket)
    }
}
