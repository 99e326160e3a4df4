//! SUBDOC_MULTI_LOOKUP (0xd0) and SUBDOC_MULTI_MUTATION (0xd1): parts of a document.

use bytes::BufMut;

use super::document::{MutationToken, some_key};
use super::expect;
use crate::{DecodeError, EncodeError, Frame, Opcode, Reader, Status};

/// Reads parts of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubdocLookup<'a> {
    /// Flags for the whole document.
    pub doc_flags: Option<u8>,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// What to read; iterate with [`lookups`](Self::lookups).
    pub value: &'a [u8],
}

/// An operation on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSpec<'a> {
    /// The opcode of the corresponding single-path operation.
    pub opcode: Opcode,
    /// Flags of the path (0x04: in the xattrs).
    pub flags: u8,
    /// The path.
    pub path: &'a [u8],
    /// What to write; empty for a lookup.
    pub value: &'a [u8],
}

impl<'a> SubdocLookup<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::SUBDOC_MULTI_LOOKUP)?;
        let mut extras = Reader::new(frame.extras, "extras");
        let doc_flags = if extras.is_empty() { None } else { Some(extras.u8()?) };
        extras.finish()?;
        let lookup = Self { doc_flags, key: some_key(frame)?, value: frame.value };
        lookup.lookups().try_for_each(|spec| spec.map(drop))?;
        Ok(lookup)
    }

    /// The lookups.
    pub fn lookups(&self) -> impl Iterator<Item = Result<PathSpec<'a>, DecodeError>> + use<'a> {
        Items::new(self.value, |reader: &mut Reader<'a>| {
            let (opcode, flags) = (Opcode(reader.u8()?), reader.u8()?);
            let path_len = usize::from(reader.u16()?);
            Ok(PathSpec { opcode, flags, path: reader.bytes(path_len)?, value: &[] })
        })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame
            .with_extras(self.doc_flags.as_slice())
            .with_key(self.key)
            .with_value(self.value)
            .encode(out)
    }
}

/// Changes parts of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubdocMutation<'a> {
    /// When the document expires.
    pub expiry: Option<u32>,
    /// Flags set by the application; only together with an expiry.
    pub user_flags: Option<u32>,
    /// Flags for the whole document.
    pub doc_flags: Option<u8>,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// What to change; iterate with [`mutations`](Self::mutations).
    pub value: &'a [u8],
}

impl<'a> SubdocMutation<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::SUBDOC_MULTI_MUTATION)?;
        let mut extras = Reader::new(frame.extras, "extras");
        // 0, 1, 4, 5, 8 or 9 bytes: any field may be absent.
        let expiry = if frame.extras.len() >= 4 { Some(extras.u32()?) } else { None };
        let user_flags = if frame.extras.len() >= 8 { Some(extras.u32()?) } else { None };
        let doc_flags = if extras.is_empty() { None } else { Some(extras.u8()?) };
        extras.finish()?;
        let mutation =
            Self { expiry, user_flags, doc_flags, key: some_key(frame)?, value: frame.value };
        mutation.mutations().try_for_each(|spec| spec.map(drop))?;
        Ok(mutation)
    }

    /// The mutations.
    pub fn mutations(&self) -> impl Iterator<Item = Result<PathSpec<'a>, DecodeError>> + use<'a> {
        Items::new(self.value, |reader: &mut Reader<'a>| {
            let (opcode, flags) = (Opcode(reader.u8()?), reader.u8()?);
            let path_len = usize::from(reader.u16()?);
            let value_len = usize::try_from(reader.u32()?).unwrap_or(usize::MAX);
            let path = reader.bytes(path_len)?;
            Ok(PathSpec { opcode, flags, path, value: reader.bytes(value_len)? })
        })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = Vec::with_capacity(9);
        if let Some(expiry) = self.expiry.or(self.user_flags.map(|_| 0)) {
            extras.put_u32(expiry);
        }
        if let Some(user_flags) = self.user_flags {
            extras.put_u32(user_flags);
        }
        if let Some(flags) = self.doc_flags {
            extras.put_u8(flags);
        }
        frame.with_extras(&extras).with_key(self.key).with_value(self.value).encode(out)
    }
}

/// Result of one path of a sub-document operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathResult<'a> {
    /// Index of the path in the request, from 0.
    pub index: u8,
    /// Status of the operation.
    pub status: Status,
    /// The value read.
    pub value: &'a [u8],
}

/// Results of a lookup, one per path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupResults<'a> {
    /// The results; iterate with [`iter`](Self::iter).
    pub value: &'a [u8],
}

impl<'a> LookupResults<'a> {
    /// Reads the value of a response.
    ///
    /// # Errors
    /// [`DecodeError`] if a result is truncated.
    pub fn decode(value: &'a [u8]) -> Result<Self, DecodeError> {
        let results = Self { value };
        results.iter().try_for_each(|result| result.map(drop))?;
        Ok(results)
    }

    /// The results in the order of the request.
    pub fn iter(&self) -> impl Iterator<Item = Result<PathResult<'a>, DecodeError>> + use<'a> {
        let mut index = 0u8;
        Items::new(self.value, move |reader: &mut Reader<'a>| {
            let status = Status(reader.u16()?);
            let len = usize::try_from(reader.u32()?).unwrap_or(usize::MAX);
            let result = PathResult { index, status, value: reader.bytes(len)? };
            index = index.saturating_add(1);
            Ok(result)
        })
    }
}

/// Results of a mutation: of the paths that return a value, or of the first failed path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationResults<'a> {
    /// vbuuid and seqno of the write.
    pub token: Option<MutationToken>,
    /// The results; iterate with [`iter`](Self::iter).
    pub value: &'a [u8],
}

impl<'a> MutationResults<'a> {
    /// Reads a response.
    ///
    /// # Errors
    /// [`DecodeError`] if a result is truncated.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        let results = Self { token: MutationToken::decode(frame)?, value: frame.value };
        results.iter().try_for_each(|result| result.map(drop))?;
        Ok(results)
    }

    /// The results.
    pub fn iter(&self) -> impl Iterator<Item = Result<PathResult<'a>, DecodeError>> + use<'a> {
        Items::new(self.value, |reader: &mut Reader<'a>| {
            let (index, status) = (reader.u8()?, Status(reader.u16()?));
            // Only a success is followed by a value.
            let len = if status.is_success() { reader.u32()? } else { 0 };
            let value = reader.bytes(usize::try_from(len).unwrap_or(usize::MAX))?;
            Ok(PathResult { index, status, value })
        })
    }
}

/// Reads items until the reader is empty; ends after the first error.
struct Items<'a, F> {
    reader: Reader<'a>,
    read: F,
}

impl<'a, F> Items<'a, F> {
    const fn new(value: &'a [u8], read: F) -> Self {
        Self { reader: Reader::new(value, "sub-document operation"), read }
    }
}

impl<'a, T, F> Iterator for Items<'a, F>
where
    F: FnMut(&mut Reader<'a>) -> Result<T, DecodeError>,
{
    type Item = Result<T, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let item = (self.read)(&mut self.reader);
        if item.is_err() {
            self.reader = Reader::new(&[], "sub-document operation");
        }
        Some(item)
    }
}
