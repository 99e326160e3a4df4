//! SASL authentication, client and server: PLAIN, SCRAM and OAUTHBEARER.
//!
//! This module neither draws random numbers nor does IO: nonces and salts are inputs, so that tests
//! can replay a recorded exchange and the caller chooses the source of randomness. Secrets are
//! erased when dropped and never shown by `Debug`.
//!
//! * Client: [`select_mechanism`], then [`encode_plain`], [`ScramClient`] or [`encode_bearer`].
//! * Server: [`PlainMessage`], [`BearerMessage`] or [`ScramServer`], which uses
//!   [`ScramCredentials`] and so never needs the password itself.
//!
//! SCRAM follows RFC 5802 and RFC 7677 without channel binding; passwords are prepared with
//! SASLprep. A successful exchange also proves that the server knows the password.

mod bearer;
mod digest;
mod salted_password;
mod scram_client;
mod scram_server;
#[cfg(test)]
mod tests;

pub use bearer::{BearerMessage, encode_bearer, is_bearer_token};
pub use salted_password::SaltedPassword;
pub use scram_client::ScramClient;
pub use scram_server::{ScramCredentials, ScramServer};

use core::fmt;

use thiserror::Error;
use zeroize::Zeroizing;

/// Bytes that are erased when they are dropped.
type Secret = Zeroizing<Vec<u8>>;

/// Most PBKDF2 rounds a client does for a server unless told otherwise.
///
/// Servers ask for 4,096 (data service) or 15,000 (cluster manager) by default. The limit bounds
/// the time a hostile server can make a client spend to a fraction of a second.
pub const MAX_ITERATIONS: u32 = 200_000;

/// Fewest PBKDF2 rounds a client does. A proof made with fewer lets whoever asked for it guess the
/// password quickly.
pub const MIN_ITERATIONS: u32 = 1_000;

/// Shortest salt a client takes, in bytes. Tables of guesses can be made beforehand for shorter
/// ones.
pub const MIN_SALT_LEN: usize = 8;

/// A way to authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mechanism {
    /// The password itself: only over TLS or towards a trusted network.
    Plain,
    /// SCRAM with SHA-1.
    ScramSha1,
    /// SCRAM with SHA-256.
    ScramSha256,
    /// SCRAM with SHA-512.
    ScramSha512,
    /// A token, as of Server 8.1: only over TLS.
    OAuthBearer,
}

impl Mechanism {
    /// All mechanisms, those for passwords first.
    pub const ALL: [Self; 5] =
        [Self::ScramSha512, Self::ScramSha256, Self::ScramSha1, Self::Plain, Self::OAuthBearer];

    /// Those for passwords, strongest first.
    pub const PASSWORD: [Self; 4] =
        [Self::ScramSha512, Self::ScramSha256, Self::ScramSha1, Self::Plain];

    /// Those that keep the password to the client, strongest first.
    pub const SCRAM: [Self; 3] = [Self::ScramSha512, Self::ScramSha256, Self::ScramSha1];

    /// Name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha1 => "SCRAM-SHA1",
            Self::ScramSha256 => "SCRAM-SHA256",
            Self::ScramSha512 => "SCRAM-SHA512",
            Self::OAuthBearer => "OAUTHBEARER",
        }
    }

    /// The mechanism with a name on the wire.
    #[must_use]
    pub fn from_name(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|mechanism| mechanism.name().as_bytes() == name)
    }

    /// Whether the password itself travels to the server.
    #[must_use]
    pub const fn reveals_password(self) -> bool {
        matches!(self, Self::Plain)
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The first of `allowed` mechanisms in a server's space-separated list.
///
/// [`Mechanism::Plain`] and [`Mechanism::OAuthBearer`] may only be allowed on a connection to a server whose certificate was
/// verified: whoever is in the middle of another one could obtain the password or token by offering
/// nothing else.
///
/// # Errors
/// [`SaslError::NoMechanism`] if nothing fits.
pub fn select_mechanism(offered: &[u8], allowed: &[Mechanism]) -> Result<Mechanism, SaslError> {
    let is_offered = |mechanism: &&Mechanism| {
        offered.split(|&byte| byte == b' ').any(|name| name == mechanism.name().as_bytes())
    };
    allowed.iter().find(is_offered).copied().ok_or(SaslError::NoMechanism)
}

/// Why authentication failed. Carries neither names nor secrets.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaslError {
    /// The peer names another channel binding than was agreed on.
    #[error("the peer asks for channel binding, which is not supported")]
    ChannelBinding,
    /// The client does not know the password.
    #[error("wrong user name or password")]
    ClientProof,
    /// The token is of another issuer, has expired, or names no user.
    #[error("the token is not accepted")]
    Token,
    /// The server wants more PBKDF2 rounds than the client does.
    #[error("the server asks for {iterations} SCRAM iterations, more than the limit of {max}")]
    Iterations {
        /// Rounds asked for.
        iterations: u32,
        /// Largest number accepted.
        max: u32,
    },
    /// The server wants fewer PBKDF2 rounds than keep the password safe.
    #[error(
        "the server asks for {iterations} SCRAM iterations, fewer than the {MIN_ITERATIONS} that \
         keep the password from being guessed: check that it is the right server, and its \
         scramsha_iteration_count"
    )]
    TooFewIterations {
        /// Rounds asked for.
        iterations: u32,
    },
    /// The server's salt is too short to keep the password safe.
    #[error(
        "the server's SCRAM salt has {len} bytes, fewer than the {MIN_SALT_LEN} that keep the \
         password from being guessed: check that it is the right server"
    )]
    ShortSalt {
        /// Its length in bytes.
        len: usize,
    },
    /// A message does not follow its grammar.
    #[error("malformed SASL message: {0}")]
    Malformed(&'static str),
    /// The server offers no mechanism this client may use.
    #[error(
        "the server offers no usable SASL mechanism (PLAIN must be allowed explicitly or TLS used)"
    )]
    NoMechanism,
    /// The peer's nonce does not continue ours: the message belongs to another exchange.
    #[error("the peer's SCRAM nonce does not continue ours")]
    Nonce,
    /// A message came at the wrong point of the exchange.
    #[error("SASL message out of order")]
    OutOfOrder,
    /// User name, password or token hold a character that may not occur in them.
    #[error("{0} holds a character that SASL does not allow")]
    Prohibited(&'static str),
    /// The server ended the exchange with an error of its own.
    #[error("the server refused SCRAM authentication: {0}")]
    Server(ServerError),
    /// The server does not know the password: it is not the server it claims to be.
    #[error("the server's signature is wrong: it does not know the password")]
    ServerSignature,
}

