//! How an item becomes a message: keys, values and layouts as the connection requested them.

use bytes::{Bytes, BytesMut};
use dcp_wire::message::{
    Abort, Commit, Deletion, Expiration, Mutation, OpenFlags, Prepare, StreamAddress, SystemEvent,
};
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Cas, Datatype, DecodeError, EncodeError, RevSeqno, Seqno, leb128, snappy};
use thiserror::Error;

use super::settings::{Settings, SyncWrites};
use super::{Features, Item, ItemKind};
use dcp_proto::Snapshot;

/// Longest value inflated, in bytes: a document and its system xattrs.
const MAX_VALUE_LEN: usize = 21 * 1024 * 1024;

/// Buffers are reused and grow to the largest value; beyond this size they are freed.
const KEPT_CAPACITY: usize = 1024 * 1024;

/// Access frequency sent for documents: storage keeps none, so all are like new.
const INITIAL_NRU: u8 = 2;
const INITIAL_MFU: u8 = 4;

/// The same for a prepared deletion, which is never read, and for a version that is on disk only.
const LOWEST_NRU: u8 = 3;
const LOWEST_MFU: u8 = 0;

/// A stored item that cannot be sent.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(super) enum Unsendable {
    #[error(transparent)]
    Value(#[from] DecodeError),
    #[error(transparent)]
    Size(#[from] EncodeError),
}

/// How much of a document is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Whole,
    /// No body.
    Omitted,
    /// No body, but the datatype of the original value.
    OmittedButNamed,
}

/// How items become messages on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageFormat {
    collections: bool,
    body: Body,
    xattrs: bool,
    deleted_user_xattrs: bool,
    delete_times: bool,
    expiry_opcode: bool,
    snappy: bool,
    force_compression: bool,
    flatbuffers_events: bool,
    sync_writes: bool,
    /// The client may lack prepares up to this seqno.
    unsure_up_to: Seqno,
    nru: u8,
    nru_uncached: u8,
    /// Documents from disk without a body keep their datatype.
    names_omitted_from_disk: bool,
    /// The same for the current document.
    names_omitted: bool,
    /// Documents from disk without body and xattrs consist of their keys only.
    only_keys_from_disk: bool,
}

/// Buffers for values that are not sent as they are stored.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    key: Vec<u8>,
    plain: Vec<u8>,
    section: Vec<u8>,
    compressed: Vec<u8>,
}

impl Scratch {
    fn trim(&mut self) {
        for buffer in [&mut self.plain, &mut self.section, &mut self.compressed] {
            if buffer.capacity() > KEPT_CAPACITY {
                *buffer = Vec::new();
            }
        }
    }
}

impl MessageFormat {
    pub(super) const fn new(settings: &Settings, features: Features) -> Self {
        let flags = settings.flags;
        Self {
            collections: features.collections,
            body: if flags.contains(OpenFlags::NO_VALUE) {
                Body::Omitted
            } else if flags.contains(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE) {
                Body::OmittedButNamed
            } else {
                Body::Whole
            },
            xattrs: flags.contains(OpenFlags::INCLUDE_XATTRS),
            deleted_user_xattrs: flags.contains(OpenFlags::INCLUDE_DELETED_USER_XATTRS),
            delete_times: flags.contains(OpenFlags::INCLUDE_DELETE_TIMES),
            expiry_opcode: settings.expiry_opcode,
            snappy: features.snappy,
            force_compression: settings.force_compression,
            flatbuffers_events: settings.flatbuffers_events,
            sync_writes: !matches!(settings.sync_writes, SyncWrites::Off),
            unsure_up_to: Seqno::ZERO,
            names_omitted_from_disk: settings.version.is_legacy()
                && !flags.contains(OpenFlags::INCLUDE_XATTRS),
            names_omitted: false,
            only_keys_from_disk: flags.contains(OpenFlags::NO_VALUE)
                && !flags.contains(OpenFlags::INCLUDE_XATTRS)
                && !settings.version.is_legacy(),
            nru: if settings.hifi_mfu { INITIAL_MFU } else { INITIAL_NRU },
            nru_uncached: if settings.hifi_mfu { LOWEST_MFU } else { LOWEST_NRU },
        }
    }

