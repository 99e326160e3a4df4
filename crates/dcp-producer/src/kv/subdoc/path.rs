//! Paths into JSON: `a.b[0].c[-1]`, with names in backticks where they hold special characters.

use dcp_wire::Status;

/// Flags of a path.
pub(super) mod path_flag {
    /// Create missing parents.
    pub(in super::super) const CREATE_PATH: u8 = 0x01;
    /// The path is that of an xattr.
    pub(in super::super) const XATTR: u8 = 0x04;
    /// The value is a macro.
    pub(in super::super) const EXPAND_MACROS: u8 = 0x10;
    /// The xattr's value is bytes, which are stored in base64.
    pub(in super::super) const BINARY: u8 = 0x20;
    pub(in super::super) const KNOWN: u8 = CREATE_PATH | XATTR | EXPAND_MACROS | BINARY;
}

/// Longest path in bytes.
const MAX_LEN: usize = 1024;
/// Most components.
const MAX_COMPONENTS: usize = 32;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Component {
    /// A member of an object.
    Name(Vec<u8>),
    /// An element of an array, counted from 0.
    Index(usize),
    /// The last element of an array.
    Last,
}

/// Parses a path; an empty one is the whole document.
pub(super) fn parse(path: &[u8]) -> Result<Vec<Component>, Status> {
    if path.len() > MAX_LEN {
        return Err(Status::SUBDOC_PATH_E2BIG);
    }
    let mut components = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        let component;
        (component, rest) = match rest {
            [b'[', tail @ ..] => index(tail)?,
            [b'.', tail @ ..] if !components.is_empty() => name(tail)?,
            _ if components.is_empty() => name(rest)?,
            _ => return Err(Status::SUBDOC_PATH_EINVAL),
        };
        components.push(component);
        if components.len() > MAX_COMPONENTS {
            return Err(Status::SUBDOC_DOC_E2DEEP);
        }
    }
    Ok(components)
}

/// An index up to its closing bracket, and the rest.
fn index(rest: &[u8]) -> Result<(Component, &[u8]), Status> {
    let end = rest.iter().position(|&byte| byte == b']').ok_or(Status::SUBDOC_PATH_EINVAL)?;
    let (digits, tail) = rest.split_at(end);
    let tail = tail.get(1..).unwrap_or_default();
    if digits == b"-1" {
        return Ok((Component::Last, tail));
    }
    let valid = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let index = str::from_utf8(digits).ok().filter(|_| valid).and_then(|text| text.parse().ok());
    Ok((Component::Index(index.ok_or(Status::SUBDOC_PATH_EINVAL)?), tail))
}

/// A name up to the next separator, and the rest. In backticks, separators are part of the name,
/// and two backticks are one.
fn name(rest: &[u8]) -> Result<(Component, &[u8]), Status> {
    let mut name = Vec::new();
    let mut quoted = false;
    let mut bytes = rest.iter().copied().enumerate().peekable();
    let mut end = rest.len();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'`' if bytes.peek().is_some_and(|&(_, next)| next == b'`') => {
                bytes.next();
                name.push(b'`');
            }
            b'`' => quoted = !quoted,
            b'.' | b'[' if !quoted => {
                end = at;
                break;
            }
            b']' if !quoted => return Err(Status::SUBDOC_PATH_EINVAL),
            _ => name.push(byte),
        }
    }
    if quoted || name.is_empty() || str::from_utf8(&name).is_err() {
        return Err(Status::SUBDOC_PATH_EINVAL);
    }
    Ok((Component::Name(name), rest.get(end..).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(text: &str) -> Component {
        Component::Name(text.as_bytes().to_vec())
    }

    #[test]
    fn subdoc_path_has_names_and_indexes_in_order() {
        let path = parse(b"a.b[0][-1].`c.d[``]`.e").unwrap();
        let expected = [
            name_of("a"),
            name_of("b"),
            Component::Index(0),
            Component::Last,
            name_of("c.d[`]"),
            name_of("e"),
        ];
        assert_eq!(path, expected);
        assert_eq!(parse(b"[3].x").unwrap(), [Component::Index(3), name_of("x")]);
        assert_eq!(parse(b"").unwrap(), []);
    }

    #[test]
    fn subdoc_paths_that_are_malformed_are_refused() {
        for path in [".", "a.", ".a", "a..b", "a[", "a[]", "a[x]", "a[-2]", "a]", "`a", "a[0]b"] {
            assert_eq!(parse(path.as_bytes()), Err(Status::SUBDOC_PATH_EINVAL), "{path}");
        }
        assert_eq!(parse(&[b'a'; 1025]), Err(Status::SUBDOC_PATH_E2BIG));
        assert_eq!(parse("a.".repeat(40).as_bytes()), Err(Status::SUBDOC_DOC_E2DEEP));
    }
}
