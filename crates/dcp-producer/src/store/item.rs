//! Items in the format of a data folder.

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::{DurabilityLevel, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, DecodeError, Reader, RevSeqno, ScopeId, Seqno, Vbid};

const FORMAT: u8 = 1;
const MUTATION: u8 = 0;
const DELETION: u8 = 1;
const EXPIRATION: u8 = 2;
const SYSTEM_EVENT: u8 = 3;
const PREPARE: u8 = 4;
const ABORT: u8 = 5;

/// The key of a version: the versions of a copy are contiguous, in seqno order.
pub(super) fn key(vbid: Vbid, node: u16, seqno: Seqno) -> [u8; 12] {
    let mut out = [0; 12];
    let numbers = vbid.0.to_be_bytes().into_iter().chain(node.to_be_bytes());
    for (place, byte) in out.iter_mut().zip(numbers.chain(seqno.0.to_be_bytes())) {
        *place = byte;
    }
    out
}

/// The first and the last key that a copy can have.
pub(super) fn keys_of(vbid: Vbid, node: u16) -> ([u8; 12], [u8; 12]) {
    (key(vbid, node, Seqno::ZERO), key(vbid, node, Seqno::MAX))
}

/// # Errors
/// A message if items of this kind cannot be stored.
pub(super) fn encode(item: &Item) -> Result<Vec<u8>, &'static str> {
    let mut out = Vec::with_capacity(64 + item.key.len() + item.value.len());
    out.push(FORMAT);
    match item.kind {
        ItemKind::Mutation => out.push(MUTATION),
        ItemKind::Deletion => out.push(DELETION),
        ItemKind::Expiration => out.push(EXPIRATION),
        ItemKind::SystemEvent { id, version, scope_id } => {
            out.push(SYSTEM_EVENT);
            out.extend(id.0.to_be_bytes());
            out.push(version);
            out.extend(scope_id.0.to_be_bytes());
        }
        ItemKind::Prepare { level, is_deletion } => {
            out.extend([PREPARE, level.0, u8::from(is_deletion)]);
        }
        ItemKind::Abort { prepared } => {
            out.push(ABORT);
            out.extend(prepared.0.to_be_bytes());
        }
        _ => return Err("changes of this kind cannot be stored"),
    }
    for number in [item.seqno.0, item.rev_seqno.0, item.cas.0] {
        out.extend(number.to_be_bytes());
    }
    for number in [item.collection_id.0, item.flags, item.expiry, item.delete_time] {
        out.extend(number.to_be_bytes());
    }
    out.push(item.datatype.0);
    // Keys have 250 bytes at most.
    out.push(u8::try_from(item.key.len()).unwrap_or(u8::MAX));
    out.extend(&item.key);
    out.extend(&item.value);
    Ok(out)
}

pub(super) fn decode(bytes: &[u8]) -> Result<Item, DecodeError> {
    let mut reader = Reader::new(bytes, "stored item");
    if reader.u8()? != FORMAT {
        return Err(DecodeError::InvalidField("format of a stored item"));
    }
    let kind = match reader.u8()? {
        MUTATION => ItemKind::Mutation,
        DELETION => ItemKind::Deletion,
        EXPIRATION => ItemKind::Expiration,
        SYSTEM_EVENT => ItemKind::SystemEvent {
            id: SystemEventId(reader.u32()?),
            version: reader.u8()?,
            scope_id: ScopeId(reader.u32()?),
        },
        PREPARE => ItemKind::Prepare {
            level: DurabilityLevel(reader.u8()?),
            is_deletion: reader.u8()? != 0,
        },
        ABORT => ItemKind::Abort { prepared: Seqno(reader.u64()?) },
        _ => return Err(DecodeError::InvalidField("kind of a stored item")),
    };
    let (seqno, rev_seqno, cas) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let (collection_id, flags) = (CollectionId(reader.u32()?), reader.u32()?);
    let (expiry, delete_time) = (reader.u32()?, reader.u32()?);
    let datatype = Datatype(reader.u8()?);
    let key_len = usize::from(reader.u8()?);
    let key = Bytes::copy_from_slice(reader.bytes(key_len)?);
    let value = Bytes::copy_from_slice(reader.rest());
    Ok(Item {
        kind,
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(rev_seqno),
        cas: Cas(cas),
        collection_id,
        key,
        value,
        datatype,
        flags,
        expiry,
        delete_time,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items() -> impl Strategy<Value = Item> {
        let kind = prop_oneof![
            Just(ItemKind::Mutation),
            Just(ItemKind::Deletion),
            Just(ItemKind::Expiration),
            (any::<u8>(), any::<bool>()).prop_map(|(level, is_deletion)| {
                ItemKind::Prepare { level: DurabilityLevel(level), is_deletion }
            }),
            any::<u64>().prop_map(|prepared| ItemKind::Abort { prepared: Seqno(prepared) }),
            (any::<u32>(), any::<u8>(), any::<u32>()).prop_map(|(id, version, scope)| {
                ItemKind::SystemEvent { id: SystemEventId(id), version, scope_id: ScopeId(scope) }
            }),
        ];
        let numbers = any::<([u64; 3], [u32; 4], u8)>();
        let bytes = |max| prop::collection::vec(any::<u8>(), 0..max);
        (kind, numbers, bytes(250), bytes(300)).prop_map(|(kind, numbers, key, value)| {
            let ([seqno, rev, cas], [collection, flags, expiry, delete_time], datatype) = numbers;
            Item {
                kind,
                seqno: Seqno(seqno),
                rev_seqno: RevSeqno(rev),
                cas: Cas(cas),
                collection_id: CollectionId(collection),
                key: key.into(),
                value: value.into(),
                datatype: Datatype(datatype),
                flags,
                expiry,
                delete_time,
            }
        })
    }

    proptest! {
        #[test]
        fn stored_item_is_read_as_it_was_written(item in items()) {
            prop_assert_eq!(decode(&encode(&item).unwrap()).unwrap(), item);
        }

        #[test]
        fn stored_item_of_any_bytes_makes_nothing_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
