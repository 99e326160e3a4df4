//! JSON web tokens, which authenticate instead of a password (RFC 7519): those signed with HS256.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dcp_wire::sasl::SaslError;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::Deserialize;
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::chance::Now;

/// The key that tokens are signed with.
pub(super) struct TokenKey(Zeroizing<Vec<u8>>);

impl fmt::Debug for TokenKey {
    /// Leaves the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenKey(..)")
    }
}

/// What a token says.
#[derive(Debug, Deserialize)]
pub(super) struct Claims {
    /// The user.
    pub(super) sub: String,
    /// When it expires, in seconds since 1970.
    exp: Option<f64>,
    /// From when on it is valid.
    nbf: Option<f64>,
}

impl Claims {
    /// How long a connection stays authenticated that has just sent the token.
    pub(super) fn lifetime(&self, now: Now) -> Result<Lifetime, SaslError> {
        let lifetime = Lifetime { begin: at(self.nbf, now), end: at(self.exp, now) };
        let has_expired = lifetime.end.is_some_and(|end| end <= now.0);
        if has_expired { Err(SaslError::Token) } else { Ok(lifetime) }
    }
}

/// A time of a token as the data service counts it: what is left of it in whole seconds.
fn at(seconds: Option<f64>, now: Now) -> Option<u64> {
    let left = seconds? - now.0 as f64 / Now::NANOS_PER_SECOND as f64;
    // Out of range, it is the nearest time in it.
    let whole = (left.floor() as i64).saturating_mul(Now::NANOS_PER_SECOND as i64);
    Some(now.0.saturating_add_signed(whole.max(0)))
}

/// When the token of a connection is valid, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lifetime {
    begin: Option<u64>,
    end: Option<u64>,
}

impl Lifetime {
    /// Whether it is over, or has not begun.
    pub(super) fn is_stale(&self, now: Now) -> bool {
        self.end.is_some_and(|end| end < now.0) || self.begin.is_some_and(|begin| begin > now.0)
    }
}

impl TokenKey {
    pub(super) fn new(key: &[u8]) -> Self {
        Self(Zeroizing::new(key.to_vec()))
    }

    /// What a token says, if it is signed with the key.
    ///
    /// # Errors
    /// [`SaslError::Token`]
    pub(super) fn verify(&self, token: &str) -> Result<Claims, SaslError> {
        #[derive(Deserialize)]
        struct Header {
            alg: String,
        }

        let decode = |part| URL_SAFE_NO_PAD.decode(part).map_err(|_| SaslError::Token);
        let (signed, signature) = token.rsplit_once('.').ok_or(SaslError::Token)?;
        let (header, claims) = signed.split_once('.').ok_or(SaslError::Token)?;
        let header: Header =
            serde_json::from_slice(&decode(header)?).map_err(|_| SaslError::Token)?;
        if header.alg != "HS256" {
            return Err(SaslError::Token);
        }
        let mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(|_| SaslError::Token)?;
        let verified = mac.chain_update(signed).verify_slice(&decode(signature)?);
        verified.map_err(|_| SaslError::Token)?;
        serde_json::from_slice(&decode(claims)?).map_err(|_| SaslError::Token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7515, appendix A.1, which is signed with HS256.
    const EXAMPLE: &str = concat!(
        "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9",
        ".eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290",
        "Ijp0cnVlfQ.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk",
    );
    const EXAMPLE_KEY: &str = "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4\
                               hcgUuTwjAzZr1Z9CAow";

    fn key() -> TokenKey {
        TokenKey::new(b"a key of thirty-two bytes or more")
    }

    fn signed(key: &TokenKey, header: &str, claims: &str) -> String {
        let text = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part)).join(".");
        let mac = Hmac::<Sha256>::new_from_slice(&key.0).unwrap().chain_update(&text);
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
    }

    fn read(claims: &str) -> Result<Claims, SaslError> {
        key().verify(&signed(&key(), r#"{"alg":"HS256"}"#, claims))
    }

    #[test]
    fn token_of_the_rfc_is_verified_and_names_no_user() {
        let key = TokenKey::new(&URL_SAFE_NO_PAD.decode(EXAMPLE_KEY).unwrap());
        // The signature is right: what is missing is the user.
        assert!(key.verify(EXAMPLE).is_err());
        let (signed_part, signature) = EXAMPLE.rsplit_once('.').unwrap();
        let mac = Hmac::<Sha256>::new_from_slice(&key.0).unwrap().chain_update(signed_part);
        assert!(mac.verify_slice(&URL_SAFE_NO_PAD.decode(signature).unwrap()).is_ok());
    }

    #[test]
    fn token_is_accepted_only_with_the_key_and_the_algorithm() {
        let claims = r#"{"sub":"reader"}"#;
        assert_eq!(read(claims).unwrap().sub, "reader");
        let other = TokenKey::new(b"another key of thirty-two bytes!!");
        let good = signed(&key(), r#"{"alg":"HS256"}"#, claims);
        let (text, signature) = good.rsplit_once('.').unwrap();
        let changed = signed(&key(), r#"{"alg":"HS256"}"#, r#"{"sub":"admin"}"#);
        let (changed, _) = changed.rsplit_once('.').unwrap();
        for wrong in [
            signed(&other, r#"{"alg":"HS256"}"#, claims),
            signed(&key(), r#"{"alg":"none"}"#, claims),
            signed(&key(), r#"{"alg":"HS512"}"#, claims),
            signed(&key(), "{}", claims),
            signed(&key(), r#"{"alg":"HS256"}"#, "{}"),
            signed(&key(), r#"{"alg":"HS256"}"#, r#"{"sub":"reader","exp":"soon"}"#),
            format!("{changed}.{signature}"),
            format!("{text}."),
            text.to_owned(),
            "x".to_owned(),
            "..".to_owned(),
        ] {
            assert_eq!(key().verify(&wrong).unwrap_err(), SaslError::Token, "{wrong}");
        }
    }

    #[test]
    fn token_time_that_is_left_is_counted_in_whole_seconds() {
        let second = Now::NANOS_PER_SECOND;
        let now = Now(1_800_000_000 * second + second / 2);
        let lifetime = |claims: &str| read(claims).unwrap().lifetime(now);
        let after = |seconds: u64| Some(now.0 + seconds * second);
        let ends = lifetime(r#"{"sub":"a","exp":1800000010,"nbf":1800000003}"#).unwrap();
        assert_eq!(ends, Lifetime { begin: after(2), end: after(9) });
        for (seconds, is_stale) in [(0, true), (2, false), (9, false)] {
            assert_eq!(ends.is_stale(Now(now.0 + seconds * second)), is_stale, "{seconds}");
        }
        assert!(ends.is_stale(Now(now.0 + 9 * second + 1)));
        let endless = lifetime(r#"{"sub":"a"}"#).unwrap();
        assert!(!endless.is_stale(Now(u64::MAX)));
        for expired in ["1", "1800000000", "-1e300", "-1"] {
            let claims = format!(r#"{{"sub":"a","exp":{expired}}}"#);
            assert_eq!(lifetime(&claims), Err(SaslError::Token), "{expired}");
        }
        assert!(lifetime(r#"{"sub":"a","exp":1e300}"#).is_ok());
    }
}
