//! Decodes documents that are given as text, apart from a stream.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int8Array, RecordBatch, StringArray, StructArray};
use arrow_schema::{ArrowError, DataType, Field as ArrowField, Schema};
use jiter::{Jiter, Peek};

use super::builders::Builder;
use super::decoder::Decoder;
use super::malformed::{Malformed, Problem, Result};
use super::malformed_fields::{MalformedFields, Step};
use super::observed::{Nested, Observations};
use super::primitives::Texts;
use super::reader::{MAX_DOCUMENT_BYTES, Reader};
use super::sightings::Sightings;
use super::skip::{raw_key, skip, unescaped, whole_pairs};
use super::widen::Names;
use super::{DocumentSchema, Field, Kind, MALFORMED_FIELDS};

/// Name of the column of what no other column holds.
pub const EXTRA: &str = "_extra";

/// What a document is to its columns, in the column [`FLAGS`]: a sum of these.
///
/// It has a field, other than null, that is no column.
pub const HAS_UNMAPPED: i8 = 1;
/// It has a value that does not fit its column.
pub const HAS_MALFORMED: i8 = 2;
/// It is no JSON object, or takes too much memory, so that all columns are null.
pub const IS_MALFORMED: i8 = 4;
/// Name of the column of flags.
pub const FLAGS: &str = "_flags";

/// What a row has for a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenKind {
    /// No document.
    None,
    /// One that the server marks as JSON.
    Json,
    /// Another.
    Binary,
}

/// Documents in a column of bytes.
#[derive(Clone, Copy, Debug)]
pub struct GivenDocuments<'a> {
    /// Where each begins in the bytes, and where the last one ends.
    pub offsets: &'a [i32],
    /// The bytes.
    pub bytes: &'a [u8],
    /// What each row has.
    pub kinds: &'a [GivenKind],
}

impl<'a> GivenDocuments<'a> {
    /// The documents with whether each is marked as JSON; `None` for rows without one.
    fn iter(self) -> impl Iterator<Item = Option<(&'a [u8], bool)>> {
        let index = |offset: i32| usize::try_from(offset).unwrap_or_default();
        self.offsets.windows(2).zip(self.kinds).map(move |(ends, kind)| match (ends, kind) {
            (_, GivenKind::None) => None,
            ([start, end], kind) => {
                let bytes = self.bytes.get(index(*start)..index(*end)).unwrap_or_default();
                Some((bytes, *kind == GivenKind::Json))
            }
            _ => None,
        })
    }

    /// Adds the documents to what was observed.
    pub fn observe(self, observations: &mut Observations) {
        for (document, is_json) in self.iter().flatten() {
            observations.add(document, is_json);
        }
    }
}

/// How documents are decoded that are given as text.
#[derive(Clone, Debug)]
pub struct DocumentDecoder {
    schema: DocumentSchema,
    names: Names,
    columns: Vec<String>,
    /// Whether a number that its column would round does not fit.
    is_exact: bool,
    keeps_extra: bool,
    /// Whether a document of which a value does not fit keeps the other values.
    keeps_rest: bool,
}

impl DocumentDecoder {
    /// Decodes to a schema, whose columns have these names.
    #[must_use]
    pub fn new(schema: DocumentSchema, names: Names, columns: Vec<String>) -> Self {
        Self { schema, names, columns, is_exact: false, keeps_extra: false, keeps_rest: true }
    }

    /// With `is_exact`, a number that its column would round does not fit.
    #[must_use]
    pub const fn exact_if(mut self, is_exact: bool) -> Self {
        self.is_exact = is_exact;
        self
    }

    /// With `keeps_extra`, there is the column [`EXTRA`].
    #[must_use]
    pub const fn extra_if(mut self, keeps_extra: bool) -> Self {
        self.keeps_extra = keeps_extra;
        self
    }

    /// Without `keeps_rest`, all columns of a document are null if one value does not fit.
    #[must_use]
    pub const fn rest_if(mut self, keeps_rest: bool) -> Self {
        self.keeps_rest = keeps_rest;
        self
    }

    /// The schema.
    #[must_use]
    pub const fn schema(&self) -> &DocumentSchema {
        &self.schema
    }

