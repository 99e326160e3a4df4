//! Decodes the documents of a batch.

use std::sync::Arc;

use arrow_array::{ArrayRef, StringArray};
use arrow_buffer::NullBuffer;
use arrow_schema::ArrowError;
use dcp_proto::SinkError;

use super::decoder::Decoder;
use super::leaves::{Texts, Variants};
use super::malformed::{Malformed, Problem};
use super::{DocumentSchema, OnMalformed, ValueFormat};
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
}

impl Formats {
    /// Whether documents are decoded at all.
    pub(crate) fn decodes(&self) -> bool {
        self.schema.is_some() || !matches!(self.value, None | Some(ValueFormat::Binary))
    }

    /// Whether only documents that the server marks as JSON are decoded.
    pub(crate) fn wants_json(&self) -> bool {
        self.schema.is_some() || self.value == Some(ValueFormat::Variant)
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
    /// Text, and which rows are valid.
    Texts(Vec<bool>),
    Variants(Variants),
}

impl Value {
    fn new(format: Option<ValueFormat>, rows: usize) -> Self {
        match format {
            None | Some(ValueFormat::Binary) => Self::Bytes,
            Some(ValueFormat::String) => Self::Texts(Vec::with_capacity(rows)),
            Some(ValueFormat::Variant) => Self::Variants(Variants::new(rows)),
        }
    }

    /// Appends a row's document; a null if it has none or it is malformed.
    fn push(&mut self, document: Option<&[u8]>, is_json: bool) -> Result<(), Malformed> {
        match self {
            Self::Bytes => Ok(()),
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
            Self::Bytes | Self::Texts(_) => 0,
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
            Self::Texts(valid) => Some(Arc::new(texts(column, &valid, pool)?)),
            Self::Variants(variants) => Some(Arc::new(variants.finish()?)),
        })
    }
}

/// The documents as text; rows that are not text are null.
fn texts(
    column: &mut ValueColumn,
    valid: &[bool],
    pool: &BufferPool,
) -> Result<StringArray, ArrowError> {
    let empty = BytesColumn::with_room_checked(0, Vec::new());
    let mut plain = std::mem::replace(&mut column.plain, empty);
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

/// Decodes the documents of a batch.
///
/// # Errors
/// [`SinkError`] for the first malformed document, if malformed documents are errors, and if the
/// decoded documents exceed the memory limit.
pub(crate) fn decode(
    formats: &Formats,
    column: &mut ValueColumn,
    rows: &Rows<'_>,
    pool: &BufferPool,
) -> Result<Decoded, SinkError> {
    let count = rows.kinds.len();
    let mut decoder = formats.schema.as_ref().map(|schema| Decoder::new(schema, count));
    let mut value = Value::new(formats.value, count);
    let mut malformed = (formats.on_malformed == OnMalformed::Column).then(|| Texts::new(count));
    for (row, kind) in rows.kinds.iter().enumerate() {
        let bytes = column.plain.value(row);
        let is_json =
            *kind == RowKind::SystemEvent || rows.json.get(row).copied().unwrap_or_default();
        let has_value = matches!(kind, RowKind::Mutation | RowKind::SystemEvent);
        let document = (*kind == RowKind::Mutation).then_some(bytes);
        let in_columns =
            decoder.as_mut().map_or(Ok(()), |decoder| push(decoder, document, is_json));
        let as_value = value.push(has_value.then_some(bytes), is_json);
        let problem = in_columns.and(as_value).err();
        if let (Some(problem), OnMalformed::Fail) = (&problem, formats.on_malformed) {
            return Err(rows.places.malformed(row, problem.describe(&formats.names)));
        }
        if let Some(malformed) = &mut malformed {
            if problem.is_some() { malformed.push(bytes) } else { malformed.push_null() }
        }
        let taken = decoder.as_ref().map_or(0, Decoder::len_bytes) + value.len_bytes();
        if taken > MAX_BATCH_BYTES {
            let what = "the documents of the batch take more than 1 GiB decoded: set batch_bytes \
                        lower";
            return Err(rows.places.error(row, what.to_owned()));
        }
    }
    finish(decoder, value, malformed, column, pool).map_err(|error| {
        rows.places.error(0, format!("documents do not match their columns: {error}"))
    })
}

fn push(decoder: &mut Decoder, document: Option<&[u8]>, is_json: bool) -> Result<(), Malformed> {
    match document {
        Some(document) if is_json => decoder.push(document),
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
    malformed: Option<Texts>,
    column: &mut ValueColumn,
    pool: &BufferPool,
) -> Result<Decoded, ArrowError> {
    let documents = decoder.map(Decoder::finish).transpose()?.unwrap_or_default();
    let value = value.finish(column, pool)?;
    let malformed = malformed.map(Texts::binaries).transpose()?;
    let malformed = malformed.map(|malformed| Arc::new(malformed) as ArrayRef);
    Ok(Decoded { documents, value, malformed })
}
