//! Where packets begin and end.

use dcp_wire::{DecodeError, Frame, MAX_BODY_LEN};

/// Whatever the bytes: packets come out as they went in, and the same ones however the bytes are
/// split on their way.
pub fn framing(data: &[u8]) {
    let Some((&how, stream)) = data.split_first() else { return };
    let max_body = [0, 64, 4096, MAX_BODY_LEN][usize::from(how & 3)];
    let mut whole = Walk::new(max_body);
    whole.take(stream, stream.len());
    whole.check_packets(stream);
    let step = usize::from(how >> 2) + 1;
    let mut split = Walk::new(max_body);
    let mut arrived = 0;
    while arrived < stream.len() && split.end == Ok(()) {
        arrived = stream.len().min(arrived + step);
        split.take(stream, arrived);
    }
    assert_eq!((split.at, split.packets, split.end), (whole.at, whole.packets, whole.end));
}

/// A reader's way through a stream.
struct Walk {
    max_body: usize,
    at: usize,
    packets: u32,
    end: Result<(), DecodeError>,
}

impl Walk {
    const fn new(max_body: usize) -> Self {
        Self { max_body, at: 0, packets: 0, end: Ok(()) }
    }

    /// Takes the whole packets among the bytes that have arrived.
    fn take(&mut self, stream: &[u8], arrived: usize) {
        loop {
            let rest = &stream[self.at..arrived];
            let wanted = Frame::wanted(rest, self.max_body);
            match Frame::parse(rest, self.max_body) {
                Ok(Some((frame, used))) => {
                    assert_eq!((used, wanted), (frame.packet_len(), Ok(used)));
                    assert!(frame.header.body_len as usize <= self.max_body);
                    self.at += used;
                    self.packets += 1;
                }
                Ok(None) => {
                    let wanted = wanted.expect("no more is wanted of what cannot be read");
                    assert!(wanted > rest.len() && wanted <= self.max_body.saturating_add(24));
                    return;
                }
                Err(error) => {
                    assert_eq!(wanted, Err(error));
                    self.end = Err(error);
                    return;
                }
            }
        }
    }

    /// Checks that the packets give the same bytes again.
    fn check_packets(&self, stream: &[u8]) {
        let mut again = Vec::with_capacity(self.at);
        let mut rest = &stream[..self.at];
        while let Ok(Some((frame, used))) = Frame::parse(rest, self.max_body) {
            let parts = [frame.framing_extras, frame.extras, frame.key, frame.value];
            assert_eq!(parts.concat(), rest[24..used]);
            frame.encode(&mut again).expect("it was a packet");
            rest = &rest[used..];
        }
        assert_eq!(again, stream[..self.at]);
    }
}
