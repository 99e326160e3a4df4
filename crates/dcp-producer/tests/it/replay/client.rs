//! The client of a recorded connection.

use std::net::SocketAddr;
use std::time::Duration;

use dcp_producer::{MemoryStream, Producer};
use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode};
use tokio::io::AsyncWriteExt;

use super::compare::Sides;

/// Longest wait for something that must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Opaque of the questions by which the client learns that the server has done everything else.
const FENCE: u32 = 0xfe00_0001;

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    peer: Peer<MemoryStream>,
    pub(super) sides: Sides,
    is_open: bool,
    scram: Option<ScramClient>,
    challenge: Vec<u8>,
}

impl Client {
    pub(super) fn connect(producer: &Producer, address: SocketAddr) -> Self {
        Self {
            peer: Peer::new(producer.dial(address).unwrap()),
            sides: Sides::default(),
            is_open: true,
            scram: None,
            challenge: Vec::new(),
        }
    }

    /// Sends a packet; a server that has closed the connection need not take it.
    pub(super) async fn send(&mut self, packet: &[u8]) {
        if self.is_open && self.peer.io.write_all(packet).await.is_err() {
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
        Some(encoded(&frame.with_value(&message)))
    }

    /// Waits until the server has answered everything, and sent what streams had to say.
    pub(super) async fn settle(&mut self) {
        // What a connection does for streams it does after it answered: the second question is
        // answered after that.
        for turn in 0..2 {
            let question = Frame::request(Opcode::GET_ERROR_MAP)
                .with_opaque(Opaque(FENCE + turn))
                .with_value(&[0, 2]);
            self.send(&encoded(&question)).await;
            while self.is_open && !self.take(FENCE + turn).await {}
        }
    }

    /// Waits until the server has sent `count` packets in all, and no longer.
    pub(super) async fn await_packets(&mut self, count: usize) {
        while self.is_open && self.sides.our_count() < count {
            self.take(0).await;
        }
    }

    /// Waits until the server closes the connection.
    pub(super) async fn drain(&mut self) {
        while self.is_open {
            self.take(0).await;
        }
    }

    /// Takes the next packet, or notes that there is none; whether it answers the question `fence`.
    async fn take(&mut self, fence: u32) -> bool {
        let packet = match tokio::time::timeout(ANSWER_TIMEOUT, self.peer.next()).await {
            Ok(Some(packet)) => packet,
            closed_or_late => {
                if closed_or_late.is_err() {
                    self.sides.note("the server says nothing more");
                }
                self.is_open = false;
                self.sides.end_ours();
                return false;
            }
        };
        let (opcode, opaque) = (packet.opcode(), packet.opaque().0);
        if opcode == Opcode::SASL_AUTH {
            self.challenge = packet.frame().value.to_vec();
        }
        let is_fence = opcode == Opcode::GET_ERROR_MAP && opaque >= FENCE;
        if !is_fence {
            self.sides.push_ours(packet.bytes());
        }
        is_fence && opaque == fence
    }
}
