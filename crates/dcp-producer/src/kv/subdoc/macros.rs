//! Macros: xattr values that are known only when the document is written.

use dcp_wire::{Cas, Seqno, Status};

/// A macro that is not offered.
const UNKNOWN: Status = Status(0xd0);

/// Values of macros in one mutation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Macros {
    /// Version that is written.
    pub(super) cas: Cas,
    /// Position that it is written at.
    pub(super) seqno: Seqno,
    /// Checksum of the body that is written.
    pub(super) crc32c: u32,
}

const CRC32C: &[u8] = b"\"${Mutation.value_crc32c}\"";

impl Macros {
    /// The value of a macro, as JSON.
    pub(super) fn expand(&self, value: &[u8]) -> Result<Vec<u8>, Status> {
        let text = match value {
            // Servers write the CAS in reverse byte order.
            b"\"${Mutation.CAS}\"" => format!("\"{:#018x}\"", self.cas.0.swap_bytes()),
            b"\"${Mutation.seqno}\"" => format!("\"{:#018x}\"", self.seqno.0),
            CRC32C => format!("\"{:#010x}\"", self.crc32c),
            _ => return Err(UNKNOWN),
        };
        Ok(text.into_bytes())
    }
}

/// Whether a macro is the body's checksum, which is known only after all other changes.
pub(super) fn is_checksum(value: &[u8]) -> bool {
    value == CRC32C
}

/// CRC-32C, as of RFC 3720, appendix B.4.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (REVERSED_POLYNOMIAL & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksums_of_the_rfc() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn macros_are_texts_of_hexadecimal_digits() {
        let macros = Macros { cas: Cas(0x1122_3344_5566_7788), seqno: Seqno(7), crc32c: 0xab };
        let text = |name: &str| String::from_utf8(macros.expand(name.as_bytes()).unwrap()).unwrap();
        assert_eq!(text("\"${Mutation.CAS}\""), "\"0x8877665544332211\"");
        assert_eq!(text("\"${Mutation.seqno}\""), "\"0x0000000000000007\"");
        assert_eq!(text("\"${Mutation.value_crc32c}\""), "\"0x000000ab\"");
        assert_eq!(macros.expand(b"\"${Mutation.exptime}\""), Err(UNKNOWN));
    }
}
