//! Handling of one request in a session.

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use dcp_producer_proto::VBucketState;
use dcp_wire::framing_extras::{FrameInfo, server_duration_frame};
use dcp_wire::{CollectionId, Datatype, DecodeError, DocKey, Frame, Opcode, Status, Vbid, snappy};
use serde_json::json;

use super::failure::Failure;
use super::session::{Flow, Session};
use crate::bucket::{Durability, MAX_VALUE_LEN, VBucket};
use crate::chance::Now;
use crate::cluster::{SERVER_VERSION, ServedBucket};
use crate::{DocumentError, value};

impl Session {
    /// Answers one request. `dcp_open`: whether the connection was opened for DCP.
    pub(crate) fn handle(
        &mut self,
        now: Now,
        frame: &Frame<'_>,
        dcp_open: bool,
        out: &mut BytesMut,
    ) -> Flow {
        let is_stale = self.login.is_stale(now);
        if frame.header.magic.is_response() {
            if is_stale {
                // The data service tries to refuse it, and cannot answer an answer.
                return Flow::Close;
            }
            // Answers to pushed cluster maps carry no information.
            let opcode = frame.header.opcode;
            let dcp = dcp_open && (opcode.is_dcp() || opcode == Opcode::GET_ERROR_MAP);
            return if dcp { Flow::Dcp } else { Flow::Continue };
        }
        if !self.may_begin(frame) {
            return Flow::Later;
        }
        // HELLO may request its own duration.
        let traced = self.features.tracing || frame.header.opcode == Opcode::HELLO;
        let started = traced.then(Instant::now);
        let result = match self.admit(frame, dcp_open) {
            _ if is_stale
                && !matches!(frame.header.opcode, Opcode::SASL_AUTH | Opcode::SASL_STEP) =>
            {
                Err(Status::AUTH_STALE.into())
            }
            Ok(()) if frame.header.opcode.is_dcp() => return Flow::Dcp,
            Ok(()) if frame.header.opcode == Opcode::QUIT => Err(Failure::Close),
            Ok(()) => Command::new(self, frame, now, started, out).run(),
            Err(failure) => Err(failure),
        };
        let failure = match result {
            Ok(()) => return Flow::Continue,
            Err(Failure::Later) => return Flow::Later,
            Err(failure) => failure,
        };
        match Command::new(self, frame, now, started, out).refuse(failure) {
            Ok(()) => Flow::Continue,
            Err(_) => Flow::Close,
        }
    }

    /// Whether the connection's state allows the request.
    fn admit(&self, frame: &Frame<'_>, dcp_open: bool) -> Result<(), Failure> {
        let opcode = frame.header.opcode;
        if frame.header.magic.is_alt() && !self.features.alt_requests && !opcode.is_dcp() {
            return Err(Failure::Invalid("framing extras were not negotiated"));
        }
        let missing = self.rights().missing(opcode).filter(|_| self.is_authenticated());
        match opcode {
            Opcode::HELLO | Opcode::GET_ERROR_MAP | Opcode::QUIT => Ok(()),
            Opcode::SELECT_BUCKET if dcp_open => Err(Status::NOT_SUPPORTED.into()),
            // Servers that take tokens let them be renewed.
            Opcode::SASL_LIST_MECHS | Opcode::SASL_AUTH | Opcode::SASL_STEP
                if dcp_open && !self.takes_tokens() =>
            {
                Err(Status::NOT_SUPPORTED.into())
            }
            Opcode::SASL_LIST_MECHS | Opcode::SASL_AUTH | Opcode::SASL_STEP
                if self.login.is_certified() =>
            {
                Err(Status::NOT_SUPPORTED.into())
            }
            Opcode::SASL_LIST_MECHS | Opcode::SASL_AUTH | Opcode::SASL_STEP => Ok(()),
            _ if !self.is_authenticated() => Err(Status::EACCESS.into()),
            _ if missing.is_some() => Err(Failure::Denied(missing.unwrap_or_default())),
            Opcode::SELECT_BUCKET
            | Opcode::GET_CLUSTER_CONFIG
            | Opcode::NOOP
            | Opcode::VERSION
            | Opcode::STAT => Ok(()),
            _ if opcode.is_dcp() => Ok(()),
            _ if self.served.is_none() && Command::knows(opcode) => Err(Status::NO_BUCKET.into()),
            _ => Ok(()),
        }
    }
}

