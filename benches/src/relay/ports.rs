//! Replaces a producer's ports with the relay's.

/// Pairs of ports as text: the producer's and the relay's replacement.
#[derive(Debug)]
pub(super) struct Ports {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Ports {
    /// `None` unless the ports of each pair have the same number of digits: lengths must not
    /// change.
    pub(super) fn new(pairs: &[(u16, u16)]) -> Option<Self> {
        let text = |port: u16| format!(":{port}").into_bytes();
        let pairs: Vec<_> = pairs.iter().map(|&(theirs, own)| (text(theirs), text(own))).collect();
        pairs.iter().all(|(theirs, own)| theirs.len() == own.len()).then_some(Self { pairs })
    }

    /// Replaces the ports in a complete text.
    pub(super) fn lead_here(&self, text: &mut [u8]) {
        for (theirs, own) in &self.pairs {
            let mut at = 0;
            while let Some(found) = find(&text[at..], theirs) {
                let start = at + found;
                at = start + theirs.len();
                // Not a prefix of a longer number.
                if !text.get(at).is_some_and(u8::is_ascii_digit) {
                    text[start..at].copy_from_slice(own);
                }
            }
        }
    }

    /// Number of bytes at the end of a text that must wait for more input.
    pub(super) fn undecided(&self, text: &[u8]) -> usize {
        let longest = self.pairs.iter().map(|(theirs, _)| theirs.len()).max().unwrap_or(0);
        let is_beginning = |tail: &[u8]| self.pairs.iter().any(|pair| pair.0.starts_with(tail));
        (1..=longest.min(text.len()))
            .rev()
            .find(|&len| is_beginning(&text[text.len() - len..]))
            .unwrap_or(0)
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_replaced_where_they_are_whole_numbers() {
        let ports = Ports::new(&[(40_001, 50_001), (40_002, 50_002)]).unwrap();
        let mut text = br#"{"kv":40001,"at":"127.0.0.1:40002","ram":400010,"x":140001}"#.to_vec();
        ports.lead_here(&mut text);
        let expected: &[u8] = br#"{"kv":50001,"at":"127.0.0.1:50002","ram":400010,"x":140001}"#;
        assert_eq!(text, expected);
        assert!(Ports::new(&[(9999, 50_001)]).is_none(), "another length");
    }

    #[test]
    fn a_text_cut_anywhere_has_its_ports_replaced() {
        let ports = Ports::new(&[(40_001, 50_001)]).unwrap();
        let text = br#"[":4",{"kv":40001},":40001",":400011"]"#;
        let mut whole = text.to_vec();
        ports.lead_here(&mut whole);
        for cut in 0..=text.len() {
            let (first, second) = text.split_at(cut);
            let (now, held) = first.split_at(first.len() - ports.undecided(first));
            let mut now = now.to_vec();
            ports.lead_here(&mut now);
            let mut rest = [held, second].concat();
            ports.lead_here(&mut rest);
            now.extend_from_slice(&rest);
            assert_eq!(now, whole, "cut after {cut} bytes");
        }
    }
}
