//! Columns and schemas of the change table.

use arrow_schema::ffi::FFI_ArrowSchema;
use dcp_arrow::{
    COLUMNS, ColumnSet, ColumnSpec, Columns, DocumentSchema, FieldMasks, KeyType, OnMalformed,
    SchemaError, TableOptions, TableSchema, ValueFormat,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyString, PyTuple};
use zeroize::Zeroizing;

use crate::arguments::{Arguments, names, one_of, one_or_more, wrong_type};
use crate::classes::{Class, make};
use crate::error::{Failure, Kind};

/// The table described by the options of `Client.stream`.
pub(crate) fn table(arguments: &Arguments<'_>) -> PyResult<TableSchema> {
    let mut options = TableOptions::default();
    let key_types = [("string", KeyType::String), ("binary", KeyType::Binary)];
    let value_formats = [
        ("binary", ValueFormat::Binary),
        ("string", ValueFormat::String),
        ("variant", ValueFormat::Variant),
    ];
    options.columns = table_columns(arguments)?;
    let include = include(arguments)?;
    options.include_xattrs = include.contains(&Include::Xattrs);
    options.history = include.contains(&Include::History);
    options.system_events = include.contains(&Include::SystemEvents);
    options.key_type = arguments.word("key_type", options.key_type, &key_types)?;
    options.value_format = arguments.word("value_format", options.value_format, &value_formats)?;
    if let Some(documents) = arguments.optional("document_schema")? {
        read_documents(&Arguments::new(documents.cast_into()?), &mut options)?;
    }
    options.masks = read_masks(arguments)?;
    Ok(TableSchema::new(&options).map_err(Failure::from)?)
}

/// What a stream delivers only if asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    Xattrs,
    History,
    SystemEvents,
    SystemDocuments,
}

/// Words of `include`.
const INCLUDE: [(&str, Include); 4] = [
    ("xattrs", Include::Xattrs),
    ("history", Include::History),
    ("system_events", Include::SystemEvents),
    ("system_documents", Include::SystemDocuments),
];

/// The option `include`.
pub(crate) fn include(arguments: &Arguments<'_>) -> PyResult<Vec<Include>> {
    let py = arguments.py();
    let Some(given) = arguments.get("include", PyTuple::empty(py))? else { return Ok(Vec::new()) };
    let words = one_or_more("include", &given, "a word or a list of words")?;
    let word = |word: &String| one_of("include", PyString::new(py, word).as_any(), &INCLUDE, None);
    words.iter().map(word).collect()
}

/// A set of columns, or column names.
fn table_columns(arguments: &Arguments<'_>) -> PyResult<Columns> {
    let Some(given) = arguments.get("columns", "basic")? else { return Ok(Columns::Basic) };
    let expected = "a list of column names";
    if given.is_instance_of::<PyString>() || given.is_none() {
        let sets = [("basic", false), ("full", true)];
        let is_full = one_of("columns", &given, &sets, Some(expected))?;
        return Ok(if is_full { Columns::Full } else { Columns::Basic });
    }
    names("columns", &given, expected).map(Columns::Named)
}

/// `dcp_rs.DocumentSchema`.
pub(crate) fn read_documents(
    arguments: &Arguments<'_>,
    options: &mut TableOptions,
) -> PyResult<()> {
    let on_malformed =
        [("null", OnMalformed::Null), ("fail", OnMalformed::Fail), ("column", OnMalformed::Column)];
    let schema = arguments.optional_text("schema")?;
    let schema = schema.as_deref().map(DocumentSchema::parse).transpose();
    options.document_schema = schema.map_err(SchemaError::from).map_err(Failure::from)?;
    options.document_prefix = arguments.text("prefix", &options.document_prefix)?;
    options.on_malformed = arguments.word("on_malformed", options.on_malformed, &on_malformed)?;
    Ok(())
}

/// The options `drop_fields`, `hash_fields` and `hash_key`.
fn read_masks(arguments: &Arguments<'_>) -> PyResult<FieldMasks> {
    let paths = |name| arguments.one_or_more(name, "a path or a list of paths");
    let dropped = paths("drop_fields")?.unwrap_or_default();
    let hashed = paths("hash_fields")?.unwrap_or_default();
    let key = arguments.optional("hash_key")?.map(|key| match key.extract::<String>() {
        Ok(text) => Ok(Zeroizing::new(text.into_bytes())),
        Err(_) => match key.cast::<PyBytes>() {
            Ok(bytes) => Ok(Zeroizing::new(bytes.as_bytes().to_vec())),
            Err(_) => Err(wrong_type("hash_key", &key, "text or bytes")),
        },
    });
    let key = key.transpose()?;
    let masks = FieldMasks::new(&dropped, &hashed, key.as_ref().map(|key| key.as_slice()));
    Ok(masks.map_err(SchemaError::from).map_err(Failure::from)?)
}

/// Which fields of documents are masked, as JSON that is the same for the same masks; `None` if no
/// field is.
#[pyfunction]
pub(crate) fn masks(options: Bound<'_, PyDict>) -> PyResult<Option<String>> {
    let masks = read_masks(&Arguments::new(options))?;
    Ok((!masks.is_empty()).then(|| masks.to_json()))
}

/// The schema of a table as an Arrow PyCapsule.
pub(crate) fn schema_capsule<'py>(
    py: Python<'py>,
    schema: &arrow_schema::Schema,
) -> PyResult<Bound<'py, PyCapsule>> {
    let schema = FFI_ArrowSchema::try_from(schema)
        .map_err(|error| Failure::new(Kind::Dcp, error.to_string()))?;
    PyCapsule::new_with_value(py, schema, c"arrow_schema")
}

/// Columns of a table, without a stream.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Schema {
    pub(crate) table: TableSchema,
}

#[pymethods]
impl Schema {
    #[new]
    fn new(options: Bound<'_, PyDict>) -> PyResult<Self> {
        Ok(Self { table: table(&Arguments::new(options))? })
    }

    #[getter]
    fn names(&self) -> Vec<&str> {
        self.table.names().collect()
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.table.arrow())
    }
}

static COLUMN_INFO: Class = Class::new("dcp_rs.schema", "ColumnInfo");

/// The columns of the change table, as `dcp_rs.ColumnInfo`.
#[pyfunction]
pub(crate) fn columns(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let info = |spec: &ColumnSpec| {
        let included = match spec.set {
            ColumnSet::Basic => "basic",
            ColumnSet::Full => "full",
            ColumnSet::OnRequest => "request",
        };
        make!(COLUMN_INFO, py, {
            name: spec.name,
            included: included,
            nullable: spec.nullable,
            meaning: spec.meaning,
        })
    };
    COLUMNS.iter().map(info).collect()
}
