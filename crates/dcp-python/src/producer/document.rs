//! Documents as written and read from Python.

use bytes::{BufMut, Bytes, BytesMut};
use dcp_producer::{Document, MutationToken, Producer, WriteOptions};
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Cas, CollectionId, Datatype};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{ANY, Arguments};
use crate::classes::{Class, make};
use crate::error::{Failure, Kind};

static MUTATION_TOKEN: Class = Class::new("dcp_rs.testing.documents", "MutationToken");
static DOCUMENT: Class = Class::new("dcp_rs.testing.documents", "Document");

/// The `dcp_rs.testing.MutationToken`.
pub(super) fn token(py: Python<'_>, token: MutationToken) -> PyResult<Bound<'_, PyAny>> {
    make!(MUTATION_TOKEN, py, {
        vbucket: token.vbid.0,
        seqno: token.seqno.0,
        vbuuid: token.vbuuid.0,
        cas: token.cas.0,
    })
}

/// Options of a document write.
pub(super) struct WriteArgs {
    cas: u64,
    expiry: u32,
    flags: u32,
    collection: Option<String>,
    xattrs: Option<Vec<(String, String)>>,
}

impl WriteArgs {
    pub(super) fn read(options: Bound<'_, PyDict>) -> PyResult<Self> {
        let arguments = Arguments::new(options);
        let xattrs = arguments.optional("xattrs")?;
        Ok(Self {
            cas: arguments.integer("cas", 0, ANY)?,
            expiry: arguments.integer("expiry", 0, 0..=u32::MAX.into())?,
            flags: arguments.integer("flags", 0, 0..=u32::MAX.into())?,
            collection: arguments.optional_text("collection")?,
            xattrs: xattrs.map(|xattrs| xattrs.extract()).transpose()?,
        })
    }

    pub(super) fn options(&self, producer: &Producer) -> Result<WriteOptions, Failure> {
        let mut options = WriteOptions::default();
        options.cas = Cas(self.cas);
        options.expiry = self.expiry;
        options.flags = self.flags;
        options.collection_id = collection_id(producer, self.collection.as_deref())?;
        Ok(options)
    }

    /// Like [`options`](Self::options), with the xattrs encoded before `value`.
    pub(super) fn with_value(
        &self,
        producer: &Producer,
        value: Bytes,
    ) -> Result<(WriteOptions, Bytes), Failure> {
        let mut options = self.options(producer)?;
        let Some(xattrs) = &self.xattrs else {
            return Ok((options, value));
        };
        let pairs = xattrs
            .iter()
            .map(|(name, json)| Xattr { name: name.as_bytes(), value: json.as_bytes() });
        let mut section = BytesMut::new();
        xattr::encode(pairs, &mut section)
            .map_err(|error| Failure::option(&["xattrs"], error.to_string()))?;
        section.put_slice(&value);
        let body = dcp_producer::datatype_of(&value);
        options.datatype = Some(body.with(Datatype::XATTR));
        Ok((options, section.freeze()))
    }
}

/// The collection named `scope.collection`, or `collection` in the default scope.
pub(super) fn collection_id(
    producer: &Producer,
    path: Option<&str>,
) -> Result<CollectionId, Failure> {
    let Some(path) = path else {
        return Ok(CollectionId::DEFAULT);
    };
    let (scope, collection) = path.split_once('.').unwrap_or(("_default", path));
    producer.collection_id(scope, collection).map_err(Failure::from)
}

/// The `dcp_rs.testing.Document`.
pub(super) fn read<'py>(py: Python<'py>, document: &Document) -> PyResult<Bound<'py, PyAny>> {
    let (xattrs, json) = (PyDict::new(py), py.import("json")?);
    let mut value: &[u8] = &document.value;
    if document.datatype.contains(Datatype::XATTR) {
        let malformed = |error| Failure::new(Kind::Data, format!("malformed xattrs: {error}"));
        let (pairs, body) = xattr::split(&document.value).map_err(malformed)?;
        for pair in pairs {
            let pair = pair.map_err(malformed)?;
            let name = String::from_utf8_lossy(pair.name);
            xattrs.set_item(name, json.call_method1("loads", (PyBytes::new(py, pair.value),))?)?;
        }
        value = body;
    }
    make!(DOCUMENT, py, {
        value: PyBytes::new(py, value),
        xattrs: xattrs,
        datatype: if document.datatype.contains(Datatype::JSON) { "json" } else { "binary" },
        cas: document.cas.0,
        seqno: document.seqno.0,
        rev: document.rev_seqno.0,
        flags: document.flags,
        expiry: document.expiry,
    })
}
