//! The embedded cluster and the ledger of everything written to it.

use std::collections::BTreeMap;

use bytes::Bytes;
use dcp_consumer::connect::{Connector, Socket};
use dcp_consumer::{ConnectOptions, Credentials};
use dcp_producer::{Producer, ProducerOptions, User, WriteOptions};
use dcp_proto::Op;
use dcp_test::peer::Peer;
use dcp_wire::{Cas, Datatype, Frame, Opcode, Seqno, Status, Vbid};

use crate::Row;
use crate::reading::READER;

/// One write as it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    op: Op,
    key: String,
    value: Option<Bytes>,
    cas: Cas,
}

/// The true history of every vBucket.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    vbuckets: BTreeMap<Vbid, BTreeMap<Seqno, Written>>,
}

impl Ledger {
    /// Checks that `rows` are a read of the changes above `from` (0 where it has no entry):
    /// seqnos ascend in every vBucket, every row is what was written at its seqno, and of every
    /// key the newest change is there. Older versions may be missing, as a server may leave them
    /// out.
    ///
    /// # Panics
    /// If the rows are not that.
    pub fn assert_read(&self, rows: &[Row], from: &BTreeMap<Vbid, Seqno>) {
        let mut last = from.clone();
        let mut seen: BTreeMap<(Vbid, &str), Seqno> = BTreeMap::new();
        for row in rows {
            let before = last.insert(row.vbid, row.seqno).unwrap_or(Seqno::ZERO);
            assert!(before < row.seqno, "{row:?} comes after seqno {before}");
            let written = self.vbuckets.get(&row.vbid).and_then(|vb| vb.get(&row.seqno));
            let Some(written) = written else { panic!("{row:?} was never written") };
            assert_eq!(row.op, written.op.name(), "{row:?}");
            assert_eq!(row.key.as_deref(), Some(written.key.as_str()), "{row:?}");
            assert!(row.value == written.value, "the value of {row:?} differs");
            assert_eq!(row.cas, Some(written.cas.0), "{row:?}");
            seen.insert((row.vbid, &written.key), row.seqno);
        }
        for (vbid, key, seqno) in self.newest() {
            if seqno > from.get(&vbid).copied().unwrap_or_default() {
                assert_eq!(
                    seen.get(&(vbid, key)),
                    Some(&seqno),
                    "newest change of {key} in {vbid}"
                );
            }
        }
    }

    /// vBucket, key and seqno of the newest change of every key.
    fn newest(&self) -> impl Iterator<Item = (Vbid, &str, Seqno)> {
        self.vbuckets.iter().flat_map(|(vbid, changes)| {
            let newest: BTreeMap<&str, Seqno> =
                changes.iter().map(|(seqno, written)| (written.key.as_str(), *seqno)).collect();
            newest.into_iter().map(|(key, seqno)| (*vbid, key, seqno))
        })
    }

    /// The documents there are: key and value.
    #[must_use]
    pub fn live(&self) -> BTreeMap<String, Bytes> {
        let newest = self.newest().map(|(vbid, key, seqno)| (key, &self.vbuckets[&vbid][&seqno]));
        newest.filter_map(|(key, written)| Some((key.to_owned(), written.value.clone()?))).collect()
    }

    /// Changes of every key counted once.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.newest().count()
    }

    /// Highest seqno of a vBucket.
    #[must_use]
    pub fn high(&self, vbid: Vbid) -> Seqno {
        let newest = self.vbuckets.get(&vbid).and_then(|changes| changes.last_key_value());
        newest.map_or(Seqno::ZERO, |(seqno, _)| *seqno)
    }

    /// The same history of one vBucket only.
    #[must_use]
    pub fn only(&self, vbid: Vbid) -> Self {
        let mut vbuckets = self.vbuckets.clone();
        vbuckets.retain(|other, _| *other == vbid);
        Self { vbuckets }
    }
}

/// An embedded cluster; everything written to it through here is in the ledger.
#[derive(Debug)]
pub struct History {
    /// The cluster.
    pub producer: Producer,
    /// What was written.
    pub ledger: Ledger,
}

