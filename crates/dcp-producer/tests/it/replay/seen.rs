//! A server's packet without what must differ from one server to the next.

use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opcode, Status, snappy};
use serde_json::Value;

use super::ignored::Ignored;
use super::markers::Marker;
use super::parts::{error_maps_differ, is_map, maps_differ, versions_differ};
use super::twins::Twins;

/// Opaque by which packets are told apart that a server sends by itself: it counts in its own way.
pub(super) const OWN: u32 = u32::MAX;

/// One packet of a server.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) opcode: Opcode,
    pub(super) is_response: bool,
    magic: u8,
    /// vBucket it is about.
    vbid: u16,
    /// vBucket of a request, status of a response.
    vbid_or_status: u16,
    datatype: Datatype,
    pub(super) opaque: u32,
    cas: u64,
    framing_extras: Vec<u8>,
    extras: Vec<u8>,
    key: Vec<u8>,
    value: Vec<u8>,
    /// As it came, before anything was left out: opaque, framing extras, value.
    raw: (u32, Vec<u8>, Vec<u8>),
    /// The snapshot marker it is, if it is a recorded one.
    pub(super) marker: Option<Marker>,
}

/// What two packets of the same place differ in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Differs {
    /// The field and both its contents, as far as they are the same in each run.
    pub(super) what: String,
    /// Whether they are different messages altogether.
    pub(super) is_another: bool,
}

impl Seen {
    /// The packet without what must differ; a compressed value inflated, because compressors of
    /// one format need not choose the same copies.
    ///
    /// `asked` is the vBucket a response is about.
    pub(super) fn of(packet: &[u8], asked: Option<u16>) -> Self {
        let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
        let header = frame.header;
        let by_itself = header.opcode == Opcode::DCP_NOOP || packet[0] == 0x82;
        let mut value = frame.value.to_vec();
        if header.datatype.contains(Datatype::SNAPPY)
            && let Ok(plain) = snappy::decompress(&value, MAX_BODY_LEN)
        {
            value = plain;
        }
        let mut framing_extras = frame.framing_extras.to_vec();
        if header.magic.is_response() {
            // All they tell is how long it took.
            framing_extras.iter_mut().skip(1).for_each(|byte| *byte = 0);
        }
        Self {
            opcode: header.opcode,
            is_response: header.magic.is_response(),
            magic: packet[0],
            vbid: asked.filter(|_| header.magic.is_response()).unwrap_or(header.vbid_or_status),
            vbid_or_status: header.vbid_or_status,
            datatype: header.datatype,
            opaque: if by_itself { OWN } else { header.opaque.0 },
            cas: header.cas.0,
            framing_extras,
            extras: frame.extras.to_vec(),
            key: frame.key.to_vec(),
            value,
            raw: (header.opaque.0, frame.framing_extras.to_vec(), frame.value.to_vec()),
            marker: None,
        }
    }

    pub(super) const fn length(&self) -> usize {
        self.value.len()
    }

    /// What a node would have sent that was not told the cluster map.
    pub(super) fn without_map(self) -> Self {
        let status = match self.status() {
            Some(Status::SUCCESS) if self.opcode == Opcode::GET_CLUSTER_CONFIG => {
                Status::KEY_ENOENT
            }
            Some(Status::NOT_MY_VBUCKET) => Status::NOT_MY_VBUCKET,
            _ => return self,
        };
        let (datatype, value) = (Datatype::RAW, Vec::new());
        Self { vbid_or_status: status.0, datatype, value, ..self }
    }

    fn status(&self) -> Option<Status> {
        self.is_response.then_some(Status(self.vbid_or_status))
    }

