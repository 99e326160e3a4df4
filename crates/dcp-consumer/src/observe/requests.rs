//! Requests to nodes about vBuckets, outside of streams that deliver changes.

use std::collections::BTreeMap;

use dcp_proto::consumer::{
    Connection, EndCause, Event, OpenStreamError, StreamFilter, StreamPosition,
};
use dcp_proto::{FailoverLog, Position};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{CollectionId, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::persisted;
use crate::bucket::Bucket;
use crate::connection::{NodeConnection, refused};
use crate::{Error, ErrorKind};

/// Answers by vBucket; without those about which the node has none.
type Answers<A> = Result<BTreeMap<Vbid, A>, Error>;

type Request = dyn Fn(&mut Connection, &[Vbid]) + Send + Sync;
type Read<A> = dyn Fn(Vec<Event>, &[Vbid]) -> Answers<A> + Send + Sync;

/// A request to each node about some of its vBuckets, and how the answers are read.
pub(super) struct NodeRequest<A> {
    request: Box<Request>,
    read: Box<Read<A>>,
}

impl<A> NodeRequest<A> {
    fn new(
        request: impl Fn(&mut Connection, &[Vbid]) + Send + Sync + 'static,
        read: impl Fn(Vec<Event>, &[Vbid]) -> Answers<A> + Send + Sync + 'static,
    ) -> Self {
        Self { request: Box::new(request), read: Box::new(read) }
    }

    /// Asks one node.
    ///
    /// # Errors
    /// [`Error`] if the node does not answer what was requested.
    pub(super) async fn ask(
        &self,
        bucket: &Bucket,
        connection: &mut NodeConnection,
        vbids: &[Vbid],
    ) -> Answers<A> {
        let answers = bucket.ask(connection, |machine| (self.request)(machine, vbids)).await?;
        (self.read)(answers, vbids)
    }
}

/// No request: a connection is enough.
pub(super) fn nothing() -> NodeRequest<()> {
    NodeRequest::new(|_, _| {}, |_, vbids| Ok(vbids.iter().map(|&vbid| (vbid, ())).collect()))
}

/// Highest seqnos of the node's active vBuckets.
pub(super) fn high_seqnos() -> NodeRequest<Seqno> {
    let read = |answers: Vec<Event>, _: &[Vbid]| {
        let seqnos = answers.into_iter().filter_map(|answer| match answer {
            Event::HighSeqnos(seqnos) => Some(seqnos),
            _ => None,
        });
        Ok(seqnos.flatten().collect())
    };
    NodeRequest::new(|machine, _| machine.request_high_seqnos(), read)
}

/// Failover logs of vBuckets active on the node.
pub(super) fn failover_logs() -> NodeRequest<FailoverLog> {
    let read = |answers: Vec<Event>, _: &[Vbid]| {
        let logs = answers.into_iter().filter_map(|answer| match answer {
            Event::FailoverLog(vbid, log) => Some((vbid, log)),
            _ => None,
        });
        Ok(logs.collect())
    };
    NodeRequest::new(Connection::request_failover_logs, read)
}

/// Seqnos in memory and on disk of copies that were last observed on these branches.
pub(super) fn observed_seqnos(branches: BTreeMap<Vbid, Vbuuid>) -> NodeRequest<ObservedSeqno> {
    let request = move |machine: &mut Connection, vbids: &[Vbid]| {
        let branch = |vbid: &Vbid| Some((*vbid, *branches.get(vbid)?));
        machine.request_observed_seqnos(&vbids.iter().filter_map(branch).collect::<Vec<_>>());
    };
    NodeRequest::new(request, |answers, _| Ok(persisted::observed_seqnos(answers)))
}

/// Purge seqnos; `None` if the node does not report them.
pub(super) fn purge_seqnos() -> NodeRequest<Option<Seqno>> {
    let read = |answers: Vec<Event>, vbids: &[Vbid]| {
        let seqnos = answers.into_iter().find_map(|answer| match answer {
            Event::PurgeSeqnos(seqnos) => seqnos,
            _ => None,
        });
        // A vBucket without a copy on the node has moved.
        let seqno = |&vbid: &Vbid| match &seqnos {
            Some(seqnos) => Some((vbid, Some(*seqnos.get(&vbid)?))),
            None => Some((vbid, None)),
        };
        Ok(vbids.iter().filter_map(seqno).collect())
    };
    NodeRequest::new(|machine, _| machine.request_purge_seqnos(), read)
}

/// The seqnos that streams from these positions are rolled back to, if any: each is opened to end
/// where it begins.
pub(super) fn rollbacks(
    positions: BTreeMap<Vbid, Position>,
    filter: StreamFilter,
) -> NodeRequest<Option<Seqno>> {
    let request = move |machine: &mut Connection, vbids: &[Vbid]| {
        machine.set_filter(filter.clone());
        for (&vbid, position) in vbids.iter().filter_map(|vbid| positions.get_key_value(vbid)) {
            let from = StreamPosition::new(position.clone());
            if let Err(misuse) = machine.open_stream(vbid, position.seqno, from) {
                tracing::error!(name: "stream_not_requested", %misuse, "a stream could not be requested");
            }
        }
    };
    let read = |answers: Vec<Event>, _: &[Vbid]| {
        let ended = answers.into_iter().filter_map(|answer| match answer {
            Event::StreamEnded { vbid, cause, .. } => Some((vbid, cause)),
            _ => None,
        });
        let rollback = |(vbid, cause)| match cause {
            EndCause::RolledBack { to, .. } => Some(Ok((vbid, Some(to)))),
            EndCause::Refused(OpenStreamError::RollbackAtZero) => {
                Some(Ok((vbid, Some(Seqno::ZERO))))
            }
            EndCause::Refused(OpenStreamError::Refused { status, .. }) => {
                let has_moved = status == Status::NOT_MY_VBUCKET;
                (!has_moved).then(|| Err(refused(Opcode::DCP_STREAM_REQ, status)))
            }
            _ => Some(Ok((vbid, None))),
        };
        ended.filter_map(rollback).collect()
    };
    NodeRequest::new(request, read)
}

/// Highest seqnos that any of these collections has in the node's active vBuckets; 0 if they have
/// none. Collections that the node does not have are skipped.
///
/// A node leaves out a vBucket in which a collection has no data, just as one that has moved. So the
/// seqnos of whole vBuckets are requested before and after: those in both answers have not moved.
pub(super) fn collection_seqnos(collections: Vec<CollectionId>) -> NodeRequest<Seqno> {
    let has_none = collections.is_empty();
    let request = move |machine: &mut Connection, _: &[Vbid]| {
        machine.request_high_seqnos();
        machine.request_collection_seqnos(&collections);
        machine.request_high_seqnos();
    };
    let read = move |answers: Vec<Event>, _: &[Vbid]| {
        let (mut whole, mut highest) = (Vec::new(), BTreeMap::<Vbid, Seqno>::new());
        let mut is_answered = has_none;
        for answer in answers {
            match answer {
                Event::HighSeqnos(seqnos) => whole.push(BTreeMap::from_iter(seqnos)),
                Event::CollectionSeqnos(answers) => {
                    is_answered = true;
                    for answer in answers {
                        let opcode = Opcode::GET_ALL_VB_SEQNOS;
                        for (vbid, seqno) in answer.seqnos.map_err(|s| refused(opcode, s))? {
                            let most = highest.entry(vbid).or_default();
                            *most = seqno.max(*most);
                        }
                    }
                }
                _ => {}
            }
        }
        let ([before, after], true) = (&whole[..], is_answered) else {
            let message = "the node does not report the seqnos of collections";
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        let stayed = before.keys().filter(|vbid| after.contains_key(vbid));
        let seqno = |&vbid: &Vbid| (vbid, highest.get(&vbid).copied().unwrap_or_default());
        Ok(stayed.map(seqno).collect())
    };
    NodeRequest::new(request, read)
}

#[cfg(test)]
mod tests {
    use dcp_proto::Snapshot;
    use dcp_proto::consumer::{CollectionSeqnos, ConnectionConfig};
    use dcp_test::harness::{Harness, config};
    use dcp_wire::message::{GetAllVbSeqnos, StreamRequest};
    use dcp_wire::{Frame, ManifestUid};

    use super::*;

    #[test]
    fn ax_15_vbucket_without_the_collection_is_left_out_like_one_that_moved() {
        let collections = [CollectionId(9), CollectionId(10)];
        let request = collection_seqnos(collections.to_vec());
        let mut server = Harness::new(ConnectionConfig { collections: true, ..config() });
        (request.request)(&mut server.machine, &[]);
        let requests = server.packets();
        let collection = |at: usize| {
            let frame: Frame<'_> = requests[at].frame();
            GetAllVbSeqnos::decode(&frame).unwrap().collection_id
        };
        let requested: Vec<_> = (0..requests.len()).map(collection).collect();
        assert_eq!(requested, [None, Some(CollectionId(9)), Some(CollectionId(10)), None]);

        let seqno = |vbid, seqno| (Vbid(vbid), Seqno(seqno));
        let whole = vec![seqno(1, 9), seqno(3, 9), seqno(4, 9)];
        let of = |id, seqnos| CollectionSeqnos { collection: CollectionId(id), seqnos };
        let answers = |second| {
            vec![
                Event::HighSeqnos(whole.clone()),
                Event::CollectionSeqnos(vec![of(9, Ok(vec![seqno(1, 8)])), of(10, second)]),
                // vBucket 4 has moved.
                Event::HighSeqnos(whole[..2].to_vec()),
            ]
        };
        let seqnos = (request.read)(answers(Ok(vec![])), &[]).unwrap();
        assert_eq!(seqnos, [seqno(1, 8), seqno(3, 0)].into());
        let refused = (request.read)(answers(Err(Status::EACCESS)), &[]).unwrap_err();
        assert_eq!(refused.status(), Some(Status::EACCESS));
        let mut without = answers(Ok(vec![]));
        without.remove(1);
        assert_eq!((request.read)(without, &[]).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    /// A position inside a snapshot and past a change of collections.
    fn position() -> Position {
        let snapshot = Snapshot { start: Seqno(2), end: Seqno(9) };
        let manifest_uid = ManifestUid(0x1f);
        Position { seqno: Seqno(5), snapshot, manifest_uid, ..Position::EARLIEST }
    }

    #[test]
    fn rollback_probe_sends_the_request_of_a_stream() {
        let filter = StreamFilter::Collections(vec![CollectionId(9)]);
        let (of_one, vbids) = ([(Vbid(3), position())].into(), [Vbid(3), Vbid(4)]);
        let request = rollbacks(of_one, filter);
        let mut server = Harness::new(ConnectionConfig { collections: true, ..config() });
        (request.request)(&mut server.machine, &vbids);
        let requests = server.packets();
        assert_eq!(requests.len(), 1, "only of positions that are known");
        let frame = requests[0].frame();
        let request = StreamRequest::decode(&frame).unwrap();
        assert_eq!(request.value, b"{\"collections\":[\"9\"],\"uid\":\"1f\"}");
        assert_eq!((request.start_seqno, request.vbid), (Seqno(5), Vbid(3)));
    }

    #[test]
    fn rollback_probe_tells_from_each_stream_end_whether_it_would_resume() {
        let rollback = |to| EndCause::RolledBack {
            rollback: dcp_proto::Rollback {
                vbid: Vbid(3),
                seqno: Seqno::ZERO,
                from_seqno: Seqno(5),
                old_vbuuid: Vbuuid(1),
                new_vbuuid: Vbuuid(0),
                epoch: 1,
            },
            to: Seqno(to),
        };
        let refused =
            |status| EndCause::Refused(OpenStreamError::Refused { status, manifest_uid: None });
        let request = rollbacks(BTreeMap::new(), StreamFilter::All);
        let read = |cause| {
            let from = Box::new(StreamPosition::new(position()));
            (request.read)(vec![Event::StreamEnded { vbid: Vbid(3), cause, from }], &[])
        };
        let at_zero = EndCause::Refused(OpenStreamError::RollbackAtZero);
        for (cause, verdict) in [
            (EndCause::Complete, Some(None)),
            (rollback(3), Some(Some(Seqno(3)))),
            (at_zero, Some(Some(Seqno::ZERO))),
            (refused(Status::NOT_MY_VBUCKET), None),
        ] {
            assert_eq!(read(cause.clone()).unwrap().get(&Vbid(3)), verdict.as_ref(), "{cause}");
        }
        let error = read(refused(Status::EACCESS)).unwrap_err();
        assert_eq!(error.opcode(), Some(Opcode::DCP_STREAM_REQ));
        assert_eq!(
            (error.kind(), error.status()),
            (ErrorKind::AccessDenied, Some(Status::EACCESS))
        );
    }
}
