//! A bounds-checked cursor over bytes.

use crate::DecodeError;

/// Reads big-endian fields from the front of a slice; every read is bounds-checked.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

macro_rules! read_int {
    ($(#[$meta:meta])* $name:ident, $int:ty) => {
        $(#[$meta])*
        ///
        /// # Errors
        /// [`DecodeError::UnexpectedEnd`] if too few bytes are left.
        #[inline]
        pub fn $name(&mut self) -> Result<$int, DecodeError> {
            Ok(<$int>::from_be_bytes(self.array()?))
        }
    };
}

impl<'a> Reader<'a> {
    /// A reader of `input`, which errors refer to as `what`.
    #[must_use]
    pub const fn new(input: &'a [u8], what: &'static str) -> Self {
        Self { rest: input, what }
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`DecodeError::UnexpectedEnd`] if too few bytes are left.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(DecodeError::UnexpectedEnd { what: self.what })?;
        self.rest = rest;
        Ok(*head)
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`DecodeError::UnexpectedEnd`] if too few bytes are left.
    #[inline]
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(DecodeError::UnexpectedEnd { what: self.what })?;
        self.rest = rest;
        Ok(head)
    }

    read_int! {
        /// The next byte.
        u8, u8
    }
    read_int! {
        /// The next two bytes.
        u16, u16
    }
    read_int! {
        /// The next four bytes.
        u32, u32
    }
    read_int! {
        /// The next eight bytes.
        u64, u64
    }

    /// All remaining bytes.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Whether no bytes remain.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Finishes reading.
    ///
    /// # Errors
    /// [`DecodeError::TrailingBytes`] if bytes are left.
    pub const fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(DecodeError::TrailingBytes { what: self.what, len: saturating_u32(self.rest.len()) })
    }
}

/// `len` for an error message, saturated at the largest value.
pub(crate) const fn saturating_u32(len: usize) -> u32 {
    if len > u32::MAX as usize {
        return u32::MAX;
    }
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    {
        len as u32
    }
}