    /// The same for a client that resumes inside a snapshot, at `start`. A snapshot from disk omits
    /// prepares of completed writes, so their commits are sent as mutations or deletions.
    pub(super) const fn resuming(self, start: Seqno, snapshot: Snapshot) -> Self {
        if start.0 < snapshot.end.0 { Self { unsure_up_to: start, ..self } } else { self }
    }

    /// Appends the message of `item`, read from disk, to `out`.
    ///
    /// For a client that wants neither values nor xattrs, servers since 7.0 read only keys and send
    /// them as documents, even for tombstones and without other metadata. Older ones omit the value
    /// and send the datatype it has on disk; for a client that wants xattrs they read the document,
    /// and send the datatype of what is left of it.
    pub(super) fn write_from_disk(
        &self,
        item: &Item,
        is_cached: bool,
        to: StreamAddress,
        scratch: &mut Scratch,
        out: &mut BytesMut,
    ) -> Result<(), Unsendable> {
        let nru = if is_cached { self.nru } else { self.nru_uncached };
        let is_document =
            matches!(item.kind, ItemKind::Mutation | ItemKind::Deletion | ItemKind::Expiration);
        if !self.only_keys_from_disk || !is_document {
            let names_omitted = self.names_omitted_from_disk;
            return Self { names_omitted, nru, ..*self }.write(item, to, scratch, out);
        }
        let document = Item {
            kind: ItemKind::Mutation,
            seqno: item.seqno,
            rev_seqno: RevSeqno(1),
            cas: Cas(0),
            collection_id: item.collection_id,
            key: item.key.clone(),
            value: Bytes::new(),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            delete_time: 0,
        };
        Self { nru, ..*self }.write(&document, to, scratch, out)
    }

    /// Appends the message of `item` to `out`.
    pub(super) fn write(
        &self,
        item: &Item,
        to: StreamAddress,
        scratch: &mut Scratch,
        out: &mut BytesMut,
    ) -> Result<(), Unsendable> {
        if item.kind == ItemKind::Mutation {
            self.write_mutation(item, to, scratch, out)?;
            scratch.trim();
            return Ok(());
        }
        let Scratch { key, plain, section, compressed } = scratch;
        let key = self.key(item, key);
        match item.kind {
            ItemKind::Commit { prepared, .. }
                if self.sync_writes && prepared > self.unsure_up_to =>
            {
                Commit { prepared_seqno: prepared, commit_seqno: item.seqno, key }
                    .encode(to, out)?;
            }
            ItemKind::Abort { prepared } => {
                Abort { prepared_seqno: prepared, abort_seqno: item.seqno, key }.encode(to, out)?;
            }
            ItemKind::Prepare { level, is_deletion } => {
                let (datatype, value) = if is_deletion {
                    self.tombstone_value(item, plain, section, compressed)?
                } else {
                    self.live_value(item, plain, compressed)?
                };
                let message = Prepare {
                    seqno: item.seqno,
                    rev_seqno: item.rev_seqno,
                    cas: item.cas,
                    datatype,
                    flags: item.flags,
                    // A deletion has its time in place of the expiry.
                    expiry: if is_deletion { item.delete_time } else { item.expiry },
                    lock_time: 0,
                    nru: if is_deletion { self.nru_uncached } else { self.nru },
                    deleted: is_deletion,
                    level,
                    key,
                    value,
                };
                message.encode(to, out)?;
            }
            ItemKind::Mutation | ItemKind::Commit { is_deletion: false, .. } => {
                self.write_mutation(item, to, scratch, out)?;
            }
            ItemKind::Expiration if self.expiry_opcode => {
                let (datatype, value) = self.tombstone_value(item, plain, section, compressed)?;
                let message = Expiration {
                    seqno: item.seqno,
                    rev_seqno: item.rev_seqno,
                    cas: item.cas,
                    datatype,
                    delete_time: item.delete_time,
                    key,
                    value,
                };
                message.encode(to, out)?;
            }
            ItemKind::Deletion | ItemKind::Expiration | ItemKind::Commit { .. } => {
                let (datatype, value) = self.tombstone_value(item, plain, section, compressed)?;
                let message = Deletion {
                    seqno: item.seqno,
                    rev_seqno: item.rev_seqno,
                    cas: item.cas,
                    datatype,
                    delete_time: self.delete_times.then_some(item.delete_time),
                    key,
                    value,
                };
                message.encode(to, out)?;
            }
            ItemKind::SystemEvent { id, version, .. } => {
                let (key, value) = (&item.key[..], &item.value[..]);
                let event = SystemEvent { seqno: item.seqno, id, version, key, value };
                self.write_event(event, to, out)?;
            }
        }
        scratch.trim();
        Ok(())
    }

