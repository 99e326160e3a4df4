//! Checks whether streams could resume, without streaming.

use std::collections::BTreeMap;

use bytes::BytesMut;
use dcp_proto::Position;
use dcp_proto::consumer::StreamFilter;
use dcp_proto::flow_control::counted_bytes;
use dcp_wire::message::{BufferAck, StreamRequest, StreamRequestFlags, rollback_seqno};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use super::{answer_noop, asked_for, lost, malformed, refused, unencodable, write};
use crate::{Error, StreamOptions};

/// Number of bytes that is acknowledged at once: a quarter of the smallest flow-control buffer.
const ACK_FROM: u64 = StreamOptions::MIN_BUFFER_SIZE as u64 / 4;

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
    let (mut unanswered, mut open, mut received) = (asked.len(), 0_usize, 0_u64);
    while unanswered > 0 || open > 0 {
        let opcode = Opcode::DCP_STREAM_REQ;
        let parsed = Frame::parse(leftover, MAX_BODY_LEN).map_err(|e| malformed(opcode, e))?;
        let Some((frame, used)) = parsed else {
            if received >= ACK_FROM {
                acknowledge(io, std::mem::take(&mut received)).await?;
            }
            if io.read_buf(leftover).await.map_err(lost)? == 0 {
                return Err(lost(std::io::ErrorKind::UnexpectedEof.into()));
            }
            continue;
        };
        let header = frame.header;
        // A stream that ends where it starts should have nothing but its end.
        received += counted_bytes(&header);
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
                // As for a stream: the node names no seqno to roll back to.
                Status::ERANGE => Some(Some(Seqno::ZERO)),
                Status::NOT_MY_VBUCKET => None,
                status => return Err(refused(opcode, status)),
            };
            verdicts.extend(asked_for(header.opaque).zip(verdict));
        } else if header.opcode == Opcode::DCP_STREAM_END {
            open = open.saturating_sub(1);
        }
        let _packet = leftover.split_to(used);
        answer_noop(io, &header).await?;
    }
    acknowledge(io, received).await?;
    Ok(verdicts)
}

/// Acknowledges bytes that count towards the connection's flow-control buffer.
async fn acknowledge<IO: AsyncWrite + Unpin>(io: &mut IO, bytes: u64) -> Result<(), Error> {
    let mut ack = BytesMut::new();
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    BufferAck { bytes }.encode(&mut ack).map_err(unencodable)?;
    write(io, &ack).await
}

#[cfg(test)]
mod tests {
    use dcp_proto::Snapshot;
    use dcp_test::packet::Packet;
    use dcp_test::peer::Peer;
    use dcp_test::words::message;
    use dcp_wire::message::StreamAddress;
    use tokio::io::duplex;

    use super::*;

    /// A position to ask about.
    fn position() -> Position {
        let seqno = Seqno(5);
        Position { seqno, snapshot: Snapshot::at(seqno), ..Position::EARLIEST }
    }

    #[tokio::test]
    async fn each_answer_has_its_verdict() {
        let seqno = 3_u64.to_be_bytes();
        for (status, value, verdict) in [
            (Status::ROLLBACK, &seqno[..], Some(Some(Seqno(3)))),
            (Status::ERANGE, b"", Some(Some(Seqno::ZERO))),
            (Status::NOT_MY_VBUCKET, b"", None),
        ] {
            let (mut client, far) = duplex(1 << 10);
            let mut node = Peer::new(far);
            let answer = Frame::response(Opcode::DCP_STREAM_REQ, status).with_opaque(Opaque(3));
            node.send_frame(&answer.with_value(value)).await;
            let position = position();
            let (asked, mut leftover) = ([(Vbid(3), &position)], BytesMut::new());
            let ask = rollbacks(&mut client, &mut leftover, &asked, &StreamFilter::All, false);
            assert_eq!(ask.await.unwrap().get(&Vbid(3)), verdict.as_ref(), "{status}");
        }
    }

    fn acknowledged(packet: &Packet) -> u32 {
        assert_eq!(packet.opcode(), Opcode::DCP_BUFFER_ACK);
        u32::from_be_bytes(packet.frame().extras.try_into().unwrap())
    }

    #[tokio::test]
    async fn whatever_comes_on_the_streams_is_acknowledged_before_it_fills_the_window() {
        let (mut client, far) = duplex(1 << 20);
        let mut node = Peer::new(far);
        let position = position();
        let (asked, mut leftover) = ([(Vbid(3), &position)], BytesMut::new());
        let ask = rollbacks(&mut client, &mut leftover, &asked, &StreamFilter::All, false);
        let serve = async {
            let opaque = node.receive().await.opaque();
            let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
            node.send_frame(&answer.with_opaque(opaque).with_value(&[1; 16])).await;
            let to = StreamAddress { vbid: Vbid(3), opaque, stream_id: None };
            let value = "v".repeat(40_000);
            node.send(&message("MARK [5-9] 0x1", to)).await;
            node.send(&message(&format!("MUT 6 key {value}"), to)).await;
            let first = acknowledged(&node.receive().await);
            node.send(&message("END 0", to)).await;
            (first, acknowledged(&node.receive().await))
        };
        let (verdicts, acknowledged) = tokio::join!(ask, serve);
        assert_eq!(verdicts.unwrap(), [(Vbid(3), None)].into());
        assert_eq!(acknowledged, (44 + 55 + 3 + 40_000, 28));
    }
}
