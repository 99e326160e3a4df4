//! Notes of the values that a document's columns could not take.

use std::fmt::Write as _;

use serde_json::json;

use super::malformed::{Malformed, Problem};

/// Maximum length of a value's text in a note, in bytes.
const MAX_TEXT_BYTES: usize = 256;
/// Maximum length of a value's path in a note, in bytes.
const MAX_PATH_BYTES: usize = 256;
/// Maximum number of notes per document.
const MAX_NOTES: usize = 16;

/// A step from a value to one within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    /// A field of the schema.
    Field(&'a str),
    Element(usize),
    /// A key of a map.
    Key(Box<str>),
}

/// A value that did not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MalformedField {
    path: String,
    /// The path without elements and keys: the same for every document.
    pub(super) field: String,
    pub(super) reason: Problem,
    /// Where the document ends to be JSON, if it is malformed as a whole.
    at: Option<usize>,
    text: String,
}

/// The values of one document that did not fit.
#[derive(Debug, Default)]
pub(super) struct MalformedFields {
    notes: Vec<MalformedField>,
    /// Number of values beyond them.
    more: usize,
}

impl MalformedFields {
    pub(super) fn clear(&mut self) {
        self.notes.clear();
        self.more = 0;
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &MalformedField> {
        self.notes.iter()
    }

    /// Adds a value by its path and JSON text.
    #[cold]
    pub(super) fn push(&mut self, path: &[Step<'_>], reason: Problem, text: &[u8]) {
        if self.notes.len() == MAX_NOTES {
            self.more += 1;
            return;
        }
        let (path, field) = (path_text(path), field_text(path));
        self.notes.push(MalformedField {
            path,
            field,
            reason,
            at: None,
            text: cut(text, MAX_TEXT_BYTES),
        });
    }

    /// Adds a document that is malformed as a whole.
    #[cold]
    pub(super) fn push_document(&mut self, malformed: &Malformed, document: &[u8]) {
        let at = (malformed.problem != Problem::NotJson).then_some(malformed.at);
        self.push(&[], malformed.problem.clone(), document);
        if let Some(note) = self.notes.last_mut() {
            note.at = at;
        }
    }

    /// The notes as a JSON array.
    pub(super) fn to_json(&self) -> String {
        let entry = |note: &MalformedField| {
            let at = note.at.map(|at| format!(" at byte {at}")).unwrap_or_default();
            let reason = format!("{}{at}", note.reason);
            json!({"path": note.path, "reason": reason, "text": note.text})
        };
        let mut entries: Vec<_> = self.notes.iter().map(entry).collect();
        if self.more > 0 {
            let reason = format!("{} more values do not fit", self.more);
            entries.push(json!({"path": null, "reason": reason, "text": null}));
        }
        serde_json::Value::from(entries).to_string()
    }
}

/// A path such as `items[3].price`, or `prices["a b"]` if a name is not a plain one.
fn path_text(steps: &[Step<'_>]) -> String {
    let mut text = String::new();
    for step in steps {
        match step {
            Step::Field(name) => push_name(&mut text, name),
            Step::Key(key) => push_name(&mut text, key),
            Step::Element(index) => {
                let _always_written = write!(text, "[{index}]");
            }
        }
        if text.len() > MAX_PATH_BYTES {
            return cut(text.as_bytes(), MAX_PATH_BYTES);
        }
    }
    text
}

/// The path's fields, such as `items[].price`.
fn field_text(steps: &[Step<'_>]) -> String {
    let mut text = String::new();
    for step in steps {
        match step {
            Step::Field(name) => push_name(&mut text, name),
            Step::Key(_) | Step::Element(_) => text.push_str("[]"),
        }
    }
    text
}

/// Adds a name to a path.
pub(super) fn push_name(text: &mut String, name: &str) {
    let is_plain = |(index, byte): (usize, u8)| {
        byte == b'_' || byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit())
    };
    if !name.is_empty() && name.bytes().enumerate().all(is_plain) {
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(name);
    } else {
        let _always_written = write!(text, "[{}]", json!(name));
    }
}

/// The beginning of a text, up to an incomplete or wrong character.
fn cut(text: &[u8], max_bytes: usize) -> String {
    let beginning = text.get(..max_bytes).unwrap_or(text);
    let valid = beginning.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    let ellipsis = if valid.len() < text.len() { "…" } else { "" };
    format!("{valid}{ellipsis}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(steps: &[Step<'_>]) -> (String, String) {
        (path_text(steps), field_text(steps))
    }

    #[test]
    fn note_path_leads_to_one_value_and_its_field_to_all_like_it() {
        let of = |path: &str, field: &str| (path.to_owned(), field.to_owned());
        let key = |key: &str| Step::Key(key.into());
        assert_eq!(
            path(&[Step::Field("items"), Step::Element(3), Step::Field("price")]),
            of("items[3].price", "items[].price")
        );
        assert_eq!(path(&[Step::Field("m"), key("k1"), Step::Element(0)]), of("m.k1[0]", "m[][]"));
        assert_eq!(
            path(&[Step::Field("a b"), key("x.\"y"), Step::Field("1")]),
            of(r#"["a b"]["x.\"y"]["1"]"#, r#"["a b"][]["1"]"#)
        );
        assert_eq!(path(&[Step::Field("é")]), of("[\"é\"]", "[\"é\"]"));
        assert_eq!(path(&[]), of("", ""));
    }

    #[test]
    fn notes_are_bounded_in_number_and_length() {
        let (long, key) = ("é".repeat(1000), Step::Key("k".repeat(10_000).into()));
        let mut notes = MalformedFields::default();
        for _ in 0..MAX_NOTES + 3 {
            notes.push(&[Step::Field("m"), key.clone()], Problem::Duplicate, long.as_bytes());
        }
        let json: serde_json::Value = serde_json::from_str(&notes.to_json()).unwrap();
        assert_eq!(json.as_array().unwrap().len(), MAX_NOTES + 1);
        assert_eq!(json[0]["text"], format!("{}…", "é".repeat(128)));
        assert_eq!(json[0]["path"].as_str().unwrap().len(), MAX_PATH_BYTES + "…".len());
        let more = json!({"path": null, "reason": "3 more values do not fit", "text": null});
        assert_eq!(json[MAX_NOTES], more);
        assert_eq!(notes.iter().next().unwrap().field, "m[]");
    }

    #[test]
    fn note_text_is_cut_between_characters() {
        for (text, bytes, expected) in [
            (&b"abc"[..], 3, "abc"),
            (b"abcd", 3, "abc…"),
            ("aé".as_bytes(), 2, "a…"),
            (b"a\xffb", 3, "a…"),
            (b"\xff", 3, "…"),
            (b"", 3, ""),
        ] {
            assert_eq!(cut(text, bytes), expected, "{text:?}");
        }
    }
}
