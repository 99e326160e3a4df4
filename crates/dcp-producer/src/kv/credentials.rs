//! The users of the cluster, and the authentication of connections.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use dcp_wire::sasl::{
    BearerMessage, MIN_ITERATIONS, Mechanism, PlainMessage, SaslError, ScramCredentials,
    ScramServer,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::tokens::{Lifetime, TokenKey};
use crate::chance::{Chance, Now};
use crate::rights::Rights;
use crate::{Error, User};

/// The users of an embedded cluster.
pub(crate) struct Credentials {
    /// The user with all privileges.
    administrator: Arc<Account>,
    readers: Vec<Arc<Account>>,
    /// Key of the tokens that are accepted.
    token_key: Option<TokenKey>,
    /// Rounds of SCRAM's key derivation.
    rounds: u32,
    /// Gives an unknown user the same salt each time.
    salts: RandomState,
    pub(super) chance: Arc<Chance>,
}

/// A user.
#[derive(Debug)]
pub(crate) struct Account {
    username: String,
    secret: RwLock<Arc<Secret>>,
    pub(super) rights: Rights,
}

impl Account {
    fn new(
        username: &str,
        password: &str,
        rights: Rights,
        chance: &Chance,
    ) -> Result<Arc<Self>, Error> {
        let secret = RwLock::new(Secret::new(password, chance)?);
        Ok(Arc::new(Self { username: username.to_owned(), secret, rights }))
    }

    fn secret(&self) -> Arc<Secret> {
        Arc::clone(&self.secret.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn accepts(&self, message: &PlainMessage<'_>) -> bool {
        message.matches(&self.username, &self.secret().password)
    }
}

/// A password and its SCRAM credentials.
struct Secret {
    password: String,
    /// Derived on first use, which takes some milliseconds.
    scram: OnceLock<Vec<ScramCredentials>>,
}

impl std::fmt::Debug for Secret {
    /// Leaves everything out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    fn new(password: &str, chance: &Chance) -> Result<Arc<Self>, Error> {
        // The minimum number of rounds is enough to check whether the password can be used.
        derive(password, MIN_ITERATIONS, chance).map_err(|error| Error::InvalidOption {
            option: "password",
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self { password: password.to_owned(), scram: OnceLock::new() }))
    }
}

impl Credentials {
    /// Rounds of SCRAM's key derivation, as in the data service.
    pub(crate) const ROUNDS: u32 = 4096;

    /// Credentials for all mechanisms.
    pub(crate) fn new(
        username: &str,
        password: &str,
        rounds: u32,
        chance: Arc<Chance>,
    ) -> Result<Self, Error> {
        let administrator = Account::new(username, password, Rights::All, &chance)?;
        let (readers, salts) = (Vec::new(), RandomState::new());
        Ok(Self { administrator, readers, token_key: None, rounds, salts, chance })
    }

    /// The same with users who may only read.
    pub(crate) fn with_readers(mut self, users: &[User]) -> Result<Self, Error> {
        for User { username, password, reads } in users {
            let rights = Rights::Reader(reads.clone());
            self.readers.push(Account::new(username, password, rights, &self.chance)?);
        }
        Ok(self)
    }

    /// The same with tokens that are signed with `key`, if there is one.
    pub(crate) fn with_token_key(self, key: Option<&[u8]>) -> Self {
        Self { token_key: key.map(TokenKey::new), ..self }
    }

    /// Whether tokens are accepted.
    pub(super) fn has_token_key(&self) -> bool {
        self.token_key.is_some()
    }

    /// The user of a token, and how long the connection stays authenticated by it.
    fn bearer(&self, message: &[u8], now: Now) -> Result<(Arc<Account>, Lifetime), SaslError> {
        let key = self.token_key.as_ref().ok_or(SaslError::NoMechanism)?;
        let message = BearerMessage::decode(message)?;
        let claims = key.verify(message.token)?;
        let lifetime = claims.lifetime(now)?;
        let is_meant = message.authzid.is_empty() || message.authzid == claims.sub;
        let mut accounts =
            self.accounts().filter(|account| is_meant && account.username == claims.sub);
        Ok((Arc::clone(accounts.next().ok_or(SaslError::Token)?), lifetime))
    }

    /// Changes the administrator's password.
    pub(crate) fn set_password(&self, password: &str) -> Result<(), Error> {
        let secret = Secret::new(password, &self.chance)?;
        *self.administrator.secret.write().unwrap_or_else(PoisonError::into_inner) = secret;
        Ok(())
    }

    /// The administrator's name.
    pub(crate) fn username(&self) -> &str {
        &self.administrator.username
    }

    fn accounts(&self) -> impl Iterator<Item = &Arc<Account>> {
        std::iter::once(&self.administrator).chain(&self.readers)
    }

    /// Whether a PLAIN message has the administrator's name and password.
    pub(crate) fn accepts(&self, message: &PlainMessage<'_>) -> bool {
        self.administrator.accepts(message)
    }

