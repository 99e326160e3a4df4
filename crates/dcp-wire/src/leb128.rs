//! Unsigned LEB128, the encoding of the collection id before a key (server page "Collections").

use crate::DecodeError;

/// Longest encoding of a 32-bit number in bytes.
pub const MAX_LEN: usize = 5;

/// Reads a number from the front of `input`; returns it and the rest.
///
/// # Errors
/// [`DecodeError::InvalidField`] for an encoding that is not canonical or longer than five bytes,
/// [`DecodeError::UnexpectedEnd`] if `input` ends inside the number.
#[inline(always)]
pub fn decode(input: &[u8]) -> Result<(u32, &[u8]), DecodeError> {
    // Nearly every key is in the default collection or one with a small id.
    if let Some((&first, rest)) = input.split_first()
        && first < 0x80
    {
        return Ok((u32::from(first), rest));
    }
    let mut value: u32 = 0;
    let mut rest = input;
    for shift in [0u32, 7, 14, 21, 28] {
        let Some((&byte, tail)) = rest.split_first() else {
            return Err(DecodeError::UnexpectedEnd { what: "LEB128 number" });
        };
        rest = tail;
        let bits = u32::from(byte & 0x7f);
        let shifted = bits.wrapping_shl(shift);
        if shifted.wrapping_shr(shift) != bits {
            return Err(DecodeError::InvalidField("LEB128 number"));
        }
        value |= shifted;
        if byte & 0x80 == 0 {
            if byte == 0 && shift != 0 {
                return Err(DecodeError::InvalidField("LEB128 number"));
            }
            return Ok((value, rest));
        }
    }
    Err(DecodeError::InvalidField("LEB128 number"))
}

/// The encoding of a number, on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    bytes: [u8; MAX_LEN],
    len: u8,
}

impl Encoded {
    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// Encodes `value` in the canonical form.
#[must_use]
pub fn encode(mut value: u32) -> Encoded {
    let mut bytes = [0; MAX_LEN];
    let mut len = 0u8;
    for slot in &mut bytes {
        let group = (value & 0x7f) as u8;
        value >>= 7;
        len = len.saturating_add(1);
        if value == 0 {
            *slot = group;
            break;
        }
        *slot = group | 0x80;
    }
    Encoded { bytes, len }
}
