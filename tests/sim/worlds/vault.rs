//! Where applications get the password from. It learns of a new one later than the cluster does.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use dcp_consumer::{Credentials, CredentialsError, ProvideCredentials};
use tokio::time::Instant;

/// What clients ask for the password at each connection.
pub(crate) struct Vault {
    known: Mutex<Known>,
}

struct Known {
    password: String,
    /// How often the password has changed, as far as is known here.
    changes: u64,
    /// A newer one, and when it becomes known.
    next: Option<(Instant, String)>,
    /// Until then nothing is given, not even the old one.
    is_sealed: bool,
    given: BTreeMap<&'static str, u64>,
}

impl Known {
    fn learn(&mut self, by: Instant) {
        if let Some((_, password)) = self.next.take_if(|(at, _)| *at <= by) {
            self.password = password;
            self.changes += 1;
        }
    }
}

impl Vault {
    pub(crate) fn new(password: &str) -> Self {
        let known = Known {
            password: password.to_owned(),
            changes: 0,
            next: None,
            is_sealed: false,
            given: BTreeMap::new(),
        };
        Self { known: Mutex::new(known) }
    }

    /// The password is another one, which becomes known after a while. Until then the old one is
    /// given, or none if the vault `is_sealed`.
    pub(crate) fn change(&self, password: String, after: Duration, is_sealed: bool) {
        let mut known = self.known.lock().unwrap();
        known.next = Some((Instant::now() + after, password));
        known.is_sealed = is_sealed;
    }

    /// Nothing is unknown any more.
    pub(crate) fn settle(&self) {
        let mut known = self.known.lock().unwrap();
        if let Some((at, _)) = known.next {
            known.learn(at);
        }
    }

    /// How often the password has changed and become known.
    pub(crate) fn changes(&self) -> u64 {
        self.known.lock().unwrap().changes
    }

    /// What clients were given, and how often.
    pub(crate) fn given(&self) -> BTreeMap<&'static str, u64> {
        self.known.lock().unwrap().given.clone()
    }
}

impl ProvideCredentials for Vault {
    fn credentials(&self) -> Result<Credentials, CredentialsError> {
        let mut known = self.known.lock().unwrap();
        known.learn(Instant::now());
        let (given, is_sealed) = match &known.next {
            Some(_) if known.is_sealed => ("no password", true),
            Some(_) => ("old password", false),
            None if known.changes > 0 => ("new password", false),
            None => ("first password", false),
        };
        *known.given.entry(given).or_default() += 1;
        if is_sealed {
            return Err("the vault is sealed".into());
        }
        Ok(Credentials::new("Administrator", known.password.as_str()))
    }
}
