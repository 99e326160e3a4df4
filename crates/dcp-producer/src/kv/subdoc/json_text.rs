//! Navigation in JSON text.
//!
//! The text is valid JSON; otherwise nothing is found.

use std::ops::Range;

use dcp_wire::Status;

use super::path::Component;

/// A member of an object or an element of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Element {
    /// From the name, or the value where there is none, to the end of the value.
    pub(super) whole: Range<usize>,
    pub(super) value: Range<usize>,
}

/// An object or array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Container {
    pub(super) is_object: bool,
    /// Position of the opening bracket.
    pub(super) open: usize,
    /// Position of the closing bracket.
    pub(super) close: usize,
    pub(super) elements: Vec<Element>,
}

/// The target of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Located {
    /// To a value; its container and place there, unless it is the whole document.
    Value { range: Range<usize>, place: Option<(Container, usize)> },
    /// Missing: the container exists, but not its element for this component.
    Missing { container: Container, component: usize },
}

/// Follows `path` from the top of `text`.
pub(super) fn locate(text: &[u8], path: &[Component]) -> Result<Located, Status> {
    let start = skip_space(text, 0);
    let end = skip_value(text, start).ok_or(Status::SUBDOC_DOC_NOTJSON)?;
    let mut range = start..end;
    let mut place = None;
    for (number, component) in path.iter().enumerate() {
        let container = container(text, range.start).ok_or(Status::SUBDOC_PATH_MISMATCH)?;
        let index = match (component, container.is_object) {
            (Component::Name(name), true) => {
                container.elements.iter().position(|element| is_named(text, element, name))
            }
            (&Component::Index(index), false) => {
                Some(index).filter(|&index| index < container.elements.len())
            }
            (Component::Last, false) => container.elements.len().checked_sub(1),
            _ => return Err(Status::SUBDOC_PATH_MISMATCH),
        };
        match index.and_then(|index| Some((index, container.elements.get(index)?))) {
            None => return Ok(Located::Missing { container, component: number }),
            Some((index, element)) => {
                range = element.value.clone();
                place = Some((container, index));
            }
        }
    }
    Ok(Located::Value { range, place })
}

/// The object or array that begins at `open`; `None` if another value does.
pub(super) fn container(text: &[u8], open: usize) -> Option<Container> {
    let (is_object, closing) = match text.get(open)? {
        b'{' => (true, b'}'),
        b'[' => (false, b']'),
        _ => return None,
    };
    let mut elements = Vec::new();
    let mut at = skip_space(text, open + 1);
    while *text.get(at)? != closing {
        if *text.get(at)? == b',' {
            at = skip_space(text, at + 1);
        }
        let start = at;
        if is_object {
            at = skip_space(text, skip_value(text, at)?);
            // The colon.
            at = skip_space(text, at + 1);
        }
        let end = skip_value(text, at)?;
        elements.push(Element { whole: start..end, value: at..end });
        at = skip_space(text, end);
    }
    Some(Container { is_object, open, close: at, elements })
}

/// Whether an object's member has that name.
fn is_named(text: &[u8], element: &Element, name: &[u8]) -> bool {
    name_of(text, element).is_some_and(|found| found.as_bytes() == name)
}

/// Name of an object's member, its escapes undone.
pub(super) fn name_of(text: &[u8], element: &Element) -> Option<String> {
    let end = skip_value(text, element.whole.start)?;
    serde_json::from_slice(text.get(element.whole.start..end)?).ok()
}

/// End of the value that begins at `at`.
fn skip_value(text: &[u8], at: usize) -> Option<usize> {
    match text.get(at)? {
        b'"' => skip_string(text, at),
        b'{' | b'[' => skip_container(text, at),
        _ => {
            let rest = text.get(at..)?;
            let is_end = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b':') || is_space(*byte);
            let len = rest.iter().position(is_end).unwrap_or(rest.len());
            (len > 0).then_some(at + len)
        }
    }
}

fn skip_string(text: &[u8], at: usize) -> Option<usize> {
    let mut at = at + 1;
    loop {
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn skip_container(text: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0usize;
    loop {
        match text.get(at)? {
            b'"' => {
                at = skip_string(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return Some(at);
        }
    }
}

fn skip_space(text: &[u8], at: usize) -> usize {
    let rest = text.get(at..).unwrap_or_default();
    at + rest.iter().position(|&byte| !is_space(byte)).unwrap_or(rest.len())
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}