    /// The columns that documents are decoded to, then those that say what did not fit.
    #[must_use]
    pub fn arrow(&self) -> Schema {
        let mut fields = Vec::new();
        let mut names = self.columns.iter();
        for field in self.schema.arrow() {
            self.flat(&field, &mut |leaf: &ArrowField| {
                let name = names.next().cloned().unwrap_or_default();
                fields.push(leaf.clone().with_name(name));
            });
        }
        fields.push(ArrowField::new(MALFORMED_FIELDS, DataType::Utf8, true));
        if self.keeps_extra {
            fields.push(ArrowField::new(EXTRA, DataType::Utf8, true));
        }
        fields.push(ArrowField::new(FLAGS, DataType::Int8, false));
        Schema::new(fields)
    }

    /// Calls `add` with each column of a field.
    fn flat(&self, field: &ArrowField, add: &mut impl FnMut(&ArrowField)) {
        match field.data_type() {
            DataType::Struct(fields) if self.is_flat(field.data_type()) => {
                fields.iter().for_each(|field| self.flat(field, add));
            }
            _ => add(field),
        }
    }

    fn is_flat(&self, kind: &DataType) -> bool {
        self.names.nested() == Nested::Columns && *kind != super::variant_type()
    }

    fn flat_columns(&self, column: &ArrayRef, found: &mut Vec<ArrayRef>) {
        match column.as_any().downcast_ref::<StructArray>() {
            // The members of a null are null.
            Some(structs) if self.is_flat(column.data_type()) => {
                structs.columns().iter().for_each(|column| self.flat_columns(column, found));
            }
            _ => found.push(Arc::clone(column)),
        }
    }

    /// Decodes documents; `seen` learns which fields of the schema they had.
    ///
    /// # Errors
    /// [`ArrowError`] if the columns cannot be made.
    pub fn decode(
        &self,
        documents: GivenDocuments<'_>,
        seen: &mut Sightings,
    ) -> Result<RecordBatch, ArrowError> {
        let count = documents.kinds.len();
        let mut decoder = Decoder::new(&self.schema, count).exact_if(self.is_exact);
        let mut flags = Vec::with_capacity(count);
        let (mut noted, mut extra) = (Texts::new(count), Texts::new(count));
        let mut notes = MalformedFields::default();
        for document in documents.iter() {
            let flag = match document {
                None => {
                    decoder.push_null();
                    0
                }
                Some((document, is_json)) => self.push(&mut decoder, document, is_json, &mut notes),
            };
            if notes.is_empty() {
                noted.push_null();
            } else {
                noted.push(notes.to_json().as_bytes());
            }
            notes.clear();
            match document {
                Some((document, _)) if self.keeps_extra && flag & IS_MALFORMED == 0 && flag > 0 => {
                    match self.extra(document) {
                        Some(text) => extra.push(&text),
                        None => extra.push_null(),
                    }
                }
                _ => extra.push_null(),
            }
            flags.push(flag);
        }
        let mut columns = Vec::new();
        for column in decoder.finish(seen)? {
            self.flat_columns(&column, &mut columns);
        }
        columns.push(Arc::new(noted.strings()?));
        if self.keeps_extra {
            let extra: StringArray = extra.strings()?;
            columns.push(Arc::new(extra));
        }
        columns.push(Arc::new(Int8Array::from(flags)));
        RecordBatch::try_new(Arc::new(self.arrow()), columns)
    }

    fn push(
        &self,
        decoder: &mut Decoder,
        document: &[u8],
        is_json: bool,
        notes: &mut MalformedFields,
    ) -> i8 {
        let pushed = if is_json {
            decoder.push(document, self.keeps_rest.then_some(&mut *notes))
        } else {
            decoder.push_null();
            Err(Malformed::new(Problem::NotJson, 0))
        };
        let unmapped = if is_json && decoder.has_unmapped() { HAS_UNMAPPED } else { 0 };
        match pushed {
            Ok(()) if notes.is_empty() => unmapped,
            Ok(()) => unmapped | HAS_MALFORMED,
            Err(malformed) => {
                // Of a JSON object, one value may be the reason.
                let field = malformed.column.and_then(|index| self.schema.names().nth(index));
                let Some(name) = field.filter(|_| !self.keeps_rest) else {
                    notes.push_document(&malformed, document);
                    return IS_MALFORMED;
                };
                notes.push(&[Step::Field(name)], malformed.problem, document);
                unmapped | HAS_MALFORMED
            }
        }
    }

