//! Decoding of documents into typed columns.
//!
//! A [`DocumentSchema`] lists the fields of a document that become columns, with their types. The
//! documents of a batch are decoded when it is finished, by the task that takes it.
//!
//! A document is *malformed* if it is not a JSON object, which the server has to mark as JSON, has a
//! number of more than 4300 digits or would take too much memory; then all its columns are null. A value that does not fit its type is
//! a *malformed field*. [`OnMalformed`] says what happens to the rest of its document: with the
//! default, only this value is null, at the innermost place that can be, which is a field of a
//! struct, an element of an array or a value of a map. These are malformed fields, too:
//!
//! * a name of the schema or a key of a map that occurs twice: none of its values is taken, since
//!   each may be the right one; a map keeps the key, with a null;
//! * text that is no date, time, decimal or base64, or that has half a surrogate pair;
//! * a key of a map that has half a surrogate pair: the entry is left out;
//! * a value that is nested too deep for its type, such as a variant.
//!
//! The column [`MALFORMED_FIELDS`] notes each of them.

mod batch;
mod builders;
mod ddl;
mod decoder;
mod given;
mod malformed;
mod malformed_fields;
mod masks;
mod numbers;
mod observed;
mod partial;
mod primitives;
mod reader;
mod sightings;
mod skip;
mod tally;
mod timestamps;
mod variant;
mod widen;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock};

use arrow_schema::{DataType, Field as ArrowField, Fields, TimeUnit};

pub(crate) use batch::{Decoded, Formats, Rows, decode};
pub use ddl::DdlError;
pub use given::{
    DocumentDecoder, EXTRA, FLAGS, GivenDocuments, GivenKind, HAS_MALFORMED, HAS_UNMAPPED,
    IS_MALFORMED,
};
pub use masks::{FieldMasks, MaskError};
pub use observed::{Nested, Observations, ObservedField};
pub use sightings::{DocumentTally, Sightings};
pub use skip::json_depth;
pub use tally::{MalformedKind, MalformedTally};
pub use widen::Names;

/// Format of the `value` column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ValueFormat {
    /// The document's bytes.
    #[default]
    Binary,
    /// Text; a document that is not UTF-8 is malformed.
    String,
    /// Spark's variant, a struct of `value` and `metadata`; a document that is not JSON is
    /// malformed.
    Variant,
}

/// How documents are handled that are malformed or have malformed fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMalformed {
    /// The values that do not fit are null, or all columns if the document is malformed. The column
    /// [`MALFORMED_FIELDS`] says why.
    #[default]
    Null,
    /// The stream fails with an error that names the vBucket and seqno.
    Fail,
    /// All columns of the document are null and its bytes are in the column [`MALFORMED`].
    Column,
}

/// Name of the column of malformed documents.
pub const MALFORMED: &str = "_malformed";

/// Name of the column of malformed fields.
///
/// It is a JSON array of objects, or null if everything fits:
///
/// | member | |
/// |---|---|
/// | `path` | where the value is, such as `items[3].price`; empty for the document; null in a last object that counts the others if there are more than 16 |
/// | `reason` | what was expected |
/// | `text` | the value's JSON text: its first 256 bytes and `…` if it is longer |
pub const MALFORMED_FIELDS: &str = "_malformed_fields";

/// Type of every timestamp, in documents and changes alike, so that they share a time zone.
pub(crate) static TIMESTAMP: LazyLock<DataType> =
    LazyLock::new(|| DataType::Timestamp(TimeUnit::Microsecond, Some(Arc::from("UTC"))));

/// The type of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Boolean,
    Byte,
    Short,
    Int,
    Long,
    Float,
    Double,
    Decimal { precision: u8, scale: u8 },
    String,
    Binary,
    Date,
    Timestamp,
    TimestampNtz,
    Variant,
    Array(Box<Self>),
    Map(Box<Self>),
    Struct(Vec<Field>),
}

/// One field of a document, or of an object in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    kind: Kind,
}

impl Field {
    fn arrow(&self) -> ArrowField {
        ArrowField::new(&self.name, self.kind.data_type(), true)
    }
}

