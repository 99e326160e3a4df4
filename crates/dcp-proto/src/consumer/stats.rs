//! Counters of a connection.

/// Counters of a connection since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionStats {
    /// Packets received.
    pub packets: u64,
    /// Bytes received in whole packets.
    pub bytes: u64,
    /// Changes given to the sink.
    pub changes: u64,
    /// Rollbacks carried out.
    pub rollbacks: u64,
    /// Packets of a stream that does not, or no longer, exist; their bytes were returned.
    pub stale_packets: u64,
    /// Answers to requests that were replaced meanwhile.
    pub stale_responses: u64,
    /// Changes with the seqno of the SEQNO_ADVANCED just before them, a known server bug; they were
    /// handled as changes.
    pub repeated_seqnos: u64,
    /// Noops answered.
    pub noops: u64,
    /// Flow-control acknowledgements sent to the producer.
    pub acks: u64,
}

impl ConnectionStats {
    /// Adds what another connection counted.
    pub const fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.changes += other.changes;
        self.rollbacks += other.rollbacks;
        self.stale_packets += other.stale_packets;
        self.stale_responses += other.stale_responses;
        self.repeated_seqnos += other.repeated_seqnos;
        self.noops += other.noops;
        self.acks += other.acks;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_counters_are_each_added_to_their_own() {
        let counted = |times: u64| ConnectionStats {
            packets: times,
            bytes: 2 * times,
            changes: 3 * times,
            rollbacks: 4 * times,
            stale_packets: 5 * times,
            stale_responses: 6 * times,
            repeated_seqnos: 7 * times,
            noops: 8 * times,
            acks: 9 * times,
        };
        let mut stats = ConnectionStats::default();
        stats.add(&counted(10));
        assert_eq!(stats, counted(10));
        stats.add(&counted(3));
        assert_eq!(stats, counted(13));
    }
}
