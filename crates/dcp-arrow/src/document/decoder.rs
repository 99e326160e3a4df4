//! Decodes documents into typed columns.

use arrow_array::ArrayRef;
use arrow_schema::ArrowError;

use super::DocumentSchema;
use super::builders::{Builder, Objects};
use super::malformed::{Malformed, Problem, Result};
use super::malformed_fields::MalformedFields;
use super::partial::PartialReader;
use super::reader::{MAX_DOCUMENT_BYTES, Reader};
use super::sightings::Sightings;
use super::skip::whole_pairs;

/// Builders of the columns of a batch's documents.
#[derive(Debug)]
pub(super) struct Decoder {
    schema: DocumentSchema,
    fields: Objects,
    rows: usize,
    /// Rows with a document.
    documents: u64,
    scratch: Vec<u8>,
    /// Total decoded size of the documents in bytes.
    len_bytes: usize,
    width: usize,
    is_exact: bool,
    has_unmapped: bool,
}

impl Decoder {
    pub(super) fn new(schema: &DocumentSchema, rows: usize) -> Self {
        let fields = Objects::new(&schema.fields, rows);
        let width = fields.columns.iter().map(Builder::width).sum();
        let schema = schema.clone();
        Self {
            schema,
            fields,
            rows: 0,
            documents: 0,
            scratch: Vec::new(),
            len_bytes: 0,
            width,
            is_exact: false,
            has_unmapped: false,
        }
    }

    /// The same; with `is_exact`, a number that its column would round does not fit, nor does text
    /// in a column of numbers.
    pub(super) fn exact_if(mut self, is_exact: bool) -> Self {
        self.is_exact = is_exact;
        self
    }

    /// Whether the last document had a field, other than null, that is no column.
    pub(super) const fn has_unmapped(&self) -> bool {
        self.has_unmapped
    }

    /// Total decoded size of the documents in bytes.
    pub(super) const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Appends a document; nulls if it is malformed. With `notes`, only the values that do not fit
    /// are null, and noted.
    pub(super) fn push(
        &mut self,
        document: &[u8],
        notes: Option<&mut MalformedFields>,
    ) -> Result<()> {
        self.has_unmapped = false;
        if let Err(error) = std::str::from_utf8(document) {
            self.push_null();
            return Err(Malformed::new(Problem::NotUtf8, error.valid_up_to()));
        }
        let scratch = std::mem::take(&mut self.scratch);
        let mut reader = Reader::new(document, MAX_DOCUMENT_BYTES, scratch).exact_if(self.is_exact);
        let mut read = reader.document(&mut self.fields, self.rows);
        self.has_unmapped = reader.has_unmapped();
        let mut rest;
        (rest, self.scratch) = reader.into_rest();
        if let (Err(_), Some(notes)) = (&read, notes) {
            self.fields.truncate(self.rows);
            (read, rest) = self.read_partially(document, notes);
        }
        if let Err(malformed) = read {
            self.fields.truncate(self.rows);
            self.push_null();
            let field = malformed.column.and_then(|index| self.fields.had_none.get_mut(index));
            field.into_iter().for_each(|had_none| *had_none = true);
            return Err(malformed);
        }
        self.rows += 1;
        self.documents += 1;
        self.len_bytes += MAX_DOCUMENT_BYTES - rest + self.width;
        Ok(())
    }

    /// Reads a document of which not all values fit; returns the rest of its budget, too.
    #[cold]
    fn read_partially(
        &mut self,
        document: &[u8],
        notes: &mut MalformedFields,
    ) -> (Result<()>, usize) {
        let schema = self.schema.clone();
        let scratch = std::mem::take(&mut self.scratch);
        let whole = whole_pairs(document);
        let mut reader = PartialReader::new(document, &whole, MAX_DOCUMENT_BYTES, scratch, notes)
            .exact_if(self.is_exact);
        let read = reader.document(&mut self.fields, &schema.fields, self.rows);
        self.has_unmapped = reader.has_unmapped();
        let rest;
        (rest, self.scratch) = reader.into_rest();
        if read.is_err() {
            notes.clear();
        }
        (read, rest)
    }

    /// Appends a row without a document.
    pub(super) fn push_null(&mut self) {
        self.fields.push_null();
        self.rows += 1;
        self.len_bytes += self.width;
    }

    /// The columns in the order of the schema; `seen` learns which of them documents had.
    pub(super) fn finish(self, seen: &mut Sightings) -> Result<Vec<ArrayRef>, ArrowError> {
        let types = self.schema.arrow();
        let columns = self.fields.columns.into_iter().zip(&types);
        let columns = columns.map(|(column, field)| column.finish(field.data_type()));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        seen.documents += self.documents;
        for (index, (column, had_none)) in columns.iter().zip(self.fields.had_none).enumerate() {
            if had_none || column.null_count() < column.len() {
                seen.see(index);
            }
        }
        Ok(columns)
    }
}