    /// The schema that holds these documents, too; see [`Names::grown`].
    #[must_use]
    pub fn grown(
        &self,
        documents: GivenDocuments<'_>,
        adds_fields: bool,
        widens_types: bool,
    ) -> DocumentSchema {
        let mut observations = Observations::default();
        documents.observe(&mut observations);
        self.names.grown(&self.schema, &observations, adds_fields, widens_types)
    }

    /// What no column holds, as the text of a JSON object.
    fn extra(&self, document: &[u8]) -> Option<Vec<u8>> {
        let whole = whole_pairs(document);
        let mut found = Vec::new();
        let mut rest = Rest { json: Jiter::new(&whole), document, is_exact: self.is_exact };
        rest.object(&self.schema.fields, &mut found).ok()?.then_some(found)
    }
}

/// A member of an object.
struct Member<'j> {
    /// That of its field.
    index: Option<usize>,
    /// The key's text.
    raw: &'j [u8],
    /// The value's text.
    text: &'j [u8],
    /// The part of the text that no column holds.
    inner: Vec<u8>,
    is_held: bool,
}

/// Collects what no column holds.
struct Rest<'j> {
    json: Jiter<'j>,
    document: &'j [u8],
    is_exact: bool,
}

impl<'j> Rest<'j> {
    /// Writes the members of an object that have no column; whether there are any.
    fn object(&mut self, fields: &[Field], found: &mut Vec<u8>) -> Result<bool> {
        let mut members = Vec::new();
        let mut counts = vec![0_usize; fields.len()];
        let mut next = self.key(true)?;
        while let Some(raw) = next {
            let name = unescaped(raw);
            let index = name.and_then(|name| fields.iter().position(|each| each.name == *name));
            if let Some(count) = index.and_then(|index| counts.get_mut(index)) {
                *count += 1;
            }
            let peek = self.json.peek()?;
            let start = self.json.current_index();
            let mut inner = Vec::new();
            let is_held = match index.and_then(|index| fields.get(index)).map(|field| &field.kind) {
                Some(Kind::Struct(fields)) if peek == Peek::Object => {
                    !self.object(fields, &mut inner)?
                }
                kind => {
                    skip(&mut self.json, peek)?;
                    let text = self.since(start);
                    inner.extend_from_slice(text);
                    match kind {
                        None => peek == Peek::Null,
                        Some(kind) => self.fits(kind, text, peek),
                    }
                }
            };
            members.push(Member { index, raw, text: self.since(start), inner, is_held });
            next = self.key(false)?;
        }
        found.push(b'{');
        let begun = found.len();
        for Member { index, raw, text, inner, is_held } in members {
            // Of a name that occurs twice, no value is taken.
            let is_taken = index.is_none_or(|index| counts.get(index) == Some(&1));
            if is_held && is_taken {
                continue;
            }
            if found.len() > begun {
                found.push(b',');
            }
            found.extend_from_slice(&[b"\"", raw, b"\":"].concat());
            found.extend_from_slice(if is_taken { &inner } else { text });
        }
        let has_members = found.len() > begun;
        found.push(b'}');
        Ok(has_members)
    }

    /// The text of the next key, as it is between its quotes.
    fn key(&mut self, is_first: bool) -> Result<Option<&'j [u8]>> {
        Ok(raw_key(&mut self.json, self.document, is_first)?.map(|(_, raw)| raw))
    }

    fn since(&self, start: usize) -> &'j [u8] {
        self.document.get(start..self.json.current_index()).unwrap_or_default()
    }

    fn fits(&self, kind: &Kind, text: &[u8], peek: Peek) -> bool {
        let mut column = Builder::new(kind, 1);
        let mut reader = Reader::new(text, MAX_DOCUMENT_BYTES, Vec::new()).exact_if(self.is_exact);
        reader.read(&mut column, peek).is_ok() && !reader.has_unmapped()
    }
}
