//! Requests to one node outside of any stream, each with its answer.

mod rollbacks;

use std::collections::BTreeMap;

use bytes::{Buf, Bytes, BytesMut};
use dcp_proto::FailoverLog;
use dcp_proto::topology::{MAX_CONFIG_LEN, Manifest};
use dcp_wire::message::{GetAllVbSeqnos, ObserveSeqno, ObservedSeqno, VbSeqnos, VbucketState};
use dcp_wire::{
    CollectionId, Datatype, EncodeError, Frame, Header, MAX_BODY_LEN, Opaque, Opcode, Seqno,
    Status, Vbid, Vbuuid, snappy,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub(crate) use self::rollbacks::rollbacks;
use crate::{Error, ErrorKind};

/// An answer.
struct Answer {
    opaque: Opaque,
    status: Status,
    datatype: Datatype,
    key: Bytes,
    value: Bytes,
}

/// Highest seqnos of the node's active vBuckets.
pub(crate) async fn high_seqnos<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
) -> Result<BTreeMap<Vbid, Seqno>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    request_seqnos(io, [None]).await?;
    whole(seqnos_answered(io, leftover).await?)
}

/// Highest seqnos that any of these collections has in the node's active vBuckets; 0 if they have
/// none. Collections that the node does not have are skipped.
///
/// A node leaves out a vBucket in which a collection has no data, just as one that has moved. So the
/// seqnos of whole vBuckets are requested before and after: those in both answers have not moved.
pub(crate) async fn collection_seqnos<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
    collections: &[CollectionId],
) -> Result<BTreeMap<Vbid, Seqno>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let ids = collections.iter().copied().map(Some);
    request_seqnos(io, [None].into_iter().chain(ids).chain([None])).await?;
    let mut highest = whole(seqnos_answered(io, leftover).await?)?;
    highest.values_mut().for_each(|seqno| *seqno = Seqno::ZERO);
    for _ in collections {
        for (vbid, seqno) in seqnos_answered(io, leftover).await?.unwrap_or_default() {
            if let Some(most) = highest.get_mut(&vbid) {
                *most = seqno.max(*most);
            }
        }
    }
    let after = whole(seqnos_answered(io, leftover).await?)?;
    highest.retain(|vbid, _| after.contains_key(vbid));
    Ok(highest)
}

async fn request_seqnos<IO: AsyncWrite + Unpin>(
    io: &mut IO,
    requested: impl IntoIterator<Item = Option<CollectionId>>,
) -> Result<(), Error> {
    let mut out = BytesMut::new();
    for collection_id in requested {
        let state = Some(Some(VbucketState::ACTIVE));
        let request = GetAllVbSeqnos { state, collection_id };
        request.encode(Opaque(0), &mut out).map_err(unencodable)?;
    }
    write(io, &out).await
}

/// The next answer to a request for seqnos; `None` if the node does not have the collection.
async fn seqnos_answered<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
) -> Result<Option<BTreeMap<Vbid, Seqno>>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::GET_ALL_VB_SEQNOS;
    let answer = answer(io, leftover, opcode).await?;
    match answer.status {
        Status::SUCCESS => {}
        Status::UNKNOWN_COLLECTION => return Ok(None),
        status => return Err(refused(opcode, status)),
    }
    let seqnos = VbSeqnos::decode(&answer.value).map_err(|error| malformed(opcode, error))?;
    Ok(Some(seqnos.collect()))
}

/// The answer to a request for the seqnos of whole vBuckets.
fn whole(answered: Option<BTreeMap<Vbid, Seqno>>) -> Result<BTreeMap<Vbid, Seqno>, Error> {
    answered.ok_or_else(|| refused(Opcode::GET_ALL_VB_SEQNOS, Status::UNKNOWN_COLLECTION))
}

/// Failover logs of vBuckets active on the node; only on a connection with DCP opened. A vBucket
/// that has moved meanwhile is left out.
pub(crate) async fn failover_logs<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
    vbids: &[Vbid],
) -> Result<BTreeMap<Vbid, FailoverLog>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::DCP_GET_FAILOVER_LOG;
    let mut out = BytesMut::new();
    for &vbid in vbids {
        let request = Frame::request(opcode).with_vbid(vbid).with_opaque(Opaque(vbid.0.into()));
        encode(&request, &mut out)?;
    }
    write(io, &out).await?;
    let mut logs = BTreeMap::new();
    for _ in vbids {
        let answer = answer(io, leftover, opcode).await?;
        match answer.status {
            Status::SUCCESS => {}
            Status::NOT_MY_VBUCKET => continue,
            status => return Err(refused(opcode, status)),
        }
        let log = FailoverLog::decode(&answer.value).map_err(|error| malformed(opcode, error))?;
        if let Some(vbid) = asked_for(answer.opaque) {
            logs.insert(vbid, log);
        }
    }
    Ok(logs)
}

