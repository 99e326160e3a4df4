//! The three hash functions behind one interface.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::Hmac;
use hmac::digest::{Digest, Key, KeyInit, Mac};
use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Sha256, Sha512};
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, Zeroizing};

use super::{Mechanism, SaslError, Secret};

/// Hash function of a SCRAM mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hash {
    Sha1,
    Sha256,
    Sha512,
}

impl Hash {
    /// The hash function of `mechanism`, `None` unless it is one of SCRAM.
    pub(super) const fn of(mechanism: Mechanism) -> Option<Self> {
        match mechanism {
            Mechanism::Plain | Mechanism::OAuthBearer => None,
            Mechanism::ScramSha1 => Some(Self::Sha1),
            Mechanism::ScramSha256 => Some(Self::Sha256),
            Mechanism::ScramSha512 => Some(Self::Sha512),
        }
    }

    /// Length of a digest in bytes.
    pub(super) const fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// HMAC of `message`. Keys are digests, which are never longer than a block.
    pub(super) fn hmac(self, key: &[u8], message: &[u8]) -> Secret {
        match self {
            Self::Sha1 => mac::<Hmac<Sha1>>(key, message),
            Self::Sha256 => mac::<Hmac<Sha256>>(key, message),
            Self::Sha512 => mac::<Hmac<Sha512>>(key, message),
        }
    }

    /// Digest of `message`.
    pub(super) fn digest(self, message: &[u8]) -> Secret {
        Zeroizing::new(match self {
            Self::Sha1 => Sha1::digest(message).to_vec(),
            Self::Sha256 => Sha256::digest(message).to_vec(),
            Self::Sha512 => Sha512::digest(message).to_vec(),
        })
    }

    /// PBKDF2 of a password, as long as a digest.
    pub(super) fn pbkdf2(self, password: &[u8], salt: &[u8], iterations: u32) -> Secret {
        let mut out = Zeroizing::new(vec![0; self.len()]);
        match self {
            Self::Sha1 => pbkdf2_hmac::<Sha1>(password, salt, iterations, &mut out),
            Self::Sha256 => pbkdf2_hmac::<Sha256>(password, salt, iterations, &mut out),
            Self::Sha512 => pbkdf2_hmac::<Sha512>(password, salt, iterations, &mut out),
        }
        out
    }
}

fn mac<M: Mac + KeyInit>(key: &[u8], message: &[u8]) -> Secret {
    let mut block = Key::<M>::default();
    for (slot, byte) in block.iter_mut().zip(key) {
        *slot = *byte;
    }
    let mut mac = <M as KeyInit>::new(&block);
    block.as_mut_slice().zeroize();
    mac.update(message);
    Zeroizing::new(mac.finalize().into_bytes().to_vec())
}

/// XORs `left` with `right`.
pub(super) fn xor(left: &[u8], right: &[u8]) -> Secret {
    Zeroizing::new(left.iter().zip(right).map(|(a, b)| a ^ b).collect())
}

/// Compares two byte strings in a time that depends only on their lengths.
pub(super) fn equal(left: &[u8], right: &[u8]) -> bool {
    left.ct_eq(right).into()
}

/// Encodes bytes as base64.
pub(super) fn encode_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Decodes base64.
pub(super) fn decode_base64(text: &str, what: &'static str) -> Result<Secret, SaslError> {
    STANDARD.decode(text).map(Zeroizing::new).map_err(|_| SaslError::Malformed(what))
}
