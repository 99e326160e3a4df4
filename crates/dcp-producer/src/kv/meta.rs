//! Documents with their metadata: GET_META and the writes of replication between clusters.

use bytes::BufMut;
use dcp_proto::producer::ItemKind;
use dcp_wire::{Cas, Datatype, Opcode, Reader, RevSeqno, Status};

use super::command::Command;
use super::failure::Failure;
use crate::bucket::MetaWrite;
use crate::value;

/// Option bits of a write with metadata.
mod option {
    /// Accept whatever the conflict resolution says (buckets that resolve by rev seqno).
    pub(super) const SKIP_CONFLICT_RESOLUTION_SEQNO: u32 = 0x01;
    /// The same for buckets that resolve by time, of which there are none here.
    pub(super) const FORCE_ACCEPT: u32 = 0x02;
    /// Draw a new CAS; needs `SKIP_CONFLICT_RESOLUTION`.
    pub(super) const REGENERATE_CAS: u32 = 0x04;
    /// Accept whatever the conflict resolution says.
    pub(super) const SKIP_CONFLICT_RESOLUTION: u32 = 0x08;
    /// The tombstone is that of an expiry.
    pub(super) const IS_EXPIRATION: u32 = 0x10;
}

/// The extras of a write with metadata.
struct Meta {
    flags: u32,
    time: u32,
    rev_seqno: RevSeqno,
    cas: Cas,
    options: u32,
    /// Bytes of extended metadata after the value.
    extended_len: usize,
}

impl Command<'_, '_> {
    pub(super) fn get_meta(&mut self) -> Result<(), Failure> {
        self.expect_key_value(true, false)?;
        let with_datatype = match self.frame.extras {
            [] | [1] => false,
            [2] => true,
            _ => return Err(Failure::Invalid("the extras are a version, 1 or 2")),
        };
        let (key, now) = (self.key()?, self.now);
        let item = self.with_vbucket(|vbucket| vbucket.newest_now(now, key))?;
        let item = item.ok_or(Status::KEY_ENOENT)?;
        let live = item.kind == ItemKind::Mutation;
        let mut extras = [0; 21];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u32(u32::from(!live));
        cursor.put_u32(item.flags);
        cursor.put_u32(if live { item.expiry } else { item.delete_time });
        cursor.put_u64(item.rev_seqno.0);
        cursor.put_u8(item.datatype.0);
        let extras = extras.get(..if with_datatype { 21 } else { 20 }).unwrap_or_default();
        self.succeed(self.success().with_cas(item.cas).with_extras(extras))
    }

    /// SET_WITH_META, ADD_WITH_META.
    pub(super) fn set_with_meta(&mut self) -> Result<(), Failure> {
        let add_only = self.frame.header.opcode == Opcode::ADD_WITH_META;
        self.write_with_meta(ItemKind::Mutation, add_only)
    }

    pub(super) fn delete_with_meta(&mut self) -> Result<(), Failure> {
        self.write_with_meta(ItemKind::Deletion, false)
    }

    fn write_with_meta(&mut self, mut kind: ItemKind, add_only: bool) -> Result<(), Failure> {
        self.expect_key_value(true, true)?;
        self.options()?;
        let meta = self.meta()?;
        let tombstone = kind != ItemKind::Mutation;
        if meta.options & option::IS_EXPIRATION != 0 {
            if !tombstone {
                return Err(Failure::Invalid("only a deletion can be an expiration"));
            }
            kind = ItemKind::Expiration;
        }
        let (mut value, mut datatype) = self.value()?;
        let Some(value_len) = value.len().checked_sub(meta.extended_len) else {
            return Err(Failure::Invalid("the extended metadata is longer than the value"));
        };
        value.truncate(value_len);
        if !datatype.contains(Datatype::XATTR) {
            if tombstone && !value.is_empty() {
                return Err(Failure::Invalid("a deletion has no body"));
            }
            datatype = value::detect(&value);
        } else if !value::is_valid(&value, datatype) {
            return Err(Failure::Invalid("malformed xattrs"));
        }
        let force = meta.options
            & (option::SKIP_CONFLICT_RESOLUTION | option::SKIP_CONFLICT_RESOLUTION_SEQNO)
            != 0;
        let now = self.now;
        let mut write = MetaWrite {
            key: self.key()?,
            kind,
            value,
            datatype,
            flags: meta.flags,
            time: meta.time,
            rev_seqno: meta.rev_seqno,
            cas: meta.cas,
            expected_cas: self.frame.header.cas,
            add_only,
            force,
        };
        if !tombstone {
            write.time = now.absolute_expiry(meta.time);
        } else if meta.time == 0 {
            write.time = now.seconds();
        }
        let regenerate = meta.options & option::REGENERATE_CAS != 0;
        let written = self.with_vbucket(|vbucket| {
            if regenerate {
                write.cas = vbucket.next_cas(now);
            }
            vbucket.store_with_meta(now, write)
        })??;
        self.send_written(written)
    }

    fn meta(&self) -> Result<Meta, Failure> {
        let mut reader = Reader::new(self.frame.extras, "extras");
        let mut meta = Meta {
            flags: reader.u32()?,
            time: reader.u32()?,
            rev_seqno: RevSeqno(reader.u64()?),
            cas: Cas(reader.u64()?),
            options: 0,
            extended_len: 0,
        };
        let rest = reader.rest().len();
        if rest == 4 || rest == 6 {
            meta.options = reader.u32()?;
        }
        if rest == 2 || rest == 6 {
            meta.extended_len = usize::from(reader.u16()?);
        }
        reader.finish()?;
        if meta.options & option::FORCE_ACCEPT != 0 {
            return Err(Failure::Invalid("the bucket resolves conflicts by rev seqno"));
        }
        let skip = meta.options & option::SKIP_CONFLICT_RESOLUTION != 0;
        if meta.options & option::REGENERATE_CAS != 0 && !skip {
            return Err(Failure::Invalid("a new CAS needs conflict resolution to be skipped"));
        }
        if matches!(meta.cas.0, 0 | u64::MAX) {
            return Err(Status::CAS_VALUE_INVALID.into());
        }
        Ok(meta)
    }
}
