//! The protocol's packets among the bytes that pass, and what flow control makes of them.
//!
//! Read by their layout, without the decoders and the accounts of either side.

use tokio::time::Instant;

/// Length of a header.
const HEADER: usize = 24;
/// Of a request, from either side; with framing extras.
const REQUESTS: [u8; 2] = [0x80, 0x08];
/// Stream end, snapshot marker, mutation, deletion, expiration, vBucket state, system event,
/// prepare, seqno acknowledged (not counted), commit, abort, seqno advanced, out-of-order snapshot.
const COUNTED: [u8; 12] = [0x55, 0x56, 0x57, 0x58, 0x59, 0x5b, 0x5f, 0x60, 0x62, 0x63, 0x64, 0x65];
const BUFFER_ACK: u8 = 0x5d;
const MUTATION: u8 = 0x57;

/// What passes in one direction.
#[derive(Debug, Default)]
pub(crate) struct Packets {
    /// Of the one under way.
    begun: Vec<u8>,
    last: Vec<u8>,
}

impl Packets {
    /// Takes the next bytes; returns the packets that are whole by them.
    pub(crate) fn follow(&mut self, mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut whole = Vec::new();
        while !bytes.is_empty() {
            let wanted = Self::len_of(&self.begun).unwrap_or(HEADER);
            let (now, rest) = bytes.split_at(bytes.len().min(wanted - self.begun.len()));
            self.begun.extend_from_slice(now);
            bytes = rest;
            if Self::len_of(&self.begun) == Some(self.begun.len()) {
                self.last = std::mem::take(&mut self.begun);
                whole.push(self.last.clone());
            }
        }
        whole
    }

    /// Length of a packet whose header is there.
    fn len_of(packet: &[u8]) -> Option<usize> {
        let body = packet.get(8..12).filter(|_| packet.len() >= HEADER)?;
        let body = u32::from_be_bytes(body.try_into().expect("four bytes"));
        Some(HEADER + usize::try_from(body).expect("a length"))
    }

    /// The last packet, if it is a change and nothing of the next one has come.
    pub(crate) fn last_change(&self) -> Option<&[u8]> {
        let is_change = self.last.get(..2) == Some(&[0x80, MUTATION]);
        (self.begun.is_empty() && is_change).then_some(&self.last)
    }
}

/// Bytes sent against bytes acknowledged on one connection.
#[derive(Debug, Default)]
pub(crate) struct Account {
    sent: u64,
    acknowledged: u64,
    /// When either did last.
    moved: Option<Instant>,
}

impl Account {
    /// Counts a packet, to the client or from it.
    pub(crate) fn count(&mut self, is_down: bool, packet: &[u8]) -> Result<(), String> {
        let (Some(magic), Some(opcode)) = (packet.first(), packet.get(1)) else { return Ok(()) };
        if !REQUESTS.contains(magic) {
            return Ok(());
        }
        if is_down && COUNTED.contains(opcode) {
            self.sent += packet.len() as u64;
            self.moved = Some(Instant::now());
        }
        if !is_down && *opcode == BUFFER_ACK {
            let bytes = packet.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok());
            self.moved = Some(Instant::now());
            self.acknowledged += bytes.map_or(0, u32::from_be_bytes) as u64;
            if self.acknowledged > self.sent {
                let Self { sent, acknowledged, .. } = self;
                return Err(format!("{acknowledged} bytes acknowledged of {sent} sent"));
            }
        }
        Ok(())
    }

    /// When it was last counted to.
    pub(crate) fn moved(&self) -> Option<Instant> {
        self.moved
    }

    /// Bytes not acknowledged.
    pub(crate) fn outstanding(&self) -> i64 {
        self.sent as i64 - self.acknowledged as i64
    }
}
