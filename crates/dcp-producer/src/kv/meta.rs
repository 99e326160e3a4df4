//! Documents with their metadata: GET_META and the writes of replication between clusters.

use dcp_producer_proto::ItemKind;
use dcp_wire::message::{GetMeta, Metadata, WithMeta, WithMetaOptions};
use dcp_wire::{Datatype, Opcode, Status};

use super::command::Command;
use super::failure::Failure;
use crate::bucket::{Condition, MetaWrite};
use crate::value;

impl Command<'_, '_> {
    pub(super) fn get_meta(&mut self) -> Result<(), Failure> {
        let with_datatype = match GetMeta::decode(self.frame)?.version {
            None | Some(1) => false,
            Some(2) => true,
            Some(_) => return Err(Failure::Invalid("the version is 1 or 2")),
        };
        let (key, now) = (self.key()?, self.now);
        let item = self.with_collection(key, |vbucket| vbucket.newest_as_stored(now, key))?;
        let item = item.ok_or(Status::KEY_ENOENT)?;
        let live = item.kind == ItemKind::Mutation;
        let metadata = Metadata {
            deleted: !live,
            flags: item.flags,
            expiry: if live { item.expiry } else { item.delete_time },
            rev_seqno: item.rev_seqno,
            datatype: with_datatype.then_some(item.datatype),
        };
        let mut extras = Vec::with_capacity(21);
        metadata.encode(&mut extras);
        self.succeed(self.success().with_cas(item.cas).with_extras(&extras))
    }

    /// SET_WITH_META, ADD_WITH_META.
    pub(super) fn set_with_meta(&mut self) -> Result<(), Failure> {
        let is_add = self.frame.header.opcode == Opcode::ADD_WITH_META;
        let condition = if is_add { Condition::Absent } else { Condition::Any };
        self.write_with_meta(ItemKind::Mutation, condition)
    }

    pub(super) fn delete_with_meta(&mut self) -> Result<(), Failure> {
        self.write_with_meta(ItemKind::Deletion, Condition::Any)
    }

    fn write_with_meta(&mut self, mut kind: ItemKind, condition: Condition) -> Result<(), Failure> {
        if self.options()?.durability.is_some() {
            return Err(Failure::Invalid("what was written elsewhere is not written durably"));
        }
        let meta = WithMeta::decode(self.frame)?;
        let options = check_options(&meta)?;
        if self.options()?.durability.is_some() {
            return Err(Failure::Invalid("a write with metadata cannot be durable"));
        }
        let tombstone = kind != ItemKind::Mutation;
        if options.contains(WithMetaOptions::IS_EXPIRATION) {
            if !tombstone {
                return Err(Failure::Invalid("only a deletion can be an expiration"));
            }
            kind = ItemKind::Expiration;
        }
        // Extended metadata, which is obsolete, follows the value.
        let extended_len = usize::from(meta.extended_len.unwrap_or(0));
        let value_len = meta.value.len().saturating_sub(extended_len);
        let (value, mut datatype) =
            self.inflate(meta.value.get(..value_len).unwrap_or_default())?;
        if !datatype.contains(Datatype::XATTR) {
            if tombstone && !value.is_empty() {
                return Err(Failure::Invalid("a deletion has no body"));
            }
            datatype = value::detect(&value);
        } else if !value::is_valid(&value, datatype) {
            return Err(Failure::Invalid("malformed xattrs"));
        }
        let force =
            options.intersects(WithMetaOptions::FORCE | WithMetaOptions::SKIP_CONFLICT_RESOLUTION);
        let now = self.now;
        let mut write = MetaWrite {
            key: self.key()?,
            kind,
            value,
            datatype,
            flags: meta.flags,
            time: meta.expiry,
            rev_seqno: meta.rev_seqno,
            cas: meta.cas,
            expected_cas: self.frame.header.cas,
            condition,
            force,
        };
        if !tombstone {
            write.time = now.absolute_expiry(meta.expiry);
        } else if meta.expiry == 0 {
            write.time = now.seconds();
        }
        let regenerate = options.contains(WithMetaOptions::REGENERATE_CAS);
        let written = self.with_vbucket(|vbucket| {
            if regenerate {
                write.cas = vbucket.next_cas(now);
            }
            vbucket.store_with_meta(now, write)
        })??;
        self.send_written(written)
    }
}

/// Checks the options of a write with metadata.
fn check_options(meta: &WithMeta<'_>) -> Result<WithMetaOptions, Failure> {
    let options = meta.options.unwrap_or_default();
    if options.contains(WithMetaOptions::FORCE_ACCEPT) {
        return Err(Failure::Invalid("the bucket resolves conflicts by rev seqno"));
    }
    if options.contains(WithMetaOptions::REGENERATE_CAS)
        && !options.contains(WithMetaOptions::SKIP_CONFLICT_RESOLUTION)
    {
        return Err(Failure::Invalid("a new CAS needs conflict resolution to be skipped"));
    }
    if matches!(meta.cas.0, 0 | u64::MAX) {
        return Err(Status::CAS_VALUE_INVALID.into());
    }
    Ok(options)
}
