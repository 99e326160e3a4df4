//! Decodes documents of which some values do not fit their columns.

use std::borrow::Cow;
use std::collections::HashMap;

use jiter::{Jiter, Peek};

use super::builders::{Builder, Objects};
use super::decoder::Reader;
use super::malformed::{Malformed, Problem, Result};
use super::notes::{Notes, Step};
use super::{Field, Kind};

/// Reads a document value by value. One that does not fit is null and noted, and the others stay.
///
/// Documents that fit are read by [`Reader`], which stops at the first problem. This reads those
/// at which it has stopped, again from their beginning. It goes through the objects and arrays that
/// become columns, and leaves every value in them to a [`Reader`] of its own.
pub(super) struct PartialReader<'j, 's> {
    document: &'j [u8],
    /// The document with [`whole_pairs`].
    json: Jiter<'j>,
    /// Remaining memory budget of the document in bytes.
    budget: usize,
    scratch: Vec<u8>,
    path: Vec<Step<'s>>,
    notes: &'s mut Notes,
}

/// A key of an object; `None` if it has half a surrogate pair.
type Key = Option<Box<str>>;

impl<'j, 's> PartialReader<'j, 's> {
    /// Reads a UTF-8 document, of which `whole` has [`whole_pairs`]; `scratch` is reused memory.
    pub(super) fn new(
        document: &'j [u8],
        whole: &'j [u8],
        budget: usize,
        scratch: Vec<u8>,
        notes: &'s mut Notes,
    ) -> Self {
        Self { document, json: Jiter::new(whole), budget, scratch, path: Vec::new(), notes }
    }

    /// Returns the rest of the budget and the scratch memory.
    pub(super) fn into_rest(self) -> (usize, Vec<u8>) {
        (self.budget, self.scratch)
    }

    /// Reads a whole document into row `row`.
    pub(super) fn document(
        &mut self,
        fields: &mut Objects,
        schema: &'s [Field],
        row: usize,
    ) -> Result<()> {
        let peek = self.json.peek()?;
        if peek != Peek::Object {
            return Err(self.malformed(Problem::Expected("an object")));
        }
        self.object(fields, schema, row)?;
        Ok(self.json.finish()?)
    }

    #[cold]
    fn malformed(&self, problem: Problem) -> Malformed {
        Malformed::at(problem, &self.json)
    }

    fn spend(&mut self, bytes: usize) -> Result<()> {
        match self.budget.checked_sub(bytes) {
            Some(rest) => {
                self.budget = rest;
                Ok(())
            }
            None => Err(self.malformed(Problem::TooLarge)),
        }
    }

    /// Reads one value, at `step` from here, into the next row of `column`.
    ///
    /// # Errors
    /// If the document is malformed as a whole.
    fn read_at(
        &mut self,
        step: Step<'s>,
        column: &mut Builder,
        kind: &'s Kind,
        peek: Peek,
    ) -> Result<()> {
        self.path.push(step);
        let read = self.read(column, kind, peek);
        self.path.pop();
        read
    }

    fn read(&mut self, column: &mut Builder, kind: &'s Kind, peek: Peek) -> Result<()> {
        match (column, kind, peek) {
            (Builder::Array { ranges, elements, width }, Kind::Array(kind), Peek::Array) => {
                let mut next = self.json.known_array()?;
                let mut index = 0;
                while let Some(peek) = next {
                    self.spend(*width)?;
                    self.read_at(Step::Element(index), elements, kind, peek)?;
                    index += 1;
                    next = self.json.array_step()?;
                }
                ranges.push(elements.len(), true);
            }
            (Builder::Map { ranges, keys, values, width }, Kind::Map(kind), Peek::Object) => {
                // Of a key that occurs twice, no value is taken, since each may be the right one.
                let mut places = HashMap::new();
                let mut next = self.first_key()?;
                while let Some(key) = next {
                    let start = self.start()?;
                    if let Some(key) = key {
                        let step = Step::Key(key.clone());
                        if let Some(row) = places.get(&key) {
                            values.set_null(*row);
                            self.skip_noting(step, Problem::Duplicate)?;
                        } else {
                            self.spend(*width + key.len())?;
                            keys.push(key.as_bytes());
                            places.insert(key, values.len());
                            let peek = self.json.peek()?;
                            self.read_at(step, values, kind, peek)?;
                        }
                    } else {
                        self.skip()?;
                        let text = self.since(start);
                        self.notes.push(&self.path, Problem::NotText, text);
                    }
                    next = self.next_key()?;
                }
                ranges.push(keys.len(), true);
            }
            (Builder::Struct { valid, fields }, Kind::Struct(kinds), Peek::Object) => {
                let row = valid.len();
                self.object(fields, kinds, row)?;
                valid.push(true);
            }
            (column, _, peek) => self.leaf(column, peek)?,
        }
        Ok(())
    }

    /// Reads a value that fits as a whole or not at all.
    fn leaf(&mut self, column: &mut Builder, peek: Peek) -> Result<()> {
        let (start, row) = (self.json.current_index(), column.len());
        self.known_skip(peek)?;
        let text = self.since(start);
        let scratch = std::mem::take(&mut self.scratch);
        let mut reader = Reader::new(text, self.budget, scratch);
        let read = reader.read(column, peek);
        (self.budget, self.scratch) = reader.into_rest();
        match read {
            Ok(()) => Ok(()),
            Err(malformed) => {
                column.truncate(row);
                column.push_null();
                let problem = match malformed.problem {
                    // Everything else would have been found when the value was skipped.
                    Problem::Syntax(_) => Problem::NotText,
                    problem => problem,
                };
                self.notes.push(&self.path, problem, text);
                Ok(())
            }
        }
    }

