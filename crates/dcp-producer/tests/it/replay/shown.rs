//! What the streams of a recording show of its vBuckets.

use std::collections::{BTreeMap, BTreeSet};

use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    Deletion, Expiration, FailoverEntries, Mutation, SnapshotMarker, SystemEvent,
};
use dcp_wire::{Datatype, Feature, Frame, MAX_BODY_LEN, Opcode, snappy, xattr};

use super::manifests;

/// What the streams of a recording show of a vBucket.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) items: BTreeMap<u64, Item>,
    pub(super) events: BTreeMap<u64, manifests::Event>,
    /// Failover logs, oldest entry first, in the order they were seen.
    pub(super) logs: Vec<Vec<(u64, u64)>>,
    /// Highest end of a snapshot.
    pub(super) announced: u64,
    /// Whether keys come with their collection.
    pub(super) prefixed: bool,
}

/// A document's version as a stream showed it.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) is_live: bool,
    /// With its collection.
    pub(super) key: Vec<u8>,
    /// As the stream had it.
    pub(super) raw_key: Vec<u8>,
    pub(super) body: Vec<u8>,
    /// The last of its xattrs, name and value.
    pub(super) xattr: Option<(String, String)>,
    pub(super) flags: u32,
    pub(super) expires: bool,
    pub(super) rev: u64,
    pub(super) cas: u64,
}

/// Whether HELLO of each connection granted collections.
pub(super) fn with_collections(scenario: &Scenario) -> BTreeMap<u32, bool> {
    let mut granted = BTreeMap::new();
    for event in &scenario.events {
        let EventKind::ServerPacket(packet) = &event.kind else { continue };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
        if frame.header.opcode == Opcode::HELLO {
            let has =
                frame.value.chunks(2).any(|code| code == Feature::COLLECTIONS.0.to_be_bytes());
            granted.insert(event.conn, has);
        }
    }
    granted
}

/// Connections whose requests for streams were all refused, if they made any.
pub(super) fn refused(scenario: &Scenario) -> BTreeSet<u32> {
    let (mut refused, mut granted) = (BTreeSet::new(), BTreeSet::new());
    for event in &scenario.events {
        let EventKind::ServerPacket(packet) = &event.kind else { continue };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
        if frame.header.opcode == Opcode::DCP_STREAM_REQ && frame.header.magic.is_response() {
            let is_granted = frame.header.status().is_success();
            if is_granted { &mut granted } else { &mut refused }.insert(event.conn);
        }
    }
    &refused - &granted
}

/// What the streams show of each vBucket.
pub(super) fn shown(scenario: &Scenario) -> BTreeMap<u16, Shown> {
    let collections = with_collections(scenario);
    let mut asked = BTreeMap::new();
    let mut all: BTreeMap<u16, Shown> = BTreeMap::new();
    for event in &scenario.events {
        let Some(packet) = event.packet() else { continue };
        let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
        let header = frame.header;
        let is_log = matches!(header.opcode, Opcode::DCP_STREAM_REQ | Opcode::DCP_GET_FAILOVER_LOG);
        if matches!(event.kind, EventKind::ClientPacket(_)) {
            if is_log {
                asked.insert((event.conn, header.opaque), header.vbid().0);
            }
            continue;
        }
        if header.magic.is_response() {
            let Some(vbid) = asked.get(&(event.conn, header.opaque)).filter(|_| is_log) else {
                continue;
            };
            let Ok(log) = FailoverEntries::decode(frame.value) else { continue };
            if header.status().is_success() {
                let mut log: Vec<_> = log.map(|entry| (entry.vbuuid.0, entry.seqno.0)).collect();
                log.reverse();
                all.entry(*vbid).or_default().logs.push(log);
            }
            continue;
        }
        let shown = all.entry(header.vbid().0).or_default();
        shown.note(&frame, collections.get(&event.conn).copied().unwrap_or_default());
    }
    all
}

impl Shown {
    /// The last change.
    pub(super) fn last(&self) -> Option<u64> {
        self.items.keys().chain(self.events.keys()).max().copied()
    }

    fn note(&mut self, frame: &Frame<'_>, collections: bool) {
        if frame.header.opcode == Opcode::DCP_SYSTEM_EVENT {
            if let Some((seqno, event)) = event(frame) {
                self.events.insert(seqno, event);
            }
            return;
        }
        if let Ok(marker) = SnapshotMarker::decode(frame) {
            self.announced = self.announced.max(marker.end_seqno.0);
        }
        let Some((seqno, mut item)) = item(frame) else { return };
        self.prefixed |= collections;
        if !collections {
            item.key.insert(0, 0);
        }
        // A stream without values shows less.
        let len = |item: &Item| (item.xattr.is_some(), item.body.len());
        if self.items.get(&seqno).is_none_or(|known| len(known) <= len(&item)) {
            self.items.insert(seqno, item);
        }
    }
}

fn event(frame: &Frame<'_>) -> Option<(u64, manifests::Event)> {
    let event = SystemEvent::decode(frame).ok()?;
    let payload = event.payload().ok().flatten()?;
    let shown = manifests::Event {
        id: event.id,
        manifest_uid: payload.manifest_uid,
        scope_id: payload.scope_id,
        collection_id: payload.collection_id,
        name: String::from_utf8_lossy(event.key).into_owned(),
        max_ttl: payload.max_ttl,
    };
    Some((event.seqno.0, shown))
}

fn item(frame: &Frame<'_>) -> Option<(u64, Item)> {
    let cas = frame.header.cas.0;
    let dead = |key: &[u8], rev| Item {
        is_live: false,
        key: key.to_vec(),
        raw_key: key.to_vec(),
        body: Vec::new(),
        xattr: None,
        flags: 0,
        expires: false,
        rev,
        cas,
    };
    match frame.header.opcode {
        Opcode::DCP_MUTATION => {
            let Mutation { seqno, rev_seqno, flags, expiry, key, value, .. } =
                Mutation::decode(frame).ok()?;
            let datatype = frame.header.datatype;
            let mut body = value.to_vec();
            if datatype.contains(Datatype::SNAPPY) {
                body = snappy::decompress(&body, MAX_BODY_LEN).ok()?;
            }
            let mut xattr = None;
            if datatype.contains(Datatype::XATTR)
                && let Ok((xattrs, rest)) = xattr::split(&body)
            {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                xattr = xattrs.flatten().last().map(|one| (text(one.name), text(one.value)));
                body = rest.to_vec();
            }
            let expires = expiry != 0;
            let item = dead(key, rev_seqno.0);
            Some((seqno.0, Item { is_live: true, body, xattr, flags, expires, ..item }))
        }
        Opcode::DCP_DELETION => {
            let Deletion { seqno, rev_seqno, key, .. } = Deletion::decode(frame).ok()?;
            Some((seqno.0, dead(key, rev_seqno.0)))
        }
        Opcode::DCP_EXPIRATION => {
            let Expiration { seqno, rev_seqno, key, .. } = Expiration::decode(frame).ok()?;
            Some((seqno.0, dead(key, rev_seqno.0)))
        }
        _ => None,
    }
}
