//! Packets that are not as they should be: every field at its ends, and cut at every byte.

use dcp_wire::MAX_BODY_LEN;

/// Place and width of the header's fields: magic, opcode, length of the key, of the extras, datatype,
/// vBucket or status, length of the body, opaque, CAS.
const HEADER: [(usize, usize); 9] =
    [(0, 1), (1, 1), KEY_LEN, EXTRAS_LEN, (5, 1), (6, 2), BODY_LEN, (12, 4), (16, 8)];

const KEY_LEN: (usize, usize) = (2, 2);
const EXTRAS_LEN: (usize, usize) = (4, 1);
const BODY_LEN: (usize, usize) = (8, 4);

const HEADER_LEN: usize = 24;

/// Longest key that servers take.
const MAX_KEY_LEN: u64 = 250;

/// Every layout of a packet.
pub(crate) fn layouts(packet: &[u8]) -> Vec<Vec<u8>> {
    let mut all = changed(packet, &fields(packet));
    for len in 1..packet.len() {
        all.push(packet[..len].to_vec());
        // The same with a length of the body that is right.
        if let Some(body) = len.checked_sub(HEADER_LEN) {
            let mut shorter = packet[..len].to_vec();
            shorter[8..12].copy_from_slice(&(body as u32).to_be_bytes());
            all.push(shorter);
        }
    }
    all
}

/// Every layout of a header, for packets too large for all of theirs.
pub(crate) fn headers(packet: &[u8]) -> Vec<Vec<u8>> {
    changed(&packet[..HEADER_LEN], &HEADER)
}

/// Places and widths of whatever may be a field. Those of the body are counted from its start, and
/// from that of the value, which a key of any length precedes.
fn fields(packet: &[u8]) -> Vec<(usize, usize)> {
    let key = match packet[0] {
        // The length of the framing extras takes half of the key's.
        0x08 | 0x18 => usize::from(packet[2]) + usize::from(packet[3]),
        _ => usize::from(u16::from_be_bytes([packet[2], packet[3]])),
    };
    let value = HEADER_LEN + usize::from(packet[EXTRAS_LEN.0]) + key;
    let body = (HEADER_LEN..packet.len()).flat_map(|at| {
        let is_wide = move |width: &usize| {
            at % width == 0 || at.checked_sub(value).is_some_and(|at| at % width == 0)
        };
        std::iter::once(1)
            .chain([2, 4, 8].into_iter().filter(is_wide))
            .map(move |width| (at, width))
    });
    HEADER.into_iter().chain(body).collect()
}

/// The packet with each of its fields at its ends.
fn changed(packet: &[u8], fields: &[(usize, usize)]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for &(at, width) in fields {
        let Some(field) = packet.get(at..at + width) else { continue };
        let now = field.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        let max = u64::MAX >> (64 - 8 * width);
        // One more than the largest there is, is 0.
        let (less, more) = (now.wrapping_sub(1) & max, now.wrapping_add(1) & max);
        // Of a length, the fifth is within what is allowed, and far more than comes.
        let mut ends = vec![0, 1, less, more, max >> 8, max / 2, max - 1, max];
        let allowed = match (at, width) {
            BODY_LEN => Some(MAX_BODY_LEN as u64),
            KEY_LEN => Some(MAX_KEY_LEN),
            _ => None,
        };
        ends.extend(allowed.into_iter().flat_map(|most| [most - 1, most, most + 1]));
        ends.sort_unstable();
        ends.dedup();
        for value in ends.into_iter().filter(|value| *value != now) {
            let mut other = packet.to_vec();
            other[at..at + width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            all.push(other);
        }
    }
    all
}
