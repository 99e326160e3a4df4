//! Reading and writing documents.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::{MutationToken, Store, Touch};
use dcp_wire::{Cas, Datatype, Frame, Opcode, Status, snappy, xattr};

use super::command::Command;
use super::failure::Failure;
use super::session::DurableWrite;
use crate::bucket::{Condition, DocumentWrite, MAX_VALUE_LEN, Written, inflated};
use crate::{DocumentError, value};

/// Body and xattr section of a document, as parts of its value.
pub(super) fn split_xattrs(item: &Item) -> (Bytes, Bytes) {
    if item.datatype.contains(Datatype::XATTR)
        && let Ok((_, body)) = xattr::split(&item.value)
    {
        let section_len = item.value.len() - body.len();
        return (item.value.slice(section_len..), item.value.slice(..section_len));
    }
    (item.value.clone(), Bytes::new())
}

impl Command<'_, '_> {
    pub(super) fn get(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        let (key, now) = (self.key()?, self.now);
        let (item, is_locked) = self.with_collection(key, |vbucket| {
            (vbucket.live_as_stored(now, key), vbucket.is_locked(now, key))
        })?;
        let item = item.ok_or(Status::KEY_ENOENT)?;
        if is_locked {
            // Its CAS is known only to the client that locked it.
            let hidden = Item { cas: Cas(u64::MAX), ..Item::clone(&item) };
            return self.send_document(&Arc::new(hidden));
        }
        self.send_document(&item)
    }

    /// The lock time, in seconds, is optional.
    pub(super) fn get_locked(&mut self) -> Result<(), Failure> {
        self.expect_key_value(true, false)?;
        let seconds = match *self.frame.extras {
            [] => 0,
            [a, b, c, d] => u32::from_be_bytes([a, b, c, d]),
            _ => return Err(Failure::Invalid("a lock's time has four bytes")),
        };
        let (key, now, time) = (self.key()?, self.now, Duration::from_secs(seconds.into()));
        self.check_readable(key.collection_id)?;
        let item = self.with_vbucket(|vbucket| vbucket.lock(now, key, time))??;
        self.send_document(&item)
    }

    pub(super) fn unlock(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        let (key, now, cas) = (self.key()?, self.now, self.frame.header.cas);
        if cas == Cas(0) {
            return Err(Failure::Invalid("unlocking needs the version that was locked"));
        }
        self.check_readable(key.collection_id)?;
        self.with_vbucket(|vbucket| vbucket.unlock(now, key, cas))??;
        self.succeed(self.success())
    }

    /// Reads a replica unchanged: replicas do not expire documents.
    pub(super) fn get_replica(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        let (key, now) = (self.key()?, self.now);
        let item = self.with_replica(key, |vbucket| vbucket.live_if_unexpired(now, key))?;
        let item = item.ok_or(Status::KEY_ENOENT)?;
        self.send_document(&item)
    }

    /// Sends a document as stored, compressed if the client negotiated it. The body of a document
    /// with xattrs cannot be sent compressed, since the whole value is compressed together.
    fn send_document(&mut self, stored: &Arc<Item>) -> Result<(), Failure> {
        let as_stored =
            self.session.features.dcp.snappy && !stored.datatype.contains(Datatype::XATTR);
        let item = if as_stored { Arc::clone(stored) } else { inflated(stored) };
        let (body, _) = split_xattrs(&item);
        let mut datatype = item.datatype.without(Datatype::XATTR);
        if !self.session.features.dcp.json {
            datatype = datatype.without(Datatype::JSON);
        }
        let flags = item.flags.to_be_bytes();
        let response = self.success().with_cas(item.cas).with_datatype(datatype);
        self.succeed(response.with_extras(&flags).with_value(&body))
    }

    /// SET, ADD, REPLACE.
    pub(super) fn store(&mut self) -> Result<(), Failure> {
        let Store { flags, expiry, .. } = Store::decode(self.frame)?;
        let options = self.options()?;
        let (value, datatype) = self.stored_value()?;
        let condition = match self.frame.header.opcode {
            Opcode::ADD => Condition::Absent,
            Opcode::REPLACE => Condition::Present,
            _ => Condition::Any,
        };
        let now = self.now;
        let mut write = DocumentWrite {
            key: self.key()?,
            value,
            datatype,
            flags,
            expiry: now.absolute_expiry(expiry),
            cas: self.frame.header.cas,
            condition,
            durability: options.durability,
        };
        let written = self.with_vbucket(|vbucket| {
            if let Some(item) = vbucket.live(now, write.key) {
                if options.preserve_expiry {
                    write.expiry = item.expiry;
                }
                keep_system_xattrs(&item, &mut write);
            }
            vbucket.store(now, write)
        })??;
        self.send_written(written)
    }

