//! How much each packet counts towards the flow-control window (server page "flow-control").
//!
//! When the consumer acknowledges is in `consumer/window.rs`, when the producer stops in
//! `window.rs` of `dcp-producer-proto`.

use dcp_wire::{Header, Opcode};

/// Bytes that a producer's packet counts towards its window; 0 for packets that do not count.
///
/// Both ends use this function: the classic bug is a header that only one side counts.
#[must_use]
pub const fn counted_bytes(header: &Header) -> u64 {
    if header.magic.is_response() {
        return 0;
    }
    let packet = header.packet_len() as u64;
    match header.opcode {
        Opcode::DCP_PREPARE => packet + PREPARE_SURPLUS,
        Opcode::DCP_STREAM_END
        | Opcode::DCP_SNAPSHOT_MARKER
        | Opcode::DCP_MUTATION
        | Opcode::DCP_DELETION
        | Opcode::DCP_EXPIRATION
        | Opcode::DCP_SET_VBUCKET_STATE
        | Opcode::DCP_SYSTEM_EVENT
        | Opcode::DCP_COMMIT
        | Opcode::DCP_ABORT
        | Opcode::DCP_SEQNO_ADVANCED
        | Opcode::DCP_OSO_SNAPSHOT
        | Opcode::DCP_CACHE_TRANSFER => packet,
        // The producer does not count the stream id of this packet.
        Opcode::DCP_CACHE_TRANSFER_END => packet - header.framing_extras_len as u64,
        _ => 0,
    }
}

/// The server counts a prepare as two bytes longer than it is (MB-46634).
const PREPARE_SURPLUS: u64 = 2;

#[cfg(test)]
mod tests {
    use dcp_wire::message::StreamAddress;
    use dcp_wire::{Frame, MAX_BODY_LEN, Magic, Status};

    use super::*;

    /// Counts a packet of 24 bytes of header, 3 of framing extras and 10 others.
    fn counted(magic: Magic, opcode: Opcode) -> u64 {
        let mut packet = Vec::new();
        let frame = match magic.is_response() {
            true => Frame::response(opcode, Status::SUCCESS),
            false => Frame::request(opcode),
        };
        let frame = frame.with_vbid(StreamAddress::default().vbid).with_value(&[0; 10]);
        let framing: &[u8] = if magic.is_alt() { &[0x22, 0, 7] } else { &[] };
        frame.with_framing_extras(framing).encode(&mut packet).unwrap();
        let (frame, _) = Frame::parse(&packet, MAX_BODY_LEN).unwrap().unwrap();
        assert_eq!(frame.header.magic, magic);
        counted_bytes(&frame.header)
    }

    #[test]
    fn flow_control_counts_every_opcode_whole_or_not_at_all() {
        let whole = [
            Opcode::DCP_STREAM_END,
            Opcode::DCP_SNAPSHOT_MARKER,
            Opcode::DCP_MUTATION,
            Opcode::DCP_DELETION,
            Opcode::DCP_EXPIRATION,
            Opcode::DCP_SET_VBUCKET_STATE,
            Opcode::DCP_SYSTEM_EVENT,
            Opcode::DCP_COMMIT,
            Opcode::DCP_ABORT,
            Opcode::DCP_SEQNO_ADVANCED,
            Opcode::DCP_OSO_SNAPSHOT,
            Opcode::DCP_CACHE_TRANSFER,
        ];
        for opcode in (0..=u8::MAX).map(Opcode) {
            let (plain, with_stream_id) = match opcode {
                Opcode::DCP_PREPARE => (36, 39),
                Opcode::DCP_CACHE_TRANSFER_END => (34, 34),
                _ if whole.contains(&opcode) => (34, 37),
                _ => (0, 0),
            };
            assert_eq!(counted(Magic::CLIENT_REQUEST, opcode), plain, "{opcode}");
            assert_eq!(counted(Magic::ALT_CLIENT_REQUEST, opcode), with_stream_id, "{opcode}");
            assert_eq!(counted(Magic::CLIENT_RESPONSE, opcode), 0, "{opcode}");
            assert_eq!(counted(Magic::ALT_CLIENT_RESPONSE, opcode), 0, "{opcode}");
        }
    }
}
