//! What is compared of a packet: all but what must differ.

use dcp_wire::{Cas, Datatype, Frame, MAX_BODY_LEN, Opcode, Status, snappy};

/// What of a packet must be the same; a compressed value is compared inflated, because two
/// compressors of one format need not choose the same copies.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) opcode: Opcode,
    pub(crate) vbid_or_status: u16,
    pub(crate) datatype: Datatype,
    pub(crate) opaque: u32,
    pub(crate) cas: Cas,
    pub(crate) framing_extras: Vec<u8>,
    pub(crate) extras: Vec<u8>,
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
}

pub(crate) fn seen(packet: &[u8]) -> Option<Seen> {
    let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
    let header = frame.header;
    if !header.opcode.is_dcp() || header.opcode == Opcode::DCP_NOOP {
        return None;
    }
    let is_error = header.magic.is_response()
        && !matches!(header.status(), Status::SUCCESS | Status::ROLLBACK);
    let value = match snappy::decompress(frame.value, MAX_BODY_LEN) {
        // Statuses are the protocol's, the words of an error body are each server's own.
        _ if is_error => Vec::new(),
        Ok(plain) if header.datatype.contains(Datatype::SNAPPY) => plain,
        _ => frame.value.to_vec(),
    };
    Some(Seen {
        opcode: header.opcode,
        vbid_or_status: header.vbid_or_status,
        datatype: header.datatype,
        opaque: header.opaque.0,
        cas: header.cas,
        framing_extras: frame.framing_extras.to_vec(),
        extras: frame.extras.to_vec(),
        key: String::from_utf8_lossy(frame.key).into_owned(),
        value,
    })
}
