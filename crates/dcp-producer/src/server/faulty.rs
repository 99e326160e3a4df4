//! What a connection does instead of the machines when a fault is injected.

use bytes::BytesMut;
use dcp_producer_proto::{BucketSource, VBucketSource};
use dcp_wire::message::StreamRequest;
use dcp_wire::{Datatype, Frame, Opaque, Opcode, Status};

use crate::cluster::NodeBucket;
use crate::fault::Refusal;
use crate::kv::Session;

/// Offset of the end seqno in the extras of a stream request.
const END_SEQNO_AT: usize = 16;

/// Answers a request that is not executed.
pub(super) fn refuse(session: &Session, frame: &Frame<'_>, refusal: Refusal, out: &mut BytesMut) {
    let answer =
        |status| Frame::response(frame.header.opcode, status).with_opaque(frame.header.opaque);
    let written = match refusal {
        Refusal::Status(status) => answer(status).encode(out),
        Refusal::Rollback(seqno) => {
            answer(Status::ROLLBACK).with_value(&seqno.0.to_be_bytes()).encode(out)
        }
        Refusal::NotMyVbucket { map } => {
            let served = session.served().filter(|_| map);
            let view = served.and_then(|served| served.map().view(session.node()).cloned());
            let config = view.unwrap_or_default();
            let json = session.features().dcp.json && !config.is_empty();
            let datatype = if json { Datatype::JSON } else { Datatype::RAW };
            answer(Status::NOT_MY_VBUCKET).with_datatype(datatype).with_value(&config).encode(out)
        }
    };
    if let Err(error) = written {
        tracing::warn!(name: "fault_not_sent", %error, "cannot send the answer that a fault rule asks for");
    }
}

/// The extras of a stream request that ends up to `count` changes later, as far as the vBucket has
/// them; `None` if it does not or the request is malformed.
pub(super) fn with_later_end(session: &Session, frame: &Frame<'_>, count: u64) -> Option<Vec<u8>> {
    let request = StreamRequest::decode(frame).ok()?;
    let served = session.served()?;
    let map = served.map();
    let (node, rights) = (session.node(), session.rights());
    let source = NodeBucket { served, map: &map, node, rights };
    let high = source.vbucket(request.vbid)?.high_seqno();
    let end = request.end_seqno.0;
    let later = end.saturating_add(count).min(high.0);
    if later <= end {
        return None;
    }
    let mut extras = frame.extras.to_vec();
    extras.get_mut(END_SEQNO_AT..END_SEQNO_AT + 8)?.copy_from_slice(&later.to_be_bytes());
    Some(extras)
}

/// The answer to a noop that was not sent to the client.
pub(super) fn noop_answer(opaque: Opaque) -> Frame<'static> {
    Frame::response(Opcode::DCP_NOOP, Status::SUCCESS).with_opaque(opaque)
}
