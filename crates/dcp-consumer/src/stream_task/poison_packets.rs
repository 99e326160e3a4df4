//! Poison packets: packets that end one connection after another.

use std::collections::BTreeMap;
use std::error::Error as StdError;

use dcp_proto::consumer::{ConnectionError, ProtocolError, StreamPosition};
use dcp_wire::{Seqno, Vbid};

use crate::Error;

/// How many connections one packet may end: beyond that, it is not requested again.
const MOST: u32 = 3;

/// The packet that ended the last connection, by vBucket.
#[derive(Debug, Default)]
pub(super) struct PoisonPackets(BTreeMap<Vbid, Failures>);

#[derive(Debug)]
struct Failures {
    packet: ProtocolError,
    /// Position of the vBucket: seqno and epoch.
    at: Option<(Seqno, u32)>,
    /// Connections that the packet has ended in a row.
    connections: u32,
}

impl PoisonPackets {
    /// A connection was lost with these streams. Returns the error that ends the stream if a packet
    /// has ended too many connections without progress of its vBucket in between.
    pub(super) fn lost(
        &mut self,
        error: &Error,
        streams: &[(Vbid, StreamPosition)],
    ) -> Option<Error> {
        let source = error.source()?.downcast_ref()?;
        let ConnectionError::Protocol(packet) = source else { return None };
        let from = streams.iter().find(|(vbid, _)| *vbid == packet.vbid);
        let at = from.map(|(_, from)| (from.position.seqno, from.position.epoch));
        let new = || Failures { packet: *packet, at, connections: 0 };
        let failures = self.0.entry(packet.vbid).or_insert_with(new);
        if !failures.packet.is_same_packet(packet) || failures.at != at {
            *failures = new();
        }
        failures.connections += 1;
        (failures.connections >= MOST).then(|| Error::unusable_packet(packet))
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
        packets.lost(&error, &[(Vbid(5), StreamPosition::new(position))])
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
            assert!(packets.lost(&lost, &[]).is_none(), "no packet's fault");
        }
    }
}
