//! Decodes the documents of a batch.

use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, StringArray};
use arrow_buffer::NullBuffer;
use arrow_schema::ArrowError;
use dcp_proto::SinkError;
use dcp_wire::{Seqno, Vbid};

use super::decoder::Decoder;
use super::malformed::{Malformed, Problem};
use super::malformed_fields::MalformedFields;
use super::primitives::{Texts, Variants};
use super::sightings::{DocumentTally, Sightings};
use super::{DocumentSchema, FieldMasks, MalformedTally, OnMalformed, ValueFormat};
use crate::BufferPool;
use crate::rows::{Places, RowKind};
use crate::values::{BytesColumn, ValueColumn, nulls};

/// Maximum size of a batch's decoded documents in bytes.
///
/// This is also far below the limit of Arrow's 32-bit offsets.
const MAX_BATCH_BYTES: usize = 1024 * 1024 * 1024;

/// What documents are decoded to, besides their bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Formats {
    /// Format of the `value` column, if the table has it.
    pub(crate) value: Option<ValueFormat>,
    /// Schema of the document columns, if any of them is shown.
    pub(crate) schema: Option<DocumentSchema>,
    /// Names of the document columns, for errors.
    pub(crate) names: Arc<[String]>,
    pub(crate) on_malformed: OnMalformed,
    /// Whether the table has the column of malformed fields.
    pub(crate) notes: bool,
    /// What is taken out of documents, if the table has any of them.
    pub(crate) masks: Option<FieldMasks>,
}

impl Formats {
    /// Whether documents are decoded at all.
    pub(crate) fn decodes(&self) -> bool {
        self.schema.is_some()
            || self.masks.is_some()
            || !matches!(self.value, None | Some(ValueFormat::Binary))
    }

    /// Whether only documents that the server marks as JSON are decoded.
    pub(crate) fn wants_json(&self) -> bool {
        self.schema.is_some() || self.masks.is_some() || self.value == Some(ValueFormat::Variant)
    }
}

/// The columns decoded from a batch's documents; each is taken once.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    /// In the order of the schema.
    pub(crate) documents: Vec<ArrayRef>,
    /// The `value` column, unless it holds the original bytes.
    pub(crate) value: Option<ArrayRef>,
    /// The bytes of malformed documents.
    pub(crate) malformed: Option<ArrayRef>,
    /// The notes of values that do not fit.
    pub(crate) malformed_fields: Option<ArrayRef>,
}

/// The rows of a batch, to be decoded.
pub(crate) struct Rows<'a> {
    pub(crate) kinds: &'a [RowKind],
    /// Whether the server marks each document as JSON; empty if that is not needed.
    pub(crate) json: &'a [bool],
    pub(crate) places: &'a Places,
}

/// The `value` column being filled.
enum Value {
    /// The original bytes.
    Bytes,
    /// Bytes without what is masked, and which rows are valid.
    Masked(Vec<bool>),
    /// Text, and which rows are valid.
    Texts(Vec<bool>),
    Variants(Variants),
}

impl Value {
    fn new(format: Option<ValueFormat>, is_masked: bool, rows: usize) -> Self {
        match format {
            Some(ValueFormat::Binary) if is_masked => Self::Masked(Vec::with_capacity(rows)),
            None | Some(ValueFormat::Binary) => Self::Bytes,
            Some(ValueFormat::String) => Self::Texts(Vec::with_capacity(rows)),
            Some(ValueFormat::Variant) => Self::Variants(Variants::new(rows)),
        }
    }

    /// Appends a row's document; a null if it has none or it is malformed.
    fn push(&mut self, document: Option<&[u8]>, is_json: bool) -> Result<(), Malformed> {
        match self {
            Self::Bytes => Ok(()),
            Self::Masked(valid) => {
                valid.push(document.is_some());
                Ok(())
            }
            Self::Texts(valid) => {
                let checked = document.map(std::str::from_utf8).transpose();
                valid.push(matches!(checked, Ok(Some(_))));
                match checked {
                    Ok(_) => Ok(()),
                    Err(error) => Err(Malformed::new(Problem::NotUtf8, error.valid_up_to())),
                }
            }
            Self::Variants(variants) => {
                let pushed = match document {
                    Some(_) if !is_json => Err(Malformed::new(Problem::NotJson, 0)),
                    Some(document) => variants.push(document),
                    None => {
                        variants.push_null();
                        return Ok(());
                    }
                };
                if pushed.is_err() {
                    variants.push_null();
                }
                pushed
            }
        }
    }

    fn len_bytes(&self) -> usize {
        match self {
            Self::Bytes | Self::Masked(_) | Self::Texts(_) => 0,
            Self::Variants(variants) => variants.len_bytes(),
        }
    }

    fn finish(
        self,
        column: &mut ValueColumn,
        pool: &BufferPool,
    ) -> Result<Option<ArrayRef>, ArrowError> {
        Ok(match self {
            Self::Bytes => None,
            Self::Masked(valid) => {
                let (offsets, bytes) = take_plain(column).finish(pool);
                Some(Arc::new(BinaryArray::try_new(offsets, bytes, nulls(&valid))?))
            }
            Self::Texts(valid) => Some(Arc::new(texts(column, &valid, pool)?)),
            Self::Variants(variants) => Some(Arc::new(variants.finish()?)),
        })
    }
}

