//! Recorded streams.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_proto::flow_control::counted_bytes;
use dcp_wire::message::{Control, StreamEnd, StreamEndReason};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status, Vbid};

use crate::Error;

/// Offset of the opaque in a packet.
const OPAQUE_AT: usize = 12;

/// The parameters of a connection and a request that determine a stream's bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Terms(Vec<u8>);

impl Terms {
    /// Negotiated features, open flags and settings, in the order sent.
    pub(super) fn negotiate(&mut self, request: &Frame<'_>) {
        let parts: &[&[u8]] = match request.header.opcode {
            Opcode::HELLO => &[request.value],
            // Ignore the key: it is the connection's name.
            Opcode::DCP_OPEN => &[request.extras, request.value],
            Opcode::DCP_CONTROL if !leaves_streams_alone(request.key) => {
                &[request.key, request.value]
            }
            _ => return,
        };
        self.add(request.header.opcode, parts);
    }

    /// The parameters of the stream requested by `request`.
    pub(super) fn of_stream(&self, request: &Frame<'_>) -> Self {
        let mut terms = self.clone();
        let vbid = request.header.vbid().0.to_be_bytes();
        let parts = [&vbid, request.framing_extras, request.extras, request.key, request.value];
        terms.add(request.header.opcode, &parts);
        terms
    }

    fn add(&mut self, opcode: Opcode, parts: &[&[u8]]) {
        self.0.push(opcode.0);
        for part in parts {
            self.0.extend_from_slice(&part.len().to_be_bytes());
            self.0.extend_from_slice(part);
        }
    }
}

fn leaves_streams_alone(control: &[u8]) -> bool {
    [Control::CONNECTION_BUFFER_SIZE, Control::SET_NOOP_INTERVAL]
        .iter()
        .any(|name| name.as_bytes() == control)
}

/// A stream's bytes, with opaques of 0.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recording {
    /// The response to the stream request.
    pub(super) response: Vec<u8>,
    /// All messages after it, up to and including the stream end.
    pub(super) stream: Vec<u8>,
}

/// The stored streams.
#[derive(Debug, Default)]
pub(super) struct Store {
    kept: Mutex<Kept>,
    forwarded: AtomicU64,
    from_memory: AtomicU64,
}

#[derive(Debug, Default)]
struct Kept {
    by_terms: HashMap<Terms, Arc<Recording>>,
    /// Distinct streams: clients with different parameters usually get the same bytes.
    different: HashMap<Vbid, Vec<Arc<Recording>>>,
}

impl Store {
    /// The stream with these parameters, if recorded; counts the request.
    pub(super) fn find(&self, terms: &Terms) -> Option<Arc<Recording>> {
        let found = self.kept().by_terms.get(terms).cloned();
        let count = if found.is_some() { &self.from_memory } else { &self.forwarded };
        count.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Numbers of requested streams sent by the producer and from memory.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.forwarded.load(Ordering::Relaxed), self.from_memory.load(Ordering::Relaxed))
    }

    /// Bytes stored.
    pub(super) fn bytes(&self) -> usize {
        let kept = self.kept();
        kept.different.values().flatten().map(|each| each.response.len() + each.stream.len()).sum()
    }

    fn keep(&self, vbid: Vbid, terms: Terms, mut recording: Recording) {
        let mut kept = self.kept();
        let different = kept.different.entry(vbid).or_default();
        let same = different.iter().find(|each| ***each == recording).cloned();
        let recording = same.unwrap_or_else(|| {
            recording.stream.shrink_to_fit();
            let recording = Arc::new(recording);
            different.push(Arc::clone(&recording));
            recording
        });
        kept.by_terms.insert(terms, recording);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the streams that the producer sends on one connection.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    begun: HashMap<Opaque, (Terms, Recording)>,
}

impl Recorder {
    /// Begins to record the stream whose packets will have `opaque`.
    pub(super) fn begin(&mut self, opaque: Opaque, terms: Terms) {
        self.begun.insert(opaque, (terms, Recording::default()));
    }

    /// Processes whole packets from the producer; a stream that has ended is added to `store`.
    ///
    /// # Errors
    /// If the bytes are not packets.
    pub(super) fn take(&mut self, packets: &[u8], store: &Store) -> Result<(), Error> {
        let mut rest = packets;
        while !self.begun.is_empty()
            && let Some((frame, len)) = Frame::parse(rest, MAX_BODY_LEN)?
        {
            let (packet, after) = rest.split_at(len);
            self.take_one(&frame, packet, store)?;
            rest = after;
        }
        Ok(())
    }

    fn take_one(&mut self, frame: &Frame<'_>, packet: &[u8], store: &Store) -> Result<(), Error> {
        let header = &frame.header;
        let Some((_, recording)) = self.begun.get_mut(&header.opaque) else { return Ok(()) };
        let is_response = header.magic.is_response() && header.opcode == Opcode::DCP_STREAM_REQ;
        if is_response && header.status() == Status::SUCCESS {
            append(packet, &mut recording.response);
        } else if is_response {
            self.begun.remove(&header.opaque);
        } else if counted_bytes(header) > 0 {
            append(packet, &mut recording.stream);
            if header.opcode == Opcode::DCP_STREAM_END
                && let Some((terms, recording)) = self.begun.remove(&header.opaque)
                && StreamEnd::decode(frame)?.reason == StreamEndReason::OK
            {
                store.keep(header.vbid(), terms, recording);
            }
        }
        Ok(())
    }
}

