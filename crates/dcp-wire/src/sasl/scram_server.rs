//! The server side of SCRAM.

use core::fmt;

use zeroize::Zeroizing;

use super::digest::{self, Hash, decode_base64, encode_base64};
use super::{
    Attributes, MAX_ITERATIONS, MIN_ITERATIONS, MIN_SALT_LEN, Mechanism, SaslError, Secret,
    is_nonce, prepare,
};

/// Whether clients accept this salt and number of iterations.
fn check(salt: &[u8], iterations: u32) -> Result<(), SaslError> {
    if salt.len() < MIN_SALT_LEN || !(MIN_ITERATIONS..=MAX_ITERATIONS).contains(&iterations) {
        return Err(SaslError::Malformed("salt or iterations"));
    }
    Ok(())
}

/// What a server stores of a password for one mechanism: enough to check it, not to use it.
#[derive(Clone)]
pub struct ScramCredentials {
    mechanism: Mechanism,
    hash: Hash,
    salt: Vec<u8>,
    iterations: u32,
    stored_key: Secret,
    server_key: Secret,
}

impl ScramCredentials {
    /// Derives the credentials from a password; `salt` should be 16 or more random bytes.
    ///
    /// # Errors
    /// [`SaslError::Prohibited`] if the password cannot be prepared, [`SaslError::NoMechanism`] for
    /// PLAIN, [`SaslError::Malformed`] for a salt or a number of iterations that clients would
    /// refuse.
    pub fn derive(
        mechanism: Mechanism,
        password: &str,
        salt: &[u8],
        iterations: u32,
    ) -> Result<Self, SaslError> {
        let hash = Hash::of(mechanism).ok_or(SaslError::NoMechanism)?;
        check(salt, iterations)?;
        let password = prepare("password", password)?;
        let salted = hash.pbkdf2(password.as_bytes(), salt, iterations);
        let client_key = hash.hmac(&salted, b"Client Key");
        let stored_key = hash.digest(&client_key);
        let server_key = hash.hmac(&salted, b"Server Key");
        Self::from_keys(mechanism, salt, iterations, stored_key, server_key)
    }

    /// Credentials from stored keys.
    ///
    /// # Errors
    /// [`SaslError::NoMechanism`] for PLAIN, [`SaslError::Malformed`] if a key does not have the
    /// length of the mechanism's digest, or for a salt or a number of iterations that clients would
    /// refuse.
    pub fn from_keys(
        mechanism: Mechanism,
        salt: &[u8],
        iterations: u32,
        stored_key: Zeroizing<Vec<u8>>,
        server_key: Zeroizing<Vec<u8>>,
    ) -> Result<Self, SaslError> {
        let hash = Hash::of(mechanism).ok_or(SaslError::NoMechanism)?;
        if stored_key.len() != hash.len() || server_key.len() != hash.len() {
            return Err(SaslError::Malformed("stored key"));
        }
        check(salt, iterations)?;
        Ok(Self { mechanism, hash, salt: salt.to_vec(), iterations, stored_key, server_key })
    }

    /// The mechanism these credentials are for.
    #[must_use]
    pub const fn mechanism(&self) -> Mechanism {
        self.mechanism
    }
}

impl fmt::Debug for ScramCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramCredentials")
            .field("mechanism", &self.mechanism)
            .field("iterations", &self.iterations)
            .finish_non_exhaustive()
    }
}

/// The server side of a SCRAM exchange.
///
/// [`read`](Self::read) the client's first message, look up its user, send the
/// [`challenge`](Self::challenge), [`verify`](Self::verify) the response. For an unknown user,
/// continue with credentials of a made-up password and a salt derived from the name, so that the
/// exchange does not reveal which users exist.
pub struct ScramServer {
    /// What the client's last message must repeat: `n,,` or `y,,`.
    gs2_header_base64: &'static str,
    username: String,
    first_bare: String,
    client_nonce: String,
    pending: Option<Pending>,
}

struct Pending {
    nonce: String,
    challenge: String,
    credentials: ScramCredentials,
}

