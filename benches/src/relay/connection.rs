//! A client's connection: packets in two directions, and those sent from memory.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use dcp_proto::flow_control::counted_bytes;
use dcp_wire::message::{BufferAck, Control};
use dcp_wire::{Frame, Header, MAX_BODY_LEN, Opcode, Vbid};

use super::outbox::{Outbox, before_response, front};
use super::ports::Ports;
use super::recordings::{Recorder, Store, Terms};
use super::socket::Socket;
use crate::Error;
use crate::sender::WRITE_LEN;
use crate::writes::Writes;

/// What a client has negotiated and requested.
#[derive(Debug, Default)]
struct Client {
    terms: Terms,
    /// Whether STREAM_END follows the answer to a close.
    ends_closed: bool,
    /// vBuckets whose last stream comes from memory.
    from_memory: BTreeSet<Vbid>,
}

/// State shared by the directions of a connection.
#[derive(Debug)]
pub(super) struct Connection {
    /// Both sockets, used to close them while another thread writes.
    client: Socket,
    server: TcpStream,
    to_client: Mutex<Socket>,
    to_server: Mutex<TcpStream>,
    outbox: Outbox,
    recorder: Mutex<Recorder>,
    store: Arc<Store>,
    ports: Arc<Ports>,
    writes: Writes,
}

impl Connection {
    /// Relays between a client and the node at `server` until either closes its connection.
    ///
    /// # Errors
    /// If the node is unreachable or the client sends invalid packets.
    pub(super) fn serve(
        client: Socket,
        server: SocketAddr,
        store: Arc<Store>,
        ports: Arc<Ports>,
        writes: Writes,
    ) -> Result<(), Error> {
        let server = TcpStream::connect(server)?;
        server.set_nodelay(true)?;
        let connection = Arc::new(Self {
            client: client.try_clone()?,
            server: server.try_clone()?,
            to_client: Mutex::new(client.try_clone()?),
            to_server: Mutex::new(server.try_clone()?),
            outbox: Outbox::default(),
            recorder: Mutex::default(),
            store,
            ports,
            writes,
        });
        connection.spawn(move |connection| {
            read_packets(server, |packets| connection.take_of_server(packets))
        })?;
        let mut asks = Client::default();
        let result = read_packets(client, |packets| {
            let mut rest = &*packets;
            while let Some((frame, len)) = Frame::parse(rest, MAX_BODY_LEN)? {
                let (packet, after) = rest.split_at(len);
                connection.take_of_client(&frame, packet, &mut asks)?;
                rest = after;
            }
            Ok(())
        });
        connection.close();
        result
    }

    fn spawn(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let connection = Arc::clone(self);
        thread::Builder::new().name("relay".to_owned()).spawn(move || {
            report(work(&connection));
            connection.close();
        })?;
        Ok(())
    }

    /// Handles a packet from the client.
    fn take_of_client(
        self: &Arc<Self>,
        frame: &Frame<'_>,
        packet: &[u8],
        client: &mut Client,
    ) -> Result<(), Error> {
        let opaque = frame.header.opaque;
        if frame.header.magic.is_response() {
            return self.write_to_server(packet);
        }
        client.terms.negotiate(frame);
        match frame.header.opcode {
            Opcode::DCP_OPEN => self.spawn(|connection| {
                let writes = connection.writes;
                connection
                    .outbox
                    .play(|packets| writes.write(&mut *lock(&connection.to_client), packets))
            })?,
            Opcode::DCP_CONTROL => {
                let control = Control::decode(frame)?;
                if control.key == Control::CONNECTION_BUFFER_SIZE.as_bytes() {
                    self.outbox.set_limit(std::str::from_utf8(control.value)?.parse()?);
                }
                if control.key == Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM.as_bytes() {
                    client.ends_closed = control.value == b"true";
                }
            }
            // The relay itself acknowledges to the producer what came from it (`take_of_server`).
            Opcode::DCP_BUFFER_ACK => {
                self.outbox.give_back(u64::from(BufferAck::decode(frame)?.bytes));
                return Ok(());
            }
            Opcode::DCP_STREAM_REQ => {
                let (vbid, terms) = (frame.header.vbid(), client.terms.of_stream(frame));
                if let Some(recording) = self.store.find(&terms) {
                    self.outbox.ask(vbid, recording, opaque);
                    client.from_memory.insert(vbid);
                    return Ok(());
                }
                client.from_memory.remove(&vbid);
                lock(&self.recorder).begin(opaque, terms);
            }
            // The producer does not know this stream.
            Opcode::DCP_CLOSE_STREAM if client.from_memory.contains(&frame.header.vbid()) => {
                self.outbox.ask_to_close(frame.header.vbid(), opaque, client.ends_closed);
                return Ok(());
            }
            _ => {}
        }
        self.outbox.pass_on();
        self.write_to_server(packet)
    }

    /// Handles whole packets from the producer.
    fn take_of_server(&self, packets: &mut [u8]) -> Result<(), Error> {
        lock(&self.recorder).take(packets, &self.store)?;
        let mut rest = packets;
        while let Some(head) = rest.first_chunk::<{ Header::LEN }>() {
            let header = Header::decode(head)?;
            let packet;
            if counted_bytes(&header) == 0 {
                (packet, rest) = rest.split_at_mut(header.packet_len());
                self.answer(&header, packet)?;
            } else {
                let reserved = self.outbox.reserve()?;
                let of_streams = before_response(rest)?;
                let mut sent = front(&mut rest[..of_streams], reserved, None)?;
                if sent.len == 0 {
                    // Larger than the whole buffer: send it by itself, as a producer may.
                    sent = front(&mut rest[..header.packet_len()], u64::MAX, None)?;
                }
                self.outbox.settle(reserved, sent.counted);
                (packet, rest) = rest.split_at_mut(sent.len);
                self.write_to_client(packet)?;
                let mut ack = Vec::new();
                BufferAck { bytes: u32::try_from(sent.counted)? }.encode(&mut ack)?;
                self.write_to_server(&ack)?;
            }
        }
        Ok(())
    }

