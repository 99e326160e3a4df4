//! Documents that are given as columns of text, apart from a stream.

use std::sync::{Mutex, MutexGuard, PoisonError};

use arrow_array::RecordBatch;
use dcp_arrow::{
    DocumentDecoder as Decoder, DocumentSchema, GivenDocuments, GivenKind, Names, Nested,
    Observations, ObservedField, SchemaError, Sightings,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::arguments::Arguments;
use crate::batch::capsules;
use crate::classes::Class;
use crate::error::{Failure, Kind};
use crate::schema::schema_capsule;

const NESTED: [(&str, Nested); 3] =
    [("json", Nested::Json), ("struct", Nested::Struct), ("columns", Nested::Columns)];

fn names(arguments: &Arguments<'_>) -> PyResult<Names> {
    let nested = arguments.word("nested", Nested::Json, &NESTED)?;
    let reserved = arguments.names("reserved")?.unwrap_or_default();
    Ok(Names::new(nested, reserved))
}

fn parsed(text: &str) -> PyResult<DocumentSchema> {
    let schema = DocumentSchema::parse(text).map_err(SchemaError::from);
    Ok(schema.map_err(Failure::from)?)
}

/// The documents of a column, copied from Python's buffers.
struct Given {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
    kinds: Vec<GivenKind>,
}

impl Given {
    /// Reads offsets, the bytes that they refer to, and for each row 0 for none, 1 for JSON or 2
    /// for another document.
    fn read(
        py: Python<'_>,
        offsets: &PyBuffer<i32>,
        bytes: &PyBuffer<u8>,
        kinds: &PyBuffer<u8>,
    ) -> PyResult<Self> {
        let kind = |kind: u8| match kind {
            0 => GivenKind::None,
            1 => GivenKind::Json,
            _ => GivenKind::Binary,
        };
        let given = Self {
            offsets: offsets.to_vec(py)?,
            bytes: bytes.to_vec(py)?,
            kinds: kinds.to_vec(py)?.into_iter().map(kind).collect(),
        };
        if given.offsets.len() != given.kinds.len() + 1 {
            return Err(PyValueError::new_err("there must be one offset more than documents"));
        }
        let end = given.offsets.last().map(|end| usize::try_from(*end));
        let ascend =
            given.offsets.first().is_some_and(|first| *first >= 0) && given.offsets.is_sorted();
        if !ascend || end.is_none_or(|end| end.is_ok_and(|end| end > given.bytes.len())) {
            return Err(PyValueError::new_err("the offsets are not within the bytes"));
        }
        Ok(given)
    }

    fn documents(&self) -> GivenDocuments<'_> {
        GivenDocuments { offsets: &self.offsets, bytes: &self.bytes, kinds: &self.kinds }
    }
}

/// Decodes columns of documents to a schema.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct DocumentDecoder {
    decoder: Decoder,
    columns: Vec<String>,
}

#[pymethods]
impl DocumentDecoder {
    /// The options are `schema`, `nested`, `reserved`, `prefix`, `is_exact`, `keeps_extra` and
    /// `keeps_rest`.
    #[new]
    fn new(options: Bound<'_, PyDict>) -> PyResult<Self> {
        let arguments = Arguments::new(options);
        let schema = parsed(&arguments.text("schema", "")?)?;
        let names = names(&arguments)?;
        let columns = match arguments.optional_text("prefix")? {
            Some(prefix) => schema.names().map(|name| format!("{prefix}{name}")).collect(),
            None => names.columns(&schema),
        };
        let decoder = Decoder::new(schema, names, columns.clone())
            .exact_if(arguments.flag("is_exact", false)?)
            .extra_if(arguments.flag("keeps_extra", false)?)
            .rest_if(arguments.flag("keeps_rest", true)?);
        Ok(Self { decoder, columns })
    }

    /// The schema as text.
    #[getter]
    fn schema(&self) -> String {
        self.decoder.schema().to_ddl()
    }