/// Seqnos in memory and on disk of the node's copies of vBuckets, requested with the branch on
/// which each was last observed. A vBucket without a copy on the node is left out; a copy that does
/// not know the branch is reported without a branch.
pub(crate) async fn observe<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
    asked: &[(Vbid, Vbuuid)],
) -> Result<BTreeMap<Vbid, ObservedSeqno>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::OBSERVE_SEQNO;
    let mut out = BytesMut::new();
    for &(vbid, vbuuid) in asked {
        let request = ObserveSeqno { vbuuid };
        request.encode(vbid, Opaque(vbid.0.into()), &mut out).map_err(unencodable)?;
    }
    write(io, &out).await?;
    let mut seqnos = BTreeMap::new();
    for _ in asked {
        let answer = answer(io, leftover, opcode).await?;
        let Some(vbid) = asked_for(answer.opaque) else { continue };
        let observed = match answer.status {
            Status::SUCCESS => {
                ObservedSeqno::decode(&answer.value).map_err(|error| malformed(opcode, error))?
            }
            Status::NOT_MY_VBUCKET => continue,
            Status::KEY_ENOENT => ObservedSeqno {
                vbid,
                vbuuid: Vbuuid(0),
                persisted_seqno: Seqno::ZERO,
                current_seqno: Seqno::ZERO,
                failover: None,
            },
            status => return Err(refused(opcode, status)),
        };
        seqnos.insert(vbid, observed);
    }
    Ok(seqnos)
}

/// Purge seqnos of the node's copies of vBuckets. `None` if the user may not read them.
pub(crate) async fn purge_seqnos<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
) -> Result<Option<BTreeMap<Vbid, Seqno>>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::STAT;
    let mut out = BytesMut::new();
    encode(&Frame::request(opcode).with_key(b"vbucket-seqno"), &mut out)?;
    write(io, &out).await?;
    let mut seqnos = BTreeMap::new();
    loop {
        let answer = answer(io, leftover, opcode).await?;
        if answer.status.is_temporary() {
            return Err(refused(opcode, answer.status));
        }
        if !answer.status.is_success() {
            tracing::debug!(status = %answer.status, "a node does not report its purge seqnos");
            return Ok(None);
        }
        if answer.key.is_empty() {
            return Ok(Some(seqnos));
        }
        seqnos.extend(purge_seqno(&answer.key, &answer.value));
    }
}

/// Reads `vb_17:purge_seqno` and ignores the other statistics.
fn purge_seqno(name: &[u8], value: &[u8]) -> Option<(Vbid, Seqno)> {
    let vbid = std::str::from_utf8(name).ok()?.strip_prefix("vb_")?.strip_suffix(":purge_seqno")?;
    let seqno = std::str::from_utf8(value).ok()?;
    Some((Vbid(vbid.parse().ok()?), Seqno(seqno.parse().ok()?)))
}

/// The cluster map as JSON; empty if the node has none.
pub(crate) async fn cluster_map<IO>(io: &mut IO, leftover: &mut BytesMut) -> Result<Bytes, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::GET_CLUSTER_CONFIG;
    let mut out = BytesMut::new();
    encode(&Frame::request(opcode), &mut out)?;
    write(io, &out).await?;
    let answer = answer(io, leftover, opcode).await?;
    if answer.status.is_success() {
        inflated(opcode, answer)
    } else {
        Err(refused(opcode, answer.status))
    }
}

/// The collections manifest; `None` if the node has none.
pub(crate) async fn manifest<IO>(
    io: &mut IO,
    leftover: &mut BytesMut,
) -> Result<Option<Manifest>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let opcode = Opcode::GET_COLLECTIONS_MANIFEST;
    let mut out = BytesMut::new();
    encode(&Frame::request(opcode), &mut out)?;
    write(io, &out).await?;
    let answer = answer(io, leftover, opcode).await?;
    match answer.status {
        Status::SUCCESS => {
            let json = inflated(opcode, answer)?;
            Manifest::parse(&json).map(Some).map_err(|error| malformed(opcode, error))
        }
        Status::NO_COLLECTIONS_MANIFEST => Ok(None),
        status => Err(refused(opcode, status)),
    }
}