    pub(super) fn send_written(&mut self, written: Written) -> Result<(), Failure> {
        self.send_written_with(written, &[])
    }

    /// Answers a write with its CAS, and its mutation token if the client negotiated it.
    pub(super) fn send_written_with(
        &mut self,
        written: Written,
        value: &[u8],
    ) -> Result<(), Failure> {
        self.send_written_as(Status::SUCCESS, written, value)
    }

    pub(super) fn send_written_as(
        &mut self,
        status: Status,
        written: Written,
        value: &[u8],
    ) -> Result<(), Failure> {
        if written.is_prepared {
            return self.await_durable(DurableWrite { written, status, value: value.to_vec() });
        }
        self.answer_write(status, written, value)
    }

    pub(super) fn answer_write(
        &mut self,
        status: Status,
        written: Written,
        value: &[u8],
    ) -> Result<(), Failure> {
        let token = MutationToken { vbuuid: written.vbuuid, seqno: written.seqno }.encode();
        let extras: &[u8] = if self.session.features.mutation_tokens { &token } else { &[] };
        let response: Frame<'_> = self.response(status).with_cas(written.cas).with_extras(extras);
        self.succeed(response.with_value(value))
    }

    pub(super) fn delete(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, false)?;
        let durability = self.options()?.durability;
        let (key, now, cas) = (self.key()?, self.now, self.frame.header.cas);
        let written = self.with_vbucket(|vbucket| {
            vbucket.check_visible(key)?;
            vbucket.remove(now, key, cas, ItemKind::Deletion, durability)
        })??;
        self.send_written(written)
    }

    /// APPEND, PREPEND.
    pub(super) fn extend(&mut self) -> Result<(), Failure> {
        self.expect_parts(true, true)?;
        let durability = self.options()?.durability;
        let (addition, _) = self.plain_value()?;
        let prepend = self.frame.header.opcode == Opcode::PREPEND;
        let (key, now, cas) = (self.key()?, self.now, self.frame.header.cas);
        let written = self.with_vbucket(|vbucket| {
            vbucket.check_collection(key)?;
            vbucket.check_visible(key)?;
            let Some(item) = vbucket.live(now, key) else {
                return Err(Failure::Status(Status::NOT_STORED));
            };
            let (body, section) = split_xattrs(&item);
            let mut value = BytesMut::with_capacity(section.len() + body.len() + addition.len());
            value.put_slice(&section);
            let (first, second) = if prepend { (&addition, &body) } else { (&body, &addition) };
            value.put_slice(first);
            value.put_slice(second);
            let body_type = value::detect(value.get(section.len()..).unwrap_or_default());
            let write = DocumentWrite {
                key,
                datatype: body_type.with(item.datatype.without(Datatype::JSON)),
                value: value.freeze(),
                flags: item.flags,
                expiry: item.expiry,
                cas,
                condition: Condition::Present,
                durability,
            };
            Ok(vbucket.store(now, write)?)
        })??;
        self.send_written(written)
    }

    /// TOUCH, GET_AND_TOUCH.
    pub(super) fn touch(&mut self) -> Result<(), Failure> {
        let Touch { expiry, .. } = Touch::decode(self.frame)?;
        let (key, now) = (self.key()?, self.now);
        let expiry = now.absolute_expiry(expiry);
        let item = self.with_vbucket(|vbucket| vbucket.touch(now, key, expiry))??;
        if self.frame.header.opcode == Opcode::TOUCH {
            return self.succeed(self.success().with_cas(item.cas));
        }
        self.send_document(&item)
    }
}

/// A write of the body leaves system xattrs as they are.
fn keep_system_xattrs(item: &Item, write: &mut DocumentWrite<'_>) {
    let section = crate::bucket::system_xattrs(item);
    if section.is_empty() {
        return;
    }
    if write.datatype.contains(Datatype::SNAPPY)
        && let Ok(plain) = snappy::decompress(&write.value, MAX_VALUE_LEN)
    {
        write.value = plain.into();
        write.datatype = write.datatype.without(Datatype::SNAPPY);
    }
    write.value = [section.as_ref(), write.value.as_ref()].concat().into();
    write.datatype = write.datatype.with(Datatype::XATTR);
}

/// Checks that a document to be written is still the one that was read.
pub(super) fn check_cas(item: &Item, cas: Cas) -> Result<(), DocumentError> {
    if cas == Cas(0) || cas == item.cas {
        return Ok(());
    }
    Err(DocumentError::CasMismatch(cas))
}