impl History {
    /// Starts an empty cluster.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start(nodes: usize, vbuckets: u16) -> Self {
        let mut options = ProducerOptions::default();
        let (username, password) = (READER.0.to_owned(), READER.1.to_owned());
        options.users = vec![User { username, password, reads: None }];
        options.nodes = nodes;
        options.vbuckets = vbuckets;
        let producer = Producer::start(options).await.expect("the cluster starts");
        Self { producer, ledger: Ledger::default() }
    }

    /// Writes a document.
    ///
    /// # Panics
    /// If it is refused.
    pub fn upsert(&mut self, key: &str, value: impl Into<Bytes>) -> (Vbid, Seqno) {
        let value = value.into();
        let token = self
            .producer
            .upsert(key.as_bytes(), value.clone(), WriteOptions::default())
            .expect(key);
        self.record(token.vbid, token.seqno, token.cas, (Op::Mutation, key, Some(value)))
    }

    /// Writes a document in its compressed form, which only clients can; the cluster must have
    /// one node.
    ///
    /// # Panics
    /// If it is refused.
    pub async fn upsert_compressed(&mut self, key: &str, value: impl Into<Bytes>) {
        let value = value.into();
        let vbid = self.producer.vbid_of(key.as_bytes());
        let key_in_default = [&[0], key.as_bytes()].concat();
        let compressed = snap::raw::Encoder::new().compress_vec(&value).expect("it compresses");
        let request = Frame::request(Opcode::SET)
            .with_vbid(vbid)
            .with_extras(&[0; 8])
            .with_datatype(Datatype::JSON.with(Datatype::SNAPPY))
            .with_key(&key_in_default)
            .with_value(&compressed);
        self.peer().await.ask_for(request, Status::SUCCESS).await;
        let document = self.producer.get(key.as_bytes()).expect("it was written");
        self.record(vbid, document.seqno, document.cas, (Op::Mutation, key, Some(value)));
    }

    /// A connection of its own, as clients set it up.
    async fn peer(&self) -> Peer<Socket> {
        let options = ConnectOptions::new(self.producer.connection_string())
            .with_bucket(self.producer.bucket_name())
            .with_credentials(Credentials::new("Administrator", "password"));
        let connector = Connector::new(options).expect("valid options");
        let connected = connector.connect_any().await.expect("a connection");
        let mut peer = Peer::new(connected.socket);
        peer.input = connected.leftover;
        peer
    }

    /// Writes `count` documents of `len` bytes under keys that begin with `prefix`.
    pub fn load(&mut self, prefix: &str, count: usize, len: usize) {
        for number in 0..count {
            let mut value = format!("{{\"n\":{number},\"pad\":\"").into_bytes();
            value.resize(len.max(value.len() + 2) - 2, b'x');
            value.extend_from_slice(b"\"}");
            self.upsert(&format!("{prefix}-{number}"), value);
        }
    }

    /// Removes a document.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn remove(&mut self, key: &str) -> (Vbid, Seqno) {
        let token = self.producer.remove(key.as_bytes(), WriteOptions::default()).expect(key);
        self.record(token.vbid, token.seqno, token.cas, (Op::Deletion, key, None))
    }

    /// Expires a document.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn expire(&mut self, key: &str) -> (Vbid, Seqno) {
        let token = self.producer.expire(key.as_bytes(), WriteOptions::default()).expect(key);
        self.record(token.vbid, token.seqno, token.cas, (Op::Expiration, key, None))
    }

    /// Takes a vBucket back to `to`; the ledger forgets what is lost.
    ///
    /// # Panics
    /// If the producer cannot.
    pub fn roll_back(&mut self, vbid: Vbid, to: Seqno) {
        self.producer.roll_back(vbid, to).expect("it can be rolled back");
        if let Some(changes) = self.ledger.vbuckets.get_mut(&vbid) {
            changes.retain(|seqno, _| *seqno <= to);
        }
    }

    fn record(
        &mut self,
        vbid: Vbid,
        seqno: Seqno,
        cas: Cas,
        (op, key, value): (Op, &str, Option<Bytes>),
    ) -> (Vbid, Seqno) {
        let written = Written { op, key: key.to_owned(), value, cas };
        let changes = self.ledger.vbuckets.entry(vbid).or_default();
        assert!(changes.insert(seqno, written).is_none(), "seqno {seqno} twice");
        (vbid, seqno)
    }
}