/// The value of an answer, decompressed if necessary.
fn inflated(opcode: Opcode, answer: Answer) -> Result<Bytes, Error> {
    if !answer.datatype.contains(Datatype::SNAPPY) {
        return Ok(answer.value);
    }
    let inflated = snappy::decompress(&answer.value, MAX_CONFIG_LEN);
    inflated.map(Bytes::from).map_err(|error| malformed(opcode, error))
}

/// The vBucket of a request, by its opaque.
fn asked_for(opaque: Opaque) -> Option<Vbid> {
    u16::try_from(opaque.0).ok().map(Vbid)
}

/// The next answer to `opcode`. Answers noops meanwhile; nothing else may arrive, since no stream
/// is open.
async fn answer<IO>(io: &mut IO, leftover: &mut BytesMut, opcode: Opcode) -> Result<Answer, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let parsed = Frame::parse(leftover, MAX_BODY_LEN).map_err(|e| malformed(opcode, e))?;
        let Some((frame, used)) = parsed else {
            let read = io.read_buf(leftover).await.map_err(lost)?;
            if read == 0 {
                return Err(lost(std::io::ErrorKind::UnexpectedEof.into()));
            }
            continue;
        };
        let header = frame.header;
        let (key, value) = (frame.key.len(), frame.value.len());
        let mut packet = leftover.split_to(used).freeze();
        if header.magic.is_response() && header.opcode == opcode {
            let value = packet.split_off(used - value);
            let key = packet.split_off(packet.len() - key);
            let (opaque, status, datatype) = (header.opaque, header.status(), header.datatype);
            return Ok(Answer { opaque, status, datatype, key, value });
        }
        answer_noop(io, &header).await?;
    }
}

/// Answers the noops that have arrived while no answer is expected.
pub(crate) async fn answer_noops<IO>(io: &mut IO, leftover: &mut BytesMut) -> Result<(), Error>
where
    IO: AsyncWrite + Unpin,
{
    let opcode = Opcode::DCP_NOOP;
    while let Some((frame, used)) =
        Frame::parse(leftover, MAX_BODY_LEN).map_err(|e| malformed(opcode, e))?
    {
        let header = frame.header;
        leftover.advance(used);
        answer_noop(io, &header).await?;
    }
    Ok(())
}

/// Answers a packet if it is a noop.
async fn answer_noop<IO: AsyncWrite + Unpin>(io: &mut IO, header: &Header) -> Result<(), Error> {
    if header.opcode != Opcode::DCP_NOOP || header.magic.is_response() {
        return Ok(());
    }
    let mut out = BytesMut::new();
    let noop = Frame::response(Opcode::DCP_NOOP, Status::SUCCESS);
    encode(&noop.with_opaque(header.opaque), &mut out)?;
    write(io, &out).await
}

async fn write<IO: AsyncWrite + Unpin>(io: &mut IO, bytes: &[u8]) -> Result<(), Error> {
    io.write_all(bytes).await.map_err(lost)?;
    io.flush().await.map_err(lost)
}

fn encode(frame: &Frame<'_>, out: &mut BytesMut) -> Result<(), Error> {
    frame.encode(out).map_err(unencodable)
}

fn unencodable(error: EncodeError) -> Error {
    Error::new(ErrorKind::Protocol, "a request does not fit a packet").with_source(error)
}

fn lost(error: std::io::Error) -> Error {
    Error::new(ErrorKind::ConnectionLost, "the connection broke before the answer")
        .with_source(error)
}

fn refused(opcode: Opcode, status: Status) -> Error {
    Error::new(ErrorKind::Status, format!("the server refused {opcode} ({status})"))
        .with_status(status)
        .with_opcode(opcode)
}

