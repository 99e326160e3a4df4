//! Forms sent by clients, and answers to them.

use hyper::StatusCode;

/// An answer: a status and a document.
pub(super) type Answer = (StatusCode, String);

/// A field of a form.
pub(super) fn field(form: &[u8], name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(form);
    pairs.find_map(|(key, value)| (key == name).then(|| value.into_owned()))
}
