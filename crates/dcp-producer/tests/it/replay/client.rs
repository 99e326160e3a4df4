//! The client of a recorded connection.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use dcp_producer::{MemoryStream, Producer};
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::compare::Sides;

/// Longest wait for something that must come.
const PATIENCE: Duration = Duration::from_secs(30);

/// Opaque of the questions by which the client learns that the server has done everything else.
const FENCE: u32 = 0xfe00_0001;

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    socket: MemoryStream,
    input: BytesMut,
    pub(super) sides: Sides,
    is_open: bool,
    scram: Option<ScramClient>,
    challenge: Vec<u8>,
}

impl Client {
    pub(super) fn connect(producer: &Producer, address: SocketAddr) -> Self {
        Self {
            socket: producer.dial(address).unwrap(),
            input: BytesMut::new(),
            sides: Sides::default(),
            is_open: true,
            scram: None,
            challenge: Vec::new(),
        }
    }

    /// Sends a packet; a server that has closed the connection need not take it.
    pub(super) async fn send(&mut self, packet: &[u8]) {
        if self.is_open && self.socket.write_all(packet).await.is_err() {
            self.drain().await;
        }
    }

    /// A recorded packet of SCRAM as this login needs it: nonces and proofs never come again.
    pub(super) fn scram(&mut self, packet: &[u8]) -> Option<Vec<u8>> {
        let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).ok()??;
        let mechanism = Mechanism::from_name(frame.key)?;
        if mechanism.reveals_password() {
            return None;
        }
        let message = match frame.header.opcode {
            Opcode::SASL_AUTH => {
                let scram = ScramClient::new(mechanism, "@admin", "password", "replayed nonce");
                self.scram.insert(scram.unwrap()).first_message()
            }
            Opcode::SASL_STEP => self.scram.as_mut()?.respond(&self.challenge).unwrap(),
            _ => return None,
        };
        let mut out = Vec::new();
        frame.with_value(&message).encode(&mut out).unwrap();
        Some(out)
    }

    /// Waits until the server has answered everything, and sent what streams had to say.
    pub(super) async fn settle(&mut self) {
        // What a connection does for streams it does after it answered: the second question is
        // answered after that.
        for turn in 0..2 {
            let question = Frame::request(Opcode::GET_ERROR_MAP)
                .with_opaque(Opaque(FENCE + turn))
                .with_value(&[0, 2]);
            let mut packet = Vec::new();
            question.encode(&mut packet).unwrap();
            self.send(&packet).await;
            while self.is_open && !self.take(FENCE + turn) {
                self.read().await;
            }
        }
    }

    /// Waits until the server has sent `count` packets in all, and no longer.
    pub(super) async fn await_packets(&mut self, count: usize) {
        while self.is_open && self.sides.our_count() < count {
            self.read().await;
            self.take(0);
        }
    }

    /// Waits until the server closes the connection.
    pub(super) async fn drain(&mut self) {
        while self.is_open {
            self.read().await;
            self.take(0);
        }
    }

    async fn read(&mut self) {
        let read = tokio::time::timeout(PATIENCE, self.socket.read_buf(&mut self.input)).await;
        if read.is_err() {
            self.sides.note("the server says nothing more");
        }
        if !matches!(read, Ok(Ok(1..))) {
            self.take(0);
            self.is_open = false;
            self.sides.end_ours();
        }
    }

    /// Takes the packets that have arrived; whether one of them answers the question `fence`.
    fn take(&mut self, fence: u32) -> bool {
        while let Some((frame, len)) = Frame::parse(&self.input, MAX_BODY_LEN).unwrap() {
            let (opcode, opaque) = (frame.header.opcode, frame.header.opaque.0);
            if opcode == Opcode::SASL_AUTH {
                self.challenge = frame.value.to_vec();
            }
            let is_fence = opcode == Opcode::GET_ERROR_MAP && opaque >= FENCE;
            if !is_fence {
                self.sides.push_ours(&self.input[..len]);
            }
            self.input.advance(len);
            if is_fence && opaque == fence {
                return true;
            }
        }
        false
    }
}