fn malformed(opcode: Opcode, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    let message = format!("the server's answer to {opcode} is invalid");
    Error::new(ErrorKind::Protocol, message).with_source(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn seqnos_come_in_entries_of_ten_bytes() {
        let value = [0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 3, 0, 0, 0, 0, 0, 0, 1, 0];
        let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
        let answers = [answer.with_value(&value), answer.with_value(&value[..19])];
        let (mut client, server) = answered(&answers).await;
        let mut leftover = BytesMut::new();
        let seqnos = high_seqnos(&mut client, &mut leftover).await.unwrap();
        assert_eq!(seqnos, [(Vbid(1), Seqno(9)), (Vbid(3), Seqno(256))].into());
        let cut = high_seqnos(&mut client, &mut leftover).await.unwrap_err();
        assert_eq!(cut.kind(), ErrorKind::Protocol);
        let sent = sent(client, server).await;
        assert_eq!((sent[4], &sent[24..28]), (4, &[0, 0, 0, 1][..]), "active vBuckets");
    }

    /// A connection on which these answers have come; what is sent goes to the other end of it.
    async fn answered(answers: &[Frame<'_>]) -> (tokio::io::DuplexStream, tokio::io::DuplexStream) {
        let (client, mut server) = tokio::io::duplex(4096);
        let mut out = BytesMut::new();
        for answer in answers {
            answer.encode(&mut out).unwrap();
        }
        server.write_all(&out).await.unwrap();
        (client, server)
    }

    /// The packets that were sent.
    async fn sent(client: tokio::io::DuplexStream, mut server: tokio::io::DuplexStream) -> Vec<u8> {
        drop(client);
        let mut bytes = Vec::new();
        server.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn ax_07_and_ax_10_a_log_comes_from_those_who_have_the_vbucket() {
        let opcode = Opcode::DCP_GET_FAILOVER_LOG;
        let mut log = [0; 16];
        log[7] = 0x57;
        let has = Frame::response(opcode, Status::SUCCESS).with_opaque(Opaque(3)).with_value(&log);
        let has_not = Frame::response(opcode, Status::NOT_MY_VBUCKET).with_opaque(Opaque(4));
        let (mut client, server) = answered(&[has_not, has]).await;
        let asked = [Vbid(3), Vbid(4)];
        let logs = failover_logs(&mut client, &mut BytesMut::new(), &asked).await.unwrap();
        assert_eq!(logs.keys().copied().collect::<Vec<_>>(), [Vbid(3)]);
        let entries: Vec<_> =
            logs[&Vbid(3)].entries().iter().map(|e| (e.vbuuid, e.seqno)).collect();
        assert_eq!(entries, [(Vbuuid(0x57), Seqno::ZERO)]);
        let sent = sent(client, server).await;
        let vbids: Vec<_> = sent.chunks(24).map(|packet| (packet[1], packet[7])).collect();
        assert_eq!(vbids, [(0x54, 3), (0x54, 4)], "without extras, key or value");
    }

    #[tokio::test]
    async fn ax_08_a_log_that_is_refused_is_an_error() {
        let refused = Frame::response(Opcode::DCP_GET_FAILOVER_LOG, Status::EINVAL);
        let (mut client, _server) = answered(&[refused]).await;
        let error = failover_logs(&mut client, &mut BytesMut::new(), &[Vbid(3)]).await.unwrap_err();
        assert_eq!((error.kind(), error.status()), (ErrorKind::Status, Some(Status::EINVAL)));
    }

    #[tokio::test]
    async fn ax_15_a_vbucket_without_the_collection_is_left_out_as_one_that_has_moved() {
        let entry = |vbid: u8, seqno: u8| [0, vbid, 0, 0, 0, 0, 0, 0, 0, seqno];
        let whole = [entry(1, 9), entry(3, 9), entry(4, 9)].concat();
        let has = entry(1, 8);
        let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
        let unknown = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::UNKNOWN_COLLECTION);
        let answers = [
            answer.with_value(&whole),
            answer.with_value(&has),
            unknown,
            // vBucket 4 has moved.
            answer.with_value(&whole[..20]),
        ];
        let (mut client, server) = answered(&answers).await;
        let (asked, mut leftover) = ([CollectionId(9), CollectionId(10)], BytesMut::new());
        let seqnos = collection_seqnos(&mut client, &mut leftover, &asked).await.unwrap();
        assert_eq!(seqnos, [(Vbid(1), Seqno(8)), (Vbid(3), Seqno::ZERO)].into());
        let sent = sent(client, server).await;
        assert_eq!(sent[24..28], [0, 0, 0, 1], "active vBuckets");
        assert_eq!(sent[52..60], [0, 0, 0, 1, 0, 0, 0, 9], "of collection 9");
        assert_eq!(sent.len(), 28 + 32 + 32 + 28);
    }

    #[tokio::test]
    async fn ax_19_who_does_not_know_the_branch_has_persisted_nothing_on_it() {
        let unknown = Frame::response(Opcode::OBSERVE_SEQNO, Status::KEY_ENOENT);
        let (mut client, server) = answered(&[unknown.with_opaque(Opaque(3))]).await;
        let asked = [(Vbid(3), Vbuuid(0x57))];
        let seqnos = observe(&mut client, &mut BytesMut::new(), &asked).await.unwrap();
        let observed = &seqnos[&Vbid(3)];
        assert_eq!((observed.vbuuid, observed.persisted_seqno), (Vbuuid(0), Seqno::ZERO));
        assert_eq!(sent(client, server).await[24..], [0, 0, 0, 0, 0, 0, 0, 0x57]);
    }
}
