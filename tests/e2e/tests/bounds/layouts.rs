//! Packets that are not as they should be: every field at its ends, and cut at every byte.

/// Place and width of the header's fields: magic, opcode, length of the key, of the extras, datatype,
/// vBucket or status, length of the body, opaque, CAS.
const HEADER: [(usize, usize); 9] =
    [(0, 1), (1, 1), (2, 2), (4, 1), (5, 1), (6, 2), (8, 4), (12, 4), (16, 8)];

const HEADER_LEN: usize = 24;

/// Every layout of a packet.
pub(crate) fn layouts(packet: &[u8]) -> Vec<Vec<u8>> {
    let body = (HEADER_LEN..packet.len()).flat_map(|at| {
        let wide = [2, 4, 8].into_iter().filter(move |width| at % width == 0);
        std::iter::once(1).chain(wide).map(move |width| (at, width))
    });
    let mut all = Vec::new();
    for (at, width) in HEADER.into_iter().chain(body) {
        let Some(field) = packet.get(at..at + width) else { continue };
        let now = field.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        let max = u64::MAX >> (64 - 8 * width);
        // One more than the largest there is, is 0.
        let (less, more) = (now.wrapping_sub(1) & max, now.wrapping_add(1) & max);
        // Of a length, the fifth is within what is allowed, and far more than comes.
        let ends = [0, 1, less, more, max >> 8, max / 2, max - 1, max];
        for value in ends.into_iter().filter(|value| *value != now) {
            let mut other = packet.to_vec();
            other[at..at + width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            all.push(other);
        }
    }
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
