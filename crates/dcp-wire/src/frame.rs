//! A whole packet as a view of the bytes it was read from.

use bytes::BufMut;

use crate::framing_extras::{FrameInfo, FrameInfos};
use crate::reader::saturating_u32;
use crate::{
    Cas, Datatype, DecodeError, EncodeError, Header, Magic, Opaque, Opcode, Reader, Status,
    StreamId, Vbid,
};

/// Bytes before the value that are assembled on the stack.
const SMALL: usize = 96;

/// A packet: its header and borrowed parts.
///
/// Parsing copies nothing. To build a packet, start from [`Frame::request`] or [`Frame::response`],
/// add parts and [`encode`](Frame::encode) it. Encoding computes the header's length fields and
/// ignores their previous values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The header.
    pub header: Header,
    /// Framing extras (only with the alternative magics).
    pub framing_extras: &'a [u8],
    /// Extras: the fixed-size fields of the opcode.
    pub extras: &'a [u8],
    /// Key.
    pub key: &'a [u8],
    /// Value.
    pub value: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Parses the packet at the front of `input`; also returns its length in bytes.
    ///
    /// `None` means that more bytes are needed; [`Frame::wanted`] returns how many. A body over
    /// `max_body` bytes is refused as soon as the header is complete.
    ///
    /// # Errors
    /// [`DecodeError::InvalidMagic`], [`DecodeError::InvalidLength`] or
    /// [`DecodeError::FrameTooLarge`]: the connection cannot be read any further.
    #[inline(always)]
    pub fn parse(input: &'a [u8], max_body: usize) -> Result<Option<(Self, usize)>, DecodeError> {
        let Some((header, body)) = Self::checked_header(input, max_body)? else {
            return Ok(None);
        };
        let Some(body) = body.get(..header.body_len as usize) else {
            return Ok(None);
        };
        let mut reader = Reader::new(body, "packet");
        let frame = Self {
            header,
            framing_extras: reader.bytes(usize::from(header.framing_extras_len))?,
            extras: reader.bytes(usize::from(header.extras_len))?,
            key: reader.bytes(usize::from(header.key_len))?,
            value: reader.rest(),
        };
        Ok(Some((frame, header.packet_len())))
    }

    /// Total length in bytes of the packet at the front of `input`; 24 until its header is
    /// complete.
    ///
    /// # Errors
    /// As [`Frame::parse`].
    pub fn wanted(input: &[u8], max_body: usize) -> Result<usize, DecodeError> {
        Ok(Self::checked_header(input, max_body)?.map_or(Header::LEN, |(h, _)| h.packet_len()))
    }

    #[inline(always)]
    fn checked_header(
        input: &[u8],
        max_body: usize,
    ) -> Result<Option<(Header, &[u8])>, DecodeError> {
        let Some((head, body)) = input.split_first_chunk::<{ Header::LEN }>() else {
            // Report an invalid first byte immediately: a peer that speaks another protocol may
            // send fewer than 24 bytes and then wait.
            if let Some(&first) = input.first()
                && Magic(first).name().is_none()
            {
                return Err(DecodeError::InvalidMagic(first));
            }
            return Ok(None);
        };
        let header = Header::decode(head)?;
        if header.body_len as usize > max_body {
            return Err(DecodeError::FrameTooLarge {
                len: header.body_len,
                max: saturating_u32(max_body),
            });
        }
        Ok(Some((header, body)))
    }

    /// Length of the whole packet in bytes, as flow control counts it.
    #[must_use]
    pub const fn packet_len(&self) -> usize {
        self.header.packet_len()
    }

    /// Decoded framing extras.
    #[must_use]
    pub const fn frame_infos(&self) -> FrameInfos<'a> {
        FrameInfos::new(self.framing_extras)
    }

    /// The stream id this packet carries, if any.
    ///
    /// # Errors
    /// [`DecodeError`] if the framing extras are malformed.
    #[inline]
    pub fn stream_id(&self) -> Result<Option<StreamId>, DecodeError> {
        if self.framing_extras.is_empty() {
            return Ok(None);
        }
        for info in self.frame_infos() {
            if let FrameInfo { id: FrameInfo::STREAM_ID, payload } = info? {
                let payload = <[u8; 2]>::try_from(payload)
                    .map_err(|_| DecodeError::InvalidField("stream id frame"))?;
                return Ok(Some(StreamId(u16::from_be_bytes(payload))));
            }
        }
        Ok(None)
    }

    /// The packet without its extras, key and value.
    #[must_use]
    pub const fn envelope(&self) -> Self {
        Self { extras: &[], key: &[], value: &[], ..*self }
    }

    /// A request with only an opcode.
    #[must_use]
    pub const fn request(opcode: Opcode) -> Self {
        Self::empty(Magic::CLIENT_REQUEST, opcode, 0)
    }

    /// A response with only an opcode and a status.
    #[must_use]
    pub const fn response(opcode: Opcode, status: Status) -> Self {
        Self::empty(Magic::CLIENT_RESPONSE, opcode, status.0)
    }

    /// A server request outside DCP with only an opcode.
    #[must_use]
    pub const fn server_request(opcode: Opcode) -> Self {
        Self::empty(Magic::SERVER_REQUEST, opcode, 0)
    }

    const fn empty(magic: Magic, opcode: Opcode, vbid_or_status: u16) -> Self {
        Self {
            header: Header {
                magic,
                opcode,
                framing_extras_len: 0,
                key_len: 0,
                extras_len: 0,
                datatype: Datatype::RAW,
                vbid_or_status,
                body_len: 0,
                opaque: Opaque(0),
                cas: Cas(0),
            },
            framing_extras: &[],
            extras: &[],
            key: &[],
            value: &[],
        }
    }

    /// This packet for `vbid`.
    #[must_use]
    pub const fn with_vbid(mut self, vbid: Vbid) -> Self {
        self.header.vbid_or_status = vbid.0;
        self
    }

    /// This packet with `opaque`.
    #[must_use]
    pub const fn with_opaque(mut self, opaque: Opaque) -> Self {
        self.header.opaque = opaque;
        self
    }

    /// This packet with `cas`.
    #[must_use]
    pub const fn with_cas(mut self, cas: Cas) -> Self {
        self.header.cas = cas;
        self
    }

    /// This packet with `datatype`.
    #[must_use]
    pub const fn with_datatype(mut self, datatype: Datatype) -> Self {
        self.header.datatype = datatype;
        self
    }

    /// This packet with `extras`.
    #[must_use]
    pub const fn with_extras(mut self, extras: &'a [u8]) -> Self {
        self.extras = extras;
        self
    }

    /// This packet with `key`.
    #[must_use]
    pub const fn with_key(mut self, key: &'a [u8]) -> Self {
        self.key = key;
        self
    }

    /// This packet with `value`.
    #[must_use]
    pub const fn with_value(mut self, value: &'a [u8]) -> Self {
        self.value = value;
        self
    }

    /// This packet with framing extras, and with the alternative magic unless they are empty.
    #[must_use]
    pub const fn with_framing_extras(mut self, framing_extras: &'a [u8]) -> Self {
        self.framing_extras = framing_extras;
        if !framing_extras.is_empty() {
            self.header.magic = if self.header.magic.is_response() {
                Magic::ALT_CLIENT_RESPONSE
            } else {
                Magic::ALT_CLIENT_REQUEST
            };
        }
        self
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if a part is longer than its length field; nothing is written then.
    pub fn encode(&self, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.encode_with_key_prefix(&[], out)
    }

    /// Appends the packet to `out`, with `prefix` before its key.
    ///
    /// # Errors
    /// As [`Frame::encode`].
    #[inline]
    pub fn encode_with_key_prefix(
        &self,
        prefix: &[u8],
        out: &mut impl BufMut,
    ) -> Result<(), EncodeError> {
        let max_key = if self.header.magic.is_alt() { 0xff } else { 0xffff };
        let key_len = prefix.len().saturating_add(self.key.len());
        let body_len = self
            .framing_extras
            .len()
            .saturating_add(self.extras.len())
            .saturating_add(key_len)
            .saturating_add(self.value.len());
        let header = Header {
            framing_extras_len: fit("framing extras", self.framing_extras.len(), 0xff)?,
            key_len: fit("key", key_len, max_key)?,
            extras_len: fit("extras", self.extras.len(), 0xff)?,
            body_len: fit("body", body_len, u32::MAX as usize)?,
            ..self.header
        };
        // Append the small parts together: a call to append costs more than copying their bytes.
        let mut head = [0; SMALL];
        let small = [self.framing_extras, self.extras, prefix, self.key];
        let used = small.iter().fold(Header::LEN, |len, part| len.saturating_add(part.len()));
        match head.get_mut(..used) {
            Some(mut rest) => {
                rest.put_slice(&header.encode());
                small.iter().for_each(|part| rest.put_slice(part));
                out.put_slice(head.get(..used).unwrap_or_default());
            }
            None => {
                out.put_slice(&header.encode());
                small.iter().for_each(|part| out.put_slice(part));
            }
        }
        if !self.value.is_empty() {
            out.put_slice(self.value);
        }
        Ok(())
    }
}

fn fit<T: TryFrom<usize>>(what: &'static str, len: usize, max: usize) -> Result<T, EncodeError> {
    let error = EncodeError { what, len, max };
    if len > max {
        return Err(error);
    }
    T::try_from(len).map_err(|_| error)
}