    /// What `ours` differs in from the recorded packet. Numbers that were not paired yet are.
    pub(super) fn differences(&self, ours: &Self, twins: &mut Twins) -> Vec<Differs> {
        let message = |seen: &Self| (seen.opcode, seen.is_response);
        if message(self) != message(ours) {
            let what = format!("{} is {}", self.name(), ours.name());
            return vec![Differs { what, is_another: true }];
        }
        if let Some(marker) = &self.marker {
            marker.count(&mut twins.marker_fields);
            let mut both = [self.clone(), ours.clone()];
            for seen in &mut both {
                seen.marker = None;
                marker.clear_taken(&mut seen.extras, &mut seen.value);
            }
            return both[0].differences(&both[1], twins);
        }
        twins.ignore(Ignored::OwnOpaque, self.opaque == OWN && self.raw.0 != ours.raw.0);
        twins.ignore(Ignored::Duration, self.is_response && self.raw.1 != ours.raw.1);
        let is_compressed = self.datatype.contains(Datatype::SNAPPY);
        twins.ignore(Ignored::CompressedBytes, is_compressed && self.raw.2 != ours.raw.2);
        twins.ignore(Ignored::Cas, self.cas != ours.cas);
        let mut all = Vec::new();
        let mut check = |equal: bool, what: String| {
            if !equal {
                all.push(Differs { what, is_another: false });
            }
        };
        let name = self.name();
        check(
            self.magic == ours.magic,
            format!("{name}: magic {:#x} is {:#x}", self.magic, ours.magic),
        );
        let (status, vbid) = (self.vbid_or_status, ours.vbid_or_status);
        check(status == vbid, format!("{name}: status or vBucket {status:#x} is {vbid:#x}"));
        let (theirs, mine) = (self.datatype.0, ours.datatype.0);
        check(theirs == mine, format!("{name}: datatype {theirs:#x} is {mine:#x}"));
        let paired = twins.cas.entry(self.vbid).or_default().match_up(self.cas, ours.cas);
        check(paired, format!("{name}: CAS"));
        let framing = self.framing_extras == ours.framing_extras;
        check(
            framing,
            format!(
                "{name}: framing extras {} is {}",
                hex(&self.framing_extras),
                hex(&ours.framing_extras)
            ),
        );
        check(self.key == ours.key, format!("{name}: key"));
        if let Some(what) = self.extras_differ(ours, twins) {
            check(false, format!("{name}: {what}"));
        }
        if let Some(what) = self.value_differs(ours, twins) {
            check(false, format!("{name}: {what}"));
        }
        all
    }

    fn name(&self) -> String {
        match self.status() {
            Some(_) => format!("response {}", self.opcode),
            None => format!("{}", self.opcode),
        }
    }

    fn extras_differ(&self, ours: &Self, twins: &mut Twins) -> Option<String> {
        let (mut theirs, mut mine) = (self.extras.clone(), ours.extras.clone());
        let mut pairs_up = true;
        if theirs.len() == mine.len() && !self.is_response {
            match self.opcode {
                Opcode::DCP_MUTATION => {
                    pairs_up = (number(&theirs, 20, 4) == 0) == (number(&mine, 20, 4) == 0);
                    twins.ignore(Ignored::Expiry, clear(&mut theirs, &mut mine, 20, 4));
                }
                Opcode::DCP_DELETION | Opcode::DCP_EXPIRATION => {
                    // Tombstones of the same second need not be of the same second again.
                    pairs_up = (number(&theirs, 16, 4) == 0) == (number(&mine, 16, 4) == 0);
                    twins.ignore(Ignored::TombstoneTime, clear(&mut theirs, &mut mine, 16, 4));
                }
                _ => {}
            }
        } else if theirs.len() == 16 && mine.len() == 16 {
            pairs_up = twins.vbuuids.match_up(number(&theirs, 0, 8), number(&mine, 0, 8));
            twins.ignore(Ignored::Vbuuid, clear(&mut theirs, &mut mine, 0, 8));
        }
        let equal = theirs == mine;
        (!equal || !pairs_up).then(|| match equal {
            true => "extras pair up wrongly".to_owned(),
            false => format!("extras {} is {}", hex(&theirs), hex(&mine)),
        })
    }