    /// Forwards a packet outside streams, with ports replaced.
    fn answer(&self, header: &Header, packet: &mut [u8]) -> Result<(), Error> {
        self.ports.lead_here(&mut packet[Header::LEN..]);
        if !header.magic.is_response() {
            return self.write_to_client(packet);
        }
        self.outbox.await_turn()?;
        self.write_to_client(packet)?;
        self.outbox.pass_answer_on();
        Ok(())
    }

    fn write_to_client(&self, bytes: &[u8]) -> Result<(), Error> {
        Ok(lock(&self.to_client).write_all(bytes)?)
    }

    fn write_to_server(&self, bytes: &[u8]) -> Result<(), Error> {
        Ok(lock(&self.to_server).write_all(bytes)?)
    }

    /// Ends all directions, which may be waiting for a socket or for flow control.
    fn close(&self) {
        self.outbox.close();
        self.client.shutdown();
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

/// Processes whole packets as they arrive, until the connection ends.
fn read_packets(
    mut from: impl Read,
    mut take: impl FnMut(&mut [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut input = Vec::new();
    let mut chunk = vec![0; WRITE_LEN];
    loop {
        let len = from.read(&mut chunk)?;
        if len == 0 {
            return Ok(());
        }
        input.extend_from_slice(&chunk[..len]);
        // Refuse impossible lengths.
        Frame::wanted(&input, MAX_BODY_LEN)?;
        let whole = front(&mut input, u64::MAX, None)?.len;
        take(&mut input[..whole])?;
        input.drain(..whole);
    }
}

/// Prints an error, unless a peer closed its connection.
pub(super) fn report(result: Result<(), Error>) {
    if let Err(error) = result
        && !error.is::<io::Error>()
    {
        // The caller notices when the connection ends.
        let _ = writeln!(io::stderr(), "relay: {error}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use dcp_wire::message::{StreamAddress, StreamEnd, StreamEndReason};
    use dcp_wire::{Opaque, Status, Vbid};

    use super::*;

    fn request(opcode: Opcode, vbid: u16, opaque: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let frame = Frame::request(opcode).with_vbid(Vbid(vbid)).with_opaque(Opaque(opaque));
        frame.encode(&mut bytes).unwrap();
        bytes
    }

    fn response(opcode: Opcode, opaque: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let frame = Frame::response(opcode, Status::SUCCESS).with_opaque(Opaque(opaque));
        frame.encode(&mut bytes).unwrap();
        bytes
    }

    fn stream_end(vbid: u16, opaque: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let to = StreamAddress { vbid: Vbid(vbid), opaque: Opaque(opaque), stream_id: None };
        StreamEnd { reason: StreamEndReason::OK }.encode(to, &mut bytes).unwrap();
        bytes
    }

    /// Writes `says`, then expects `hears` within 20 seconds.
    fn exchange(mut socket: &TcpStream, says: &[u8], hears: &[u8]) {
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(says).unwrap();
        let mut heard = vec![0; hears.len()];
        socket.read_exact(&mut heard).unwrap();
        assert_eq!(heard, hears);
    }

    #[test]
    fn a_response_right_after_changes_counts_as_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let client = TcpStream::connect(at).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        thread::spawn(move || {
            let accepted = Socket::new(accepted, None).unwrap();
            let ports = Arc::new(Ports::new(&[]).unwrap());
            let _ = Connection::serve(accepted, at, Arc::default(), ports, Writes::Large);
        });
        let (node, _) = listener.accept().unwrap();
        let stream = |vbid, opaque| request(Opcode::DCP_STREAM_REQ, vbid, opaque);
        let opened = |opaque| response(Opcode::DCP_STREAM_REQ, opaque);
        // Records the stream of vBucket 0.
        let open = [request(Opcode::DCP_OPEN, 0, 9), stream(0, 1)].concat();
        exchange(&client, &open, &[]);
        exchange(&node, &[], &open);
        let answer = [response(Opcode::DCP_OPEN, 9), opened(1), stream_end(0, 1)].concat();
        exchange(&node, &answer, &[]);
        exchange(&client, &[], &answer);
        let mut ack = Vec::new();
        let bytes = u32::try_from(stream_end(0, 1).len()).unwrap();
        BufferAck { bytes }.encode(&mut ack).unwrap();
        exchange(&node, &[], &ack);
        // The response to the second request arrives together with a message of a stream.
        let more = [stream(1, 2), request(Opcode::GET_CLUSTER_CONFIG, 0, 3)].concat();
        exchange(&client, &more, &[]);
        exchange(&node, &[], &more);
        let of_node = [opened(2), stream_end(1, 2), response(Opcode::GET_CLUSTER_CONFIG, 3)];
        exchange(&node, &of_node.concat(), &[]);
        exchange(&client, &[], &of_node.concat());
        // So it is the turn of a stream from memory.
        exchange(&client, &stream(0, 4), &[opened(4), stream_end(0, 4)].concat());
        // It has ended, which the relay knows and the node does not.
        let mut ended = Vec::new();
        let refusal = Frame::response(Opcode::DCP_CLOSE_STREAM, Status::KEY_ENOENT);
        refusal.with_opaque(Opaque(5)).encode(&mut ended).unwrap();
        exchange(&client, &request(Opcode::DCP_CLOSE_STREAM, 0, 5), &ended);
    }
}