    /// Appends `item` as a mutation. Most messages are mutations, so each part is copied only once,
    /// into the output.
    #[inline]
    fn write_mutation(
        &self,
        item: &Item,
        to: StreamAddress,
        scratch: &mut Scratch,
        out: &mut BytesMut,
    ) -> Result<(), Unsendable> {
        let (datatype, value) =
            self.live_value(item, &mut scratch.plain, &mut scratch.compressed)?;
        let message = Mutation {
            seqno: item.seqno,
            rev_seqno: item.rev_seqno,
            cas: item.cas,
            datatype,
            flags: item.flags,
            expiry: item.expiry,
            lock_time: 0,
            nru: self.nru,
            key: &item.key,
            value,
        };
        if self.collections {
            let id = leb128::encode(item.collection_id.0);
            return Ok(message.encode_with_key_prefix(id.as_slice(), to, out)?);
        }
        Ok(message.encode_with_key_prefix(&[], to, out)?)
    }

    /// An event in the form that the client requested, regardless of the stored form.
    fn write_event(
        &self,
        event: SystemEvent<'_>,
        to: StreamAddress,
        out: &mut BytesMut,
    ) -> Result<(), Unsendable> {
        const FLATBUFFERS: u8 = 2;
        if (event.version == FLATBUFFERS) == self.flatbuffers_events {
            return Ok(event.encode(to, out)?);
        }
        let Some(payload) = event.payload()? else {
            return Ok(event.encode(to, out)?);
        };
        let (value, version) = if self.flatbuffers_events {
            (payload.to_flatbuffers(event.id), FLATBUFFERS)
        } else {
            payload.to_plain()
        };
        Ok(SystemEvent { version, value: &value, ..event }.encode(to, out)?)
    }

    fn key<'a>(&self, item: &'a Item, buffer: &'a mut Vec<u8>) -> &'a [u8] {
        if !self.collections {
            return &item.key;
        }
        buffer.clear();
        buffer.extend_from_slice(leb128::encode(item.collection_id.0).as_slice());
        buffer.extend_from_slice(&item.key);
        buffer
    }

