//! Sub-document operations with one path, in their own packets.

use dcp_producer_proto::ItemKind;
use dcp_wire::message::PathSpec;
use dcp_wire::{DecodeError, Frame, Reader, Status};

use super::{Outcome, collect};
use crate::kv::command::Command;
use crate::kv::failure::Failure;

/// A request with one path.
struct Single<'a> {
    spec: PathSpec<'a>,
    expiry: Option<u32>,
    doc_flags: u8,
}

/// The request: path length and flags of the path, then expiry, then flags of the document,
/// where the length of the extras leaves room for them; value after the path.
fn single<'a>(frame: &Frame<'a>) -> Result<Single<'a>, Failure> {
    if frame.key.is_empty() {
        return Err(Failure::Invalid("the request must have a key"));
    }
    let len = frame.extras.len();
    let mut extras = Reader::new(frame.extras, "extras");
    let (path_len, flags) = (usize::from(extras.u16()?), extras.u8()?);
    let expiry = if len >= 7 { Some(extras.u32()?) } else { None };
    let doc_flags = if extras.is_empty() { 0 } else { extras.u8()? };
    extras.finish()?;
    let mut value = Reader::new(frame.value, "value");
    let path = value.bytes(path_len)?;
    let value = value.rest();
    let opcode = frame.header.opcode;
    Ok(Single { spec: PathSpec { opcode, flags, path, value }, expiry, doc_flags })
}

impl Command<'_, '_> {
    /// SUBDOC_GET, SUBDOC_EXISTS, SUBDOC_GET_COUNT.
    pub(in crate::kv) fn subdoc_path_lookup(&mut self) -> Result<(), Failure> {
        let frame = self.frame;
        let Single { spec, expiry, doc_flags } = single(frame)?;
        if expiry.is_some() || !spec.value.is_empty() {
            return Err(Failure::Invalid("a lookup has neither expiry nor value"));
        }
        collect(std::iter::once(Ok::<_, DecodeError>(spec)))?;
        let (item, document) = self.document_to_read(doc_flags)?;
        let found = document.look_up(&spec)?;
        let deleted = item.kind != ItemKind::Mutation;
        let status = if deleted { Status::SUBDOC_SUCCESS_DELETED } else { Status::SUCCESS };
        self.succeed(self.response(status).with_cas(item.cas).with_value(&found))
    }

    /// The other ones.
    pub(in crate::kv) fn subdoc_path_mutation(&mut self) -> Result<(), Failure> {
        let frame = self.frame;
        let Single { spec, expiry, doc_flags } = single(frame)?;
        let specs = collect(std::iter::once(Ok::<_, DecodeError>(spec)))?;
        match self.mutate(&specs, doc_flags, expiry, None)? {
            Outcome::PathFailed(_, status) => Err(status.into()),
            Outcome::Written { written, results, is_deleted } => {
                let deleted = Status::SUBDOC_SUCCESS_DELETED;
                let status = if is_deleted { deleted } else { Status::SUCCESS };
                let result = results.into_iter().next().map(|(_, result)| result);
                self.send_written_as(status, written, &result.unwrap_or_default())
            }
        }
    }
}
