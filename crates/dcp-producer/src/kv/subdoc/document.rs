//! A document for sub-document operations: a body and an object of xattrs.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::PathSpec;
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Cas, CollectionId, Datatype, Opcode, RevSeqno, Seqno, Status, Vbuuid};
use serde_json::{Value, json};

use super::binary;
use super::edit::{self, op};
use super::json_text;
use super::macros::{Macros, crc32c};
use super::path::path_flag;
use crate::bucket::MAX_VALUE_LEN;
use crate::chance::Now;
use crate::kv::document::split_xattrs;
use crate::value;

/// The virtual xattrs: a document's metadata, the names of its xattrs, its vBucket's clock.
const DOCUMENT: &str = "$document";
const NAMES: &str = "$XTOC";
const VBUCKET: &str = "$vbucket";

/// A document in parts.
#[derive(Clone, Debug)]
pub(super) struct Document {
    body: Vec<u8>,
    body_is_json: bool,
    /// The xattrs as one JSON object.
    xattrs: Vec<u8>,
    /// Contents of virtual xattrs, if they can be read.
    metadata: Option<Vec<u8>>,
}

impl Document {
    /// A stored document; `None` if its xattrs are malformed, which storing it rules out.
    pub(super) fn of(item: &Item) -> Option<Self> {
        let (body, _) = split_xattrs(item);
        let mut xattrs = vec![b'{'];
        if item.datatype.contains(Datatype::XATTR) {
            for pair in xattr::split(&item.value).ok()?.0 {
                let Xattr { name, value } = pair.ok()?;
                if xattrs.len() > 1 {
                    xattrs.push(b',');
                }
                let name = Value::from(str::from_utf8(name).ok()?).to_string();
                xattrs.extend_from_slice(name.as_bytes());
                xattrs.push(b':');
                xattrs.extend_from_slice(value);
            }
        }
        xattrs.push(b'}');
        Some(Self {
            body_is_json: item.datatype.contains(Datatype::JSON),
            body: body.to_vec(),
            xattrs,
            metadata: None,
        })
    }

