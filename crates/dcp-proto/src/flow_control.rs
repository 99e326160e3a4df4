//! How much each packet counts towards the flow-control window (server page "flow-control").
//!
//! When the consumer acknowledges is in `consumer/window.rs`, when the producer stops in
//! `producer/window.rs`.

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
