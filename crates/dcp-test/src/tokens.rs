//! Signed tokens (RFC 7519), as an issuer gives them to clients.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// The key of [`issue`]'s tokens.
pub const KEY: &[u8] = b"the key of an issuer, never-shown";

/// A token with these claims, signed with HS256.
///
/// # Panics
/// Never: a key may have any length.
#[must_use]
pub fn signed(key: &[u8], claims: &str) -> String {
    let text = [r#"{"alg":"HS256","typ":"JWT"}"#, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
    let text = text.join(".");
    let mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length").chain_update(&text);
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
}

/// A token for `user` that is valid for this long, or has expired that long ago.
#[must_use]
pub fn issue(user: &str, seconds: i64) -> String {
    signed(KEY, &format!(r#"{{"sub":"{user}","exp":{}}}"#, at(seconds)))
}

/// A whole second, so long from now.
#[must_use]
pub fn at(seconds: i64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.as_ref().map_or(0, Duration::as_secs).saturating_add_signed(seconds)
}
