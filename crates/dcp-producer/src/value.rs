//! Encodings of documents' values.

use dcp_wire::{Datatype, xattr};
use serde::de::IgnoredAny;

/// The detected datatype of a plain value: JSON or raw.
#[must_use]
pub fn detect(value: &[u8]) -> Datatype {
    if is_json(value) { Datatype::JSON } else { Datatype::RAW }
}

/// Whether an uncompressed value matches its datatype.
pub(crate) fn is_valid(value: &[u8], datatype: Datatype) -> bool {
    if !datatype.is_valid() || datatype.contains(Datatype::SNAPPY) {
        return false;
    }
    let body = if datatype.contains(Datatype::XATTR) {
        let Ok((mut xattrs, body)) = xattr::split(value) else {
            return false;
        };
        if !xattrs.all(|xattr| xattr.is_ok_and(|xattr| is_json(xattr.value))) {
            return false;
        }
        body
    } else {
        value
    };
    !datatype.contains(Datatype::JSON) || is_json(body)
}

/// Whether `bytes` are one JSON value.
pub(crate) fn is_json(bytes: &[u8]) -> bool {
    // The first byte rules out most values that are not JSON.
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    matches!(first, Some(b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n'))
        && serde_json::from_slice::<IgnoredAny>(bytes).is_ok()
}
