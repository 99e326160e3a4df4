//! Sub-document operations: reading and changing parts of JSON documents and of their xattrs.
//!
//! Documents are edited as text, so that everything an operation does not change stays as written:
//! the order of members, the form of numbers, white space.

mod binary;
mod document;
mod edit;
mod json_text;
mod macros;
mod path;
mod single;

use std::sync::Arc;

use bytes::BufMut;
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::{PathSpec, SubdocLookup, SubdocMutation};
use dcp_wire::{Cas, Opcode, Seqno, Status};
use serde_json::Value;

use super::command::{Command, RequestOptions};
use super::document::check_cas;
use super::failure::Failure;
use crate::DocumentError;
use crate::bucket::{Condition, DocumentWrite, VBucket, Written};
use crate::chance::Now;
use document::Document;
use macros::{Macros, is_checksum, is_of_document};
use path::path_flag;

/// Most paths in one request.
const MAX_PATHS: usize = 16;

/// Flags of the whole document.
mod doc_flag {
    /// Create the document if it is missing.
    pub(super) const CREATE: u8 = 0x01;
    /// The document must be missing.
    pub(super) const ADD: u8 = 0x02;
    /// Tombstones can be read.
    pub(super) const ACCESS_DELETED: u8 = 0x04;
    /// A document that is created starts as a tombstone.
    pub(super) const CREATE_AS_DELETED: u8 = 0x08;
    /// A replica must answer.
    pub(super) const REPLICA_READ: u8 = 0x20;
    pub(super) const OF_LOOKUPS: u8 = ACCESS_DELETED | REPLICA_READ;
    pub(super) const OF_MUTATIONS: u8 = CREATE | ADD | ACCESS_DELETED | CREATE_AS_DELETED;
}

/// The paths of a request, or an error of the request as a whole.
fn collect<'a>(
    specs: impl Iterator<Item = Result<PathSpec<'a>, dcp_wire::DecodeError>>,
) -> Result<Vec<PathSpec<'a>>, Failure> {
    let specs = specs.collect::<Result<Vec<_>, _>>()?;
    if specs.is_empty() || specs.len() > MAX_PATHS {
        return Err(Status::SUBDOC_INVALID_COMBO.into());
    }
    if specs.iter().any(|spec| spec.flags & !path_flag::KNOWN != 0) {
        return Err(Failure::Invalid("unknown path flags"));
    }
    // Xattrs come first.
    if !specs.is_sorted_by_key(|spec| spec.flags & path_flag::XATTR == 0) {
        return Err(Status::SUBDOC_INVALID_COMBO.into());
    }
    Ok(specs)
}

/// Results of paths that have one, by the path's index.
type Results = Vec<(u8, Vec<u8>)>;

/// Outcome of a mutation.
enum Outcome {
    Written {
        written: Written,
        results: Results,
        /// Whether a tombstone was written.
        is_deleted: bool,
    },
    PathFailed(u8, Status),
}

impl Command<'_, '_> {
    pub(super) fn subdoc_lookup(&mut self) -> Result<(), Failure> {
        let lookup = SubdocLookup::decode(self.frame)?;
        let specs = collect(lookup.lookups())?;
        let (item, document) = self.document_to_read(lookup.doc_flags.unwrap_or(0))?;
        let deleted = item.kind != ItemKind::Mutation;
        let mut value = Vec::new();
        let mut failed = false;
        for spec in &specs {
            let (status, found) = match document.look_up(spec) {
                Ok(found) => (Status::SUCCESS, found),
                Err(status) => (status, Vec::new()),
            };
            failed |= !status.is_success();
            value.put_u16(status.0);
            value.put_u32(u32::try_from(found.len()).unwrap_or(u32::MAX));
            value.put_slice(&found);
        }
        let status = match (failed, deleted) {
            (false, false) => Status::SUCCESS,
            (false, true) => Status::SUBDOC_SUCCESS_DELETED,
            (true, false) => Status::SUBDOC_MULTI_PATH_FAILURE,
            (true, true) => Status::SUBDOC_MULTI_PATH_FAILURE_DELETED,
        };
        self.succeed(self.response(status).with_cas(item.cas).with_value(&value))
    }