/// Executes a request and answers it.
type Handler<'a, 'f> = fn(&mut Command<'a, 'f>) -> Result<(), Failure>;

/// One request being handled by its session.
pub(super) struct Command<'a, 'f> {
    pub(super) session: &'a mut Session,
    pub(super) frame: &'a Frame<'f>,
    pub(super) now: Now,
    /// When handling began, if the client requests the duration.
    pub(super) started: Option<Instant>,
    out: &'a mut BytesMut,
}

/// Options in the framing extras of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestOptions {
    /// Keep the document's expiry.
    pub(super) preserve_expiry: bool,
    /// What the write waits for.
    pub(super) durability: Option<Durability>,
}

impl<'a, 'f> Command<'a, 'f> {
    pub(super) fn new(
        session: &'a mut Session,
        frame: &'a Frame<'f>,
        now: Now,
        started: Option<Instant>,
        out: &'a mut BytesMut,
    ) -> Self {
        Self { session, frame, now, started, out }
    }

    /// Whether the opcode is one that needs a bucket.
    pub(super) fn knows(opcode: Opcode) -> bool {
        !matches!(opcode, Opcode::HELLO) && Self::handler(opcode).is_some()
    }

    /// Executes the request and answers it.
    pub(super) fn run(&mut self) -> Result<(), Failure> {
        match Self::handler(self.frame.header.opcode) {
            Some(handler) => handler(self),
            // Older servers have no privilege for commands that they do not know.
            None if self.session.version.is_legacy()
                && self.frame.header.opcode.name().is_none() =>
            {
                Err(Status::EACCESS.into())
            }
            None => Err(Status::UNKNOWN_COMMAND.into()),
        }
    }

    fn handler(opcode: Opcode) -> Option<Handler<'a, 'f>> {
        Some(match opcode {
            Opcode::HELLO => Self::hello,
            Opcode::GET_ERROR_MAP => Self::error_map,
            Opcode::SASL_LIST_MECHS => Self::list_mechanisms,
            Opcode::SASL_AUTH | Opcode::SASL_STEP => Self::authenticate,
            Opcode::SELECT_BUCKET => Self::select_bucket,
            Opcode::GET_CLUSTER_CONFIG => Self::cluster_config,
            Opcode::NOOP => Self::noop,
            Opcode::VERSION => Self::version,
            Opcode::STAT => Self::stats,
            Opcode::GET => Self::get,
            Opcode::GET_REPLICA => Self::get_replica,
            Opcode::SET | Opcode::ADD | Opcode::REPLACE => Self::store,
            Opcode::DELETE => Self::delete,
            Opcode::INCREMENT | Opcode::DECREMENT => Self::count,
            Opcode::APPEND | Opcode::PREPEND => Self::extend,
            Opcode::TOUCH | Opcode::GET_AND_TOUCH => Self::touch,
            Opcode::GET_LOCKED => Self::get_locked,
            Opcode::UNLOCK => Self::unlock,
            Opcode::SUBDOC_MULTI_LOOKUP => Self::subdoc_lookup,
            Opcode::SUBDOC_MULTI_MUTATION => Self::subdoc_mutation,
            Opcode::SUBDOC_GET | Opcode::SUBDOC_EXISTS | Opcode::SUBDOC_GET_COUNT => {
                Self::subdoc_path_lookup
            }
            Opcode::SUBDOC_DICT_ADD
            | Opcode::SUBDOC_DICT_UPSERT
            | Opcode::SUBDOC_DELETE
            | Opcode::SUBDOC_REPLACE
            | Opcode::SUBDOC_ARRAY_PUSH_LAST
            | Opcode::SUBDOC_ARRAY_PUSH_FIRST
            | Opcode::SUBDOC_ARRAY_INSERT
            | Opcode::SUBDOC_ARRAY_ADD_UNIQUE
            | Opcode::SUBDOC_COUNTER => Self::subdoc_path_mutation,
            Opcode::GET_META => Self::get_meta,
            Opcode::SET_WITH_META | Opcode::ADD_WITH_META => Self::set_with_meta,
            Opcode::DELETE_WITH_META => Self::delete_with_meta,
            Opcode::GET_ALL_VB_SEQNOS => Self::all_seqnos,
            Opcode::OBSERVE_SEQNO => Self::observe_seqno,
            Opcode::GET_FAILOVER_LOG => Self::failover_log,
            Opcode::SEQNO_PERSISTENCE => Self::seqno_persistence,
            Opcode::GET_COLLECTIONS_MANIFEST => Self::manifest,
            Opcode::GET_COLLECTION_ID => Self::collection_id,
            Opcode::GET_SCOPE_ID => Self::scope_id,
            _ => return None,
        })
    }