fn append(packet: &[u8], to: &mut Vec<u8>) {
    let start = to.len();
    to.extend_from_slice(packet);
    set_opaque(&mut to[start..], Opaque(0));
}

/// Sets the opaque of the packet at the front of `bytes`.
pub(super) fn set_opaque(bytes: &mut [u8], opaque: Opaque) {
    if let Some(place) = bytes.get_mut(OPAQUE_AT..OPAQUE_AT + 4) {
        place.copy_from_slice(&opaque.0.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::Seqno;
    use dcp_wire::message::{SnapshotFlags, SnapshotMarker, StreamAddress};

    use super::*;

    fn stream(opaque: u32, reason: StreamEndReason) -> [Vec<u8>; 3] {
        let opaque = Opaque(opaque);
        let address = StreamAddress { vbid: Vbid(7), opaque, stream_id: None };
        let mut packets = [const { Vec::new() }; 3];
        Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS)
            .with_opaque(opaque)
            .with_value(&[1; 16])
            .encode(&mut packets[0])
            .unwrap();
        SnapshotMarker::new(Seqno(1), Seqno(9), SnapshotFlags::DISK)
            .encode(address, &mut packets[1])
            .unwrap();
        StreamEnd { reason }.encode(address, &mut packets[2]).unwrap();
        packets
    }

    fn terms(text: &str) -> Terms {
        Terms(text.as_bytes().to_vec())
    }

    #[test]
    fn streams_are_kept_as_they_were_sent() {
        let (store, mut recorder) = (Store::default(), Recorder::default());
        for (number, name) in [(3, "a"), (4, "b"), (5, "closed"), (6, "refused")] {
            assert_eq!(store.find(&terms(name)), None);
            recorder.begin(Opaque(number), terms(name));
        }
        let mut noop = Vec::new();
        Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(3)).encode(&mut noop).unwrap();
        let mut refusal = Vec::new();
        Frame::response(Opcode::DCP_STREAM_REQ, Status::EINVAL)
            .with_opaque(Opaque(6))
            .encode(&mut refusal)
            .unwrap();
        let [a, b] = [3, 4].map(|opaque| stream(opaque, StreamEndReason::OK));
        let closed = stream(5, StreamEndReason::CLOSED);
        let refused = stream(6, StreamEndReason::OK);
        let sent = [
            &refusal,
            &a[0],
            &noop,
            &b[0],
            &closed[0],
            &a[1],
            &b[1],
            &a[2],
            &closed[2],
            &b[2],
            &refused[2],
        ];
        let sent: Vec<u8> = sent.into_iter().flatten().copied().collect();
        recorder.take(&sent, &store).unwrap();
        assert!(recorder.begun.is_empty());
        let expected = stream(0, StreamEndReason::OK);
        let kept = store.find(&terms("a")).unwrap();
        assert_eq!(kept.response, expected[0]);
        assert_eq!(kept.stream, [&*expected[1], &*expected[2]].concat());
        assert!(Arc::ptr_eq(&kept, &store.find(&terms("b")).unwrap()), "the same bytes");
        assert_eq!(store.bytes(), expected.concat().len());
        assert_eq!(store.find(&terms("closed")), None);
        assert_eq!(store.find(&terms("refused")), None);
        assert_eq!(store.counts(), (6, 2));
    }

    #[test]
    fn whatever_shapes_a_stream_is_part_of_its_terms() {
        let request = |opcode| Frame::request(opcode);
        let terms = |negotiated: &[Frame<'_>], asked: Frame<'_>| {
            let mut terms = Terms::default();
            for packet in negotiated {
                let mut bytes = Vec::new();
                packet.encode(&mut bytes).unwrap();
                let (frame, _) = Frame::parse(&bytes, MAX_BODY_LEN).unwrap().unwrap();
                terms.negotiate(&frame);
            }
            terms.of_stream(&asked)
        };
        let hello = request(Opcode::HELLO).with_key(b"one").with_value(&[0, 6]);
        let open = request(Opcode::DCP_OPEN).with_key(b"first").with_extras(&[0; 8]);
        let window =
            request(Opcode::DCP_CONTROL).with_key(b"connection_buffer_size").with_value(b"99");
        let asked = request(Opcode::DCP_STREAM_REQ).with_extras(&[0; 48]);
        let first = terms(&[hello, open, window], asked.with_opaque(Opaque(1)));
        let named = [hello.with_key(b"two"), open.with_key(b"second")];
        assert_eq!(terms(&named, asked.with_opaque(Opaque(2))), first, "names and the window");
        for (negotiated, asked) in [
            ([hello.with_value(&[0, 6, 0, 0x12]), open], asked),
            ([hello, open.with_extras(&[4; 8])], asked),
            ([hello, request(Opcode::DCP_CONTROL).with_key(b"k").with_value(b"v")], asked),
            ([hello, open], asked.with_vbid(Vbid(1))),
            ([hello, open], asked.with_extras(&[1; 48])),
            ([hello, open], asked.with_value(br#"{"sid":1}"#)),
        ] {
            assert_ne!(terms(&negotiated, asked), first);
        }
    }
}