/// Takes the bytes out of a column.
fn take_plain(column: &mut ValueColumn) -> BytesColumn {
    std::mem::replace(&mut column.plain, BytesColumn::with_room_checked(0, Vec::new()))
}

/// The documents as text; rows that are not text are null.
fn texts(
    column: &mut ValueColumn,
    valid: &[bool],
    pool: &BufferPool,
) -> Result<StringArray, ArrowError> {
    let mut plain = take_plain(column);
    // Arrow requires valid text in null rows, too; most of them are empty.
    if valid.iter().enumerate().any(|(row, valid)| !valid && !plain.value(row).is_empty()) {
        let mut checked = BytesColumn::with_room_checked(valid.len(), pool.take(plain.len_bytes()));
        for (row, valid) in valid.iter().enumerate() {
            checked.push(if *valid { plain.value(row) } else { &[] });
        }
        drop(plain.finish(pool));
        plain = checked;
    }
    let nulls: Option<NullBuffer> = nulls(valid);
    let (offsets, bytes) = plain.finish(pool);
    StringArray::try_new(offsets, bytes, nulls)
}

/// What becomes of malformed documents and of values that do not fit.
struct Malformations<'a> {
    formats: &'a Formats,
    /// Those of the current document.
    notes: MalformedFields,
    bytes: Option<Texts>,
    /// Begins with the first row that has notes: most batches have none.
    fields: Option<Texts>,
    rows: usize,
    tally: &'a mut MalformedTally,
}

impl<'a> Malformations<'a> {
    fn new(formats: &'a Formats, rows: usize, tally: &'a mut MalformedTally) -> Self {
        let bytes = (formats.on_malformed == OnMalformed::Column).then(|| Texts::new(rows));
        Self { formats, notes: MalformedFields::default(), bytes, fields: None, rows: 0, tally }
    }

    /// Where values that do not fit are noted, if the rest of their document is kept.
    fn partial(&mut self) -> Option<&mut MalformedFields> {
        (self.formats.on_malformed == OnMalformed::Null).then_some(&mut self.notes)
    }

    /// Ends a row whose document was decoded to columns and to a value.
    #[inline]
    fn end_row(
        &mut self,
        document: &[u8],
        in_columns: Result<(), Malformed>,
        as_value: Result<(), Malformed>,
        place: impl FnOnce() -> (Vbid, Seqno),
    ) -> Result<(), Malformed> {
        self.rows += 1;
        if in_columns.is_ok() && as_value.is_ok() && self.notes.is_empty() {
            if let Some(bytes) = &mut self.bytes {
                bytes.push_null();
            }
            return Ok(());
        }
        self.end_malformed(document, in_columns, as_value, place())
    }

    #[cold]
    fn end_malformed(
        &mut self,
        document: &[u8],
        in_columns: Result<(), Malformed>,
        as_value: Result<(), Malformed>,
        place: (Vbid, Seqno),
    ) -> Result<(), Malformed> {
        let has_columns = self.formats.schema.is_some();
        let is_whole = in_columns.is_err() || (as_value.is_err() && !has_columns);
        let problem = in_columns.and(as_value);
        match (self.formats.on_malformed, problem) {
            (OnMalformed::Fail, Err(problem)) => return Err(problem),
            (OnMalformed::Null, Err(problem)) => self.notes.push_document(&problem, document),
            _ => {}
        }
        if is_whole {
            self.tally.whole += 1;
        } else {
            self.tally.partial += 1;
        }
        self.tally.note(&self.notes, place);
        if let Some(bytes) = &mut self.bytes {
            bytes.push(document);
        }
        if self.formats.notes {
            let fields = self.fields.get_or_insert_with(|| Texts::new(0));
            (fields.len()..self.rows - 1).for_each(|_| fields.push_null());
            fields.push(self.notes.to_json().as_bytes());
        }
        self.notes.clear();
        Ok(())
    }

    /// The columns of bytes and of notes.
    fn finish(self) -> Result<(Option<ArrayRef>, Option<ArrayRef>), ArrowError> {
        let bytes = self.bytes.map(Texts::binaries).transpose()?;
        let fields = match self.fields {
            Some(mut fields) => {
                (fields.len()..self.rows).for_each(|_| fields.push_null());
                Some(fields.strings()?)
            }
            None => self.formats.notes.then(|| StringArray::new_null(self.rows)),
        };
        let bytes = bytes.map(|bytes| Arc::new(bytes) as ArrayRef);
        Ok((bytes, fields.map(|fields| Arc::new(fields) as ArrayRef)))
    }

    fn len_bytes(&self) -> usize {
        self.fields.as_ref().map_or(0, Texts::len_bytes)
    }
}