/// The error a SCRAM server names in its final message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerError {
    /// Channel binding trouble of one of several kinds.
    ChannelBinding,
    /// The client's proof is wrong.
    InvalidProof,
    /// Anything else.
    Other,
    /// The user does not exist.
    UnknownUser,
}

impl ServerError {
    fn from_wire(name: &[u8]) -> Self {
        match name {
            b"invalid-proof" => Self::InvalidProof,
            b"unknown-user" => Self::UnknownUser,
            b"channel-bindings-dont-match"
            | b"server-does-support-channel-binding"
            | b"channel-binding-not-supported"
            | b"unsupported-channel-binding-type" => Self::ChannelBinding,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ChannelBinding => "channel binding",
            Self::InvalidProof => "invalid proof",
            Self::Other => "other error",
            Self::UnknownUser => "unknown user",
        })
    }
}

/// The PLAIN message: NUL, user name, NUL, password.
///
/// # Errors
/// [`SaslError::Prohibited`] if either holds a NUL byte.
pub fn encode_plain(username: &str, password: &str) -> Result<Zeroizing<Vec<u8>>, SaslError> {
    if username.contains('\0') {
        return Err(SaslError::Prohibited("user name"));
    }
    if password.contains('\0') {
        return Err(SaslError::Prohibited("password"));
    }
    let len = username.len().saturating_add(password.len()).saturating_add(2);
    // Allocated once: growing would leave a copy of the password behind.
    let mut message = Zeroizing::new(Vec::with_capacity(len));
    message.push(0);
    message.extend_from_slice(username.as_bytes());
    message.push(0);
    message.extend_from_slice(password.as_bytes());
    Ok(message)
}

/// A PLAIN message as a server reads it.
#[derive(Clone, Copy)]
pub struct PlainMessage<'a> {
    /// User to act as; empty for the user itself.
    pub authzid: &'a str,
    /// Who authenticates.
    pub username: &'a str,
    /// The password.
    pub password: &'a str,
}

impl<'a> PlainMessage<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// [`SaslError::Malformed`] unless it is three UTF-8 strings with NUL bytes between them.
    pub fn decode(message: &'a [u8]) -> Result<Self, SaslError> {
        let malformed = SaslError::Malformed("PLAIN message");
        let text = str::from_utf8(message).map_err(|_| malformed)?;
        let mut parts = text.split('\0');
        let (Some(authzid), Some(username), Some(password), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed);
        };
        if username.is_empty() {
            return Err(malformed);
        }
        Ok(Self { authzid, username, password })
    }

    /// Whether the message names `username` and `password`, compared in constant time.
    #[must_use]
    pub fn matches(&self, username: &str, password: &str) -> bool {
        let name = digest::equal(self.username.as_bytes(), username.as_bytes());
        let word = digest::equal(self.password.as_bytes(), password.as_bytes());
        (self.authzid.is_empty() || self.authzid == self.username) && (name & word)
    }
}

impl fmt::Debug for PlainMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainMessage").field("username", &self.username).finish_non_exhaustive()
    }
}

/// SASLprep of a user name or password.
fn prepare<'a>(what: &'static str, text: &'a str) -> Result<Zeroizing<String>, SaslError> {
    let prepared: std::borrow::Cow<'a, str> =
        stringprep::saslprep(text).map_err(|_| SaslError::Prohibited(what))?;
    Ok(Zeroizing::new(prepared.into_owned()))
}

/// The attributes of a SCRAM message in order: `r=...,s=...` as pairs.
struct Attributes<'a> {
    rest: Option<&'a str>,
}

impl<'a> Attributes<'a> {
    const fn new(text: &'a str) -> Self {
        Self { rest: Some(text) }
    }

    /// The next attribute's value, which must have the name `name`.
    fn expect(&mut self, name: char, what: &'static str) -> Result<&'a str, SaslError> {
        let malformed = SaslError::Malformed(what);
        let rest = self.rest.ok_or(malformed)?;
        let (attribute, rest) = match rest.split_once(',') {
            Some((attribute, rest)) => (attribute, Some(rest)),
            None => (rest, None),
        };
        let value = attribute.strip_prefix(name).and_then(|value| value.strip_prefix('='));
        self.rest = rest;
        value.ok_or(malformed)
    }
}

/// Whether a nonce may be sent: printable ASCII without a comma, and not empty.
///
/// The RFC leaves the space out as well; official clients put spaces into theirs, so it passes.
fn is_nonce(nonce: &str) -> bool {
    !nonce.is_empty() && nonce.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b',')
}
