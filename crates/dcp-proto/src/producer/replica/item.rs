//! Stream messages as items.

use bytes::Bytes;
use dcp_wire::message::{Deletion, Expiration, Mutation, Prepare, SystemEvent};
use dcp_wire::{Cas, CollectionId, Datatype, DecodeError, DocKey, Frame, Opcode, RevSeqno, Seqno};

use crate::producer::{Item, ItemKind};

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
