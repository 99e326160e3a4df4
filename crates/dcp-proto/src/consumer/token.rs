//! Tokens, which authenticate instead of a password (RFC 7519, RFC 7628).

use core::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dcp_wire::sasl::is_bearer_token;
use serde::Deserialize;
use thiserror::Error;
use zeroize::Zeroizing;

/// A token for one user, such as a JWT. Erased when dropped and never shown.
///
/// It is opaque but for the time at which it expires: whoever accepts it verifies it.
#[derive(Clone)]
pub struct Token {
    text: Zeroizing<String>,
    expires: Option<Duration>,
}

/// Why a text is no token. Holds nothing of it.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidToken {
    /// It is empty.
    #[error("it is empty")]
    Empty,
    /// It is too long.
    #[error("it is longer than {} KiB", Token::MAX_LEN / 1024)]
    TooLong,
    /// It holds a character that RFC 6750 does not allow.
    #[error("it holds a character that no token has, such as a space")]
    Character,
}

impl Token {
    /// Longest token, in bytes.
    pub const MAX_LEN: usize = 32 * 1024;

    /// Takes the text of a token, and reads when it expires.
    ///
    /// # Errors
    /// [`InvalidToken`]
    pub fn new(text: impl Into<Zeroizing<String>>) -> Result<Self, InvalidToken> {
        let text = text.into();
        if text.is_empty() {
            return Err(InvalidToken::Empty);
        }
        if text.len() > Self::MAX_LEN {
            return Err(InvalidToken::TooLong);
        }
        if !is_bearer_token(&text) {
            return Err(InvalidToken::Character);
        }
        let expires = expiry(&text);
        Ok(Self { text, expires })
    }

    /// The token itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// When it expires, counted from 1970; `None` if it does not say.
    #[must_use]
    pub const fn expires(&self) -> Option<Duration> {
        self.expires
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// The claim `exp` of a JWT (RFC 7519, section 4.1.4); `None` for any other text.
fn expiry(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Claims {
        exp: f64,
    }

    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let json = Zeroizing::new(URL_SAFE_NO_PAD.decode(claims).ok()?);
    let claims: Claims = serde_json::from_slice(&json).ok()?;
    Duration::try_from_secs_f64(claims.exp).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(claims: &str) -> Token {
        let claims = URL_SAFE_NO_PAD.encode(claims);
        Token::new(format!("aGVhZGVy.{claims}.c2lnbmF0dXJl")).unwrap()
    }

    #[test]
    fn token_says_when_it_expires() {
        assert_eq!(
            jwt(r#"{"exp":1800000000}"#).expires(),
            Some(Duration::from_secs(1_800_000_000))
        );
        assert_eq!(jwt(r#"{"sub":"a","exp":1.5}"#).expires(), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn token_that_does_not_say_when_it_expires_is_taken_as_it_is() {
        for claims in ["", "{}", r#"{"exp":"1"}"#, r#"{"exp":-1}"#, r#"{"exp":1e300}"#, "1"] {
            assert_eq!(jwt(claims).expires(), None, "{claims}");
        }
        for opaque in ["x", "a.b", "a.~.c", "a.eyJleHAiOjF9.c.d", "a.=="] {
            let token = Token::new(opaque.to_owned()).unwrap();
            assert_eq!(token.expires(), None, "{opaque}");
        }
    }

    #[test]
    fn token_of_another_form_is_refused_without_being_shown() {
        let refused = |text: &str| Token::new(text.to_owned()).unwrap_err();
        assert_eq!(refused(""), InvalidToken::Empty);
        assert_eq!(refused("secret word"), InvalidToken::Character);
        assert_eq!(refused("secret\n"), InvalidToken::Character);
        assert_eq!(refused(&"x".repeat(Token::MAX_LEN + 1)), InvalidToken::TooLong);
        assert!(Token::new("x".repeat(Token::MAX_LEN)).is_ok());
        assert!(!format!("{:?}", Token::new("secret".to_owned())).contains("secret"));
    }
}