    /// Reads an object into row `row` of its fields' columns.
    fn object(&mut self, fields: &mut Objects, schema: &'s [Field], row: usize) -> Result<()> {
        let mut guess = 0;
        let mut next = self.first_key()?;
        while let Some(key) = next {
            // A key that is no text is not the name of a field.
            let found = key.and_then(|key| fields.find(&key, guess));
            let column = found.and_then(|index| fields.columns.get_mut(index));
            let field = found.and_then(|index| schema.get(index));
            match (column, field) {
                (Some(column), Some(field)) => {
                    let step = Step::Field(&field.name);
                    if column.len() > row {
                        column.set_null(row);
                        self.skip_noting(step, Problem::Duplicate)?;
                    } else {
                        let peek = self.json.peek()?;
                        self.read_at(step, column, &field.kind, peek)?;
                    }
                    guess = found.map_or(0, |index| index + 1);
                }
                _ => self.skip()?,
            }
            next = self.next_key()?;
        }
        fields.end_row(row);
        Ok(())
    }

    fn first_key(&mut self) -> Result<Option<Key>> {
        Ok(self.json.next_object_bytes()?.map(decode_key))
    }

    fn next_key(&mut self) -> Result<Option<Key>> {
        Ok(self.json.next_key_bytes()?.map(decode_key))
    }

    /// The document's text from `start` to here.
    fn since(&self, start: usize) -> &'j [u8] {
        self.document.get(start..self.json.current_index()).unwrap_or_default()
    }

    /// Where the next value starts.
    fn start(&mut self) -> Result<usize> {
        self.json.peek()?;
        Ok(self.json.current_index())
    }

    fn skip_noting(&mut self, step: Step<'s>, problem: Problem) -> Result<()> {
        let start = self.start()?;
        self.skip()?;
        let text = self.since(start);
        self.path.push(step);
        self.notes.push(&self.path, problem, text);
        self.path.pop();
        Ok(())
    }

    fn skip(&mut self) -> Result<()> {
        let peek = self.json.peek()?;
        self.known_skip(peek)
    }

    /// Skips a value of any depth, unlike `Jiter::known_skip`.
    fn known_skip(&mut self, mut peek: Peek) -> Result<()> {
        // Whether each open value is an object; the others are arrays.
        let mut open = Vec::new();
        loop {
            let first = match peek {
                Peek::Array => self.json.known_array()?.map(|peek| (false, peek)),
                Peek::Object => match self.json.next_object_bytes()? {
                    Some(_) => Some((true, self.json.peek()?)),
                    None => None,
                },
                _ => {
                    self.json.known_skip(peek)?;
                    None
                }
            };
            if let Some((is_object, first)) = first {
                open.push(is_object);
                peek = first;
                continue;
            }
            peek = loop {
                let next = match open.last() {
                    None => return Ok(()),
                    Some(true) => match self.json.next_key_bytes()? {
                        Some(_) => Some(self.json.peek()?),
                        None => None,
                    },
                    Some(false) => self.json.array_step()?,
                };
                if let Some(next) = next {
                    break next;
                }
                open.pop();
            };
        }
    }
}

/// Written instead of half a surrogate pair: a code point that is never a character.
const HALF: (&[u8; 4], char) = (b"fdd0", '\u{fdd0}');

/// The text of a key from what is between its quotes.
fn decode_key(raw: &[u8]) -> Key {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Into::into);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    let mut json = Jiter::new(&quoted);
    let key = json.next_str().ok()?;
    (!key.contains(HALF.1)).then(|| key.into())
}

/// The document with [`HALF`] for each escape that is half a surrogate pair, at which `Jiter` ends
/// the document even if the value is skipped. No other byte is changed or moved.
pub(super) fn whole_pairs(document: &[u8]) -> Cow<'_, [u8]> {
    let mut whole = Cow::Borrowed(document);
    let unit = |at: usize| {
        let hex = document.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
    };
    let mut from = 0;
    while let Some(found) = document.iter().skip(from).position(|byte| *byte == b'\\') {
        let at = from + found;
        from = at + 2;
        match unit(at) {
            Some(0xd800..0xdc00) if matches!(unit(at + 6), Some(0xdc00..0xe000)) => from = at + 12,
            Some(0xd800..0xe000) => {
                if let Some(hex) = whole.to_mut().get_mut(at + 2..at + 6) {
                    hex.copy_from_slice(HALF.0);
                }
            }
            _ => {}
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_surrogate_pairs_are_replaced_and_nothing_else() {
        for (text, expected) in [
            (r#"{"a\n": "\ud83d\ude00"}"#, None),
            (r#""\\ud800 \u0041 \uD83D\uDE00""#, None),
            (r#""\ud83dx""#, Some(r#""\ufdd0x""#)),
            (r#""\ude00\ud83d\ud83d\ude00""#, Some(r#""\ufdd0\ufdd0\ud83d\ude00""#)),
            (r#""\\\ud800""#, Some(r#""\\\ufdd0""#)),
            (r"\ud8", None),
            (r"\u+123", None),
            ("\\", None),
        ] {
            let whole = whole_pairs(text.as_bytes());
            assert_eq!(matches!(whole, Cow::Borrowed(_)), expected.is_none(), "{text}");
            assert_eq!(whole, expected.unwrap_or(text).as_bytes(), "{text}");
        }
    }
}