    /// The challenge for `username`: for an unknown user one that cannot be answered, so that the
    /// exchange does not reveal which users exist.
    pub(crate) fn scram(
        &self,
        mechanism: Mechanism,
        username: &str,
    ) -> Result<ScramCredentials, SaslError> {
        let known = self.accounts().find(|account| account.username == username);
        let secret = known.unwrap_or(&self.administrator).secret();
        let derived = secret.scram.get_or_init(|| {
            derive(&secret.password, self.rounds, &self.chance).unwrap_or_default()
        });
        let kept = derived
            .iter()
            .find(|credentials| credentials.mechanism() == mechanism)
            .ok_or(SaslError::NoMechanism)?;
        if known.is_some() {
            return Ok(kept.clone());
        }
        let low = self.salts.hash_one((username, 0u8)).to_be_bytes();
        let high = self.salts.hash_one((username, 1u8)).to_be_bytes();
        let len = match mechanism {
            Mechanism::ScramSha1 => 20,
            Mechanism::ScramSha256 => 32,
            _ => 64,
        };
        let mut keys = [0u8; 128];
        StdRng::from_os_rng().fill(&mut keys[..]);
        let (stored, server) = keys.split_at(64);
        let key = |bytes: &[u8]| bytes.iter().copied().take(len).collect::<Vec<u8>>().into();
        let salt = [low, high].concat();
        ScramCredentials::from_keys(mechanism, &salt, self.rounds, key(stored), key(server))
    }
}

/// The credentials of each SCRAM mechanism for a password.
fn derive(
    password: &str,
    iterations: u32,
    chance: &Chance,
) -> Result<Vec<ScramCredentials>, SaslError> {
    let derive = |mechanism| {
        let salt = chance.number().to_be_bytes();
        ScramCredentials::derive(mechanism, password, &salt, iterations)
    };
    let salted = Mechanism::PASSWORD.into_iter().filter(|mechanism| !mechanism.reveals_password());
    salted.map(derive).collect()
}

impl std::fmt::Debug for Credentials {
    /// Leaves the secrets out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username()).finish_non_exhaustive()
    }
}

/// State of a connection's authentication.
#[derive(Debug)]
pub(crate) struct Login {
    pub(super) credentials: Arc<Credentials>,
    state: State,
    /// Of the token, if one authenticated the client.
    lifetime: Option<Lifetime>,
}

#[derive(Debug)]
enum State {
    Anonymous,
    Challenged(Mechanism, Box<ScramServer>),
    Done(Arc<Account>),
    /// By a client certificate, which SASL cannot change.
    Certified,
}

/// The answer to a client.
pub(super) enum Answer {
    Challenge(Vec<u8>),
    Done(Vec<u8>),
}

impl Login {
    pub(super) fn new(credentials: Arc<Credentials>) -> Self {
        Self { credentials, state: State::Anonymous, lifetime: None }
    }

    /// Whether the client's token has expired or is not valid yet.
    pub(super) fn is_stale(&self, now: Now) -> bool {
        self.lifetime.is_some_and(|lifetime| lifetime.is_stale(now))
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done(_) | State::Certified)
    }

    /// The client's privileges.
    pub(crate) fn rights(&self) -> &Rights {
        match &self.state {
            State::Done(account) => &account.rights,
            State::Certified => &self.credentials.administrator.rights,
            State::Anonymous | State::Challenged(..) => {
                const NONE: &Rights = &Rights::Nothing;
                NONE
            }
        }
    }

    /// Authenticates the client by the administrator's certificate.
    pub(super) fn certify(&mut self) {
        self.state = State::Certified;
    }

    pub(super) fn is_certified(&self) -> bool {
        matches!(self.state, State::Certified)
    }

    /// Starts over, regardless of the earlier user.
    pub(super) fn begin(
        &mut self,
        mechanism: Mechanism,
        message: &[u8],
        now: Now,
    ) -> Result<Answer, SaslError> {
        self.state = State::Anonymous;
        if mechanism == Mechanism::OAuthBearer {
            // That of an earlier token stays in force if this one is refused.
            let (account, lifetime) = self.credentials.bearer(message, now)?;
            (self.state, self.lifetime) = (State::Done(account), Some(lifetime));
            return Ok(Answer::Done(Vec::new()));
        }
        self.lifetime = None;
        if mechanism == Mechanism::Plain {
            let message = PlainMessage::decode(message)?;
            let account = self.credentials.accounts().find(|account| account.accepts(&message));
            self.state = State::Done(Arc::clone(account.ok_or(SaslError::ClientProof)?));
            return Ok(Answer::Done(Vec::new()));
        }
        let mut server = ScramServer::read(message)?;
        let credentials = self.credentials.scram(mechanism, server.username())?;
        let nonce = format!("{:032x}", self.credentials.chance.number());
        let challenge = server.challenge(credentials, &nonce)?;
        self.state = State::Challenged(mechanism, Box::new(server));
        Ok(Answer::Challenge(challenge))
    }

    pub(super) fn step(
        &mut self,
        mechanism: Mechanism,
        message: &[u8],
    ) -> Result<Answer, SaslError> {
        match std::mem::replace(&mut self.state, State::Anonymous) {
            State::Challenged(begun, server) if begun == mechanism => {
                let username = server.username().to_owned();
                let proof = server.verify(message)?;
                let mut accounts = self.credentials.accounts();
                let account = accounts.find(|account| account.username == username);
                self.state = State::Done(Arc::clone(account.ok_or(SaslError::ClientProof)?));
                Ok(Answer::Done(proof))
            }
            _ => Err(SaslError::OutOfOrder),
        }
    }
}
