//! Decodes documents of which some values do not fit their columns.

use std::collections::HashMap;

use jiter::{Jiter, Peek};

use super::builders::{Builder, Objects};
use super::malformed::{Malformed, Problem, Result};
use super::malformed_fields::{MalformedFields, Step};
use super::reader::Reader;
use super::skip::{HALF, skip};
use super::{Field, Kind};

/// Reads a document value by value. One that does not fit is null and noted, and the others stay.
///
/// Documents that fit are read by [`Reader`], which stops at the first problem. This reads those
/// at which it has stopped, again from their beginning. It goes through the objects and arrays that
/// become columns, and leaves every value in them to a [`Reader`] of its own.
pub(super) struct PartialReader<'j, 's> {
    document: &'j [u8],
    /// The document with [`whole_pairs`](super::skip::whole_pairs).
    json: Jiter<'j>,
    /// Remaining memory budget of the document in bytes.
    budget: usize,
    scratch: Vec<u8>,
    path: Vec<Step<'s>>,
    notes: &'s mut MalformedFields,
    is_exact: bool,
    has_unmapped: bool,
}

/// A key of an object; `None` if it has half a surrogate pair.
type Key = Option<Box<str>>;

impl<'j, 's> PartialReader<'j, 's> {
    /// Reads a UTF-8 document, of which `whole` has [`whole_pairs`](super::skip::whole_pairs); `scratch` is reused memory.
    pub(super) fn new(
        document: &'j [u8],
        whole: &'j [u8],
        budget: usize,
        scratch: Vec<u8>,
        notes: &'s mut MalformedFields,
    ) -> Self {
        let (json, path) = (Jiter::new(whole), Vec::new());
        Self { document, json, budget, scratch, path, notes, is_exact: false, has_unmapped: false }
    }

    /// See [`Reader::exact_if`].
    pub(super) const fn exact_if(mut self, is_exact: bool) -> Self {
        self.is_exact = is_exact;
        self
    }

    /// See [`Reader::has_unmapped`].
    pub(super) const fn has_unmapped(&self) -> bool {
        self.has_unmapped
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
        skip(&mut self.json, peek)?;
        let text = self.since(start);
        let scratch = std::mem::take(&mut self.scratch);
        let mut reader = Reader::new(text, self.budget, scratch).exact_if(self.is_exact);
        let read = reader.read(column, peek);
        self.has_unmapped |= reader.has_unmapped();
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
                    if let Some(had_none) = found.and_then(|index| fields.had_none.get_mut(index)) {
                        *had_none = true;
                    }
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
                _ => {
                    self.has_unmapped |= self.json.peek()? != Peek::Null;
                    self.skip()?;
                }
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
        skip(&mut self.json, peek)?;
        Ok(())
    }
}

/// The text of a key from what is between its quotes.
fn decode_key(raw: &[u8]) -> Key {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Into::into);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    let mut json = Jiter::new(&quoted);
    let key = json.next_str().ok()?;
    (!key.contains(HALF)).then(|| key.into())
}
