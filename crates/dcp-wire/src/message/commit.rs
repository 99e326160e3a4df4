//! DCP_COMMIT (0x62), DCP_ABORT (0x63) and DCP_SEQNO_ACK (0x61): outcome of a durable write.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode, Reader, Seqno};

/// A durable write succeeded (DCP page `commit`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit<'a> {
    /// Seqno of the prepare.
    pub prepared_seqno: Seqno,
    /// Seqno of the commit.
    pub commit_seqno: Seqno,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> Commit<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_COMMIT)?;
        let (prepared_seqno, commit_seqno) = decode_seqnos(frame)?;
        Ok(Self { prepared_seqno, commit_seqno, key: frame.key })
    }

    encode_stream_message!(DCP_COMMIT);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let extras = encode_seqnos(self.prepared_seqno, self.commit_seqno);
        frame.with_extras(&extras).with_key(self.key).encode(out)
    }
}

/// A durable write was aborted (DCP page `abort`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort<'a> {
    /// Seqno of the prepare.
    pub prepared_seqno: Seqno,
    /// Seqno of the abort.
    pub abort_seqno: Seqno,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> Abort<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_ABORT)?;
        let (prepared_seqno, abort_seqno) = decode_seqnos(frame)?;
        Ok(Self { prepared_seqno, abort_seqno, key: frame.key })
    }

    encode_stream_message!(DCP_ABORT);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let extras = encode_seqnos(self.prepared_seqno, self.abort_seqno);
        frame.with_extras(&extras).with_key(self.key).encode(out)
    }
}

/// A replica acknowledges every prepare up to a seqno (DCP page `seqno-acknowledged`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqnoAck {
    /// The seqno.
    pub prepared_seqno: Seqno,
}

impl SeqnoAck {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_SEQNO_ACK)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self { prepared_seqno: Seqno(u64::from_be_bytes(extras(frame)?)) })
    }

    encode_stream_message!(DCP_SEQNO_ACK);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.prepared_seqno.0.to_be_bytes()).encode(out)
    }
}

fn decode_seqnos(frame: &Frame<'_>) -> Result<(Seqno, Seqno), DecodeError> {
    no_value(frame)?;
    let extras = extras::<16>(frame)?;
    let mut reader = Reader::new(&extras, "durable write");
    Ok((Seqno(reader.u64()?), Seqno(reader.u64()?)))
}

fn encode_seqnos(prepared: Seqno, end: Seqno) -> [u8; 16] {
    let mut extras = [0; 16];
    let mut cursor = extras.as_mut_slice();
    cursor.put_u64(prepared.0);
    cursor.put_u64(end.0);
    extras
}
