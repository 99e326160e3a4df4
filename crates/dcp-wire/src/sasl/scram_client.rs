//! The client side of SCRAM.

use core::fmt;

use zeroize::Zeroizing;

use super::digest::{self, Hash, decode_base64, encode_base64};
use super::{
    Attributes, MAX_ITERATIONS, MIN_ITERATIONS, MIN_SALT_LEN, Mechanism, SaltedPassword, SaslError,
    Secret, ServerError, is_nonce, prepare,
};

/// No channel binding, no authorization identity: `n,,` and its base64 encoding.
const GS2_HEADER: &str = "n,,";
const GS2_HEADER_BASE64: &str = "biws";

/// The client side of a SCRAM exchange.
///
/// ```
/// use dcp_wire::sasl::{Mechanism, ScramClient};
///
/// // RFC 7677, section 3.
/// let mut client = ScramClient::new(Mechanism::ScramSha256, "user", "pencil", "rOprNGfwEbeRWgbNEkqO")?;
/// assert_eq!(client.first_message(), b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO");
/// let proof = client.respond(
///     b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
/// )?;
/// assert!(proof.ends_with(b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="));
/// client.verify(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")?;
/// # Ok::<(), dcp_wire::sasl::SaslError>(())
/// ```
pub struct ScramClient {
    hash: Hash,
    /// First message without its GS2 header.
    first_bare: String,
    nonce: String,
    max_iterations: u32,
    salted: SaltedPassword,
    state: State,
}

enum State {
    /// The password is kept until the server sends salt and iterations.
    AwaitingChallenge { password: Zeroizing<String> },
    /// Only the expected server signature is kept.
    AwaitingSignature { expected: Secret },
    /// The exchange has succeeded or failed.
    Done,
}

impl ScramClient {
    /// Begins an exchange. `nonce` must be printable ASCII without a comma, 24 or more random
    /// characters, and never reused.
    ///
    /// # Errors
    /// [`SaslError::Prohibited`] if name or password cannot be prepared, [`SaslError::Malformed`]
    /// for an invalid nonce, [`SaslError::NoMechanism`] for PLAIN.
    pub fn new(
        mechanism: Mechanism,
        username: &str,
        password: &str,
        nonce: &str,
    ) -> Result<Self, SaslError> {
        let hash = Hash::of(mechanism).ok_or(SaslError::NoMechanism)?;
        if !is_nonce(nonce) {
            return Err(SaslError::Malformed("nonce"));
        }
        let username = prepare("user name", username)?;
        if username.is_empty() {
            return Err(SaslError::Prohibited("user name"));
        }
        let password = prepare("password", password)?;
        let username = username.replace('=', "=3D").replace(',', "=2C");
        Ok(Self {
            hash,
            first_bare: format!("n={username},r={nonce}"),
            nonce: nonce.to_owned(),
            max_iterations: MAX_ITERATIONS,
            salted: SaltedPassword::default(),
            state: State::AwaitingChallenge { password },
        })
    }

    /// Sets the maximum number of PBKDF2 rounds; the default is [`MAX_ITERATIONS`].
    #[must_use]
    pub const fn with_max_iterations(mut self, max: u32) -> Self {
        self.max_iterations = max;
        self
    }

    /// Shares the salted password with other exchanges.
    #[must_use]
    pub fn with_salted(mut self, salted: SaltedPassword) -> Self {
        self.salted = salted;
        self
    }

    /// The payload of SASL_AUTH.
    #[must_use]
    pub fn first_message(&self) -> Vec<u8> {
        format!("{GS2_HEADER}{}", self.first_bare).into_bytes()
    }

