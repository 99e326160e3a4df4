//! The messages of a stream that move its position: documents, system events, SEQNO_ADVANCED.

use dcp_wire::message::{Deletion, Expiration, Mutation, SeqnoAdvanced, SystemEvent};
use dcp_wire::{CollectionId, DecodeError, DocKey, Frame, Header, Opcode, RevSeqno, Vbuuid};

use super::{Fault, ItemEffects, Stream};
use crate::consumer::Misbehaviour;
use crate::consumer::delivery::Exclusions;
use crate::{Change, ChangeSink, Op, RowFilter, Snapshot, SystemEventRecord};

impl Stream {
    /// A document was written, was removed, or expired.
    pub(in crate::consumer) fn document<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        collections: bool,
        exclusions: &Exclusions,
        rows: &RowFilter,
        sink: &mut S,
    ) -> Result<ItemEffects, Fault> {
        let change = decode(frame, collections)?;
        let seqno = change.seqno;
        if seqno > self.clamp {
            return Ok(self.past_end(seqno)?);
        }
        let repeated_seqno = self.check_item(seqno)?;
        let no_row = exclusions.excludes(change.collection_id, change.key) || !rows.passes(&change);
        if !no_row {
            sink.change(&Change {
                vbuuid: self.branch_of(seqno),
                epoch: self.position.epoch,
                snapshot: self.row_snapshot(seqno),
                history: self.keeps_versions,
                ..change
            })?;
        }
        Ok(ItemEffects { repeated_seqno, no_row, ..self.processed(seqno) })
    }

    /// A collection or scope changed.
    pub(in crate::consumer) fn system_event<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        exclusions: &mut Exclusions,
        sink: &mut S,
    ) -> Result<ItemEffects, Fault> {
        let event = SystemEvent::decode(frame)?;
        let learned = exclusions.learn(&event);
        if event.seqno > self.clamp {
            return Ok(ItemEffects { learned, ..self.past_end(event.seqno)? });
        }
        let repeated_seqno = self.check_item(event.seqno)?;
        if !exclusions.excludes_event(&event) {
            sink.system_event(&SystemEventRecord {
                vbid: self.vbid,
                seqno: event.seqno,
                epoch: self.position.epoch,
                id: event.id,
                version: event.version,
                key: event.key,
                value: event.value,
            })?;
        }
        // Unknown payloads are skipped, as the protocol demands.
        if let Ok(Some(payload)) = event.payload() {
            self.position.manifest_uid = payload.manifest_uid;
        }
        Ok(ItemEffects { repeated_seqno, learned, ..self.processed(event.seqno) })
    }

    /// Nothing up to a seqno is part of the stream.
    pub(in crate::consumer) fn seqno_advanced(
        &mut self,
        frame: &Frame<'_>,
    ) -> Result<ItemEffects, Fault> {
        let seqno = SeqnoAdvanced::decode(frame)?.seqno;
        if seqno > self.clamp {
            return Ok(self.past_end(seqno)?);
        }
        let last = self.position.seqno;
        if self.oso.is_none() {
            if seqno < last {
                return Err(Misbehaviour::SeqnoNotAscending { seqno, last }.into());
            }
            self.enter_snapshot(seqno)?;
        }
        let mut effects = self.processed(seqno);
        self.advanced = true;
        // At the end of a snapshot, servers with MB-62984 may send a mutation with the same seqno
        // next. They end the stream there in any case.
        effects.reached_end &= !self.position.is_snapshot_complete();
        Ok(effects)
    }
}

/// What a packet says of a document; its place in the history is the stream's to say.
fn decode<'a>(frame: &Frame<'a>, collections: bool) -> Result<Change<'a>, DecodeError> {
    let change = |op, seqno, key, value| -> Result<Change<'a>, DecodeError> {
        let (collection_id, key) = split_key(key, collections)?;
        let Header { datatype, cas, .. } = frame.header;
        Ok(Change {
            op,
            vbid: frame.header.vbid(),
            seqno,
            vbuuid: Vbuuid(0),
            epoch: 0,
            snapshot: Snapshot::at(seqno),
            history: false,
            collection_id,
            key,
            value,
            datatype,
            cas,
            rev_seqno: RevSeqno(0),
            flags: 0,
            expiry: 0,
            delete_time: 0,
        })
    };
    Ok(match frame.header.opcode {
        Opcode::DCP_MUTATION => {
            let Mutation { seqno, rev_seqno, key, value, flags, expiry, .. } =
                Mutation::decode(frame)?;
            let change = change(Op::Mutation, seqno, key, value)?;
            Change { rev_seqno, flags, expiry, ..change }
        }
        Opcode::DCP_DELETION => {
            let Deletion { seqno, rev_seqno, key, value, delete_time, .. } =
                Deletion::decode(frame)?;
            let change = change(Op::Deletion, seqno, key, value)?;
            Change { rev_seqno, delete_time: delete_time.unwrap_or(0), ..change }
        }
        _ => {
            let Expiration { seqno, rev_seqno, key, value, delete_time, .. } =
                Expiration::decode(frame)?;
            let change = change(Op::Expiration, seqno, key, value)?;
            Change { rev_seqno, delete_time, ..change }
        }
    })
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
