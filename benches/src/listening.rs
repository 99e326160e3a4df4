//! Loopback listeners of the programs that clients are measured against.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

use crate::Error;

/// Whether this process may use the congestion control `name`.
#[must_use]
pub fn may_choose(name: &str) -> bool {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
        .and_then(|socket| socket.set_tcp_congestion(name.as_bytes()))
        .is_ok()
}

/// Listens on a loopback port chosen by the system; also returns the congestion control of its
/// connections, which is `congestion_control` if given.
///
/// # Errors
/// If the system refuses the port or the congestion control.
pub fn listen(congestion_control: Option<&str>) -> Result<(TcpListener, String), Error> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    if let Some(name) = congestion_control {
        socket.set_tcp_congestion(name.as_bytes())?;
    }
    let in_force = socket.tcp_congestion()?;
    let in_force = in_force.split(|&byte| byte == 0).next().unwrap_or_default();
    let in_force = String::from_utf8_lossy(in_force).into_owned();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    socket.listen(16)?;
    Ok((TcpListener::from(socket), in_force))
}
