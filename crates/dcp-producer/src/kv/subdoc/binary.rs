//! Binary xattrs: a JSON string of a prefix and base64.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dcp_wire::Status;

const PREFIX: &str = "cb-content-base64-encoded:";

/// A value requested as binary is not binary.
const NOT_BINARY: Status = Status(0xd8);

/// The JSON string that stands for `bytes`.
pub(super) fn encode(bytes: &[u8]) -> Vec<u8> {
    format!("\"{PREFIX}{}\"", BASE64_STANDARD.encode(bytes)).into_bytes()
}

/// The bytes that a JSON string stands for.
pub(super) fn decode(json: &[u8]) -> Result<Vec<u8>, Status> {
    let text = json.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
    let encoded = text.and_then(|text| text.strip_prefix(PREFIX.as_bytes()));
    BASE64_STANDARD.decode(encoded.ok_or(NOT_BINARY)?).map_err(|_| NOT_BINARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subdoc_binary_bytes_are_read_back_and_other_values_are_refused() {
        let stored = encode(b"base64_encode_value");
        assert_eq!(stored, b"\"cb-content-base64-encoded:YmFzZTY0X2VuY29kZV92YWx1ZQ==\"");
        assert_eq!(decode(&stored).unwrap(), b"base64_encode_value");
        assert_eq!(decode(&encode(b"")).unwrap(), b"");
        for other in ["1", "\"text\"", "{}", "\"cb-content-base64-encoded:!\"", ""] {
            assert_eq!(decode(other.as_bytes()), Err(NOT_BINARY), "{other}");
        }
    }
}
