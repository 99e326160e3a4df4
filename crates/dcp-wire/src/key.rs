//! Document keys and the ids of collections and scopes.

use core::fmt;

use crate::{DecodeError, leb128};

macro_rules! hex_id {
    ($(#[$meta:meta])* $name:ident($int:ty)) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            /// As in the server's JSON: hex digits without a prefix.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:x}", self.0)
            }
        }
    };
}

hex_id! {
    /// Identity of a collection within its bucket; 0 is the default collection.
    CollectionId(u32)
}
hex_id! {
    /// Identity of a scope within its bucket; 0 is the default scope.
    ScopeId(u32)
}
hex_id! {
    /// Version of a bucket's collections manifest.
    ManifestUid(u64)
}

impl CollectionId {
    /// The default collection.
    pub const DEFAULT: Self = Self(0);

    /// Whether the id is reserved and may not appear on the wire (1 to 7).
    #[must_use]
    pub const fn is_reserved(self) -> bool {
        self.0 >= 1 && self.0 <= 7
    }
}

/// A document key as encoded on a connection with collections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocKey<'a> {
    /// Collection of the document.
    pub collection_id: CollectionId,
    /// The key without its collection id.
    pub key: &'a [u8],
}

impl<'a> DocKey<'a> {
    /// Longest key on the wire in bytes, collection prefix included.
    pub const MAX_ENCODED_LEN: usize = 251;
    /// Longest key in the default collection in bytes.
    pub const MAX_DEFAULT_LEN: usize = 250;
    /// Longest key in any other collection in bytes.
    pub const MAX_COLLECTION_LEN: usize = 246;

    /// Splits a key that begins with its collection id.
    ///
    /// # Errors
    /// [`DecodeError::InvalidField`] for a reserved collection, an empty or over-long key, or a
    /// malformed prefix.
    #[inline(always)]
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let (id, key) = leb128::decode(bytes)?;
        let collection_id = CollectionId(id);
        let max = if id == 0 { Self::MAX_DEFAULT_LEN } else { Self::MAX_COLLECTION_LEN };
        if collection_id.is_reserved() || key.is_empty() || key.len() > max {
            return Err(DecodeError::InvalidField("key"));
        }
        Ok(Self { collection_id, key })
    }
}
