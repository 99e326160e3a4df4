//! What values hold: system events, extended attributes, snappy blocks.

use dcp_meter::Meter;
use dcp_wire::message::{StreamAddress, SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{Frame, MAX_BODY_LEN, Seqno};

use crate::bytes_in::BytesIn;

/// Whatever a system event: what its payload says survives both forms of writing it.
pub fn system_events(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    let id = bytes.one_of(SystemEventId::KNOWN);
    let version = bytes.u8() & 3;
    let key = bytes.part();
    // There is no event 0.
    let seqno = Seqno(bytes.u64().max(1));
    let event = SystemEvent { seqno, id, version, key, value: bytes.rest() };
    let mut packet = Vec::new();
    event.encode(StreamAddress::default(), &mut packet).expect("a small packet");
    let (frame, _) = Frame::parse(&packet, MAX_BODY_LEN).expect("a packet").expect("whole");
    assert_eq!(SystemEvent::decode(&frame), Ok(event));
    let Ok(Some(payload)) = event.payload() else { return };
    let flatbuffers = payload.to_flatbuffers(id);
    let again = SystemEvent { version: 2, value: &flatbuffers, ..event };
    // Only of collections that there are an expiry is said in this form.
    let lives = matches!(id, SystemEventId::BEGIN_COLLECTION | SystemEventId::MODIFY_COLLECTION);
    let said = SystemEventPayload { max_ttl: payload.max_ttl.filter(|_| lives), ..payload };
    assert_eq!(again.payload(), Ok(Some(said)), "as FlatBuffers");
    if id != SystemEventId::MODIFY_COLLECTION && version != 2 {
        let (plain, version) = payload.to_plain();
        let again = SystemEvent { version, value: &plain, ..event };
        assert_eq!(again.payload(), Ok(Some(payload)), "in the plain form");
        assert_eq!(plain, event.value);
    }
}

/// Whatever a value with attributes: they are written as they were read, and nothing follows an
/// error.
pub fn xattrs(data: &[u8]) {
    if let Ok((xattrs, body)) = xattr::split(data) {
        assert_eq!(4 + xattrs.len_bytes() + body.len(), data.len());
        let read: Vec<_> = xattrs.collect();
        let errors = read.iter().filter(|xattr| xattr.is_err()).count();
        assert!(errors == 0 || errors == 1 && read.last().is_some_and(Result::is_err));
        if let Ok(read) = read.into_iter().collect::<Result<Vec<_>, _>>() {
            let mut again = Vec::with_capacity(data.len());
            xattr::encode(read.iter().copied(), &mut again).expect("they were read");
            again.extend_from_slice(body);
            assert_eq!(again, data);
        }
    }
    let mut bytes = BytesIn::new(data);
    let mut pairs = Vec::new();
    while !bytes.is_empty() {
        pairs.push(Xattr { name: bytes.part(), value: bytes.part() });
    }
    let mut section = Vec::new();
    if xattr::encode(pairs.iter().copied(), &mut section).is_ok() {
        let (read, body) = xattr::split(&section).expect("it was written");
        assert!(body.is_empty() && read.eq(pairs.into_iter().map(Ok)));
    } else {
        assert!(section.is_empty());
    }
}

/// Whatever a block: it inflates to what it says or to nothing, never beyond the limit, and never
/// takes memory that its length cannot need.
pub fn snappy(data: &[u8]) {
    const LIMIT: usize = 1 << 16;
    /// Bytes a block can inflate to, as a multiple of its own.
    const RATIO: usize = 22;
    let declared = dcp_wire::snappy::decompressed_len(data, LIMIT);
    let meter = Meter::start();
    let inflated = dcp_wire::snappy::decompress(data, LIMIT);
    let most = meter.most();
    assert!(most <= LIMIT.min(RATIO * data.len()), "{most} bytes for {}", data.len());
    match (declared, &inflated) {
        (Ok(declared), Ok(inflated)) => {
            assert_eq!(inflated.len(), declared);
            let mut place = vec![0; declared];
            assert_eq!(dcp_wire::snappy::decompress_exact(data, &mut place), Ok(()));
            assert_eq!(&place, inflated);
        }
        (Ok(declared), Err(_)) => {
            let mut place = vec![0; declared];
            assert!(dcp_wire::snappy::decompress_exact(data, &mut place).is_err());
        }
        (Err(declared), inflated) => assert_eq!(inflated.as_ref(), Err(&declared)),
    }
    let block = dcp_wire::snappy::compress(data).expect("a short value");
    assert_eq!(dcp_wire::snappy::decompress(&block, data.len()).as_deref(), Ok(data));
}
