//! The change table's columns.

use arrow_schema::ffi::FFI_ArrowSchema;
use dcp_arrow::{
    COLUMNS, ColumnSet, Detail, DocumentSchema, KeyType, OnMalformed, SchemaError, TableOptions,
    TableSchema, ValueFormat,
};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::error::{Failure, Kind};

/// What a table is to hold, by the names of `Client.stream`'s arguments.
#[derive(Debug, FromPyObject)]
pub(crate) struct TableArgs {
    columns: Option<Vec<String>>,
    metadata: String,
    include_value: bool,
    include_xattrs: bool,
    key_type: String,
    system_events: bool,
    value_format: String,
    document_schema: Option<String>,
    document_prefix: String,
    on_malformed: String,
}

impl TableArgs {
    pub(crate) fn schema(self) -> Result<TableSchema, Failure> {
        let detail = match self.metadata.as_str() {
            "basic" => Detail::Basic,
            "full" => Detail::Full,
            _ => return Err(one_of("metadata", &["basic", "full"])),
        };
        let key_type = match self.key_type.as_str() {
            "string" => KeyType::String,
            "binary" => KeyType::Binary,
            _ => return Err(one_of("key_type", &["string", "binary"])),
        };
        let value_format = match self.value_format.as_str() {
            "binary" => ValueFormat::Binary,
            "string" => ValueFormat::String,
            "variant" => ValueFormat::Variant,
            _ => return Err(one_of("value_format", &["binary", "string", "variant"])),
        };
        let on_malformed = match self.on_malformed.as_str() {
            "null" => OnMalformed::Null,
            "fail" => OnMalformed::Fail,
            "column" => OnMalformed::Column,
            _ => return Err(one_of("on_malformed", &["null", "fail", "column"])),
        };
        let document_schema = self.document_schema.as_deref().map(DocumentSchema::parse);
        Ok(TableSchema::new(&TableOptions {
            columns: self.columns,
            detail,
            include_value: self.include_value,
            include_xattrs: self.include_xattrs,
            key_type,
            system_events: self.system_events,
            value_format,
            document_schema: document_schema.transpose().map_err(SchemaError::from)?,
            document_prefix: self.document_prefix,
            on_malformed,
        })?)
    }
}

/// The error of an option that takes one of a few words.
pub(crate) fn one_of(option: &str, choices: &[&str]) -> Failure {
    Failure::new(Kind::Config, format!("{option}: must be one of {}", choices.join(", ")))
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
    fn new(options: TableArgs) -> PyResult<Self> {
        Ok(Self { table: options.schema()? })
    }

    #[getter]
    fn names(&self) -> Vec<&str> {
        self.table.names().collect()
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.table.arrow())
    }
}

/// The change table: `(name, set, nullable, meaning)` of each column.
#[pyfunction]
pub(crate) fn columns() -> Vec<(&'static str, &'static str, bool, &'static str)> {
    COLUMNS
        .iter()
        .map(|spec| {
            let set = match spec.set {
                ColumnSet::Basic => "basic",
                ColumnSet::Full => "full",
                ColumnSet::OnRequest => "request",
            };
            (spec.name, set, spec.nullable, spec.meaning)
        })
        .collect()
}