    pub(super) fn subdoc_mutation(&mut self) -> Result<(), Failure> {
        let mutation = SubdocMutation::decode(self.frame)?;
        let specs = collect(mutation.mutations())?;
        let doc_flags = mutation.doc_flags.unwrap_or(0);
        match self.mutate(&specs, doc_flags, mutation.expiry, mutation.user_flags)? {
            Outcome::PathFailed(index, status) => {
                let mut value = vec![index];
                value.put_u16(status.0);
                let response = self.response(Status::SUBDOC_MULTI_PATH_FAILURE);
                self.succeed(response.with_value(&value))
            }
            Outcome::Written { written, results, is_deleted } => {
                let mut value = Vec::new();
                for (index, result) in results {
                    value.put_u8(index);
                    value.put_u16(Status::SUCCESS.0);
                    value.put_u32(u32::try_from(result.len()).unwrap_or(u32::MAX));
                    value.put_slice(&result);
                }
                let deleted = Status::SUBDOC_SUCCESS_DELETED;
                let status = if is_deleted { deleted } else { Status::SUCCESS };
                self.send_written_as(status, written, &value)
            }
        }
    }
}

impl Command<'_, '_> {
    /// The document whose parts are to be read, and its parts.
    fn document_to_read(&mut self, flags: u8) -> Result<(Arc<Item>, Document), Failure> {
        if flags & !doc_flag::OF_LOOKUPS != 0 {
            return Err(Failure::Invalid("unknown document flags"));
        }
        let (key, now) = (self.key()?, self.now);
        let (item, vbuuid) = if flags & doc_flag::REPLICA_READ == 0 {
            self.with_collection(key, |vbucket| (vbucket.newest_now(now, key), vbucket.vbuuid()))?
        } else {
            self.with_replica(key, |vbucket| {
                (vbucket.newest_unless_expired(now, key), vbucket.vbuuid())
            })?
        };
        let item = item.ok_or(Status::KEY_ENOENT)?;
        if item.kind != ItemKind::Mutation && flags & doc_flag::ACCESS_DELETED == 0 {
            return Err(Status::KEY_ENOENT.into());
        }
        let mut document = Document::of(&item).ok_or(Status::EINTERNAL)?;
        document.add_virtual(&item, vbuuid, now);
        Ok((item, document))
    }

    /// Changes parts of the document.
    fn mutate(
        &mut self,
        specs: &[PathSpec<'_>],
        flags: u8,
        expiry: Option<u32>,
        user_flags: Option<u32>,
    ) -> Result<Outcome, Failure> {
        if flags & !doc_flag::OF_MUTATIONS != 0 {
            return Err(Failure::Invalid("unknown document flags"));
        }
        let creates = flags & (doc_flag::CREATE | doc_flag::ADD) != 0;
        if flags & doc_flag::CREATE_AS_DELETED != 0 && !creates {
            return Err(Failure::Invalid("creating as deleted needs the flag for creating"));
        }
        let options = self.options()?;
        let now = self.now;
        let request = Mutation {
            key: self.key()?,
            specs,
            flags,
            cas: self.frame.header.cas,
            expiry: now.absolute_expiry(expiry.unwrap_or(0)),
            user_flags,
            options,
        };
        self.with_collection(request.key, |vbucket| request.apply(now, vbucket))?
    }
}

/// A mutation of parts of a document.
struct Mutation<'a> {
    key: dcp_wire::DocKey<'a>,
    specs: &'a [PathSpec<'a>],
    flags: u8,
    cas: Cas,
    expiry: u32,
    user_flags: Option<u32>,
    options: RequestOptions,
}

