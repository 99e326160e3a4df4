use super::*;

/// A document with no value.
pub(super) fn item(seqno: u64) -> Item {
    Item {
        kind: ItemKind::Mutation,
        seqno: Seqno(seqno),
        rev_seqno: dcp_wire::RevSeqno(1),
        cas: dcp_wire::Cas(1),
        collection_id: dcp_wire::CollectionId::DEFAULT,
        key: Bytes::from(format!("k{seqno}")),
        value: Bytes::new(),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    }
}