    /// The payload of SASL_STEP, computed from the server's challenge.
    ///
    /// Does up to [`MAX_ITERATIONS`] rounds of PBKDF2, which takes tens of milliseconds at worst
    /// with the numbers servers send, unless [`with_salted`](Self::with_salted) has the result. Refuses fewer than [`MIN_ITERATIONS`] rounds and salts
    /// shorter than [`MIN_SALT_LEN`].
    ///
    /// # Errors
    /// [`SaslError`]; the exchange has failed then.
    pub fn respond(&mut self, challenge: &[u8]) -> Result<Vec<u8>, SaslError> {
        let State::AwaitingChallenge { password } =
            core::mem::replace(&mut self.state, State::Done)
        else {
            return Err(SaslError::OutOfOrder);
        };
        let challenge = str::from_utf8(challenge)
            .map_err(|_| SaslError::Malformed("server's first message"))?;
        let Challenge { nonce, salt, iterations } = Challenge::decode(challenge)?;
        // The server appends to our nonce: any other nonce belongs to another exchange.
        if !nonce.starts_with(&self.nonce) || nonce.len() == self.nonce.len() || !is_nonce(nonce) {
            return Err(SaslError::Nonce);
        }
        if iterations < MIN_ITERATIONS {
            return Err(SaslError::TooFewIterations { iterations });
        }
        if salt.len() < MIN_SALT_LEN {
            return Err(SaslError::ShortSalt { len: salt.len() });
        }
        if iterations > self.max_iterations {
            return Err(SaslError::Iterations { iterations, max: self.max_iterations });
        }
        let shared = core::mem::take(&mut self.salted);
        let salted = shared.get(self.hash, &password, &salt, iterations);
        let client_key = self.hash.hmac(&salted, b"Client Key");
        let stored_key = self.hash.digest(&client_key);
        let server_key = self.hash.hmac(&salted, b"Server Key");
        let without_proof = format!("c={GS2_HEADER_BASE64},r={nonce}");
        let auth_message = format!("{},{challenge},{without_proof}", self.first_bare);
        let signature = self.hash.hmac(&stored_key, auth_message.as_bytes());
        let proof = digest::xor(&client_key, &signature);
        let expected = self.hash.hmac(&server_key, auth_message.as_bytes());
        self.state = State::AwaitingSignature { expected };
        Ok(format!("{without_proof},p={}", encode_base64(&proof)).into_bytes())
    }

    /// Checks the server's last message, which proves that the server knows the password.
    ///
    /// # Errors
    /// [`SaslError::ServerSignature`] for a wrong signature, [`SaslError::Server`] for an error
    /// sent by the server, or another [`SaslError`].
    pub fn verify(&mut self, last: &[u8]) -> Result<(), SaslError> {
        let State::AwaitingSignature { expected } =
            core::mem::replace(&mut self.state, State::Done)
        else {
            return Err(SaslError::OutOfOrder);
        };
        if let Some(error) = last.strip_prefix(b"e=") {
            let name = error.split(|&byte| byte == b',').next().unwrap_or_default();
            return Err(SaslError::Server(ServerError::from_wire(name)));
        }
        let what = "server's final message";
        let last = str::from_utf8(last).map_err(|_| SaslError::Malformed(what))?;
        let signature = decode_base64(Attributes::new(last).expect('v', what)?, what)?;
        if !digest::equal(&signature, &expected) {
            return Err(SaslError::ServerSignature);
        }
        Ok(())
    }
}

impl fmt::Debug for ScramClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::AwaitingChallenge { .. } => "awaiting challenge",
            State::AwaitingSignature { .. } => "awaiting signature",
            State::Done => "done",
        };
        f.debug_struct("ScramClient")
            .field("hash", &self.hash)
            .field("state", &state)
            .finish_non_exhaustive()
    }
}

struct Challenge<'a> {
    nonce: &'a str,
    salt: Secret,
    iterations: u32,
}

impl<'a> Challenge<'a> {
    fn decode(text: &'a str) -> Result<Self, SaslError> {
        let what = "server's first message";
        if text.starts_with("m=") {
            return Err(SaslError::Malformed("unknown mandatory extension"));
        }
        let mut attributes = Attributes::new(text);
        let nonce = attributes.expect('r', what)?;
        let salt = decode_base64(attributes.expect('s', what)?, what)?;
        let iterations =
            attributes.expect('i', what)?.parse().map_err(|_| SaslError::Malformed(what))?;
        Ok(Self { nonce, salt, iterations })
    }
}