    fn noop(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        self.succeed(self.success())
    }

    fn version(&mut self) -> Result<(), Failure> {
        self.expect_parts(false, false)?;
        // Clients use the version to determine features.
        self.succeed(self.success().with_value(SERVER_VERSION.as_bytes()))
    }

    /// An empty response with status success.
    pub(super) fn success(&self) -> Frame<'static> {
        Frame::response(self.frame.header.opcode, Status::SUCCESS)
    }

    /// An empty response with `status`.
    pub(super) fn response(&self, status: Status) -> Frame<'static> {
        Frame::response(self.frame.header.opcode, status)
    }

    /// Appends a response.
    pub(super) fn succeed(&mut self, response: Frame<'_>) -> Result<(), Failure> {
        let started = self.started.filter(|_| self.session.features.tracing);
        let duration = started.map(|started| server_duration_frame(encode_duration(started)));
        response
            .with_opaque(self.frame.header.opaque)
            .with_framing_extras(duration.as_ref().map_or(&[], |frame| frame.as_slice()))
            .encode(self.out)?;
        Ok(())
    }

    /// Appends the response to a request that failed.
    ///
    /// # Errors
    /// [`Failure::Close`]: there is no response, the connection must be closed.
    pub(super) fn refuse(&mut self, failure: Failure) -> Result<(), Failure> {
        let features = &self.session.features;
        let legacy = self.session.version.is_legacy();
        let (status, body) = match failure {
            Failure::Close | Failure::Later => return Err(Failure::Close),
            // A client that did not negotiate them does not know these statuses. Since 7.0, a
            // missing login is reported anyway.
            Failure::Status(Status::NO_BUCKET) if !features.dcp.xerror => {
                return Err(Failure::Close);
            }
            Failure::Status(Status::EACCESS) if !features.dcp.xerror && legacy => {
                return Err(Failure::Close);
            }
            // Older servers do not explain malformed requests, and close the connection.
            Failure::Invalid(_) if legacy => {
                self.succeed(self.response(Status::EINVAL))?;
                return Err(Failure::Close);
            }
            Failure::Unknown(_) if !features.dcp.collections => (Status::EINVAL, None),
            Failure::Status(status) => (status, None),
            Failure::Denied(privilege) => {
                let opcode = self.frame.header.opcode;
                let context = format!("{opcode} needs the privilege {privilege}");
                let body = json!({"error": {"context": context}}).to_string();
                (Status::EACCESS, Some(Bytes::from(body)))
            }
            Failure::Invalid(context) => (
                Status::EINVAL,
                Some(Bytes::from(json!({"error": {"context": context}}).to_string())),
            ),
            Failure::Unknown(status) => {
                let uid = self.session.served.as_ref().map(|served| served.manifest().uid());
                let uid = uid.unwrap_or_default().to_string();
                (status, Some(Bytes::from(unknown_collection(&uid).to_string())))
            }
            Failure::NotMyVbucket => (Status::NOT_MY_VBUCKET, self.map_for_stranger()),
        };
        let body = body.unwrap_or_default();
        // Older servers do not mark the cluster map as JSON.
        let says_json = !(legacy && status == Status::NOT_MY_VBUCKET);
        let json = if says_json { features_json(self.session, &body) } else { Datatype::RAW };
        self.succeed(self.response(status).with_datatype(json).with_value(&body))
    }

    /// The map to send with NOT_MY_VBUCKET, unless the client already has it.
    fn map_for_stranger(&mut self) -> Option<Bytes> {
        let map = self.session.served.as_ref()?.map();
        let deduplicated = self.session.features.dedupe_maps;
        if deduplicated && self.session.map_sent >= Some(map.version) {
            return None;
        }
        self.session.map_sent = Some(map.version);
        map.view(self.session.node).cloned()
    }

    /// The datatype to announce for a value that is JSON.
    pub(super) fn json(&self) -> Datatype {
        if self.session.features.dcp.json { Datatype::JSON } else { Datatype::RAW }
    }

    /// Refuses extras, and key and value unless they are expected.
    pub(super) fn expect_parts(&self, key: bool, value: bool) -> Result<(), Failure> {
        if !self.frame.extras.is_empty() {
            return Err(Failure::Invalid("the request must not have extras"));
        }
        self.expect_key_value(key, value)
    }

    /// Refuses a key or value that is missing or not expected.
    pub(super) fn expect_key_value(&self, key: bool, value: bool) -> Result<(), Failure> {
        if self.frame.key.is_empty() == key {
            return Err(Failure::Invalid("the request has or lacks a key against the rules"));
        }
        if !value && !self.frame.value.is_empty() {
            return Err(Failure::Invalid("the request must not have a value"));
        }
        Ok(())
    }

    /// The document of the request.
    pub(super) fn key(&self) -> Result<DocKey<'f>, Failure> {
        let malformed = |_: DecodeError| Failure::Invalid("malformed key");
        if self.session.features.dcp.collections {
            return DocKey::decode(self.frame.key).map_err(malformed);
        }
        if self.frame.key.is_empty() || self.frame.key.len() > DocKey::MAX_DEFAULT_LEN {
            return Err(Failure::Invalid("malformed key"));
        }
        Ok(DocKey { collection_id: CollectionId::DEFAULT, key: self.frame.key })
    }

    /// The selected bucket.
    pub(super) fn served(&self) -> Result<&ServedBucket, Failure> {
        Ok(self.session.served.as_ref().ok_or(Status::NO_BUCKET)?)
    }

    pub(super) fn vbid(&self) -> Vbid {
        self.frame.header.vbid()
    }

    /// Runs an operation on the vBucket of the request, if this node has the active copy.
    pub(super) fn with_vbucket<T>(
        &mut self,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Result<T, Failure> {
        let (bucket, node) = (&self.served()?.bucket, self.session.node);
        bucket.with_active_on(node, self.vbid(), op).ok_or(Failure::NotMyVbucket)
    }

    /// Refuses requests about a collection that the user may not read.
    pub(super) fn check_readable(&self, id: CollectionId) -> Result<(), Failure> {
        let manifest = self.served()?.manifest();
        match manifest.has_collection(id) && !self.session.rights().reads(id, &manifest) {
            true => Err(Failure::Denied("Read")),
            false => Ok(()),
        }
    }

    /// Runs an operation that reads the document of the request on its vBucket, which must have the
    /// collection of the key.
    pub(super) fn with_collection<T>(
        &mut self,
        key: DocKey<'_>,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Result<T, Failure> {
        self.check_readable(key.collection_id)?;
        let checked = |vbucket: &mut VBucket| {
            vbucket.check_collection(key)?;
            vbucket.check_visible(key)?;
            Ok::<T, DocumentError>(op(vbucket))
        };
        Ok(self.with_vbucket(checked)??)
    }

    /// Runs an operation on this node's copy of the vBucket of the request, active or not.
    pub(super) fn with_copy<T>(
        &mut self,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Result<T, Failure> {
        let (bucket, node) = (&self.served()?.bucket, self.session.node);
        bucket.with_on(node, self.vbid(), op).ok_or(Failure::NotMyVbucket)
    }

    /// Reads from this node's replica of the request's vBucket, which must have the key's
    /// collection. The active copy does not answer such requests.
    pub(super) fn with_replica<T>(
        &mut self,
        key: DocKey<'_>,
        op: impl FnOnce(&VBucket) -> T,
    ) -> Result<T, Failure> {
        self.check_readable(key.collection_id)?;
        self.with_copy(|vbucket| match vbucket.state {
            VBucketState::Replica => Ok(vbucket.check_collection(key).map(|()| op(vbucket))?),
            _ => Err(Failure::NotMyVbucket),
        })?
    }

    /// The value of the request, decompressed if necessary, and its datatype without the
    /// compression bit.
    pub(super) fn inflate(&self, value: &[u8]) -> Result<(Bytes, Datatype), Failure> {
        let (features, datatype) = (&self.session.features, self.frame.header.datatype);
        let mut allowed = Datatype::RAW;
        for (bit, negotiated) in [
            (Datatype::JSON, features.dcp.json),
            (Datatype::SNAPPY, features.dcp.snappy),
            (Datatype::XATTR, features.xattr),
        ] {
            if negotiated {
                allowed = allowed.with(bit);
            }
        }
        if !allowed.contains(datatype) {
            return Err(Failure::Invalid("the datatype was not negotiated"));
        }
        let value = if datatype.contains(Datatype::SNAPPY) {
            let inflated = snappy::decompress(value, MAX_VALUE_LEN)
                .map_err(|_| Failure::Invalid("the value is not valid snappy"))?;
            Bytes::from(inflated)
        } else {
            Bytes::copy_from_slice(value)
        };
        Ok((value, datatype.without(Datatype::SNAPPY)))
    }

    /// The value of a request that writes a document; whether it is JSON is checked, not taken from
    /// the client.
    pub(super) fn plain_value(&self) -> Result<(Bytes, Datatype), Failure> {
        let (value, datatype) = self.inflate(self.frame.value)?;
        if datatype.contains(Datatype::XATTR) {
            return Err(Failure::Invalid("xattrs cannot be written this way"));
        }
        let datatype = value::detect(&value);
        Ok((value, datatype))
    }

    /// The value of a request that writes a whole document, in the form it is stored in.
    pub(super) fn stored_value(&self) -> Result<(Bytes, Datatype), Failure> {
        let (value, datatype) = self.plain_value()?;
        let is_compressed = self.frame.header.datatype.contains(Datatype::SNAPPY);
        if !is_compressed || !self.served()?.bucket.keeps_compressed() {
            return Ok((value, datatype));
        }
        Ok((Bytes::copy_from_slice(self.frame.value), datatype.with(Datatype::SNAPPY)))
    }

    /// The options in the framing extras.
    pub(super) fn options(&self) -> Result<RequestOptions, Failure> {
        const BARRIER: u16 = 0;
        const PRESERVE_TTL: u16 = 5;
        let mut options = RequestOptions::default();
        for info in self.frame.frame_infos() {
            match info? {
                FrameInfo { id: BARRIER, payload: [] } => {}
                FrameInfo { id: PRESERVE_TTL, payload: [] } => options.preserve_expiry = true,
                FrameInfo { id: FrameInfo::DURABILITY, payload } => {
                    options.durability = Some(self.durability(payload)?);
                }
                _ => return Err(Status::UNKNOWN_FRAME_INFO.into()),
            }
        }
        Ok(options)
    }
}

/// The answer to a client that named an unknown scope or collection.
fn unknown_collection(uid: &str) -> serde_json::Value {
    json!({"error": {"context": "unknown scope or collection"}, "manifest_uid": uid})
}

/// JSON bodies of refusals are marked as such for clients that negotiated it.
fn features_json(session: &Session, body: &[u8]) -> Datatype {
    if session.features.dcp.json && !body.is_empty() { Datatype::JSON } else { Datatype::RAW }
}

/// The server's encoding of a request's duration.
fn encode_duration(started: Instant) -> u16 {
    let micros = started.elapsed().as_secs_f64() * 1e6;
    // Saturates, as casts from floats do.
    (micros * 2.0).powf(1.0 / 1.74).round() as u16
}
