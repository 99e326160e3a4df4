//! Facts about recorded changes from outside the DCP stream.
//!
//! The first line of a recording contains them: the operations that made the changes, and lists of
//! stream messages as text.

use core::fmt::Write;

use dcp_wire::{Cas, Datatype, Seqno, Vbid, snappy, xattr};
use serde_json::Value;
use sha1::{Digest, Sha1};

/// Maximum length of an inflated value in a recording, in bytes.
const MAX_VALUE_LEN: usize = 1 << 20;

/// A document change as received on the stream.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The vBucket.
    pub vbid: Vbid,
    /// Its seqno.
    pub seqno: Seqno,
    /// Its CAS.
    pub cas: Cas,
    /// Whether the document was removed.
    pub deleted: bool,
    /// Flags, if the message has them.
    pub flags: Option<u32>,
    /// Expiry, if the message has one.
    pub expiry: Option<u32>,
    /// Datatype of the value.
    pub datatype: Datatype,
    /// Key as on the wire.
    pub key: &'a [u8],
    /// Value as on the wire.
    pub value: &'a [u8],
    /// Whether the connection omits bodies.
    pub no_value: bool,
}

impl Change<'_> {
    /// Differences between the change and the operation that made it (`expected.kv_ops`).
    ///
    /// # Panics
    /// If the value does not match its datatype.
    #[must_use]
    pub fn differences(&self, operation: &Value) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut same = |name: &str, is: bool, is_not: String| {
            if !is {
                wrong.push(format!("{name}: {is_not}"));
            }
        };
        same("key", self.is_of(operation), format!("{:?}", self.key));
        // Without values, servers since 7.6 restore what they read from disk from the key alone:
        // with CAS 0, flags 0, expiry 0, and removed documents as if they existed.
        if self.no_value && self.cas == Cas(0) {
            return wrong;
        }
        let cas = hex_u64(&operation["cas"]).unwrap_or_default();
        same("cas", self.cas == Cas(cas), format!("{:x}", self.cas.0));
        match operation.get("op").and_then(Value::as_str) {
            Some("set") => {
                same("deleted", !self.deleted, String::new());
                if let Some(flags) = operation["flags"].as_u64() {
                    let sent = self.flags.map(u64::from);
                    same("flags", sent == Some(flags), format!("{sent:?}"));
                }
                if let Some(expiry) = operation["exp"].as_u64() {
                    // Relative expiries arrive as absolute ones.
                    let sent = self.expiry.unwrap_or_default();
                    same("expiry", (sent > 0) == (expiry > 0) || expiry == 0, sent.to_string());
                }
                let value = operation["value"].as_str().unwrap_or_default();
                if !self.no_value {
                    let body = self.body();
                    same("value", value_fits(value, operation, &body), format!("{body:02x?}"));
                }
            }
            Some("delete") => same("deleted", self.deleted, String::new()),
            Some("xattr_upsert")
                if self.datatype.contains(Datatype::XATTR) && !self.value.is_empty() =>
            {
                let value = self.inflated();
                let path = operation["path"].as_str().unwrap_or_default().as_bytes();
                let expected = operation["xvalue"].as_str().unwrap_or_default().as_bytes();
                let found = xattr::split(&value).is_ok_and(|(mut xattrs, _)| {
                    xattrs.any(|xattr| {
                        xattr.is_ok_and(|xattr| xattr.name == path && xattr.value == expected)
                    })
                });
                same("xattr", found, format!("{value:02x?}"));
            }
            _ => {}
        }
        wrong
    }

    /// Whether an operation concerned this document.
    #[must_use]
    pub fn is_of(&self, operation: &Value) -> bool {
        let key = key_of(operation);
        // The operation may have used a connection without collections.
        self.key == key || self.key.strip_prefix(b"\0") == Some(&key[..])
    }

    /// The document without xattrs, inflated if the server compressed it.
    ///
    /// # Panics
    /// If the value does not match its datatype.
    #[must_use]
    pub fn body(&self) -> Vec<u8> {
        let value = self.inflated();
        if self.datatype.contains(Datatype::XATTR) {
            return xattr::split(&value).expect("xattrs").1.to_vec();
        }
        value
    }

    fn inflated(&self) -> Vec<u8> {
        if self.datatype.contains(Datatype::SNAPPY) {
            return snappy::decompress(self.value, MAX_VALUE_LEN).expect("a compressed value");
        }
        self.value.to_vec()
    }
}

/// Whether a body matches that of an operation: given in hex, or by length and digest.
fn value_fits(expected: &str, operation: &Value, body: &[u8]) -> bool {
    if let Some(rest) = expected.strip_prefix("len:") {
        let digest: String = Sha1::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
        return rest == format!("{} sha1:{digest}", body.len());
    }
    let written = bytes(expected);
    if operation["dt"].as_u64().is_some_and(|datatype| datatype & 2 != 0) {
        return snappy::decompress(&written, MAX_VALUE_LEN).as_deref() == Ok(body);
    }
    written == body
}

/// Bytes as encoded in operations: text, or `hex:` and digits.
fn bytes(text: &str) -> Vec<u8> {
    let hex = text.strip_prefix("hex:").and_then(crate::parse_hex);
    hex.unwrap_or_else(|| text.as_bytes().to_vec())
}

/// The key of an operation, with its collection if the connection had them.
#[must_use]
pub fn key_of(operation: &Value) -> Vec<u8> {
    bytes(operation["key"].as_str().unwrap_or_default())
}

/// A number in hex.
#[must_use]
pub fn hex_u64(value: &Value) -> Option<u64> {
    u64::from_str_radix(value.as_str()?, 16).ok()
}

/// An item in the format of the lists, for example `MUTATION seq=1 b'z' dt=1 vl=1`.
#[must_use]
pub fn item_in_words(
    name: &str,
    seqno: Seqno,
    key: &[u8],
    datatype: Datatype,
    value_len: usize,
) -> String {
    let key = bytes_in_words(key);
    format!("{name} seq={seqno} {key} dt={} vl={value_len}", datatype.0)
}

/// The first 20 bytes of a key as Python prints them.
fn bytes_in_words(bytes: &[u8]) -> String {
    let mut text = "b'".to_owned();
    for &byte in bytes.iter().take(20) {
        match byte {
            b'\\' => text.push_str("\\\\"),
            b'\t' => text.push_str("\\t"),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b' '..=b'~' => text.push(byte.into()),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text.push('\'');
    text
}
