//! A consumer's and a producer's machine under one simulated clock.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::BytesMut;
use dcp_producer_proto as producer;
use dcp_producer_proto::{BucketSource, Features, Item};
use dcp_proto::consumer::{ConnectionConfig, StreamPosition};
use dcp_wire::message::{Control, Open, OpenFlags};
use dcp_wire::{Datatype, Opaque, Seqno, Status};

use crate::bucket::{Bucket, VBucket};
use crate::harness::{Harness, VB};
use crate::packet::{Packet, packets};

/// Both ends of an open DCP connection, negotiated from the consumer's configuration.
#[derive(Debug)]
pub struct Pair {
    /// The consumer and its sink.
    pub reader: Harness,
    /// The producer's end.
    pub node: producer::Connection,
    /// The producer's data, in [`VB`].
    pub bucket: Bucket,
    features: Features,
}

impl Pair {
    /// A consumer of one vBucket.
    ///
    /// # Panics
    /// If the producer refuses the consumer's settings.
    #[must_use]
    pub fn open(vbucket: VBucket, config: ConnectionConfig) -> Self {
        let mut bucket = Bucket::with(VBucket::new());
        bucket.vbuckets = BTreeMap::from([(VB.0, vbucket)]);
        let (window, noops, collections) =
            (config.window, config.noop_interval, config.collections);
        let ends_closed = config.stream_end_on_close;
        let mut pair = Self {
            reader: Harness::new(config),
            node: producer::Connection::new(producer::ConnectionConfig::default()),
            bucket,
            features: Features { xerror: true, json: true, collections, ..Features::NONE },
        };
        let mut packet = BytesMut::new();
        let (flags, datatype) = (OpenFlags::PRODUCER, Datatype::RAW);
        let open = Open { flags, name: b"pair", value: &[], datatype };
        open.encode(Opaque(1), &mut packet).unwrap();
        let window = (window > 0).then(|| ("connection_buffer_size", window.to_string()));
        let noops = noops.map(|every| ("set_noop_interval", every.as_secs().to_string()));
        let enabled = noops.is_some().then(|| ("enable_noop", "true".to_owned()));
        let ends = ends_closed
            .then(|| (Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM, "true".to_owned()));
        for (key, value) in [window, enabled, noops, ends].into_iter().flatten() {
            let control = Control { key: key.as_bytes(), value: value.as_bytes() };
            control.encode(Opaque(2), &mut packet).unwrap();
        }
        for request in packets(&packet) {
            let answer = pair.take(&request);
            assert_eq!(packets(&answer)[0].status(), Status::SUCCESS, "{request:?}");
        }
        pair
    }

    /// Lets the consumer request the stream and exchanges all packets.
    pub fn stream(&mut self, resume: StreamPosition, end: Seqno) {
        self.reader.machine.open_stream(VB, end, resume).unwrap();
        self.run();
    }

    /// Exchanges packets until neither end has any left.
    pub fn run(&mut self) {
        loop {
            let mut sent = BytesMut::new();
            self.reader.machine.poll_transmit(&mut sent);
            for packet in packets(&sent) {
                let answer = self.take(&packet);
                self.reader.wire.extend(answer);
            }
            let mut out = BytesMut::new();
            while self.node.poll_transmit(self.reader.now, &self.bucket, &mut out, usize::MAX).more
            {
            }
            self.reader.wire.extend(out);
            if sent.is_empty() && self.reader.wire.is_empty() {
                return;
            }
            self.reader.play();
        }
    }

    /// The producer's responses.
    fn take(&mut self, packet: &Packet) -> BytesMut {
        let mut out = BytesMut::new();
        let source = Some(&self.bucket);
        let now = self.reader.now;
        self.node.handle_frame(now, &packet.frame(), source, self.features, &mut out).unwrap();
        out
    }

    /// Writes to the vBucket and exchanges packets.
    pub fn write(&mut self, items: impl IntoIterator<Item = Item>) {
        let vbucket = self.bucket.vbuckets.get_mut(&VB.0).expect("the vBucket");
        items.into_iter().for_each(|item| vbucket.write(item));
        self.node.notify(VB);
        self.run();
    }

    /// Acknowledges everything delivered to the application.
    pub fn release(&mut self) {
        let held = self.reader.machine.take_held();
        self.reader.machine.release(self.reader.now, held);
        self.run();
    }

    /// Advances time for both ends.
    pub fn pass(&mut self, time: Duration) {
        self.reader.now += time;
        self.reader.machine.handle_timeout(self.reader.now).unwrap();
        self.node.handle_timeout(self.reader.now).unwrap();
        self.run();
    }

    /// Replaces the connection; the consumer resumes on the new one.
    pub fn reconnect(&mut self, config: ConnectionConfig, end: Seqno) {
        let vbucket = self.bucket.vbuckets.remove(&VB.0).expect("the vBucket");
        let mut next = Self::open(vbucket, config);
        std::mem::swap(&mut next.reader.sink, &mut self.reader.sink);
        let old = std::mem::replace(self, next);
        let [(_, resume)] = &old.reader.machine.into_streams()[..] else { panic!("one stream") };
        self.stream(resume.clone(), end);
    }

    /// Asserts that both ends count the same number of unacknowledged bytes.
    ///
    /// # Panics
    /// If they do not.
    pub fn assert_accounts_agree(&self) {
        assert_eq!(self.node.unacked_bytes(), self.reader.machine.unacknowledged());
    }

    /// The producer's high seqno.
    #[must_use]
    pub fn high_seqno(&self) -> Seqno {
        use dcp_producer_proto::VBucketSource;
        self.bucket.vbucket(VB).expect("the vBucket").high_seqno()
    }
}