impl Mutation<'_> {
    /// Applies all paths or none.
    fn apply(&self, now: Now, vbucket: &mut VBucket) -> Result<Outcome, Failure> {
        let newest = vbucket.newest_now(now, self.key);
        let item = newest.as_ref().filter(|item| item.kind == ItemKind::Mutation).cloned();
        let accessible = self.flags & doc_flag::ACCESS_DELETED != 0;
        let tombstone = newest.filter(|_| item.is_none() && accessible);
        let creates_deleted = item.is_none() && self.flags & doc_flag::CREATE_AS_DELETED != 0;
        let is_deleted = tombstone.is_some() || creates_deleted;
        if is_deleted && self.specs.iter().any(|spec| spec.flags & path_flag::XATTR == 0) {
            return Err(Status::EINVAL.into());
        }
        let mut document = match &item {
            Some(_) if self.flags & doc_flag::ADD != 0 => {
                return Err(DocumentError::Exists.into());
            }
            Some(item) => {
                check_cas(item, self.cas)?;
                Document::of(item).ok_or(Status::EINTERNAL)?
            }
            None if tombstone.is_some() => {
                let tombstone = tombstone.as_ref().ok_or(Status::EINTERNAL)?;
                check_cas(tombstone, self.cas)?;
                Document::of(tombstone).ok_or(Status::EINTERNAL)?
            }
            None if self.flags & (doc_flag::CREATE | doc_flag::ADD) == 0 || self.cas != Cas(0) => {
                return Err(DocumentError::NotFound.into());
            }
            None if creates_deleted => Document::without_body(),
            None => Document::empty_for(self.specs),
        };
        let mut macros = Macros {
            cas: vbucket.upcoming_cas(now),
            seqno: Seqno(vbucket.high_seqno.0 + 1),
            crc32c: 0,
            document: Value::Null,
        };
        if self.specs.iter().any(|spec| is_of_document(spec.value)) {
            macros.document = match item.as_ref().or(tombstone.as_ref()) {
                Some(stored) => document.metadata_of(stored, vbucket.vbuuid()),
                None => document.metadata_of_missing(),
            };
        }
        // The body's checksum is known only once the body is.
        if self.specs.iter().any(|spec| is_checksum(spec.value)) {
            let mut body = document.clone();
            if self.edit(&mut body, &macros).is_ok() {
                macros.crc32c = body.checksum();
            }
        }
        let edited = self.edit(&mut document, &macros);
        let results = match edited {
            Ok(results) => results,
            Err((index, status)) => return Ok(Outcome::PathFailed(index, status)),
        };
        if self.specs.iter().any(is_deletion) {
            let durability = self.options.durability;
            let written =
                vbucket.remove(now, self.key, self.cas, ItemKind::Deletion, durability)?;
            return Ok(Outcome::Written { written, results, is_deleted: false });
        }
        let (value, datatype) = document.into_value().ok_or(Status::XATTR_EINVAL)?;
        if is_deleted {
            let written = vbucket.store_tombstone(now, self.key, value, self.options.durability)?;
            return Ok(Outcome::Written { written, results, is_deleted });
        }
        let old_expiry =
            item.as_ref().map(|item| item.expiry).filter(|_| self.options.preserve_expiry);
        let write = DocumentWrite {
            key: self.key,
            value,
            datatype,
            flags: self.user_flags.unwrap_or(item.as_ref().map_or(0, |item| item.flags)),
            expiry: old_expiry.unwrap_or(self.expiry),
            cas: self.cas,
            condition: Condition::Any,
            durability: self.options.durability,
        };
        let written = vbucket.store(now, write)?;
        Ok(Outcome::Written { written, results, is_deleted })
    }
}

impl Mutation<'_> {
    /// Changes the document's parts, up to a path that removes the whole document; returns the
    /// results of paths that have one, or the path that failed.
    fn edit(&self, document: &mut Document, macros: &Macros) -> Result<Results, (u8, Status)> {
        // Permission to create the document includes the parents of every path.
        let creates = self.flags & (doc_flag::CREATE | doc_flag::ADD) != 0;
        let implied = if creates { path_flag::CREATE_PATH } else { 0 };
        let mut results = Vec::new();
        for (index, spec) in (0u8..).zip(self.specs).take_while(|(_, spec)| !is_deletion(spec)) {
            let spec = PathSpec { flags: spec.flags | implied, ..*spec };
            match document.mutate(&spec, macros) {
                Ok(result) if result.is_empty() => {}
                Ok(result) => results.push((index, result)),
                Err(status) => return Err((index, status)),
            }
        }
        Ok(results)
    }
}

/// Whether the path removes the whole document.
fn is_deletion(spec: &PathSpec<'_>) -> bool {
    spec.opcode == Opcode::DELETE && spec.flags & path_flag::XATTR == 0
}
