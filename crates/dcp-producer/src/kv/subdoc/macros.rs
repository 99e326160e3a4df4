//! Macros: xattr values that are known only when the document is written.

use dcp_wire::{Cas, Seqno, Status};
use serde_json::Value;

/// A macro that is not offered.
const UNKNOWN: Status = Status(0xd0);

/// Values of macros in one mutation.
#[derive(Clone, Debug, Default)]
pub(super) struct Macros {
    /// Version that is written.
    pub(super) cas: Cas,
    /// Position that it is written at.
    pub(super) seqno: Seqno,
    /// Checksum of the body that is written.
    pub(super) crc32c: u32,
    /// The xattr `$document` as it was before; null if no macro needs it.
    pub(super) document: Value,
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
            _ => self.of_document(value).ok_or(UNKNOWN)?.to_string(),
        };
        Ok(text.into_bytes())
    }

    /// The value of a macro that is the xattr `$document` or a member of it.
    fn of_document(&self, value: &[u8]) -> Option<&Value> {
        let name = document_macro(value)?;
        if name.is_empty() {
            return Some(&self.document).filter(|document| !document.is_null());
        }
        let name = str::from_utf8(name.strip_prefix(b".")?).ok()?;
        // Servers do not offer the checksum by itself.
        (name != "value_crc32c").then(|| self.document.get(name))?
    }
}

/// What follows `$document` in a macro that begins so.
fn document_macro(value: &[u8]) -> Option<&[u8]> {
    value.strip_prefix(b"\"${$document")?.strip_suffix(b"}\"")
}

/// Whether a macro is the document's metadata, as it was before, or a part of that.
pub(super) fn is_of_document(value: &[u8]) -> bool {
    document_macro(value).is_some()
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
    fn crc32c_checksums_are_those_of_the_rfc() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn subdoc_macros_are_hexadecimal_texts() {
        let macros = Macros {
            cas: Cas(0x1122_3344_5566_7788),
            seqno: Seqno(7),
            crc32c: 0xab,
            document: serde_json::json!({"CAS": "0x01", "exptime": 5, "value_crc32c": "0x02"}),
        };
        let text = |name: &str| String::from_utf8(macros.expand(name.as_bytes()).unwrap()).unwrap();
        assert_eq!(text("\"${Mutation.CAS}\""), "\"0x8877665544332211\"");
        assert_eq!(text("\"${Mutation.seqno}\""), "\"0x0000000000000007\"");
        assert_eq!(text("\"${Mutation.value_crc32c}\""), "\"0x000000ab\"");
        assert_eq!(text("\"${$document.CAS}\""), "\"0x01\"");
        assert_eq!(text("\"${$document.exptime}\""), "5");
        assert_eq!(text("\"${$document}\""), macros.document.to_string());
        for unknown in ["Mutation.exptime", "$document.value_crc32c", "$document.a", "$documentCAS"]
        {
            let value = format!("\"${{{unknown}}}\"");
            assert_eq!(macros.expand(value.as_bytes()), Err(UNKNOWN), "{unknown}");
        }
        assert_eq!(Macros::default().expand(b"\"${$document}\""), Err(UNKNOWN));
    }
}
