//! Any sequence of changes against rows kept one by one.

use dcp_arrow::COLUMNS;
use dcp_proto::{BatchSink, Change, ChangeSink, Op, Snapshot};
use dcp_test::with;
use dcp_wire::xattr::Xattr;
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid, snappy, xattr};
use proptest::prelude::*;

use crate::{bytes, columns, flags, maps, numbers, sink, texts};

/// A change as a row-at-a-time program would keep it.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) op: Op,
    pub(crate) key: String,
    body: Vec<u8>,
    attributes: Option<Vec<(String, String)>>,
    compressed: bool,
    json: bool,
    pub(crate) numbers: [u64; 5],
    pub(crate) small: [u32; 4],
}

impl Row {
    pub(crate) fn datatype(&self) -> Datatype {
        let bit = |set, bit| if set { bit } else { Datatype::RAW };
        bit(self.json, Datatype::JSON)
            .with(bit(self.compressed, Datatype::SNAPPY))
            .with(bit(self.attributes.is_some(), Datatype::XATTR))
    }

    /// The value as a server would send it.
    pub(crate) fn wire_value(&self) -> Vec<u8> {
        let mut value = Vec::new();
        if let Some(attributes) = &self.attributes {
            let pairs: Vec<_> = attributes
                .iter()
                .map(|(name, value)| Xattr { name: name.as_bytes(), value: value.as_bytes() })
                .collect();
            xattr::encode(pairs, &mut value).unwrap();
        }
        if self.op == Op::Mutation {
            value.extend_from_slice(&self.body);
        }
        if self.compressed { snappy::compress(&value).unwrap() } else { value }
    }

    fn change<'a>(&'a self, value: &'a [u8], vbid: u16) -> Change<'a> {
        let [seqno, cas, rev, start, end] = self.numbers;
        let [flags, expiry, delete_time, epoch] = self.small;
        Change {
            op: self.op,
            vbid: Vbid(vbid),
            seqno: Seqno(seqno),
            vbuuid: Vbuuid(seqno ^ cas),
            epoch,
            snapshot: Snapshot { start: Seqno(start), end: Seqno(end) },
            history: flags % 2 == 1,
            collection_id: CollectionId(flags % 3),
            key: self.key.as_bytes(),
            value,
            datatype: self.datatype(),
            cas: Cas(cas),
            rev_seqno: RevSeqno(rev),
            flags,
            expiry,
            delete_time,
        }
    }
}

pub(crate) fn row() -> impl Strategy<Value = Row> {
    let op = prop_oneof![
        6 => Just(Op::Mutation),
        1 => Just(Op::Deletion),
        1 => Just(Op::Expiration),
    ];
    let attributes = prop::collection::vec(("[a-z_]{1,8}", "[^\\x00]{0,12}"), 0..3);
    (
        op,
        "\\PC{1,20}",
        prop::collection::vec(any::<u8>(), 0..200),
        prop::option::weighted(0.2, attributes),
        prop::bool::weighted(0.3),
        any::<bool>(),
        any::<[u64; 5]>(),
        any::<[u32; 4]>(),
    )
        .prop_map(|(op, key, body, attributes, compressed, json, numbers, small)| Row {
            op,
            key,
            body,
            attributes,
            compressed,
            json,
            numbers,
            small,
        })
}

fn signed(number: u64) -> Option<i64> {
    Some(i64::from_ne_bytes(number.to_ne_bytes()))
}

fn seconds(number: u32) -> Option<i64> {
    (number != 0).then(|| i64::from(number) * 1_000_000)
}

proptest! {
    #[test]
    fn batches_hold_what_was_put_in(
        rows in prop::collection::vec(row(), 0..60),
        cuts in prop::collection::vec(1_usize..20, 1..8),
    ) {
        let every: Vec<&str> = COLUMNS.iter().map(|spec| spec.name).collect();
        let options = with(columns(&every), |o| o.include_xattrs = true);
        let mut sink = sink(&options);
        let mut cuts = cuts.into_iter().cycle();
        let mut rest = rows.as_slice();
        while !rest.is_empty() {
            let (part, tail) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            rest = tail;
            for (vbid, row) in part.iter().enumerate() {
                let value = row.wire_value();
                sink.change(&row.change(&value, vbid.try_into().unwrap())).unwrap();
            }
            prop_assert_eq!(sink.rows(), part.len());
            let batch = sink.take_batch().unwrap().finish().unwrap();
            for (index, row) in part.iter().enumerate() {
                let is_mutation = row.op == Op::Mutation;
                let text = |column: &str| texts(&batch, column)[index].clone();
                let number = |column: &str| numbers(&batch, column)[index];
                prop_assert_eq!(text("key"), Some(row.key.clone()));
                let body = is_mutation.then(|| row.body.clone());
                prop_assert_eq!(&bytes(&batch, "value")[index], &body);
                prop_assert_eq!(&maps(&batch)[index], &row.attributes);
                prop_assert_eq!(number("vbucket"), Some(i64::try_from(index).unwrap()));
                prop_assert_eq!(number("seqno"), signed(row.numbers[0]));
                prop_assert_eq!(number("cas"), signed(row.numbers[1]));
                prop_assert_eq!(number("rev"), signed(row.numbers[2]));
                prop_assert_eq!(number("snapshot_start"), signed(row.numbers[3]));
                prop_assert_eq!(number("snapshot_end"), signed(row.numbers[4]));
                prop_assert_eq!(flags(&batch, "history")[index], Some(row.small[0] % 2 == 1));
                prop_assert_eq!(number("flags"), is_mutation.then_some(row.small[0].into()));
                prop_assert_eq!(number("expiry"), seconds(row.small[1]));
                prop_assert_eq!(number("deleted_at"), seconds(row.small[2]));
                prop_assert_eq!(number("collection_id"), Some(i64::from(row.small[0] % 3)));
                let known = (row.small[0] % 3 == 0).then(|| "_default".to_owned());
                prop_assert_eq!(text("scope"), known);
                let datatype = if row.json { "json" } else { "binary" };
                prop_assert_eq!(text("datatype"), is_mutation.then(|| datatype.to_owned()));
            }
        }
    }
}
