//! Extended attributes before a document's body (server page "Document").
//!
//! A value with [`Datatype::XATTR`](crate::Datatype::XATTR) begins with a section of attributes:
//! its length, then pairs of a name and a JSON value. The body follows. With
//! [`Datatype::SNAPPY`](crate::Datatype::SNAPPY) the whole value is compressed and must be inflated
//! first.

use bytes::BufMut;

use crate::reader::saturating_u32;
use crate::{DecodeError, EncodeError, Reader};

/// One extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xattr<'a> {
    /// Name; a leading underscore marks a system attribute, which outlives the document.
    pub name: &'a [u8],
    /// JSON value.
    pub value: &'a [u8],
}

impl Xattr<'_> {
    /// Whether this is a system attribute.
    #[must_use]
    pub fn is_system(&self) -> bool {
        self.name.first() == Some(&b'_')
    }
}

/// The attributes of a value; iterates over them in order.
///
/// Ends after the first error.
#[derive(Clone, Copy, Debug)]
pub struct Xattrs<'a> {
    reader: Reader<'a>,
}

/// Splits a value into its attributes and its body.
///
/// # Errors
/// [`DecodeError`] if the section is longer than the value.
pub fn split(value: &[u8]) -> Result<(Xattrs<'_>, &[u8]), DecodeError> {
    let mut reader = Reader::new(value, "xattr section");
    let len = usize::try_from(reader.u32()?)
        .map_err(|_| DecodeError::UnexpectedEnd { what: "xattr section" })?;
    let pairs = reader.bytes(len)?;
    Ok((Xattrs { reader: Reader::new(pairs, "xattr") }, reader.rest()))
}

impl<'a> Xattrs<'a> {
    /// Remaining bytes of the section, an upper bound of the names and values to come.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.reader.rest().len()
    }

    fn read(&mut self) -> Result<Xattr<'a>, DecodeError> {
        let len = self.reader.u32()?;
        let malformed = DecodeError::InvalidLength { what: "xattr", len };
        let pair = self.reader.bytes(usize::try_from(len).map_err(|_| malformed)?)?;
        let end = pair.iter().position(|&byte| byte == 0).ok_or(malformed)?;
        let (name, value) = pair.split_at_checked(end).ok_or(malformed)?;
        // The first byte is the NUL after the name, the last the NUL after the value.
        let [0, value @ .., 0] = value else {
            return Err(malformed);
        };
        if name.is_empty() || value.contains(&0) {
            return Err(DecodeError::InvalidField("xattr"));
        }
        Ok(Xattr { name, value })
    }
}

impl<'a> Iterator for Xattrs<'a> {
    type Item = Result<Xattr<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let item = self.read();
        if item.is_err() {
            self.reader = Reader::new(&[], "xattr");
        }
        Some(item)
    }
}

/// Appends the section of `xattrs`; the caller appends the body.
///
/// # Errors
/// [`EncodeError`] if a name is empty or longer than a section can hold, or a name or value
/// contains a NUL byte; nothing is written then.
pub fn encode<'a, I>(xattrs: I, out: &mut impl BufMut) -> Result<(), EncodeError>
where
    I: IntoIterator<Item = Xattr<'a>> + Clone,
{
    let mut total = 0usize;
    for xattr in xattrs.clone() {
        total = total.saturating_add(4).saturating_add(pair_len(xattr)?);
    }
    let section = u32::try_from(total).map_err(|_| too_long(total))?;
    out.put_u32(section);
    for xattr in xattrs {
        out.put_u32(saturating_u32(pair_len(xattr)?));
        out.put_slice(xattr.name);
        out.put_u8(0);
        out.put_slice(xattr.value);
        out.put_u8(0);
    }
    Ok(())
}

/// Length of a pair without its length field.
fn pair_len(xattr: Xattr<'_>) -> Result<usize, EncodeError> {
    if xattr.name.is_empty() || xattr.name.contains(&0) || xattr.value.contains(&0) {
        let len = xattr.name.len();
        return Err(EncodeError { what: "xattr without a name or with a NUL byte", len, max: 0 });
    }
    Ok(xattr.name.len().saturating_add(xattr.value.len()).saturating_add(2))
}

const fn too_long(len: usize) -> EncodeError {
    EncodeError { what: "xattr section", len, max: u32::MAX as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VA_26: [u8; 21] = *b"\0\0\0\x0f\0\0\0\x0b_k\0{\"a\":1}\0{}";

    #[test]
    fn xattr_section_of_one_system_xattr_splits_from_its_body() {
        let (mut xattrs, body) = split(&VA_26).unwrap();
        let xattr = xattrs.next().unwrap().unwrap();
        assert_eq!((xattr.name, xattr.value), (&b"_k"[..], &br#"{"a":1}"#[..]));
        assert!(xattr.is_system());
        assert!(xattrs.next().is_none());
        assert_eq!(body, b"{}");
    }

    #[test]
    fn xattr_section_encodes_to_the_bytes_that_were_decoded() {
        let mut out = Vec::new();
        encode([Xattr { name: b"_k", value: br#"{"a":1}"# }], &mut out).unwrap();
        out.extend_from_slice(b"{}");
        assert_eq!(out, VA_26);
    }

    #[test]
    fn xattr_section_cut_anywhere_is_an_error() {
        for len in 0..VA_26.len() - 2 {
            let truncated = &VA_26[..len];
            let whole = split(truncated).is_ok_and(|(mut xattrs, _)| xattrs.all(|x| x.is_ok()));
            assert!(!whole, "{len} bytes passed");
        }
    }

    #[test]
    fn xattr_pairs_with_wrong_lengths_or_no_terminators_are_errors() {
        let section = |pairs: &[u8]| {
            let mut value = u32::try_from(pairs.len()).unwrap().to_be_bytes().to_vec();
            value.extend_from_slice(pairs);
            split(&value).unwrap().0.find_map(Result::err)
        };
        assert!(section(b"\0\0\0\x04k\0v\0").is_none());
        // Longer than the section, no NUL at all, only one NUL, no name, 4 GiB.
        assert!(section(b"\0\0\0\x05k\0v\0").is_some());
        assert!(section(b"\0\0\0\x02kv").is_some());
        assert!(section(b"\0\0\0\x03k\0v").is_some());
        assert!(section(b"\0\0\0\x03\0v\0").is_some());
        assert!(section(b"\xff\xff\xff\xffk\0v\0").is_some());
        assert!(section(b"\0\0\0\x06k\0v\0w\0").is_some());
    }

    #[test]
    fn xattr_names_and_values_that_would_break_the_section_are_refused() {
        for (name, value) in [(&b""[..], &b"1"[..]), (b"a\0b", b"1"), (b"a", b"1\0")] {
            let mut out = Vec::new();
            assert!(encode([Xattr { name, value }], &mut out).is_err());
            assert!(out.is_empty());
        }
    }
}
