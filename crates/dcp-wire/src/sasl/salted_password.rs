//! A salted password, which several exchanges share.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use zeroize::Zeroizing;

use super::Secret;
use super::digest::{self, Hash};

/// The password that was salted last, for [`ScramClient::with_salted`](super::ScramClient::with_salted).
///
/// All nodes of a cluster have the same salt for a user, so that a client does PBKDF2, which takes
/// milliseconds, once instead of for every connection. Clones share it. It is erased when dropped and
/// never shown.
#[derive(Clone, Default)]
pub struct SaltedPassword(Arc<Mutex<Option<Last>>>);

struct Last {
    hash: Hash,
    password: Zeroizing<String>,
    salt: Secret,
    iterations: u32,
    salted: Secret,
}

impl SaltedPassword {
    /// PBKDF2 of a password. Connections that are made at the same time wait for the first one.
    pub(super) fn get(&self, hash: Hash, password: &str, salt: &[u8], iterations: u32) -> Secret {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &*last
            && (last.hash, last.iterations) == (hash, iterations)
            && digest::equal(&last.salt, salt)
            && digest::equal(last.password.as_bytes(), password.as_bytes())
        {
            return last.salted.clone();
        }
        let salted = hash.pbkdf2(password.as_bytes(), salt, iterations);
        *last = Some(Last {
            hash,
            password: Zeroizing::new(password.to_owned()),
            salt: Zeroizing::new(salt.to_vec()),
            iterations,
            salted: salted.clone(),
        });
        salted
    }
}

impl fmt::Debug for SaltedPassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaltedPassword").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salted_password_is_that_of_its_password_salt_hash_and_rounds() {
        let shared = SaltedPassword::default();
        let cases = [
            (Hash::Sha256, "pencil", b"salt", 4096),
            (Hash::Sha256, "pencil", b"salt", 4096),
            (Hash::Sha256, "pen", b"salt", 4096),
            (Hash::Sha256, "pen", b"dirt", 4096),
            (Hash::Sha256, "pen", b"dirt", 4097),
            (Hash::Sha512, "pen", b"dirt", 4097),
        ];
        for (hash, password, salt, iterations) in cases {
            let right = hash.pbkdf2(password.as_bytes(), salt, iterations);
            let found = shared.clone().get(hash, password, salt, iterations);
            assert!(digest::equal(&found, &right), "{hash:?} {password} {salt:?} {iterations}");
        }
    }

    #[test]
    fn password_is_salted_once() {
        let shared = SaltedPassword::default();
        shared.get(Hash::Sha1, "pencil", b"salt", 4096);
        shared.0.lock().unwrap().as_mut().unwrap().salted = Zeroizing::new(vec![7]);
        assert_eq!(shared.clone().get(Hash::Sha1, "pencil", b"salt", 4096).as_slice(), [7]);
    }

    #[test]
    fn salted_password_is_never_shown() {
        let shared = SaltedPassword::default();
        shared.get(Hash::Sha1, "pencil", b"salt", 4096);
        assert_eq!(format!("{shared:?}"), "SaltedPassword { .. }");
    }
}
