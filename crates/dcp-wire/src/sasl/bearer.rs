//! OAUTHBEARER: a token instead of a password (RFC 7628).

use core::fmt;
use std::borrow::Cow;

use zeroize::Zeroizing;

use super::SaslError;

/// What separates the parts of a message.
const SEPARATOR: char = '\x01';

/// Whether a text may be sent as a token: what RFC 6750 calls `b64token`. A JWT always is.
#[must_use]
pub fn is_bearer_token(text: &str) -> bool {
    let unpadded = text.trim_end_matches('=');
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte);
    !unpadded.is_empty() && unpadded.bytes().all(allowed)
}

/// The OAUTHBEARER message, which leaves it to the token to name the user.
///
/// # Errors
/// [`SaslError::Prohibited`] unless it is a [token](is_bearer_token).
pub fn encode_bearer(token: &str) -> Result<Zeroizing<Vec<u8>>, SaslError> {
    const BEFORE: &[u8] = b"n,,\x01auth=Bearer ";
    const AFTER: &[u8] = b"\x01\x01";

    if !is_bearer_token(token) {
        return Err(SaslError::Prohibited("token"));
    }
    let len = token.len().saturating_add(BEFORE.len()).saturating_add(AFTER.len());
    // Allocated once: growing would leave a copy of the token behind.
    let mut message = Zeroizing::new(Vec::with_capacity(len));
    for part in [BEFORE, token.as_bytes(), AFTER] {
        message.extend_from_slice(part);
    }
    Ok(message)
}

/// An OAUTHBEARER message as a server reads it.
#[derive(Clone, PartialEq, Eq)]
pub struct BearerMessage<'a> {
    /// User to act as; empty for the one that the token names.
    pub authzid: Cow<'a, str>,
    /// The token.
    pub token: &'a str,
}

impl<'a> BearerMessage<'a> {
    /// Reads the message. Parts other than the token, such as the host, are ignored.
    ///
    /// # Errors
    /// [`SaslError::Malformed`] if it has no token or another form, [`SaslError::ChannelBinding`] if
    /// it asks for one.
    pub fn decode(message: &'a [u8]) -> Result<Self, SaslError> {
        let malformed = SaslError::Malformed("OAUTHBEARER message");
        let text = str::from_utf8(message).map_err(|_| malformed)?;
        let body = text.strip_suffix("\x01\x01").ok_or(malformed)?;
        let mut parts = body.split(SEPARATOR);
        let header = parts.next().and_then(|header| header.strip_suffix(',')).ok_or(malformed)?;
        let (binding, name) = header.split_once(',').ok_or(malformed)?;
        if binding != "n" {
            return Err(SaslError::ChannelBinding);
        }
        let authzid = match name {
            "" => Cow::Borrowed(""),
            name => saslname(name.strip_prefix("a=").ok_or(malformed)?).ok_or(malformed)?,
        };
        let mut found = parts.filter_map(|part| part.strip_prefix("auth="));
        let (Some(auth), None) = (found.next(), found.next()) else { return Err(malformed) };
        let (scheme, token) = auth.split_once(' ').ok_or(malformed)?;
        if !scheme.eq_ignore_ascii_case("Bearer") || !is_bearer_token(token) {
            return Err(malformed);
        }
        Ok(Self { authzid, token })
    }
}

impl fmt::Debug for BearerMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BearerMessage").field("authzid", &self.authzid).finish_non_exhaustive()
    }
}

/// A name in which `,` and `=` are written `=2C` and `=3D`; `None` for anything else after a `=`.
fn saslname(encoded: &str) -> Option<Cow<'_, str>> {
    if encoded.is_empty() || encoded.contains(',') {
        return None;
    }
    let mut parts = encoded.split('=');
    let first = parts.next()?;
    if first.len() == encoded.len() {
        return Some(Cow::Borrowed(encoded));
    }
    let mut name = first.to_owned();
    for part in parts {
        let (character, rest) = match part.split_at_checked(2)? {
            ("2C", rest) => (',', rest),
            ("3D", rest) => ('=', rest),
            _ => return None,
        };
        name.push(character);
        name.push_str(rest);
    }
    Some(Cow::Owned(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7628, section 4.1, whose channel binding is none.
    const EXAMPLE: &[u8] = b"n,a=user@example.com,\x01host=server.example.com\x01port=143\x01\
        auth=Bearer vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==\x01\x01";

    fn authzid(header: &str) -> Result<String, SaslError> {
        let message = format!("{header}\x01auth=Bearer x\x01\x01");
        BearerMessage::decode(message.as_bytes()).map(|message| message.authzid.into_owned())
    }

    #[test]
    fn bearer_message_is_what_servers_and_sdks_agree_on() {
        let message = encode_bearer("a.b-_~+/c==").unwrap();
        assert_eq!(message.as_slice(), b"n,,\x01auth=Bearer a.b-_~+/c==\x01\x01");
        let read = BearerMessage::decode(&message).unwrap();
        assert_eq!((read.authzid.as_ref(), read.token), ("", "a.b-_~+/c=="));
    }

    #[test]
    fn bearer_message_of_the_rfc_is_read() {
        let read = BearerMessage::decode(EXAMPLE).unwrap();
        assert_eq!(read.authzid, "user@example.com");
        assert_eq!(read.token, "vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==");
        assert!(!format!("{read:?}").contains("vF9"), "{read:?}");
    }

    #[test]
    fn bearer_token_that_would_break_the_message_is_refused() {
        for token in ["", "=", "a b", "a\x01b", "a\n", "a=b", "caf\u{e9}", "a,b"] {
            let refused = encode_bearer(token);
            assert_eq!(refused.unwrap_err(), SaslError::Prohibited("token"), "{token:?}");
        }
    }

    #[test]
    fn bearer_message_names_a_user_with_its_characters_escaped() {
        assert_eq!(authzid("n,a=a=2Cb=3D,").as_deref(), Ok("a,b="));
        assert_eq!(authzid("n,a=plain,").as_deref(), Ok("plain"));
        for wrong in ["n,a=,", "n,a=x=2c,", "n,a=x=,", "n,a=x=\u{e9},", "n,b=x,", "n,a=x,y,", "n,"]
        {
            assert!(matches!(authzid(wrong), Err(SaslError::Malformed(_))), "{wrong}");
        }
        for binding in ["y,,", "p=tls-unique,,"] {
            assert_eq!(authzid(binding), Err(SaslError::ChannelBinding), "{binding}");
        }
    }

    #[test]
    fn bearer_message_that_is_malformed_is_refused() {
        for wrong in [
            &b""[..],
            b"\x01\x01",
            b"n,,\x01\x01",
            b"n,,\x01auth=Bearer x\x01",
            b"n,,\x01auth=Basic x\x01\x01",
            b"n,,\x01auth=Bearer\x01\x01",
            b"n,,\x01auth=Bearer x y\x01\x01",
            b"n,,\x01auth=Bearer x\x01auth=Bearer y\x01\x01",
            b"n,,auth=Bearer x\x01\x01",
            b"n,,\x01auth=Bearer \xff\x01\x01",
        ] {
            assert!(BearerMessage::decode(wrong).is_err(), "{wrong:?}");
        }
    }
}
