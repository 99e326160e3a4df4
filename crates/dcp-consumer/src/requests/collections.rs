//! Requests for the seqnos of collections.

use std::collections::BTreeMap;

use bytes::BytesMut;
use dcp_wire::message::{GetAllVbSeqnos, VbucketState};
use dcp_wire::{CollectionId, Opaque, Opcode, Seqno, Status, Vbid};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{answer, decode_seqnos, malformed, refused, unencodable, write};
use crate::Error;

/// Highest seqno that any of these collections has in each of the node's active vBuckets.
/// Collections that the node does not have are skipped.
pub(crate) async fn collection_seqnos<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
    collections: &[CollectionId],
) -> Result<BTreeMap<Vbid, Seqno>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::GET_ALL_VB_SEQNOS;
    let mut out = BytesMut::new();
    for &id in collections {
        let state = Some(Some(VbucketState::ACTIVE));
        let request = GetAllVbSeqnos { state, collection_id: Some(id) };
        request.encode(Opaque(0), &mut out).map_err(unencodable)?;
    }
    write(io, &out).await?;
    let mut highest = BTreeMap::<Vbid, Seqno>::new();
    for _ in collections {
        let answer = answer(io, leftover, opcode).await?;
        match answer.status {
            Status::SUCCESS => {}
            Status::UNKNOWN_COLLECTION => continue,
            status => return Err(refused(opcode, status)),
        }
        let seqnos = decode_seqnos(&answer.value).map_err(|error| malformed(opcode, error))?;
        for (vbid, seqno) in seqnos {
            let most = highest.entry(vbid).or_default();
            *most = seqno.max(*most);
        }
    }
    Ok(highest)
}
