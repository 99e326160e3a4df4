//! Renewal of the token that authenticates a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use dcp_proto::consumer::{Connection, Token};
use dcp_proto::topology::Address;
use zeroize::{Zeroize, Zeroizing};

use super::now;
use crate::connect::{Connector, since_1970};
use crate::socket::Gather;

/// A newer token on its way.
type Coming = Pin<Box<dyn Future<Output = Option<Token>> + Send>>;

/// Gets newer tokens for a connection, and writes them: a packet with a token is erased once it is
/// written, unlike others.
pub(super) struct Renewal {
    address: Address,
    connector: Connector,
    coming: Option<Coming>,
    packet: Zeroizing<Vec<u8>>,
    /// Bytes of `packet` that are written.
    written: usize,
}

impl Renewal {
    pub(super) fn new(address: Address, connector: Connector) -> Self {
        Self { address, connector, coming: None, packet: Zeroizing::default(), written: 0 }
    }

    /// Does what the machine wants; ready once it has, with whether something was written.
    /// `is_between`: whether the packet before has been written whole.
    pub(super) fn poll<IO: Gather>(
        &mut self,
        cx: &mut Context<'_>,
        machine: &mut Connection,
        io: &mut IO,
        is_between: bool,
    ) -> Poll<io::Result<bool>> {
        if machine.poll_token_wanted() {
            let (connector, address) = (self.connector.clone(), self.address.clone());
            self.coming = Some(Box::pin(async move { connector.newer_token(address).await }));
        }
        if let Some(coming) = &mut self.coming
            && let Poll::Ready(token) = coming.as_mut().poll(cx)
        {
            self.coming = None;
            machine.renew_token(now(), since_1970(), token.as_ref());
            return Poll::Ready(Ok(false));
        }
        if self.packet.is_empty() && !(is_between && machine.poll_transmit_token(&mut *self.packet))
        {
            return Poll::Pending;
        }
        let left = self.packet.get(self.written..).unwrap_or_default();
        let written = ready!(Pin::new(io).poll_write(cx, left))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.written += written;
        if self.written >= self.packet.len() {
            self.packet.zeroize();
            self.written = 0;
        }
        Poll::Ready(Ok(true))
    }

    /// Whether a packet is partly written, before any other.
    pub(super) fn is_writing(&self) -> bool {
        !self.packet.is_empty()
    }
}
