//! Packets, for people.

use dcp_wire::message::{Message, PushedVersion, Request, Response};
use dcp_wire::{DecodeError, DocKey, Feature, Frame, Header, MAX_BODY_LEN};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::Failure;

/// Decodes the whole packets at the front of `data`.
///
/// Returns them as dicts, the bytes used, and whether keys carry collection ids after them: a
/// response to HELLO may have changed that.
#[pyfunction]
pub(crate) fn decode<'py>(
    py: Python<'py>,
    data: &[u8],
    collections: bool,
) -> PyResult<(Bound<'py, PyList>, usize, bool)> {
    let packets = PyList::empty(py);
    let (mut used, mut collections) = (0, collections);
    while let Some((frame, len)) =
        Frame::parse(data.get(used..).unwrap_or_default(), MAX_BODY_LEN).map_err(Failure::from)?
    {
        packets.append(packet(py, &frame, &mut collections)?)?;
        used += len;
    }
    Ok((packets, used, collections))
}

/// How many bytes the packet at the front of `data` has in all, as far as that shows.
#[pyfunction]
pub(crate) fn wanted(data: &[u8]) -> PyResult<usize> {
    Ok(Frame::wanted(data, MAX_BODY_LEN).map_err(Failure::from)?)
}

fn packet<'py>(
    py: Python<'py>,
    frame: &Frame<'_>,
    collections: &mut bool,
) -> PyResult<Bound<'py, PyDict>> {
    let header = &frame.header;
    let dict = PyDict::new(py);
    set_header(&dict, header)?;
    dict.set_item("framing_extras", PyBytes::new(py, frame.framing_extras))?;
    dict.set_item("extras", PyBytes::new(py, frame.extras))?;
    dict.set_item("key", PyBytes::new(py, frame.key))?;
    dict.set_item("value", PyBytes::new(py, frame.value))?;
    let fields = Fields { dict: PyDict::new(py), collections: *collections };
    let error = match frame.stream_id().and_then(|id| Ok((id, Message::decode(frame)?))) {
        Ok((stream_id, message)) => {
            if let Some(stream_id) = stream_id {
                fields.set("stream_id", stream_id.0)?;
            }
            if let Message::Response(Response::Hello(features)) = &message {
                *collections = features.contains(Feature::COLLECTIONS);
            }
            fields.message(&message)?
        }
        Err(error) => Some(error),
    };
    dict.set_item("fields", fields.dict)?;
    dict.set_item("error", error.map(|error| error.to_string()))?;
    Ok(dict)
}

fn set_header(dict: &Bound<'_, PyDict>, header: &Header) -> PyResult<()> {
    let is_response = header.magic.is_response();
    dict.set_item("magic", header.magic.0)?;
    dict.set_item("opcode", header.opcode.0)?;
    dict.set_item("name", header.opcode.to_string())?;
    dict.set_item("is_response", is_response)?;
    dict.set_item("vbucket", (!is_response).then_some(header.vbid().0))?;
    dict.set_item("status", is_response.then_some(header.status().0))?;
    dict.set_item("status_name", is_response.then(|| header.status().to_string()))?;
    dict.set_item("opaque", header.opaque.0)?;
    dict.set_item("cas", header.cas.0)?;
    dict.set_item("datatype", header.datatype.to_string())?;
    dict.set_item("size", header.packet_len())
}

/// The fields of a message by name.
struct Fields<'py> {
    dict: Bound<'py, PyDict>,
    collections: bool,
}

type Decoded = PyResult<Option<DecodeError>>;

impl<'py> Fields<'py> {
    fn set(&self, name: &str, value: impl IntoPyObject<'py>) -> PyResult<()> {
        self.dict.set_item(name, value)
    }

    fn text(&self, name: &str, bytes: &[u8]) -> PyResult<()> {
        self.set(name, String::from_utf8_lossy(bytes))
    }

