//! The messages of a stream that move its position: documents, system events, SEQNO_ADVANCED.

use dcp_wire::message::{Deletion, Expiration, Mutation, SeqnoAdvanced, SystemEvent};
use dcp_wire::{CollectionId, DecodeError, DocKey, Frame};

use super::{Fault, Progress, Stream};
use crate::consumer::Misbehaviour;
use crate::consumer::delivery::Hidden;
use crate::{Change, ChangeSink, Op, SystemEventRecord};

impl Stream {
    /// A document was written.
    #[inline(always)]
    pub(in crate::consumer) fn mutation<S: ChangeSink>(
        &mut self,
        frame: Frame<'_>,
        collections: bool,
        hidden: &Hidden,
        sink: &mut S,
    ) -> Result<Progress, Fault> {
        let mutation = Mutation::decode(&frame)?;
        let (collection_id, key) = split_key(mutation.key, collections)?;
        if mutation.seqno > self.clamp {
            return Ok(self.past_end(mutation.seqno)?);
        }
        let repeated_seqno = self.check_item(mutation.seqno)?;
        if hidden.hides(collection_id, key) {
            return Ok(Progress { repeated_seqno, no_row: true, ..self.processed(mutation.seqno) });
        }
        let change = Change {
            op: Op::Mutation,
            vbid: self.vbid,
            seqno: mutation.seqno,
            vbuuid: self.branch_of(mutation.seqno),
            epoch: self.resume.position.epoch,
            snapshot: self.row_snapshot(mutation.seqno),
            collection_id,
            key,
            value: mutation.value,
            datatype: mutation.datatype,
            cas: mutation.cas,
            rev_seqno: mutation.rev_seqno,
            flags: mutation.flags,
            expiry: mutation.expiry,
            delete_time: 0,
        };
        sink.change(&change)?;
        Ok(Progress { repeated_seqno, ..self.processed(mutation.seqno) })
    }

    /// A document was removed.
    pub(in crate::consumer) fn deletion<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        collections: bool,
        hidden: &Hidden,
        sink: &mut S,
    ) -> Result<Progress, Fault> {
        let deletion = Deletion::decode(frame)?;
        let delete_time = deletion.delete_time.unwrap_or(0);
        self.tombstone(Op::Deletion, &deletion, delete_time, (collections, hidden), sink)
    }

    /// A document expired.
    pub(in crate::consumer) fn expiration<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        collections: bool,
        hidden: &Hidden,
        sink: &mut S,
    ) -> Result<Progress, Fault> {
        let Expiration { seqno, rev_seqno, cas, datatype, delete_time, key, value } =
            Expiration::decode(frame)?;
        let deletion = Deletion { seqno, rev_seqno, cas, datatype, key, value, delete_time: None };
        self.tombstone(Op::Expiration, &deletion, delete_time, (collections, hidden), sink)
    }

    fn tombstone<S: ChangeSink>(
        &mut self,
        op: Op,
        tombstone: &Deletion<'_>,
        delete_time: u32,
        (collections, hidden): (bool, &Hidden),
        sink: &mut S,
    ) -> Result<Progress, Fault> {
        let (collection_id, key) = split_key(tombstone.key, collections)?;
        if tombstone.seqno > self.clamp {
            return Ok(self.past_end(tombstone.seqno)?);
        }
        let repeated_seqno = self.check_item(tombstone.seqno)?;
        if hidden.hides(collection_id, key) {
            return Ok(Progress {
                repeated_seqno,
                no_row: true,
                ..self.processed(tombstone.seqno)
            });
        }
        let change = Change {
            op,
            vbid: self.vbid,
            seqno: tombstone.seqno,
            vbuuid: self.branch_of(tombstone.seqno),
            epoch: self.resume.position.epoch,
            snapshot: self.row_snapshot(tombstone.seqno),
            collection_id,
            key,
            value: tombstone.value,
            datatype: tombstone.datatype,
            cas: tombstone.cas,
            rev_seqno: tombstone.rev_seqno,
            flags: 0,
            expiry: 0,
            delete_time,
        };
        sink.change(&change)?;
        Ok(Progress { repeated_seqno, ..self.processed(tombstone.seqno) })
    }

    /// A collection or scope changed.
    pub(in crate::consumer) fn system_event<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        hidden: &mut Hidden,
        sink: &mut S,
    ) -> Result<Progress, Fault> {
        let event = SystemEvent::decode(frame)?;
        let learned = hidden.learn(&event);
        if event.seqno > self.clamp {
            return Ok(Progress { learned, ..self.past_end(event.seqno)? });
        }
        let repeated_seqno = self.check_item(event.seqno)?;
        sink.system_event(&SystemEventRecord {
            vbid: self.vbid,
            seqno: event.seqno,
            epoch: self.resume.position.epoch,
            id: event.id,
            version: event.version,
            key: event.key,
            value: event.value,
        })?;
        // What is not understood is passed over, as the protocol wants it.
        if let Ok(Some(payload)) = event.payload() {
            self.resume.position.manifest_uid = payload.manifest_uid;
        }
        Ok(Progress { repeated_seqno, learned, ..self.processed(event.seqno) })
    }

    /// Nothing up to a seqno is meant for the stream.
    pub(in crate::consumer) fn seqno_advanced(
        &mut self,
        frame: &Frame<'_>,
    ) -> Result<Progress, Fault> {
        let seqno = SeqnoAdvanced::decode(frame)?.seqno;
        if seqno > self.clamp {
            return Ok(self.past_end(seqno)?);
        }
        let last = self.resume.position.seqno;
        if self.oso.is_none() {
            if seqno < last {
                return Err(Misbehaviour::SeqnoNotAscending { seqno, last }.into());
            }
            self.enter_snapshot(seqno)?;
        }
        let progress = self.processed(seqno);
        self.advanced = true;
        Ok(progress)
    }
}

/// Collection and key of a document.
#[inline(always)]
fn split_key(bytes: &[u8], collections: bool) -> Result<(CollectionId, &[u8]), DecodeError> {
    if collections {
        let DocKey { collection_id, key } = DocKey::decode(bytes)?;
        return Ok((collection_id, key));
    }
    if bytes.is_empty() || bytes.len() > DocKey::MAX_DEFAULT_LEN {
        return Err(DecodeError::InvalidField("key"));
    }
    Ok((CollectionId::DEFAULT, bytes))
}