/// Takes what is masked out of the documents of a batch. Those of which it cannot be taken out are
/// empty from then on; returns why, by row.
fn mask(
    masks: &FieldMasks,
    column: &mut ValueColumn,
    rows: &Rows<'_>,
    pool: &BufferPool,
    seen: &mut Sightings,
) -> Result<Vec<(usize, Malformed)>, SinkError> {
    let plain = take_plain(column);
    let count = rows.kinds.len();
    let mut masked = BytesColumn::with_room_checked(count, pool.take(plain.len_bytes()));
    let (mut unmasked, mut scratch) = (Vec::new(), Vec::new());
    for (row, kind) in rows.kinds.iter().enumerate() {
        let document = plain.value(row);
        let mut kept = document;
        if *kind == RowKind::Mutation {
            let is_json = rows.json.get(row).copied().unwrap_or_default();
            let done = match is_json {
                true => masks.mask(document, &mut scratch, seen),
                false => Err(Malformed::new(Problem::NotJson, 0)),
            };
            kept = if done.is_ok() { &scratch } else { &[] };
            unmasked.extend(done.err().map(|malformed| (row, malformed)));
        }
        if masked.len_bytes() + kept.len() > MAX_BATCH_BYTES
            || masked.check_room(kept.len()).is_err()
        {
            let what = "the documents of the batch take more than 1 GiB with hashes: set \
                        batch_bytes lower";
            return Err(rows.places.error(row, what.to_owned()));
        }
        masked.push(kept);
    }
    drop(plain.finish(pool));
    column.plain = masked;
    Ok(unmasked)
}

/// Decodes the documents of a batch; `tally` says what they were found to be.
///
/// # Errors
/// [`SinkError`] for the first malformed document, if malformed documents are errors, and if the
/// decoded documents exceed the memory limit.
pub(crate) fn decode(
    formats: &Formats,
    column: &mut ValueColumn,
    rows: &Rows<'_>,
    pool: &BufferPool,
    tally: &mut DocumentTally,
) -> Result<Decoded, SinkError> {
    let count = rows.kinds.len();
    let unmasked = match &formats.masks {
        Some(masks) => mask(masks, column, rows, pool, &mut tally.masked)?,
        None => Vec::new(),
    };
    let has_unmasked = !unmasked.is_empty();
    let mut unmasked = unmasked.into_iter().peekable();
    let mut decoder = formats.schema.as_ref().map(|schema| Decoder::new(schema, count));
    let mut value = Value::new(formats.value, formats.masks.is_some(), count);
    let mut malformed = Malformations::new(formats, count, &mut tally.malformed);
    for (row, kind) in rows.kinds.iter().enumerate() {
        let bytes = column.plain.value(row);
        let is_json =
            *kind == RowKind::SystemEvent || rows.json.get(row).copied().unwrap_or_default();
        let has_value = matches!(kind, RowKind::Mutation | RowKind::SystemEvent);
        let document = (*kind == RowKind::Mutation).then_some(bytes);
        let (in_columns, as_value) = if has_unmasked
            && let Some((_, why)) = unmasked.next_if(|(unmasked, _)| *unmasked == row)
        {
            if let Some(decoder) = &mut decoder {
                decoder.push_null();
            }
            (Err(why.clone()), value.push(None, is_json).and(Err(why)))
        } else {
            let in_columns = match &mut decoder {
                Some(decoder) => push(decoder, document, is_json, malformed.partial()),
                None => Ok(()),
            };
            (in_columns, value.push(has_value.then_some(bytes), is_json))
        };
        malformed
            .end_row(bytes, in_columns, as_value, || rows.places.of(row))
            .map_err(|problem| rows.places.malformed(row, problem.describe(&formats.names)))?;
        let taken = decoder.as_ref().map_or(0, Decoder::len_bytes)
            + value.len_bytes()
            + malformed.len_bytes();
        if taken > MAX_BATCH_BYTES {
            let what = "the documents of the batch take more than 1 GiB decoded: set batch_bytes \
                        lower";
            return Err(rows.places.error(row, what.to_owned()));
        }
    }
    finish(decoder, value, malformed, column, pool, &mut tally.decoded).map_err(|error| {
        rows.places.error(0, format!("documents do not match their columns: {error}"))
    })
}

fn push(
    decoder: &mut Decoder,
    document: Option<&[u8]>,
    is_json: bool,
    notes: Option<&mut MalformedFields>,
) -> Result<(), Malformed> {
    match document {
        Some(document) if is_json => decoder.push(document, notes),
        Some(_) => {
            decoder.push_null();
            Err(Malformed::new(Problem::NotJson, 0))
        }
        None => {
            decoder.push_null();
            Ok(())
        }
    }
}

fn finish(
    decoder: Option<Decoder>,
    value: Value,
    malformed: Malformations<'_>,
    column: &mut ValueColumn,
    pool: &BufferPool,
    seen: &mut Sightings,
) -> Result<Decoded, ArrowError> {
    let documents = decoder.map(|decoder| decoder.finish(seen)).transpose()?.unwrap_or_default();
    let value = value.finish(column, pool)?;
    let (malformed, malformed_fields) = malformed.finish()?;
    Ok(Decoded { documents, value, malformed, malformed_fields })
}