    /// Initial body of a document that the first path creates: an array if something is pushed onto
    /// the document itself, otherwise an object.
    pub(super) fn empty_for(specs: &[PathSpec<'_>]) -> Self {
        let body_spec = specs.iter().find(|spec| spec.flags & path_flag::XATTR == 0);
        let is_array = body_spec.is_some_and(|spec| {
            let pushes = [op::ARRAY_PUSH_FIRST, op::ARRAY_PUSH_LAST, op::ARRAY_ADD_UNIQUE];
            spec.path.is_empty() && pushes.contains(&spec.opcode)
        });
        let body = if is_array { b"[]".to_vec() } else { b"{}".to_vec() };
        Self { body, body_is_json: true, xattrs: b"{}".to_vec(), metadata: None }
    }

    /// Initial state of a tombstone that never was a document.
    pub(super) fn without_body() -> Self {
        Self { body: Vec::new(), body_is_json: false, xattrs: b"{}".to_vec(), metadata: None }
    }

    /// Names of the xattrs.
    fn xattr_names(&self) -> Vec<String> {
        let elements = json_text::container(&self.xattrs, 0).map(|object| object.elements);
        let elements = elements.unwrap_or_default();
        elements.iter().filter_map(|element| json_text::name_of(&self.xattrs, element)).collect()
    }

    /// Makes virtual xattrs readable.
    pub(super) fn add_virtual(&mut self, item: &Item, vbuuid: Vbuuid, now: Now) {
        let metadata = self.metadata_of(item, vbuuid);
        let clock = json!({"HLC": {"now": now.seconds().to_string(), "mode": "real"}});
        let all = json!({DOCUMENT: metadata, NAMES: self.xattr_names(), VBUCKET: clock});
        self.metadata = Some(all.to_string().into_bytes());
    }

    /// The xattr `$document` of a stored document.
    pub(super) fn metadata_of(&self, item: &Item, vbuuid: Vbuuid) -> Value {
        const NANOS_PER_SECOND: u64 = 1_000_000_000;
        let datatypes = [(Datatype::JSON, "json"), (Datatype::XATTR, "xattr")];
        let mut datatypes: Vec<_> = datatypes
            .into_iter()
            .filter_map(|(bit, name)| item.datatype.contains(bit).then_some(name))
            .collect();
        if !item.datatype.contains(Datatype::JSON) {
            datatypes.insert(0, "raw");
        }
        json!({
            "CAS": format!("{:#018x}", item.cas.0),
            "vbucket_uuid": format!("{:#018x}", vbuuid.0),
            "seqno": format!("{:#018x}", item.seqno.0),
            "revid": item.rev_seqno.0.to_string(),
            "exptime": item.expiry,
            "value_bytes": self.body.len(),
            "value_crc32c": format!("{:#010x}", self.checksum()),
            "datatype": datatypes,
            "deleted": item.kind != ItemKind::Mutation,
            "flags": item.flags,
            "last_modified": (item.cas.0 / NANOS_PER_SECOND).to_string(),
        })
    }

    /// The xattr `$document` of a document that is being created: servers fill it from a deleted
    /// item of zeros and the initial body, without the time of a CAS.
    pub(super) fn metadata_of_missing(&self) -> Value {
        let none = Item {
            kind: ItemKind::Deletion,
            seqno: Seqno::ZERO,
            rev_seqno: RevSeqno(0),
            cas: Cas(0),
            collection_id: CollectionId::DEFAULT,
            key: Bytes::new(),
            value: Bytes::new(),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            delete_time: 0,
        };
        let mut metadata = self.metadata_of(&none, Vbuuid(0));
        if let Some(members) = metadata.as_object_mut() {
            members.remove("last_modified");
        }
        metadata
    }

    /// Performs the lookup of one path.
    pub(super) fn look_up(&self, spec: &PathSpec<'_>) -> Result<Vec<u8>, Status> {
        if spec.flags & path_flag::CREATE_PATH != 0 {
            return Err(Status::EINVAL);
        }
        if spec.flags & path_flag::XATTR != 0 {
            let text = if spec.path.starts_with(b"$") {
                let known = [DOCUMENT, NAMES, VBUCKET].iter().any(|name| names(spec.path, name));
                self.metadata.as_ref().filter(|_| known).ok_or(UNKNOWN_VIRTUAL_XATTR)?
            } else {
                &self.xattrs
            };
            let found = edit::look_up(text, spec.opcode, spec.path)?;
            let is_binary = spec.opcode == op::GET && spec.flags & path_flag::BINARY != 0;
            return if is_binary { binary::decode(&found) } else { Ok(found) };
        }
        if spec.flags & path_flag::BINARY != 0 {
            return Err(Status::EINVAL);
        }
        if spec.opcode == Opcode::GET {
            return if spec.path.is_empty() { Ok(self.body.clone()) } else { Err(Status::EINVAL) };
        }
        self.check_body()?;
        edit::look_up(&self.body, spec.opcode, spec.path)
    }

    /// Checksum of the body.
    pub(super) fn checksum(&self) -> u32 {
        crc32c(&self.body)
    }

    /// Performs the mutation of one path.
    pub(super) fn mutate(
        &mut self,
        spec: &PathSpec<'_>,
        macros: &Macros,
    ) -> Result<Vec<u8>, Status> {
        let create_path = spec.flags & path_flag::CREATE_PATH != 0;
        if spec.flags & path_flag::XATTR != 0 {
            if spec.path.starts_with(b"$") {
                return Err(UNMODIFIABLE_VIRTUAL_XATTR);
            }
            // A whole xattr is a member of the object of xattrs.
            if spec.path.is_empty() {
                return Err(Status::SUBDOC_PATH_EINVAL);
            }
            let value = match spec.flags & (path_flag::EXPAND_MACROS | path_flag::BINARY) {
                0 => Cow::Borrowed(spec.value),
                path_flag::EXPAND_MACROS => macros.expand(spec.value)?.into(),
                path_flag::BINARY => binary::encode(spec.value).into(),
                _ => return Err(Status::EINVAL),
            };
            return edit::mutate(&mut self.xattrs, spec.opcode, spec.path, &value, create_path);
        }
        if spec.flags & (path_flag::EXPAND_MACROS | path_flag::BINARY) != 0 {
            return Err(Status::EINVAL);
        }
        if spec.opcode == Opcode::SET {
            if !spec.path.is_empty() {
                return Err(Status::EINVAL);
            }
            self.body = spec.value.to_vec();
            self.body_is_json = value::is_json(&self.body);
            return Ok(Vec::new());
        }
        self.check_body()?;
        edit::mutate(&mut self.body, spec.opcode, spec.path, spec.value, create_path)
    }

    fn check_body(&self) -> Result<(), Status> {
        if self.body_is_json { Ok(()) } else { Err(Status::SUBDOC_DOC_NOTJSON) }
    }

    /// The document as it is stored; `None` if its xattrs cannot be stored.
    pub(super) fn into_value(self) -> Option<(Bytes, Datatype)> {
        let json = if self.body_is_json { Datatype::JSON } else { Datatype::RAW };
        let object = json_text::container(&self.xattrs, 0)?;
        if object.elements.is_empty() {
            return Some((self.body.into(), json));
        }
        let named = object.elements.iter().map(|element| {
            let name = json_text::name_of(&self.xattrs, element)?;
            Some((name, self.xattrs.get(element.value.clone())?))
        });
        let mut named = named.collect::<Option<Vec<_>>>()?;
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        let pairs = named.iter().map(|(name, value)| Xattr { name: name.as_bytes(), value });
        let mut out = bytes::BufMut::limit(BytesMut::new(), MAX_VALUE_LEN);
        xattr::encode(pairs, &mut out).ok()?;
        let mut out = out.into_inner();
        out.extend_from_slice(&self.body);
        Some((out.freeze(), json.with(Datatype::XATTR)))
    }
}

/// A virtual xattr that is not offered.
const UNKNOWN_VIRTUAL_XATTR: Status = Status(0xd1);
/// Virtual xattrs cannot be written.
const UNMODIFIABLE_VIRTUAL_XATTR: Status = Status(0xd2);

/// Whether a path is that of the xattr, or leads into it.
fn names(path: &[u8], xattr: &str) -> bool {
    path.strip_prefix(xattr.as_bytes())
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'.' | b'[')))
}
