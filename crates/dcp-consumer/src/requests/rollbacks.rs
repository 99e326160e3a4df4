//! Checks whether streams could resume, without streaming.

use std::collections::BTreeMap;

use bytes::BytesMut;
use dcp_proto::Position;
use dcp_proto::consumer::StreamFilter;
use dcp_wire::message::{BufferAck, StreamRequest, StreamRequestFlags, rollback_seqno};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use super::{answer_noop, asked_for, lost, malformed, refused, unencodable, write};
use crate::Error;

/// Requests an empty stream from each of these positions: `None` if the server would resume there,
/// or the seqno that it rolls back to. Only on a connection with DCP opened.
///
/// A stream that ends where it starts is accepted or rolled back like any other, and ends at once.
/// A vBucket that has moved meanwhile is left out. `purge_seqnos` says whether the server accepts
/// those of the positions, as it does from a stream that resumes there.
pub(crate) async fn rollbacks<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
    asked: &[(Vbid, &Position)],
    filter: &StreamFilter,
    purge_seqnos: bool,
) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let member = filter.member().map(|(name, value)| format!("\"{name}\":{value}"));
    let mut out = BytesMut::new();
    for &(vbid, position) in asked {
        let snapshot = position.request_snapshot();
        let purge_seqno = (purge_seqnos && position.purge_seqno != Seqno::ZERO)
            .then(|| format!("\"purge_seqno\":\"{}\"", position.purge_seqno));
        let members: Vec<&str> = member.iter().chain(&purge_seqno).map(String::as_str).collect();
        // Servers refuse an object without known members.
        let value = match members.is_empty() {
            true => String::new(),
            false => format!("{{{}}}", members.join(",")),
        };
        let request = StreamRequest {
            vbid,
            opaque: Opaque(vbid.0.into()),
            flags: StreamRequestFlags::ACTIVE_VB_ONLY,
            start_seqno: position.seqno,
            end_seqno: position.seqno,
            vbuuid: position.vbuuid(),
            snapshot_start: snapshot.start,
            snapshot_end: snapshot.end,
            value: value.as_bytes(),
        };
        request.encode(&mut out).map_err(unencodable)?;
    }
    write(io, &out).await?;
    let mut verdicts = BTreeMap::new();
    let (mut unanswered, mut open, mut received) = (asked.len(), 0_usize, 0_usize);
    while unanswered > 0 || open > 0 {
        let opcode = Opcode::DCP_STREAM_REQ;
        let parsed = Frame::parse(leftover, MAX_BODY_LEN).map_err(|e| malformed(opcode, e))?;
        let Some((frame, used)) = parsed else {
            if io.read_buf(leftover).await.map_err(lost)? == 0 {
                return Err(lost(std::io::ErrorKind::UnexpectedEof.into()));
            }
            continue;
        };
        let header = frame.header;
        if header.magic.is_response() && header.opcode == opcode {
            unanswered = unanswered.saturating_sub(1);
            let verdict = match header.status() {
                Status::SUCCESS => {
                    open += 1;
                    Some(None)
                }
                Status::ROLLBACK => {
                    Some(Some(rollback_seqno(&frame).map_err(|error| malformed(opcode, error))?))
                }
                Status::NOT_MY_VBUCKET => None,
                status => return Err(refused(opcode, status)),
            };
            verdicts.extend(asked_for(header.opaque).zip(verdict));
        } else if header.opcode == Opcode::DCP_STREAM_END {
            open = open.saturating_sub(1);
            received += used;
        }
        let _packet = leftover.split_to(used);
        answer_noop(io, &header).await?;
    }
    // STREAM_END messages count towards the connection's window.
    let mut ack = BytesMut::new();
    let bytes = u32::try_from(received).unwrap_or(u32::MAX);
    BufferAck { bytes }.encode(&mut ack).map_err(unencodable)?;
    write(io, &ack).await?;
    Ok(verdicts)
}