    /// The value of a live document.
    fn live_value<'a>(
        &self,
        item: &'a Item,
        plain: &'a mut Vec<u8>,
        compressed: &'a mut Vec<u8>,
    ) -> Result<(Datatype, &'a [u8]), Unsendable> {
        let has_xattrs = item.datatype.contains(Datatype::XATTR);
        if self.body == Body::Whole && (self.xattrs || !has_xattrs) {
            let is_compressed = item.datatype.contains(Datatype::SNAPPY);
            // Forced compression implies snappy, and leaves compressed values alone.
            if if is_compressed { self.snappy } else { !self.force_compression } {
                return Ok((item.datatype, &item.value));
            }
            let value = inflate(item, plain)?;
            return self.finish(item.datatype.without(Datatype::SNAPPY), value, compressed);
        }
        if self.body != Body::Whole && !(self.xattrs && has_xattrs) {
            let named = if self.names_omitted { item.datatype } else { Datatype::RAW };
            return Ok((self.named(named, item.datatype), &[]));
        }
        let value = inflate(item, plain)?;
        let (_, body) = xattr::split(value)?;
        if self.body == Body::Whole {
            let datatype = item.datatype.without(Datatype::SNAPPY).without(Datatype::XATTR);
            return self.finish(datatype, body, compressed);
        }
        let section = value.get(..value.len() - body.len()).unwrap_or_default();
        let (datatype, value) = self.finish(Datatype::XATTR, section, compressed)?;
        Ok((self.named(datatype, item.datatype), value))
    }

    /// The value of a tombstone: the xattrs that outlive the document, if they are requested.
    fn tombstone_value<'a>(
        &self,
        item: &'a Item,
        plain: &'a mut Vec<u8>,
        section: &'a mut Vec<u8>,
        compressed: &'a mut Vec<u8>,
    ) -> Result<(Datatype, &'a [u8]), Unsendable> {
        if !item.datatype.contains(Datatype::XATTR) {
            return Ok((Datatype::RAW, &[]));
        }
        section.clear();
        if self.xattrs {
            let keep_user = self.deleted_user_xattrs && item.kind != ItemKind::Expiration;
            let (xattrs, _) = xattr::split(inflate(item, plain)?)?;
            let all = xattrs.collect::<Result<Vec<Xattr<'_>>, _>>()?;
            let kept = all.iter().copied().filter(|xattr| keep_user || xattr.is_system());
            if kept.clone().next().is_some() {
                xattr::encode(kept, section)?;
            }
        }
        if section.is_empty() {
            return Ok((self.named(Datatype::RAW, item.datatype), &[]));
        }
        let (datatype, value) = self.finish(Datatype::XATTR, section, compressed)?;
        Ok((self.named(datatype, item.datatype), value))
    }

    /// The datatype to send: that of the sent value, or that of the stored document if requested.
    fn named(&self, sent: Datatype, stored: Datatype) -> Datatype {
        if self.body == Body::OmittedButNamed { stored } else { sent }
    }

    /// The value to send for an uncompressed one: compressed if the client forces compression and
    /// it helps.
    fn finish<'a>(
        &self,
        datatype: Datatype,
        value: &'a [u8],
        compressed: &'a mut Vec<u8>,
    ) -> Result<(Datatype, &'a [u8]), Unsendable> {
        if !self.force_compression || value.is_empty() {
            return Ok((datatype, value));
        }
        *compressed = snappy::compress(value)?;
        if compressed.len() >= value.len() {
            return Ok((datatype, value));
        }
        Ok((datatype.with(Datatype::SNAPPY), compressed))
    }
}

/// The value uncompressed.
fn inflate<'a>(item: &'a Item, plain: &'a mut Vec<u8>) -> Result<&'a [u8], DecodeError> {
    if !item.datatype.contains(Datatype::SNAPPY) {
        return Ok(&item.value);
    }
    snappy::decompress_into(&item.value, MAX_VALUE_LEN, plain)?;
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_kept_up_to_their_size_and_freed_beyond_it() {
        let of = |capacity| Scratch {
            key: Vec::new(),
            plain: Vec::with_capacity(capacity),
            section: Vec::with_capacity(capacity),
            compressed: Vec::with_capacity(capacity),
        };
        let capacities = |scratch: &Scratch| {
            [&scratch.plain, &scratch.section, &scratch.compressed].map(Vec::capacity)
        };
        const MIB: usize = 1 << 20;
        for (capacity, kept) in [(MIB, MIB), (MIB + 1, 0)] {
            let mut scratch = of(capacity);
            scratch.trim();
            assert_eq!(capacities(&scratch), [kept; 3]);
        }
    }
}
