//! Documents as written and read from Python.

use bytes::{BufMut, Bytes, BytesMut};
use dcp_producer::{Document, MutationToken, Producer, WriteOptions};
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Cas, CollectionId, Datatype};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{ANY, Arguments};
use crate::error::{Failure, Kind};

/// A document's vBucket, seqno, vbuuid and CAS.
pub(super) type Token = (u16, u64, u64, u64);

pub(super) fn token(token: MutationToken) -> Token {
    (token.vbid.0, token.seqno.0, token.vbuuid.0, token.cas.0)
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

/// A document as the arguments of `dcp_rs.Document`, its xattrs as JSON texts by name.
pub(super) fn dict<'py>(py: Python<'py>, document: &Document) -> PyResult<Bound<'py, PyDict>> {
    let xattrs = PyDict::new(py);
    let mut value: &[u8] = &document.value;
    if document.datatype.contains(Datatype::XATTR) {
        let malformed = |error| Failure::new(Kind::Data, format!("malformed xattrs: {error}"));
        let (pairs, body) = xattr::split(&document.value).map_err(malformed)?;
        for pair in pairs {
            let pair = pair.map_err(malformed)?;
            let name = String::from_utf8_lossy(pair.name);
            xattrs.set_item(name, PyBytes::new(py, pair.value))?;
        }
        value = body;
    }
    let dict = PyDict::new(py);
    dict.set_item("value", PyBytes::new(py, value))?;
    dict.set_item("xattrs", xattrs)?;
    dict.set_item(
        "datatype",
        if document.datatype.contains(Datatype::JSON) { "json" } else { "binary" },
    )?;
    dict.set_item("cas", document.cas.0)?;
    dict.set_item("seqno", document.seqno.0)?;
    dict.set_item("rev", document.rev_seqno.0)?;
    dict.set_item("flags", document.flags)?;
    dict.set_item("expiry", document.expiry)?;
    Ok(dict)
}
