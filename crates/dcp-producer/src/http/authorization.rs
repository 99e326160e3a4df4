//! HTTP basic authentication.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dcp_wire::sasl::PlainMessage;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use zeroize::Zeroizing;

use crate::kv::Credentials;

/// Whether the request has valid credentials.
pub(super) fn is_authorized(headers: &HeaderMap, credentials: &Credentials) -> bool {
    headers.get(AUTHORIZATION).and_then(|header| decode(header.as_bytes())).is_some_and(|pair| {
        pair.split_once(':').is_some_and(|(username, password)| {
            credentials.accepts(&PlainMessage { authzid: "", username, password })
        })
    })
}

/// `username:password` of a header like `Basic QWRtaW46eA==`.
fn decode(header: &[u8]) -> Option<Zeroizing<String>> {
    let (scheme, encoded) = header.split_at_checked(b"Basic ".len())?;
    if !scheme.eq_ignore_ascii_case(b"Basic ") {
        return None;
    }
    let pair = BASE64_STANDARD.decode(encoded.trim_ascii()).ok()?;
    String::from_utf8(pair).ok().map(Zeroizing::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn basic_authorization_header_is_read_only_whole() {
        let read = |header: &str| decode(header.as_bytes()).map(|pair| pair.to_string());
        assert_eq!(read("Basic dXNlcjpwYTpzcw==").as_deref(), Some("user:pa:ss"));
        assert_eq!(read("basic  dXNlcjpw ").as_deref(), Some("user:p"));
        for wrong in ["", "Basic", "Basic !", "Bearer dXNlcjpw", "Basic /w=="] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
