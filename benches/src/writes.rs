//! Write patterns of a source.

use std::io::{self, IoSlice, Write};
use std::time::Duration;

use dcp_wire::Header;

use crate::Error;
use crate::measure::WallClock;

/// How a source writes packets that are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// As much as is available, up to 256 KiB: a source that no client can keep up with.
    Large,
    /// Like a node of server 8.0: five messages per `writev`, after 3 us of its thread's time for
    /// each. A reader that is woken by every write is woken 200,000 times per million messages.
    LikeANode,
}

/// Number of messages that a node writes at once.
const AT_ONCE: usize = 5;

/// Time that a node's thread spends on a message before writing it.
const WORK: Duration = Duration::from_micros(3);

impl Writes {
    /// Writes whole packets.
    pub(crate) fn write(self, to: &mut impl Write, packets: &[u8]) -> Result<(), Error> {
        match self {
            Self::Large => Ok(to.write_all(packets)?),
            Self::LikeANode => {
                let mut rest = packets;
                while !rest.is_empty() {
                    let mut messages = Vec::with_capacity(AT_ONCE);
                    while messages.len() < AT_ONCE && !rest.is_empty() {
                        let head = rest.first_chunk().ok_or("part of a packet")?;
                        let len = Header::decode(head)?.packet_len();
                        let (message, after) =
                            rest.split_at_checked(len).ok_or("part of a packet")?;
                        messages.push(IoSlice::new(message));
                        rest = after;
                    }
                    work(messages.len());
                    write_all(to, &mut messages)?;
                }
                Ok(())
            }
        }
    }
}

/// Busy-waits for the time that a node takes for this many messages.
fn work(messages: usize) {
    let clock = WallClock::start();
    let takes = WORK.as_secs_f64() * messages as f64;
    while clock.elapsed().as_secs_f64() < takes {
        std::hint::spin_loop();
    }
}

fn write_all(to: &mut impl Write, mut messages: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !messages.is_empty() {
        match to.write_vectored(messages)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            len => IoSlice::advance_slices(&mut messages, len),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dcp_wire::{Frame, Opcode};

    use super::*;

    /// Takes at most so many bytes a write, and knows where each ended.
    struct Socket {
        takes: usize,
        bytes: Vec<u8>,
        ends: Vec<usize>,
    }

    impl Write for Socket {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write_vectored(&[IoSlice::new(bytes)])
        }

        fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
            let all: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            let len = all.len().min(self.takes);
            self.bytes.extend_from_slice(&all[..len]);
            self.ends.push(self.bytes.len());
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(writes: Writes, packets: &[u8], takes: usize) -> Vec<usize> {
        let mut socket = Socket { takes, bytes: Vec::new(), ends: Vec::new() };
        writes.write(&mut socket, packets).unwrap();
        assert_eq!(socket.bytes, packets);
        socket.ends
    }

    #[test]
    fn a_node_writes_five_messages_at_a_time_and_works_before() {
        let (mut packets, mut ends) = (Vec::new(), Vec::new());
        for len in 0..12 {
            let value = vec![7; len];
            Frame::request(Opcode::DCP_MUTATION).with_value(&value).encode(&mut packets).unwrap();
            ends.push(packets.len());
        }
        let clock = WallClock::start();
        let five = written(Writes::LikeANode, &packets, usize::MAX);
        assert!(clock.elapsed() >= WORK * 12);
        assert_eq!(five, [ends[4], ends[9], ends[11]]);
        assert_eq!(written(Writes::Large, &packets, usize::MAX), [packets.len()]);
        // What the socket does not take at once is written after it.
        written(Writes::LikeANode, &packets, 30);
    }
}