impl ScramServer {
    /// Reads the client's first message.
    ///
    /// # Errors
    /// [`SaslError`] if it is malformed or requires channel binding.
    pub fn read(client_first: &[u8]) -> Result<Self, SaslError> {
        let what = "client's first message";
        let malformed = SaslError::Malformed(what);
        let text = str::from_utf8(client_first).map_err(|_| malformed)?;
        // `n`: no channel binding; `y`: the client supports it but believes that the server does
        // not. The client repeats this in its last message, where the proof covers it.
        let (gs2_header_base64, rest) = match (text.strip_prefix("n,"), text.strip_prefix("y,")) {
            (Some(rest), _) => ("biws", rest),
            (_, Some(rest)) => ("eSws", rest),
            _ if text.starts_with("p=") => return Err(SaslError::ChannelBinding),
            _ => return Err(malformed),
        };
        // Acting as another user is not supported: the authorization identity must be absent.
        let first_bare = rest.strip_prefix(',').ok_or(malformed)?;
        let mut attributes = Attributes::new(first_bare);
        let username = unescape(attributes.expect('n', what)?).ok_or(malformed)?;
        let nonce = attributes.expect('r', what)?;
        if username.is_empty() || !is_nonce(nonce) {
            return Err(malformed);
        }
        Ok(Self {
            gs2_header_base64,
            username,
            first_bare: first_bare.to_owned(),
            client_nonce: nonce.to_owned(),
            pending: None,
        })
    }

    /// Name of the user to authenticate.
    #[must_use]
    pub fn username(&self) -> &str {
        &self.username
    }

    /// The challenge for the user's credentials. `nonce` must be random, like the client's.
    ///
    /// # Errors
    /// [`SaslError::OutOfOrder`] if a challenge was already sent, [`SaslError::Malformed`] for an
    /// invalid nonce.
    pub fn challenge(
        &mut self,
        credentials: ScramCredentials,
        nonce: &str,
    ) -> Result<Vec<u8>, SaslError> {
        if self.pending.is_some() {
            return Err(SaslError::OutOfOrder);
        }
        if !is_nonce(nonce) {
            return Err(SaslError::Malformed("nonce"));
        }
        let nonce = format!("{}{nonce}", self.client_nonce);
        let salt = encode_base64(&credentials.salt);
        let challenge = format!("r={nonce},s={salt},i={}", credentials.iterations);
        let message = challenge.clone().into_bytes();
        self.pending = Some(Pending { nonce, challenge, credentials });
        Ok(message)
    }

    /// Checks the client's proof; returns the message that authenticates the server to the client.
    ///
    /// # Errors
    /// [`SaslError::ClientProof`] for a wrong password, or another [`SaslError`].
    pub fn verify(self, client_final: &[u8]) -> Result<Vec<u8>, SaslError> {
        let what = "client's final message";
        let Pending { nonce, challenge, credentials } =
            self.pending.ok_or(SaslError::OutOfOrder)?;
        let text = str::from_utf8(client_final).map_err(|_| SaslError::Malformed(what))?;
        // The proof is the last attribute: it covers everything before it.
        let (without_proof, proof) = text.rsplit_once(",p=").ok_or(SaslError::Malformed(what))?;
        let mut attributes = Attributes::new(without_proof);
        if attributes.expect('c', what)? != self.gs2_header_base64 {
            return Err(SaslError::ChannelBinding);
        }
        if attributes.expect('r', what)? != nonce {
            return Err(SaslError::Nonce);
        }
        let proof = decode_base64(proof, what)?;
        let auth_message = format!("{},{challenge},{without_proof}", self.first_bare);
        let hash = credentials.hash;
        let signature = hash.hmac(&credentials.stored_key, auth_message.as_bytes());
        let client_key = digest::xor(&proof, &signature);
        let proved = digest::equal(&hash.digest(&client_key), &credentials.stored_key);
        if proof.len() != hash.len() || !proved {
            return Err(SaslError::ClientProof);
        }
        let signature = hash.hmac(&credentials.server_key, auth_message.as_bytes());
        Ok(format!("v={}", encode_base64(&signature)).into_bytes())
    }
}

impl fmt::Debug for ScramServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramServer").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Unescapes a user name; `None` if it contains an invalid escape.
fn unescape(name: &str) -> Option<String> {
    let mut out = String::with_capacity(name.len());
    let mut parts = name.split('=');
    out.push_str(parts.next()?);
    for part in parts {
        if let Some(rest) = part.strip_prefix("2C") {
            out.push(',');
            out.push_str(rest);
        } else {
            out.push('=');
            out.push_str(part.strip_prefix("3D")?);
        }
    }
    Some(out)
}