    /// Names of the columns of documents.
    #[getter]
    fn names(&self) -> Vec<String> {
        self.columns.clone()
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.decoder.arrow())
    }

    /// Decodes documents to the columns, and those that say what did not fit. Returns the names of
    /// the fields that no document had, and the number of documents, too.
    fn decode(
        &self,
        py: Python<'_>,
        offsets: PyBuffer<i32>,
        data: PyBuffer<u8>,
        kinds: PyBuffer<u8>,
    ) -> PyResult<DecodedDocuments> {
        let given = Given::read(py, &offsets, &data, &kinds)?;
        let mut seen = Sightings::default();
        let decoded = py.detach(|| self.decoder.decode(given.documents(), &mut seen));
        let failed = |error: arrow_schema::ArrowError| Failure::new(Kind::Dcp, error.to_string());
        let batch = decoded.map_err(failed)?;
        let names = self.decoder.schema().names().enumerate();
        let missing = names.filter(|(index, _)| !seen.has_seen(*index));
        let missing = missing.map(|(_, name)| name.to_owned()).collect();
        Ok(DecodedDocuments { batch, missing, documents: seen.documents })
    }

    /// The text of a schema that holds documents, too.
    fn grown(
        &self,
        py: Python<'_>,
        offsets: PyBuffer<i32>,
        data: PyBuffer<u8>,
        kinds: PyBuffer<u8>,
        adds_fields: bool,
        widens_types: bool,
    ) -> PyResult<String> {
        let given = Given::read(py, &offsets, &data, &kinds)?;
        let grown = py.detach(|| self.decoder.grown(given.documents(), adds_fields, widens_types));
        Ok(grown.to_ddl())
    }
}

/// Documents in columns.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct DecodedDocuments {
    batch: RecordBatch,
    /// Fields of the schema that no document has.
    #[pyo3(get)]
    missing: Vec<String>,
    /// Documents that are JSON objects.
    #[pyo3(get)]
    documents: u64,
}

#[pymethods]
impl DecodedDocuments {
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _wish = requested_schema;
        capsules(py, &self.batch)
    }
}

static INFERRED_FIELD: Class = Class::new("dcp_rs.replication.inferring", "InferredField");

/// What documents were seen to have.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Inference {
    names: Names,
    seen: Mutex<Observations>,
}

impl Inference {
    fn seen(&self) -> MutexGuard<'_, Observations> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Inference {
    /// The options are `nested`, `reserved` and `examples`.
    #[new]
    fn new(options: Bound<'_, PyDict>) -> PyResult<Self> {
        let arguments = Arguments::new(options);
        let names = names(&arguments)?;
        let seen = Observations::default();
        let seen = if arguments.flag("examples", false)? { seen.with_examples() } else { seen };
        Ok(Self { names, seen: Mutex::new(seen) })
    }

    /// Adds documents.
    fn add(
        &self,
        py: Python<'_>,
        offsets: PyBuffer<i32>,
        data: PyBuffer<u8>,
        kinds: PyBuffer<u8>,
    ) -> PyResult<()> {
        let given = Given::read(py, &offsets, &data, &kinds)?;
        py.detach(|| given.documents().observe(&mut self.seen()));
        Ok(())
    }

    /// The text of the schema; `None` if no column can be made.
    #[getter]
    fn schema(&self) -> Option<String> {
        self.names.inferred(&self.seen()).map(|schema| schema.to_ddl())
    }

    /// Documents that are JSON objects.
    #[getter]
    fn objects(&self) -> u64 {
        self.seen().objects
    }

    /// Documents that are other JSON.
    #[getter]
    fn others(&self) -> u64 {
        self.seen().others
    }

    /// Documents that are not JSON.
    #[getter]
    fn binary(&self) -> u64 {
        self.seen().binary
    }

    /// The fields, as `dcp_rs.replication.InferredField`.
    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (fields, objects) = {
            let seen = self.seen();
            (seen.fields(self.names.nested()), seen.objects.max(1))
        };
        let field = |field: ObservedField| {
            let of = PyDict::new(py);
            of.set_item("path", PyTuple::new(py, field.path)?)?;
            of.set_item("type", field.kind)?;
            #[expect(clippy::cast_precision_loss, reason = "counts of a sample are small")]
            of.set_item("share", field.count as f64 / objects as f64)?;
            of.set_item("example", field.example)?;
            INFERRED_FIELD.call(&of)
        };
        fields.into_iter().map(field).collect()
    }
}
