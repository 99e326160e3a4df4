//! A way from a client to an embedded cluster, over loopback, on which somebody else may take over
//! the server's part.

use std::io;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::BytesMut;
use dcp_consumer::{Dial, Dialing, Transport};
use dcp_proto::topology::Address;
use dcp_test::peer::Peer;
use dcp_wire::message::StreamRequest;
use dcp_wire::{Frame, Opcode};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A stream that is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    pub(crate) vbid: dcp_wire::Vbid,
    pub(crate) opaque: dcp_wire::Opaque,
    /// Last seqno the client has.
    pub(crate) seqno: u64,
}

impl Open {
    pub(crate) fn of(request: &Frame<'_>) -> Option<Self> {
        let request = StreamRequest::decode(request).ok()?;
        let StreamRequest { vbid, opaque, start_seqno, .. } = request;
        Some(Self { vbid, opaque, seqno: start_seqno.0 })
    }
}

/// A connection of a client whose server's part is to be taken over.
pub(crate) struct Taken {
    pub(crate) client: TcpStream,
    /// What the client has sent and nobody has read.
    pub(crate) input: BytesMut,
    pub(crate) streams: Vec<Open>,
    /// The cluster map that the server told.
    pub(crate) map: Vec<u8>,
}

/// Whoever takes over.
pub(crate) type Takeover =
    Box<dyn Fn(Taken) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send>> + Send + Sync>;

/// Leads to the cluster, until DCP is open, `streams` streams are, and `start` is set.
pub(crate) struct Tap {
    pub(crate) streams: usize,
    pub(crate) start: watch::Sender<bool>,
    pub(crate) takeover: Takeover,
    /// Connections that are taken over at the moment.
    pub(crate) live: AtomicUsize,
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").finish_non_exhaustive()
    }
}

/// As [`Dial`] wants it.
#[derive(Clone, Debug)]
pub(crate) struct Dialer(pub(crate) Arc<Tap>);

impl Dial for Dialer {
    fn dial(&self, address: &Address) -> Dialing {
        let node = (address.host.clone(), address.port);
        let tap = Arc::clone(&self.0);
        Box::pin(async move {
            let server = TcpStream::connect((node.0.as_str(), node.1)).await?;
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let client = TcpStream::connect(listener.local_addr()?).await?;
            let (far, _) = listener.accept().await?;
            for socket in [&server, &client, &far] {
                socket.set_nodelay(true)?;
            }
            tokio::spawn(async move {
                let taken = tap.carry(server, far).await?;
                tap.live.fetch_add(1, Ordering::SeqCst);
                let over = (tap.takeover)(taken).await;
                tap.live.fetch_sub(1, Ordering::SeqCst);
                over
            });
            Ok(Box::new(client) as Box<dyn Transport>)
        })
    }
}

impl Tap {
    /// Carries packets to and fro until it is time to take over.
    async fn carry(&self, server: TcpStream, client: TcpStream) -> io::Result<Taken> {
        let (mut server, mut client) = (Peer::new(server), Peer::new(client));
        let (mut streams, mut map, mut is_dcp, mut answered) = (Vec::new(), Vec::new(), false, 0);
        let mut start = self.start.subscribe();
        loop {
            if is_dcp && answered >= self.streams && *start.borrow_and_update() {
                return Ok(Taken { client: client.io, input: client.input, streams, map });
            }
            tokio::select! {
                packet = client.next() => {
                    let packet = packet.ok_or(io::ErrorKind::UnexpectedEof)?;
                    is_dcp |= packet.opcode() == Opcode::DCP_OPEN;
                    if packet.opcode() == Opcode::DCP_STREAM_REQ {
                        streams.extend(Open::of(&packet.frame()));
                    }
                    server.io.write_all(packet.bytes()).await?;
                }
                packet = server.next() => {
                    let packet = packet.ok_or(io::ErrorKind::UnexpectedEof)?;
                    match packet.opcode() {
                        Opcode::DCP_STREAM_REQ => answered += 1,
                        Opcode::GET_CLUSTER_CONFIG => map = packet.frame().value.to_vec(),
                        _ => {}
                    }
                    client.io.write_all(packet.bytes()).await?;
                }
                _ = start.changed() => {}
            }
        }
    }
}
