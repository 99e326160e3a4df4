//! Write patterns of a source.

use std::io::Write;
use std::time::Duration;

use dcp_wire::Header;

use crate::Error;
use crate::measure::WallClock;

/// How a source writes packets that are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// As much as is available, up to 256 KiB: a source that no client can keep up with.
    Large,
    /// Like a node of server 8.0 that was asked for this priority: the messages of a pass at once,
    /// in pieces of at most 16 KiB, after the time that its thread takes for them. At medium
    /// priority, a reader that is woken by every write is woken 200,000 times per million messages.
    LikeANode(Priority),
}

/// What a reader asks a node for with `set_priority`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// One message in a pass.
    Low,
    /// Five: what nodes do unless they are asked.
    Medium,
    /// Fifty.
    High,
}

/// Most bytes that a node writes at once, however many messages a pass has.
const AT_ONCE: usize = 16 * 1024;

impl Priority {
    /// Number of messages in a pass.
    const fn messages(self) -> usize {
        match self {
            Self::Low => 1,
            Self::Medium => 5,
            Self::High => 50,
        }
    }

    /// Time that a node's thread spends on a pass before it writes: some for each message, which is
    /// less the more of them follow each other, and some for each byte.
    ///
    /// From the pauses between 10,000 segments of a node 8.0.2 at each priority, with documents of
    /// 256 B and 1 KiB and a reader that naps, less what writing them takes here. A napping reader
    /// takes 4.0 to 4.7 and 2.2 s for a million documents of 256 B at medium and high priority, where
    /// it took 3.8 and 2.2 s from that node, and 5.9 to 6.7 and 4.4 to 5.0 s for those of 1 KiB (5.9
    /// and 4.2 s).
    fn work(self, messages: usize, bytes: usize) -> Duration {
        let message = match self {
            Self::Low | Self::High => Duration::from_nanos(1000),
            Self::Medium => Duration::from_nanos(1800),
        };
        let kibibyte = Duration::from_nanos(2300);
        message.mul_f64(messages as f64) + kibibyte.mul_f64(bytes as f64 / 1024.0)
    }
}

impl Writes {
    /// Writes whole packets.
    pub(crate) fn write(self, to: &mut impl Write, packets: &[u8]) -> Result<(), Error> {
        match self {
            Self::Large => Ok(to.write_all(packets)?),
            Self::LikeANode(priority) => {
                let mut rest = packets;
                while !rest.is_empty() {
                    let (mut messages, mut len) = (0, 0);
                    while messages < priority.messages() && len < rest.len() {
                        let head = rest[len..].first_chunk().ok_or("part of a packet")?;
                        len += Header::decode(head)?.packet_len();
                        messages += 1;
                    }
                    let (pass, after) = rest.split_at_checked(len).ok_or("part of a packet")?;
                    busy_wait(priority.work(messages, len));
                    for piece in pass.chunks(AT_ONCE) {
                        to.write_all(piece)?;
                    }
                    rest = after;
                }
                Ok(())
            }
        }
    }
}

fn busy_wait(time: Duration) {
    let clock = WallClock::start();
    while clock.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use std::io;

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
            let len = bytes.len().min(self.takes);
            self.bytes.extend_from_slice(&bytes[..len]);
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

    /// So many messages with values of this length, and where each ends.
    fn messages(count: usize, value_len: usize) -> (Vec<u8>, Vec<usize>) {
        let (mut packets, mut ends) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let value = vec![7; value_len];
            Frame::request(Opcode::DCP_MUTATION).with_value(&value).encode(&mut packets).unwrap();
            ends.push(packets.len());
        }
        (packets, ends)
    }

    #[test]
    fn a_node_writes_a_pass_at_a_time_and_works_before() {
        let (packets, ends) = messages(12, 4);
        let clock = WallClock::start();
        let five = written(Writes::LikeANode(Priority::Medium), &packets, usize::MAX);
        assert!(clock.elapsed() >= Priority::Medium.work(12, packets.len()));
        assert_eq!(five, [ends[4], ends[9], ends[11]]);
        assert_eq!(written(Writes::LikeANode(Priority::Low), &packets, usize::MAX), ends);
        let all = [packets.len()];
        assert_eq!(written(Writes::LikeANode(Priority::High), &packets, usize::MAX), all);
        assert_eq!(written(Writes::Large, &packets, usize::MAX), all);
        // What the socket does not take at once is written after it.
        written(Writes::LikeANode(Priority::Medium), &packets, 30);
    }

    /// The sizes of a node's writes on record: 330 B for one document of 256 B with a key of 19 B,
    /// 1,650 B for five, 16,384 and 116 B for fifty, of which the first piece is full.
    #[test]
    fn a_node_writes_the_sizes_on_record() {
        let sizes = |priority, value_len: usize, len: usize| {
            // The rest of a message is its header, here with the extras and the key as value.
            let (packets, _) = messages(100, value_len);
            assert_eq!(packets.len(), 100 * len);
            let ends = written(Writes::LikeANode(priority), &packets, usize::MAX);
            let starts = [0].into_iter().chain(ends.clone());
            ends.iter().zip(starts).map(|(end, start)| end - start).collect::<Vec<_>>()
        };
        assert_eq!(sizes(Priority::Low, 306, 330), [330; 100]);
        assert_eq!(sizes(Priority::Medium, 306, 330), [1650; 20]);
        assert_eq!(sizes(Priority::High, 306, 330), [16384, 116, 16384, 116]);
        assert_eq!(sizes(Priority::Medium, 1074, 1098), [5490; 20]);
        assert_eq!(sizes(Priority::High, 1074, 1098), [[16384, 16384, 16384, 5748]; 2].concat());
    }

    #[test]
    fn a_node_takes_its_time_by_message_and_byte() {
        let per_million = |priority: Priority, message: usize| {
            let messages = priority.messages();
            let pass = priority.work(messages, messages * message);
            pass.mul_f64(1e6 / messages as f64).as_secs_f64()
        };
        assert!(per_million(Priority::High, 330) < per_million(Priority::Medium, 330) * 0.7);
        assert!(per_million(Priority::High, 1098) > per_million(Priority::High, 330) * 1.8);
    }
}