    fn value_differs(&self, ours: &Self, twins: &mut Twins) -> Option<String> {
        let (theirs, mine) = (&self.value, &ours.value);
        let is_log = matches!(self.opcode, Opcode::DCP_STREAM_REQ | Opcode::DCP_GET_FAILOVER_LOG);
        match self.status() {
            Some(Status::SUCCESS) if is_log => logs_differ(theirs, mine, 0, twins),
            Some(Status::SUCCESS) if self.opcode == Opcode::OBSERVE_SEQNO => {
                logs_differ(theirs, mine, 3, twins)
            }
            // Nonces, salts and what is computed from them.
            Some(Status::SUCCESS | Status::AUTH_CONTINUE)
                if matches!(self.opcode, Opcode::SASL_AUTH | Opcode::SASL_STEP) =>
            {
                twins.ignore(Ignored::Login, theirs != mine);
                (theirs.is_empty() != mine.is_empty()).then(|| "value".to_owned())
            }
            Some(Status::SUCCESS) if self.opcode == Opcode::VERSION => {
                versions_differ(theirs, mine, twins)
            }
            Some(Status::SUCCESS) if self.opcode == Opcode::GET_ERROR_MAP => {
                error_maps_differ(theirs, mine, twins)
            }
            Some(Status::SUCCESS | Status::NOT_MY_VBUCKET) if is_map(theirs) || is_map(mine) => {
                maps_differ(theirs, mine, twins)
            }
            Some(status) if !status.is_success() && status != Status::ROLLBACK => {
                twins.ignore(Ignored::ErrorContext, theirs != mine);
                json_differs(theirs, mine, |body| {
                    let mut body = body.clone();
                    for part in ["context", "ref"] {
                        if body["error"][part].is_string() {
                            body["error"][part] = "said".into();
                        }
                    }
                    body
                })
            }
            _ if theirs == mine => None,
            _ => Some(format!("value {} is {}", hex(theirs), hex(mine))),
        }
    }
}

/// Some bytes, the length if they are many.
fn hex(bytes: &[u8]) -> String {
    if bytes.len() > 48 {
        return format!("of {} bytes", bytes.len());
    }
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    if digits.is_empty() { "nothing".to_owned() } else { digits }
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let part = bytes.get(at..at + len).unwrap_or_default();
    part.iter().fold(0, |number, &byte| (number << 8) | u64::from(byte))
}

/// Clears a number of both; whether they differed in it.
fn clear(theirs: &mut [u8], mine: &mut [u8], at: usize, len: usize) -> bool {
    let differs = number(theirs, at, len) != number(mine, at, len);
    for bytes in [theirs, mine] {
        if let Some(part) = bytes.get_mut(at..at + len) {
            part.fill(0);
        }
    }
    differs
}

/// Compares branches with seqnos, which begin at `at`.
fn logs_differ(theirs: &[u8], mine: &[u8], at: usize, twins: &mut Twins) -> Option<String> {
    let (mut theirs, mut mine) = (theirs.to_vec(), mine.to_vec());
    let mut pairs_up = true;
    if theirs.len() == mine.len() {
        // OBSERVE_SEQNO has two seqnos after its first vbuuid.
        let places: Vec<usize> =
            if at == 3 { vec![3, 27] } else { (0..theirs.len()).step_by(16).collect() };
        let len = theirs.len();
        for at in places.into_iter().filter(|at| at + 8 <= len) {
            pairs_up &= twins.vbuuids.match_up(number(&theirs, at, 8), number(&mine, at, 8));
            twins.ignore(Ignored::Vbuuid, clear(&mut theirs, &mut mine, at, 8));
        }
    }
    if theirs != mine {
        return Some(format!("value {} is {}", hex(&theirs), hex(&mine)));
    }
    (!pairs_up).then(|| "vbuuids pair up wrongly".to_owned())
}

fn json_differs(theirs: &[u8], mine: &[u8], keep: impl Fn(&Value) -> Value) -> Option<String> {
    let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok().map(|json| keep(&json));
    let (recorded, own) = (read(theirs), read(mine));
    if theirs.is_empty() == mine.is_empty() && recorded == own {
        return None;
    }
    let text = |json: &Option<Value>| json.as_ref().map_or("nothing".to_owned(), Value::to_string);
    Some(format!("body {} is {}", text(&recorded), text(&own)))
}
