use dcp_wire::message::FailoverEntry;
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Seqno, Vbuuid};
use proptest::prelude::*;

use super::*;
use crate::consumer::StreamFilter;
use crate::{CollectionPatterns, CompletePoint, FailoverLog, Op, RowFilter, Snapshot};

fn filter(ids: &[u32]) -> StoredFilter {
    StoredFilter::new(
        StreamFilter::Collections(ids.iter().copied().map(CollectionId).collect()),
        false,
    )
}

fn manifest() -> Manifest {
    let json = r#"{"uid":"7","scopes":[{"name":"shop","uid":"8","collections":
        [{"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]}]}"#;
    Manifest::parse(json.as_bytes()).unwrap()
}

fn position(seqno: u64, log: &[(u64, u64)]) -> Position {
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    Position {
        seqno: Seqno(seqno),
        snapshot: Snapshot { start: Seqno(seqno / 2), end: Seqno(seqno + 3) },
        failover_log: FailoverLog::new(log.iter().map(entry).collect()).ok(),
        manifest_uid: ManifestUid(0x1f),
        purge_seqno: Seqno(seqno / 4),
        epoch: 2,
    }
}

fn checkpoint() -> Checkpoint {
    Checkpoint::new("bucket-uuid", filter(&[9]))
        .with_position(Vbid(0), position(10, &[(0xabc, 4), (u64::MAX, 0)]))
        .with_position(Vbid(31), position(11, &[]))
        .with_position(Vbid(1023), position(u64::MAX - 3, &[(1, 0)]))
}

#[test]
fn checkpoint_survives_being_written() {
    let checkpoint = checkpoint();
    let read = Checkpoint::from_json(checkpoint.to_json().as_bytes()).unwrap();
    assert_eq!(read, checkpoint);
    assert_eq!(read.position(Vbid(31)), Some(&position(11, &[])));
    assert_eq!(read.position(Vbid(32)), None);
    assert_eq!(read.positions().map(|(vbid, _)| vbid.0).collect::<Vec<_>>(), [0, 31, 1023]);
}

#[test]
fn position_is_moved_back_on_the_branch_that_had_the_seqno() {
    let checkpoint = checkpoint();
    let rewound = |seqno| checkpoint.rewound_to(Vbid(0), Seqno(seqno));
    for (seqno, vbuuid) in [(9, 0xabc), (4, u64::MAX), (0, 0)] {
        let rewound = rewound(seqno);
        let position = rewound.position(Vbid(0)).unwrap();
        assert_eq!((position.seqno, position.vbuuid()), (Seqno(seqno), Vbuuid(vbuuid)));
        assert_eq!(position.request_snapshot(), Snapshot::at(Seqno(seqno)));
        assert_eq!(rewound.position(Vbid(31)), checkpoint.position(Vbid(31)));
    }
    assert_eq!(rewound(10), checkpoint, "never forward");
    assert_eq!(checkpoint.rewound_to(Vbid(5), Seqno(1)), checkpoint, "nor from nothing");
}

#[test]
fn vbucket_begun_again_is_at_the_beginning_of_its_next_epoch() {
    let checkpoint = checkpoint();
    let again = checkpoint.begun_again(Vbid(0));
    let epoch = checkpoint.position(Vbid(0)).unwrap().epoch + 1;
    assert_eq!(again.position(Vbid(0)), Some(&Position { epoch, ..Position::EARLIEST }));
    assert_eq!(again.position(Vbid(31)), checkpoint.position(Vbid(31)));
    assert_eq!(checkpoint.begun_again(Vbid(5)), checkpoint, "it has not been read");
}

#[test]
fn checkpoint_of_version_1_stays_readable() {
    // As the first release wrote it; never to be changed.
    let document = br#"{"format":"dcp_rs checkpoint","version":1,"crc32":"6c134e0e","content":{"bucket_uuid":"b","filter":"000000000000feed","positions":{"7":{"seqno":5,"snapshot":[0,9],"failover_log":[["0000000000000abc",4]],"manifest":"000000000000001f","purge_seqno":1,"epoch":2}}}}"#;
    let read = Checkpoint::from_json(document).unwrap();
    let expected = Position {
        snapshot: Snapshot { start: Seqno(0), end: Seqno(9) },
        ..position(5, &[(0xabc, 4)])
    };
    assert_eq!(read.position(Vbid(7)), Some(&expected));
    assert_eq!((read.bucket_uuid(), read.filter()), ("b", None));
    assert_eq!(read.history(Vbid(7)), Some(&History::default()));
}

#[test]
fn checkpoint_of_version_2_stays_readable() {
    // As the release that brought earlier points wrote it; never to be changed.
    let document = br#"{"format":"dcp_rs checkpoint","version":2,"crc32":"90d10a57","content":{"bucket_uuid":"b","filter":"000000000000feed","positions":{"7":{"seqno":5,"snapshot":[0,9],"failover_log":[["0000000000000abc",4]],"manifest":"000000000000001f","purge_seqno":1,"epoch":2,"earlier":[{"seqno":2,"failover_log":[["0000000000000def",0]],"manifest":"000000000000001e","purge_seqno":0},{"seqno":4}]}}}}"#;
    let read = Checkpoint::from_json(document).unwrap();
    let expected = Position {
        snapshot: Snapshot { start: Seqno(0), end: Seqno(9) },
        ..position(5, &[(0xabc, 4)])
    };
    assert_eq!(read.position(Vbid(7)), Some(&expected));
    let points = [point(2, &[(0xdef, 0)], 0x1e, 0), point(4, &[(0xabc, 4)], 0x1f, 1)];
    assert_eq!(read.history(Vbid(7)).unwrap().points(), points);
    assert_eq!(read.to_json().as_bytes(), document, "and this release writes the same");
}

#[test]
fn checkpoint_of_version_3_stays_readable() {
    // As the release that brought the filter wrote it; never to be changed.
    let document = br#"{"format":"dcp_rs checkpoint","version":3,"crc32":"7f369016","content":{"bucket_uuid":"b","filter":{"collections":["00000009","0000000a"],"system_documents":false},"positions":{"7":{"seqno":5,"snapshot":[0,9],"failover_log":[["0000000000000abc",4]],"manifest":"000000000000001f","purge_seqno":1,"epoch":2}}}}"#;
    let read = Checkpoint::from_json(document).unwrap();
    assert_eq!(read.filter(), Some(&filter(&[9, 10])));
    assert_eq!(read.position(Vbid(7)).unwrap().seqno, Seqno(5));
    assert_eq!(read.to_json().as_bytes(), document, "and this release writes the same");
}

#[test]
fn checkpoint_of_a_row_filter_or_patterns_has_a_version_of_its_own() {
    let keys = Some(vec!["b?".to_owned(), "a*".to_owned()]);
    let ops = Some(vec![Op::Mutation, Op::Deletion]);
    let rows = RowFilter::new(keys, ops, Some(0x1234_5678)).unwrap();
    let made = Checkpoint::new("b", filter(&[9]).with_rows(rows));
    let document = made.to_json();
    // Never to be changed.
    let content = r#""system_documents":false,"keys":["a*","b?"],"ops":["deletion","mutation"],"since":305397760}"#;
    assert!(document.contains(content), "{document}");
    assert!(document.contains(r#""version":4"#), "earlier releases name it as the reason");
    assert_eq!(Checkpoint::from_json(document.as_bytes()), Ok(made.clone()));
    let patterns = CollectionPatterns::new(["shop.o*"]).unwrap();
    let matching = Checkpoint::new("b", StoredFilter::default().with_patterns(patterns));
    let with_patterns = matching.to_json();
    assert!(with_patterns.contains(r#""patterns":["shop.o*"]"#), "{with_patterns}");
    assert_eq!(Checkpoint::from_json(with_patterns.as_bytes()), Ok(matching));
    for (document, version) in [(document, 3), (Checkpoint::new("b", filter(&[9])).to_json(), 4)] {
        let changed = document.replace("\"version\":4", "\"version\":3");
        let changed = changed.replace("\"version\":3", &format!("\"version\":{version}"));
        let read = Checkpoint::from_json(changed.as_bytes());
        assert!(matches!(read, Err(CheckpointError::Damaged { .. })), "{changed}: {read:?}");
    }
    assert!(made.narrowed_to("b", &filter(&[9]), &manifest()).is_err(), "that is more");
    assert!(Checkpoint::new("b", filter(&[9])).merge(&made).is_err());
}

#[test]
fn checkpoint_with_only_a_filter_hash_stores_the_filter_when_used_again() {
    // Of collections 0x9 and 0xa; never to be changed.
    let document = br#"{"format":"dcp_rs checkpoint","version":2,"crc32":"2f08c80d","content":{"bucket_uuid":"b","filter":"53a6f4b741b32ac3","positions":{"7":{"seqno":5,"snapshot":[0,9],"failover_log":[["0000000000000abc",4]],"manifest":"000000000000001f","purge_seqno":1,"epoch":2}}}}"#;
    let read = Checkpoint::from_json(document).unwrap();
    let both = filter(&[9, 10]);
    for asked in [both.clone(), StoredFilter::new(both.documents().clone(), true)] {
        let resumed = read.narrowed_to("b", &asked, &manifest()).unwrap();
        assert_eq!(resumed.filter(), Some(&asked));
        assert!(resumed.positions().eq(read.positions()));
        assert!(resumed.to_json().contains(r#""version":3"#));
    }
    for other in [filter(&[9]), filter(&[9, 10, 11]), StoredFilter::default()] {
        let refused = read.narrowed_to("b", &other, &manifest());
        assert_eq!(refused, Err(CheckpointError::OtherFilter(FilterMismatch::Hash)), "{other}");
    }
    let part = read.restricted_to([Vbid(7)]);
    assert_eq!(part.to_json().as_bytes(), document);
    for (mut first, second) in [
        (part.clone(), Checkpoint::new("b", both.clone())),
        (Checkpoint::new("b", both.clone()), part.clone()),
    ] {
        first.merge(&second).unwrap();
        assert_eq!(first.filter(), Some(&both));
        assert_eq!(first.position(Vbid(7)), read.position(Vbid(7)));
    }
    let refused = Checkpoint::new("b", filter(&[9])).merge(&part).unwrap_err();
    assert!(refused.to_string().contains("one with the hash 53a6f4b741b32ac3"), "{refused}");
}

#[test]
fn checkpoint_accepts_and_stores_a_narrower_filter() {
    let whole =
        Checkpoint::new("b", StoredFilter::default()).with_position(Vbid(7), position(5, &[]));
    let orders = filter(&[9]);
    let narrowed = whole.narrowed_to("b", &orders, &manifest()).unwrap();
    assert_eq!(narrowed.filter(), Some(&orders));
    assert_eq!(narrowed.position(Vbid(7)), whole.position(Vbid(7)));
    let read = Checkpoint::from_json(narrowed.to_json().as_bytes()).unwrap();
    for wider in [filter(&[9, 10]), StoredFilter::default()] {
        let refused = read.narrowed_to("b", &wider, &manifest());
        assert!(matches!(refused, Err(CheckpointError::OtherFilter(_))), "{wider}: {refused:?}");
    }
    let text = read.narrowed_to("b", &filter(&[9, 10]), &manifest()).unwrap_err().to_string();
    assert!(text.contains("shop.carts (0xa)"), "{text}");
}

fn point(seqno: u64, log: &[(u64, u64)], manifest: u64, purge: u64) -> CompletePoint {
    CompletePoint {
        seqno: Seqno(seqno),
        failover_log: position(0, log).failover_log,
        manifest_uid: ManifestUid(manifest),
        purge_seqno: Seqno(purge),
    }
}

#[test]
fn checkpoint_with_impossible_earlier_points_is_damaged() {
    for (earlier, what) in [
        (&[2, 2][..], "earlier points are out of order"),
        (&[0, 2], "earlier points are out of order"),
        (&[2, 6], "an earlier point lies above its position"),
    ] {
        let points = earlier.iter().map(|&seqno| point(seqno, &[], 0, 0)).collect::<Vec<_>>();
        let history = History::unchecked(points);
        let mut checkpoint = Checkpoint::new("b", filter(&[9]));
        checkpoint.advance(PositionUpdate { vbid: Vbid(7), position: position(5, &[]), history });
        let read = Checkpoint::from_json(checkpoint.to_json().as_bytes());
        assert_eq!(read, Err(CheckpointError::damaged(Form::Checkpoint, what)), "{earlier:?}");
    }
}

#[test]
fn checkpoint_document_may_be_reformatted_but_not_changed() {
    let value: serde_json::Value = serde_json::from_str(&checkpoint().to_json()).unwrap();
    let pretty = serde_json::to_string_pretty(&value).unwrap();
    assert_eq!(Checkpoint::from_json(pretty.as_bytes()).unwrap(), checkpoint());
    let changed = pretty.replace("\"seqno\": 10", "\"seqno\": 11");
    assert_ne!(changed, pretty);
    assert_eq!(
        Checkpoint::from_json(changed.as_bytes()),
        Err(CheckpointError::damaged(Form::Checkpoint, "checksum mismatch"))
    );
}

#[test]
fn checkpoint_with_any_damaged_byte_is_an_error() {
    let json = checkpoint().to_json().into_bytes();
    for at in 0..json.len() {
        for flip in [0x01, 0x02, 0x10, 0x20, 0x80] {
            let mut damaged = json.clone();
            damaged[at] ^= flip;
            assert!(
                Checkpoint::from_json(&damaged).is_err(),
                "byte {at} flipped by {flip:#x}: {}",
                String::from_utf8_lossy(&damaged)
            );
        }
        assert!(Checkpoint::from_json(&json[..at]).is_err(), "cut to {at} bytes");
    }
}

#[test]
fn checkpoint_with_a_seqno_outside_its_snapshot_is_damaged() {
    for (start, end) in [(11, 20), (0, 9)] {
        let snapshot = Snapshot { start: Seqno(start), end: Seqno(end) };
        let outside = Position { snapshot, ..position(10, &[(1, 0)]) };
        let json = checkpoint().with_position(Vbid(0), outside).to_json();
        let error = Checkpoint::from_json(json.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("a seqno lies outside its snapshot"), "{error}");
    }
    for (start, end) in [(10, 20), (0, 10), (10, 10)] {
        let snapshot = Snapshot { start: Seqno(start), end: Seqno(end) };
        let at_an_end = Position { snapshot, ..position(10, &[(1, 0)]) };
        let written = checkpoint().with_position(Vbid(0), at_an_end);
        assert_eq!(Checkpoint::from_json(written.to_json().as_bytes()), Ok(written));
    }
}

#[test]
fn checkpoint_is_never_read_from_nothing() {
    for nothing in ["", "{}", "null", "[]", "\0\0\0\0", r#"{"version":1}"#] {
        assert!(Checkpoint::from_json(nothing.as_bytes()).is_err(), "{nothing}");
    }
    let empty = Checkpoint::new("b", filter(&[9]));
    assert!(Checkpoint::from_json(empty.to_json().as_bytes()).unwrap().is_empty());
    assert!(!checkpoint().is_empty());
}

#[test]
fn checkpoint_of_a_newer_release_names_it_as_the_reason() {
    let newer = checkpoint().to_json().replace("\"version\":3", "\"version\":5");
    assert_eq!(
        Checkpoint::from_json(newer.as_bytes()),
        Err(CheckpointError::Version { form: Form::Checkpoint, found: 5, supported: 4 })
    );
}

#[test]
fn checkpoint_of_another_bucket_is_refused() {
    let refused = checkpoint().narrowed_to("recreated", &filter(&[9]), &manifest());
    assert!(matches!(refused, Err(CheckpointError::OtherBucket { .. })), "{refused:?}");
}

#[test]
fn checkpoint_of_another_version_needs_the_filter_of_that() {
    let whole = checkpoint().to_json();
    let hash = r#""00000000000000ab""#;
    let document = r#"{"collections":["00000009"],"system_documents":false}"#;
    assert!(whole.contains(document));
    for wrong in [hash, "null", r#"{"collections":["00000009"]}"#, r#"{"scope":"9"}"#] {
        let read = Checkpoint::from_json(whole.replace(document, wrong).as_bytes());
        assert!(matches!(read, Err(CheckpointError::Damaged { .. })), "{wrong}: {read:?}");
    }
}

#[test]
fn checkpoint_clones_keep_their_positions() {
    let mut checkpoint = checkpoint();
    let before = checkpoint.clone();
    checkpoint.set(Vbid(0), position(99, &[]));
    assert_eq!(before.position(Vbid(0)), Some(&position(10, &[(0xabc, 4), (u64::MAX, 0)])));
    checkpoint.set(Vbid(32), position(1, &[]));
    assert_eq!(before.position(Vbid(32)), None);
    assert_ne!(before, checkpoint);
}

#[test]
fn checkpoints_are_equal_by_their_positions() {
    let mut grown = checkpoint();
    grown.set(Vbid(5000), position(1, &[]));
    assert_ne!(grown, checkpoint());
    let without = (0..5000).map(Vbid);
    assert_eq!(grown.restricted_to(without), checkpoint());
}

#[test]
fn checkpoint_parts_can_be_taken_and_joined() {
    let whole = checkpoint();
    let part = whole.restricted_to([Vbid(31), Vbid(77)]);
    assert_eq!(part.positions().count(), 1);
    let mut joined = whole.restricted_to([Vbid(0), Vbid(1023)]);
    joined.merge(&part).unwrap();
    assert_eq!(joined, whole);
    assert!(joined.merge(&Checkpoint::new("other", filter(&[9]))).is_err());
    let mixed = joined.merge(&Checkpoint::new("bucket-uuid", filter(&[10]))).unwrap_err();
    assert!(matches!(mixed, CheckpointError::MixedFilters { .. }), "{mixed}");
    assert_eq!(joined, whole, "nothing was taken over");
}

#[test]
fn checkpoint_of_1024_vbuckets_is_of_a_sane_size() {
    let mut checkpoint = Checkpoint::new("0123456789abcdef0123456789abcdef", filter(&[9]));
    for vbid in (0..1024).map(Vbid) {
        let log = [(u64::MAX, 1 << 40), (u64::MAX - 1, 1 << 39), (u64::MAX - 2, 0)];
        let position = position(1 << 41, &log);
        let mut history = History::default();
        for age in (0..40).rev() {
            let seqno = Seqno((1 << 41) - (1 << age));
            let snapshot = Snapshot::at(seqno);
            history.push(&Position { seqno, snapshot, ..position.clone() });
        }
        assert_eq!(history.points().len(), 8);
        checkpoint.advance(PositionUpdate { vbid, position, history });
    }
    let json = checkpoint.to_json();
    assert!(json.len() < 512 * 1024, "{} bytes", json.len());
    assert_eq!(Checkpoint::from_json(json.as_bytes()).unwrap(), checkpoint);
}

fn any_filter() -> impl Strategy<Value = StoredFilter> {
    let documents = prop_oneof![
        Just(StreamFilter::All),
        any::<u32>().prop_map(|id| StreamFilter::Scope(ScopeId(id))),
        proptest::collection::vec(any::<u32>().prop_map(CollectionId), 0..20)
            .prop_map(StreamFilter::Collections),
    ];
    let keys = proptest::option::of(proptest::collection::vec(".{1,9}", 1..5));
    let ops = proptest::option::of(proptest::collection::vec(
        proptest::sample::select(&Op::ALL[..]),
        1..4,
    ));
    let rows = (keys, ops, any::<Option<u64>>())
        .prop_map(|(keys, ops, since)| RowFilter::new(keys, ops, since).unwrap());
    (documents, any::<bool>(), rows)
        .prop_map(|(documents, system, rows)| StoredFilter::new(documents, system).with_rows(rows))
}

proptest! {
    #[test]
    fn checkpoint_of_any_positions_survives_being_written(
        uuid in ".*",
        filter in any_filter(),
        positions in proptest::collection::btree_map(
            any::<u16>(),
            (any::<[u64; 3]>(), any::<[u64; 2]>(), any::<u32>(),
             proptest::collection::vec(any::<(u64, u64)>(), 0..5),
             proptest::collection::vec(any::<(u64, bool, u64)>(), 0..12)),
            0..20,
        ),
    ) {
        let mut checkpoint = Checkpoint::new(&uuid, filter);
        for (vbid, (mut range, [manifest, purge], epoch, log, earlier)) in positions {
            range.sort_unstable();
            let [start, seqno, end] = range.map(Seqno);
            let position = Position {
                seqno,
                snapshot: Snapshot { start, end },
                manifest_uid: ManifestUid(manifest),
                purge_seqno: Seqno(purge),
                epoch,
                ..position(0, &log)
            };
            let mut history = History::default();
            for (older, same, purge) in earlier {
                let older = Seqno(older.min(seqno.0));
                let mut at = Position {
                    seqno: older,
                    snapshot: Snapshot::at(older),
                    ..position.clone()
                };
                if !same {
                    (at.failover_log, at.purge_seqno) = (None, Seqno(purge));
                }
                history.push(&at);
            }
            checkpoint.advance(PositionUpdate { vbid: Vbid(vbid), position, history });
        }
        let read = Checkpoint::from_json(checkpoint.to_json().as_bytes());
        prop_assert_eq!(read, Ok(checkpoint));
    }

    #[test]
    fn checkpoint_reader_survives_any_bytes(bytes: Vec<u8>) {
        prop_assert!(Checkpoint::from_json(&bytes).is_err());
    }
}

#[test]
fn checkpoint_is_shown_by_what_it_belongs_to() {
    let checkpoint = Checkpoint::new("0123", StoredFilter::default());
    let shown = format!("{checkpoint:?}");
    assert!(shown.contains("bucket_uuid: \"0123\""), "{shown}");
    assert!(shown.contains("vbuckets: 0"), "{shown}");
}

#[test]
fn positions_of_either_form_are_told_apart_by_their_text() {
    let stream = checkpoint();
    assert_eq!(Positions::from_json(&stream.to_json()), Ok(Positions::Checkpoint(stream)));
    // A name of its own in a filter's key is escaped, so that it makes no difference.
    let rows = RowFilter::new(Some(vec!["\"format\"".to_owned()]), None, None).unwrap();
    let ends = Offsets::new("b", filter(&[9]).with_rows(rows), 4);
    assert_eq!(Positions::from_json(&ends.to_json()), Ok(Positions::Offsets(ends)));
    for (text, form) in [("{}", Form::Offsets), (r#"{"format":"x"}"#, Form::Checkpoint)] {
        let refused = Positions::from_json(text);
        assert!(
            matches!(&refused, Err(CheckpointError::Damaged { form: of, .. }) if *of == form),
            "{refused:?}"
        );
    }
}