impl Kind {
    /// The Arrow type that Spark maps its own to, including names of inner fields.
    fn data_type(&self) -> DataType {
        match self {
            Self::Boolean => DataType::Boolean,
            Self::Byte => DataType::Int8,
            Self::Short => DataType::Int16,
            Self::Int => DataType::Int32,
            Self::Long => DataType::Int64,
            Self::Float => DataType::Float32,
            Self::Double => DataType::Float64,
            Self::Decimal { precision, scale } => {
                DataType::Decimal128(*precision, scale.cast_signed())
            }
            Self::String => DataType::Utf8,
            Self::Binary => DataType::Binary,
            Self::Date => DataType::Date32,
            Self::Timestamp => TIMESTAMP.clone(),
            Self::TimestampNtz => DataType::Timestamp(TimeUnit::Microsecond, None),
            Self::Variant => variant_type(),
            Self::Array(element) => {
                DataType::List(Arc::new(ArrowField::new("element", element.data_type(), true)))
            }
            Self::Map(value) => {
                let fields = vec![
                    ArrowField::new("key", DataType::Utf8, false),
                    ArrowField::new("value", value.data_type(), true),
                ];
                let entries = DataType::Struct(fields.into());
                DataType::Map(Arc::new(ArrowField::new("entries", entries, false)), false)
            }
            Self::Struct(fields) => DataType::Struct(fields.iter().map(Field::arrow).collect()),
        }
    }
}

/// The fields of a document that become columns, with their types.
///
/// ```
/// use dcp_arrow::DocumentSchema;
///
/// let schema = DocumentSchema::parse("name STRING, geo STRUCT<lat: DOUBLE, lon: DOUBLE>")?;
/// assert_eq!(schema.names().collect::<Vec<_>>(), ["name", "geo"]);
/// # Ok::<(), dcp_arrow::DdlError>(())
/// ```
///
/// | type | JSON | Arrow |
/// |---|---|---|
/// | `STRING` | text; any other value as its JSON text | utf8 |
/// | `BOOLEAN` | `true`, `false` | bool |
/// | `TINYINT`, `SMALLINT`, `INT`, `BIGINT` | a number without fraction and exponent, in range | int8 to int64 |
/// | `FLOAT`, `DOUBLE` | a number that is finite as such | float32, float64 |
/// | `DECIMAL(p, s)` | a number, or text that contains one; rounded half up | decimal128 |
/// | `DATE` | `2024-02-29` | date32 |
/// | `TIMESTAMP` | ISO 8601, in UTC without an offset; or whole seconds since 1970 | timestamp\[us, UTC\] |
/// | `TIMESTAMP_NTZ` | ISO 8601 without an offset | timestamp\[us\] |
/// | `BINARY` | a base64 string | binary |
/// | `VARIANT` | anything but `null` | Spark's variant: a struct of `value` and `metadata` |
/// | `ARRAY<type>` | an array | list |
/// | `MAP<STRING, type>` | an object | map |
/// | `STRUCT<name: type, ...>` | an object; other fields are ignored | struct |
///
/// Every column is nullable: a field may be missing or `null`.
#[derive(Clone, PartialEq, Eq)]
pub struct DocumentSchema {
    fields: Arc<[Field]>,
}

impl DocumentSchema {
    /// Parses a schema in the syntax of Spark SQL's column lists.
    ///
    /// # Errors
    /// [`DdlError`] if the text is not such a list, or names an unknown type.
    pub fn parse(text: &str) -> Result<Self, DdlError> {
        Ok(Self { fields: ddl::parse(text)?.into() })
    }

    /// Names of the fields in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.fields.iter().map(|field| field.name.as_str())
    }

    /// The text that [`parse`](Self::parse) reads.
    #[must_use]
    pub fn to_ddl(&self) -> String {
        ddl::fields(&self.fields, " ")
    }

    /// The columns as Arrow fields.
    pub(crate) fn arrow(&self) -> Vec<ArrowField> {
        self.fields.iter().map(Field::arrow).collect()
    }
}

impl fmt::Debug for DocumentSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// Arrow type of Spark's variant.
pub(crate) fn variant_type() -> DataType {
    DataType::Struct(variant_fields())
}

fn variant_fields() -> Fields {
    // This metadata lets Spark distinguish a variant from a struct with the same fields.
    let mark = HashMap::from([("variant".to_owned(), "true".to_owned())]);
    let fields = vec![
        ArrowField::new("value", DataType::Binary, false),
        ArrowField::new("metadata", DataType::Binary, false).with_metadata(mark),
    ];
    fields.into()
}
