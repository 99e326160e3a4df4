//! Poison packets: packets, and bytes that are none, that end one connection after another.

use std::collections::BTreeMap;
use std::error::Error as StdError;

use dcp_proto::consumer::{ConnectionError, ProtocolError, StreamPosition};
use dcp_proto::topology::Address;
use dcp_wire::{DecodeError, Seqno, Vbid};

use crate::Error;

/// How many connections one packet may end: beyond that, it is not requested again.
const MOST: u32 = 3;

/// What ended the last connections.
#[derive(Debug, Default)]
pub(super) struct PoisonPackets {
    /// The packet that ended the last connection, by vBucket.
    packets: BTreeMap<Vbid, Failures>,
    /// Bytes that are no packet and ended the last connection, by node.
    bytes: BTreeMap<Address, Garbled>,
}

/// Position of a vBucket: seqno and epoch.
type At = (Seqno, u32);

#[derive(Debug, Default)]
struct Garbled {
    /// Where the vBuckets of the node were last.
    at: BTreeMap<Vbid, At>,
    /// Connections that have ended so in a row.
    connections: u32,
}

#[derive(Debug)]
struct Failures {
    packet: ProtocolError,
    at: Option<At>,
    /// Connections that the packet has ended in a row.
    connections: u32,
}

impl PoisonPackets {
    /// A connection to a node was lost with these streams. Returns the error that ends the stream if
    /// a packet has ended too many connections without progress of its vBucket in between, or bytes
    /// that are no packet without progress of any vBucket.
    pub(super) fn lost(
        &mut self,
        node: Option<&Address>,
        error: &Error,
        streams: &[(Vbid, StreamPosition)],
    ) -> Option<Error> {
        let mut at = streams.iter().map(|(vbid, from)| {
            let at: At = (from.position.seqno, from.position.epoch);
            (*vbid, at)
        });
        match (error.source()?.downcast_ref()?, node) {
            (ConnectionError::Protocol(packet), _) => {
                let at = at.find(|(vbid, _)| *vbid == packet.vbid);
                self.packet(packet, at.map(|(_, at)| at))
            }
            (ConnectionError::Framing(error), Some(node)) => self.bytes(node, *error, at),
            _ => None,
        }
    }

    fn packet(&mut self, packet: &ProtocolError, at: Option<At>) -> Option<Error> {
        let new = || Failures { packet: *packet, at, connections: 0 };
        let failures = self.packets.entry(packet.vbid).or_insert_with(new);
        if !failures.packet.is_same_packet(packet) || failures.at != at {
            *failures = new();
        }
        failures.connections += 1;
        (failures.connections >= MOST).then(|| Error::unusable_packet(packet))
    }

    fn bytes(
        &mut self,
        node: &Address,
        error: DecodeError,
        streams: impl Iterator<Item = (Vbid, At)>,
    ) -> Option<Error> {
        let garbled = self.bytes.entry(node.clone()).or_default();
        // Not every connection lasts until all of its streams are requested.
        for (vbid, at) in streams {
            if garbled.at.insert(vbid, at).is_some_and(|last| last != at) {
                garbled.connections = 0;
            }
        }
        garbled.connections += 1;
        (garbled.connections >= MOST).then(|| Error::unusable_bytes(node, error))
    }
}

#[cfg(test)]
mod tests {
    use dcp_proto::Position;
    use dcp_proto::consumer::{Misbehaviour, ProtocolErrorKind};
    use dcp_wire::{Opaque, Opcode};

    use super::*;
    use crate::ErrorKind;

    fn packet(seqno: u64) -> ProtocolError {
        ProtocolError {
            kind: ProtocolErrorKind::PeerMisbehaved(Misbehaviour::UnexpectedPacket),
            opcode: Opcode::DCP_DELETION,
            vbid: Vbid(5),
            seqno: Some(Seqno(seqno)),
            opaque: Opaque(0),
        }
    }

    fn lose(packets: &mut PoisonPackets, packet: ProtocolError, at: u64) -> Option<Error> {
        let error = Error::new(ErrorKind::Protocol, "x").with_source(ConnectionError::from(packet));
        let position = Position { seqno: Seqno(at), ..Position::EARLIEST };
        packets.lost(Some(&node(1)), &error, &[(Vbid(5), StreamPosition::new(position))])
    }

    fn node(port: u16) -> Address {
        Address::new("node", port)
    }

    #[test]
    fn packet_that_ends_three_connections_in_a_row_ends_the_stream() {
        let mut packets = PoisonPackets::default();
        for round in 0..2 {
            let opaque = Opaque(round);
            assert!(lose(&mut packets, ProtocolError { opaque, ..packet(9) }, 8).is_none());
        }
        let error = lose(&mut packets, packet(9), 8).unwrap();
        assert_eq!(error.kind(), ErrorKind::UnusablePacket);
        assert_eq!((error.vbid(), error.seqno()), (Some(Vbid(5)), Some(Seqno(9))));
        assert_eq!(error.opcode(), Some(Opcode::DCP_DELETION));
        let text = error.to_string();
        for part in ["vb:5", "seqno 9", "DCP_DELETION", "unexpected packet"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn packet_that_differs_or_a_stream_that_advances_resets_the_count() {
        let mut packets = PoisonPackets::default();
        for at in 0..10 {
            assert!(lose(&mut packets, packet(9), at).is_none(), "it has moved");
        }
        for seqno in 10..20 {
            assert!(lose(&mut packets, packet(seqno), 9).is_none(), "another packet");
        }
        let lost = Error::new(ErrorKind::ConnectionLost, "x").with_source(ConnectionError::Idle);
        for _ in 0..10 {
            assert!(packets.lost(Some(&node(1)), &lost, &[]).is_none(), "no packet's fault");
        }
    }

    /// A connection to `port` that ends by bytes that are no packet, with vBuckets at these seqnos.
    fn garble(packets: &mut PoisonPackets, port: u16, at: &[(u16, u64)]) -> Option<Error> {
        let framing = ConnectionError::Framing(DecodeError::InvalidMagic(0x7f));
        let error = Error::new(ErrorKind::Protocol, "x").with_source(framing);
        let stream = |&(vbid, seqno): &(u16, u64)| {
            let position = Position { seqno: Seqno(seqno), ..Position::EARLIEST };
            (Vbid(vbid), StreamPosition::new(position))
        };
        let streams: Vec<_> = at.iter().map(stream).collect();
        packets.lost(Some(&node(port)), &error, &streams)
    }

    #[test]
    fn bytes_that_are_no_packet_end_the_stream_after_three_connections_without_progress() {
        let mut packets = PoisonPackets::default();
        for seqno in 0..10 {
            assert!(garble(&mut packets, 1, &[(5, 3), (6, seqno)]).is_none(), "one has moved");
            assert!(garble(&mut packets, 2, &[(5, 3), (6, seqno)]).is_none(), "another node");
        }
        // Only one of them was requested before the connection ended.
        assert!(garble(&mut packets, 1, &[(5, 3)]).is_none());
        let error = garble(&mut packets, 1, &[(5, 3), (6, 9)]).unwrap();
        assert_eq!((error.kind(), error.vbid()), (ErrorKind::UnusablePacket, None));
        let text = error.to_string();
        assert!(text.starts_with("node:1 keeps sending bytes that are no packet"), "{text}");
    }
}