    /// A document's key, without its collection id if keys carry one.
    fn key(&self, key: &[u8]) -> PyResult<Option<DecodeError>> {
        if !self.collections {
            self.text("key", key)?;
            return Ok(None);
        }
        match DocKey::decode(key) {
            Ok(DocKey { collection_id, key }) => {
                self.set("collection_id", collection_id.0)?;
                self.text("key", key)?;
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    fn message(&self, message: &Message<'_>) -> Decoded {
        match message {
            Message::Request(request) => self.request(request),
            Message::Response(response) => self.response(response),
            Message::ClusterMapChange(change) => {
                self.text("bucket", change.bucket)?;
                if let PushedVersion::EpochAndRev(version) = change.version {
                    self.set("epoch", version.epoch)?;
                    self.set("rev", version.rev)?;
                }
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// The messages of streams; the others are in [`Self::set_up`] and [`Self::document`].
    fn request(&self, request: &Request<'_>) -> Decoded {
        match request {
            Request::Mutation(message) => {
                self.set("seqno", message.seqno.0)?;
                self.set("rev", message.rev_seqno.0)?;
                self.set("flags", message.flags)?;
                self.set("expiry", message.expiry)?;
                self.key(message.key)
            }
            Request::Deletion(message) => {
                self.set("seqno", message.seqno.0)?;
                self.set("rev", message.rev_seqno.0)?;
                self.set("delete_time", message.delete_time)?;
                self.key(message.key)
            }
            Request::Expiration(message) => {
                self.set("seqno", message.seqno.0)?;
                self.set("rev", message.rev_seqno.0)?;
                self.set("delete_time", message.delete_time)?;
                self.key(message.key)
            }
            Request::SnapshotMarker(message) => {
                self.set("start_seqno", message.start_seqno.0)?;
                self.set("end_seqno", message.end_seqno.0)?;
                self.set("flags", flag_names(message.flags.iter_names(), message.flags.bits()))?;
                let optional = [
                    ("max_visible_seqno", message.max_visible_seqno),
                    ("high_completed_seqno", message.high_completed_seqno),
                    ("purge_seqno", message.purge_seqno),
                    ("high_prepared_seqno", message.high_prepared_seqno),
                ];
                for (name, seqno) in optional {
                    if let Some(seqno) = seqno {
                        self.set(name, seqno.0)?;
                    }
                }
                Ok(None)
            }
            Request::SeqnoAdvanced(message) => self.one("seqno", message.seqno.0),
            Request::StreamEnd(message) => self.one("reason", message.reason.to_string()),
            Request::OsoSnapshot(message) => self.one("what", format!("{message:?}")),
            Request::SystemEvent(message) => {
                self.set("seqno", message.seqno.0)?;
                self.set("event", message.id.to_string())?;
                self.set("version", message.version)?;
                self.text("name", message.key)?;
                Ok(None)
            }
            Request::Prepare(message) => {
                self.set("seqno", message.seqno.0)?;
                self.set("level", message.level.to_string())?;
                self.set("deleted", message.deleted)?;
                self.key(message.key)
            }
            Request::Commit(message) => {
                self.set("prepared_seqno", message.prepared_seqno.0)?;
                self.set("seqno", message.commit_seqno.0)?;
                self.key(message.key)
            }
            Request::Abort(message) => {
                self.set("prepared_seqno", message.prepared_seqno.0)?;
                self.set("seqno", message.abort_seqno.0)?;
                self.key(message.key)
            }
            Request::StreamRequest(message, _) => {
                self.set("flags", flag_names(message.flags.iter_names(), message.flags.bits()))?;
                self.set("start_seqno", message.start_seqno.0)?;
                self.set("end_seqno", message.end_seqno.0)?;
                self.set("vbuuid", message.vbuuid.0)?;
                self.set("snapshot_start", message.snapshot_start.0)?;
                self.set("snapshot_end", message.snapshot_end.0)?;
                self.text("filter", message.value)?;
                Ok(None)
            }
            Request::SeqnoAck(message) => self.one("prepared_seqno", message.prepared_seqno.0),
            Request::BufferAck(message) => self.one("bytes", message.bytes),
            _ => self.set_up(request),
        }
    }

    fn set_up(&self, request: &Request<'_>) -> Decoded {
        match request {
            Request::Open(message, _) => {
                self.set("flags", flag_names(message.flags.iter_names(), message.flags.bits()))?;
                self.text("connection_name", message.name)?;
            }
            Request::Control(message) => {
                self.text("setting", message.key)?;
                self.text("to", message.value)?;
            }
            Request::Hello(message) => {
                self.text("agent", message.agent)?;
                self.set(
                    "features",
                    message.features.iter().map(|f| f.to_string()).collect::<Vec<_>>(),
                )?;
            }
            // What is said in a SASL exchange may be a password.
            Request::Sasl(message) => self.text("mechanism", message.mechanism)?,
            Request::SelectBucket(message) => self.text("bucket", message.bucket)?,
            Request::GetErrorMap(message) => self.set("version", message.version)?,
            Request::ObserveSeqno(message) => self.set("vbuuid", message.vbuuid.0)?,
            Request::SeqnoPersistence(message) => self.set("seqno", message.seqno.0)?,
            Request::SetVbucketState(message) => {
                self.set("state", format!("{:?}", message.state))?;
            }
            Request::ResolveName(message) => self.text("path", message.path)?,
            Request::Stat(group) => self.text("group", group)?,
            Request::GetClusterConfig(message) => {
                if let Some(known) = message.known {
                    self.set("known_epoch", known.epoch)?;
                    self.set("known_rev", known.rev)?;
                }
            }
            _ => return self.document(request),
        }
        Ok(None)
    }

    fn document(&self, request: &Request<'_>) -> Decoded {
        match request {
            Request::KeyRequest(message) => self.key(message.key),
            Request::Store(message) => {
                self.set("flags", message.flags)?;
                self.set("expiry", message.expiry)?;
                self.key(message.key)
            }
            Request::Touch(message) => {
                self.set("expiry", message.expiry)?;
                self.key(message.key)
            }
            Request::Counter(message) => {
                self.set("delta", message.delta)?;
                self.key(message.key)
            }
            Request::GetMeta(message) => self.key(message.key),
            _ => Ok(None),
        }
    }

    fn response(&self, response: &Response<'_>) -> Decoded {
        match response {
            Response::FailoverLog(entries) => {
                let entries: Vec<(u64, u64)> =
                    entries.map(|entry| (entry.vbuuid.0, entry.seqno.0)).collect();
                self.one("failover_log", entries)
            }
            Response::Rollback(seqno) => self.one("seqno", seqno.0),
            Response::Hello(features) => {
                self.one("features", features.iter().map(|f| f.to_string()).collect::<Vec<_>>())
            }
            Response::SaslMechanisms(mechanisms) => {
                self.text("mechanisms", mechanisms)?;
                Ok(None)
            }
            Response::VbSeqnos(seqnos) => {
                let seqnos: Vec<(u16, u64)> =
                    seqnos.map(|(vbid, seqno)| (vbid.0, seqno.0)).collect();
                self.one("seqnos", seqnos)
            }
            Response::ObservedSeqno(observed) => {
                self.set("vbuuid", observed.vbuuid.0)?;
                self.set("persisted_seqno", observed.persisted_seqno.0)?;
                self.one("current_seqno", observed.current_seqno.0)
            }
            Response::Written(token) => {
                self.set("vbuuid", token.vbuuid.0)?;
                self.one("seqno", token.seqno.0)
            }
            Response::Document(flags, _, value) => {
                self.set("flags", *flags)?;
                self.one("value_bytes", value.len())
            }
            Response::ClusterConfig(json) | Response::CollectionsManifest(json) => {
                self.one("json_bytes", json.len())
            }
            Response::Version(version) => {
                self.text("version", version)?;
                Ok(None)
            }
            Response::Error(context) => {
                self.text("context", context)?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn one(&self, name: &str, value: impl IntoPyObject<'py>) -> Decoded {
        self.set(name, value)?;
        Ok(None)
    }
}

/// Names of the flags that are set; unknown ones are named by their number.
fn flag_names<F>(names: impl Iterator<Item = (&'static str, F)>, bits: u32) -> Vec<String>
where
    F: Into<FlagBits>,
{
    let mut rest = bits;
    let mut found = Vec::new();
    for (name, flag) in names {
        rest &= !flag.into().0;
        found.push(name.to_lowercase());
    }
    if rest != 0 {
        found.push(format!("{rest:#x}"));
    }
    found
}

/// The number of any set of flags.
struct FlagBits(u32);

macro_rules! flag_bits {
    ($($name:ty),*) => {
        $(impl From<$name> for FlagBits {
            fn from(flags: $name) -> Self {
                Self(flags.bits())
            }
        })*
    };
}
flag_bits!(
    dcp_wire::message::OpenFlags,
    dcp_wire::message::SnapshotFlags,
    dcp_wire::message::StreamRequestFlags
);
