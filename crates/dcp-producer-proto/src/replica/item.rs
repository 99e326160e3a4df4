//! Stream messages as items.

use bytes::Bytes;
use dcp_wire::message::{Deletion, Expiration, Mutation, Prepare, SystemEvent};
use dcp_wire::{Cas, CollectionId, Datatype, DecodeError, DocKey, Frame, Opcode, RevSeqno, Seqno};

use crate::{Item, ItemKind};

/// The key of a message; without collections all documents are in the default one.
pub(super) fn doc_key(key: &[u8], collections: bool) -> Result<DocKey<'_>, DecodeError> {
    if collections {
        return DocKey::decode(key);
    }
    if key.is_empty() || key.len() > DocKey::MAX_DEFAULT_LEN {
        return Err(DecodeError::InvalidField("key"));
    }
    Ok(DocKey { collection_id: CollectionId::DEFAULT, key })
}

/// The item in a message other than COMMIT and ABORT.
pub(super) fn decode(frame: &Frame<'_>, collections: bool) -> Result<Item, DecodeError> {
    let item = match frame.header.opcode {
        Opcode::DCP_MUTATION => {
            let message = Mutation::decode(frame)?;
            Item {
                flags: message.flags,
                expiry: message.expiry,
                ..document(
                    ItemKind::Mutation,
                    message.seqno,
                    message.rev_seqno,
                    frame,
                    collections,
                )?
            }
        }
        Opcode::DCP_DELETION => {
            let message = Deletion::decode(frame)?;
            Item {
                delete_time: message.delete_time.unwrap_or_default(),
                ..document(
                    ItemKind::Deletion,
                    message.seqno,
                    message.rev_seqno,
                    frame,
                    collections,
                )?
            }
        }
        Opcode::DCP_EXPIRATION => {
            let message = Expiration::decode(frame)?;
            let kind = ItemKind::Expiration;
            Item {
                delete_time: message.delete_time,
                ..document(kind, message.seqno, message.rev_seqno, frame, collections)?
            }
        }
        Opcode::DCP_PREPARE => {
            let message = Prepare::decode(frame)?;
            let kind = ItemKind::Prepare { level: message.level, is_deletion: message.deleted };
            // A prepared deletion has the delete time in place of the expiry.
            let (expiry, delete_time) =
                if message.deleted { (0, message.expiry) } else { (message.expiry, 0) };
            Item {
                flags: message.flags,
                expiry,
                delete_time,
                ..document(kind, message.seqno, message.rev_seqno, frame, collections)?
            }
        }
        _ => system_event(frame)?,
    };
    if item.seqno == Seqno::ZERO {
        return Err(DecodeError::InvalidField("seqno 0"));
    }
    Ok(item)
}

fn document(
    kind: ItemKind,
    seqno: Seqno,
    rev_seqno: RevSeqno,
    frame: &Frame<'_>,
    collections: bool,
) -> Result<Item, DecodeError> {
    let DocKey { collection_id, key } = doc_key(frame.key, collections)?;
    Ok(Item {
        kind,
        seqno,
        rev_seqno,
        cas: frame.header.cas,
        collection_id,
        key: Bytes::copy_from_slice(key),
        value: Bytes::copy_from_slice(frame.value),
        datatype: frame.header.datatype,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    })
}

fn system_event(frame: &Frame<'_>) -> Result<Item, DecodeError> {
    let event = SystemEvent::decode(frame)?;
    let payload = event.payload()?.ok_or(DecodeError::InvalidField("system event"))?;
    let (scope_id, collection_id) = (payload.scope_id, payload.collection_id);
    Ok(Item {
        kind: ItemKind::SystemEvent { id: event.id, version: event.version, scope_id },
        seqno: event.seqno,
        rev_seqno: RevSeqno(1),
        cas: Cas(0),
        collection_id: collection_id.unwrap_or(CollectionId::DEFAULT),
        key: Bytes::copy_from_slice(event.key),
        value: Bytes::copy_from_slice(event.value),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    })
}

#[cfg(test)]
mod tests {
    use dcp_wire::message::{DurabilityLevel, StreamAddress};

    use super::*;

    const DOCUMENT: Item = Item {
        kind: ItemKind::Mutation,
        seqno: Seqno(7),
        rev_seqno: RevSeqno(3),
        cas: Cas(5),
        collection_id: CollectionId(9),
        key: Bytes::from_static(b"key"),
        value: Bytes::from_static(b"value"),
        datatype: Datatype::XATTR,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    };

    fn read(write: impl FnOnce(&mut Vec<u8>)) -> Item {
        let mut packet = Vec::new();
        write(&mut packet);
        let (frame, _) = Frame::parse(&packet, dcp_wire::MAX_BODY_LEN).unwrap().unwrap();
        decode(&frame, true).unwrap()
    }

    #[test]
    fn replica_item_has_everything_that_a_message_says_of_a_document() {
        let to = StreamAddress::default();
        let Item { seqno, rev_seqno, cas, datatype, .. } = DOCUMENT;
        let (key, value) = (&b"\x09key"[..], &b"value"[..]);
        let (flags, expiry, delete_time) = (0xf1a6, 1_800_000_000, 1_700_000_000);
        let written = Mutation {
            seqno,
            rev_seqno,
            cas,
            datatype,
            flags,
            expiry,
            lock_time: 0,
            nru: 0,
            key,
            value,
        };
        let read_back = read(|out| written.encode(to, out).unwrap());
        assert_eq!(read_back, Item { flags, expiry, ..DOCUMENT });

        let removed = Deletion {
            seqno,
            rev_seqno,
            cas,
            datatype,
            delete_time: Some(delete_time),
            key,
            value,
        };
        let kind = ItemKind::Deletion;
        let read_back = read(|out| removed.encode(to, out).unwrap());
        assert_eq!(read_back, Item { kind, delete_time, ..DOCUMENT });

        let expired = Expiration { seqno, rev_seqno, cas, datatype, delete_time, key, value };
        let kind = ItemKind::Expiration;
        let read_back = read(|out| expired.encode(to, out).unwrap());
        assert_eq!(read_back, Item { kind, delete_time, ..DOCUMENT });
    }

    #[test]
    fn prepare_has_the_expiry_or_for_a_deletion_its_time() {
        let Item { seqno, rev_seqno, cas, datatype, .. } = DOCUMENT;
        let (flags, level) = (0xf1a6, DurabilityLevel::MAJORITY);
        for (is_deletion, expiry, delete_time) in [(false, 15, 0), (true, 0, 15)] {
            let prepare = Prepare {
                seqno,
                rev_seqno,
                cas,
                datatype,
                flags,
                expiry: 15,
                lock_time: 0,
                nru: 0,
                deleted: is_deletion,
                level,
                key: b"\x09key",
                value: b"value",
            };
            let kind = ItemKind::Prepare { level, is_deletion };
            let read_back = read(|out| prepare.encode(StreamAddress::default(), out).unwrap());
            assert_eq!(read_back, Item { kind, flags, expiry, delete_time, ..DOCUMENT });
        }
    }
}
