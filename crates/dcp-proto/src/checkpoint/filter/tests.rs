use proptest::prelude::*;

use super::*;

fn manifest() -> Manifest {
    let json = r#"{"uid":"7","scopes":[
        {"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]},
        {"name":"_system","uid":"8","collections":[{"name":"_query","uid":"8"}]},
        {"name":"shop","uid":"9","collections":
            [{"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]},
        {"name":"empty","uid":"a","collections":[]}]}"#;
    Manifest::parse(json.as_bytes()).unwrap()
}

fn all(system_documents: bool) -> StoredFilter {
    StoredFilter::new(StreamFilter::All, system_documents)
}

fn scope(id: u32) -> StoredFilter {
    StoredFilter::new(StreamFilter::Scope(ScopeId(id)), false)
}

fn collections(ids: &[u32]) -> StoredFilter {
    let ids = ids.iter().copied().map(CollectionId).collect();
    StoredFilter::new(StreamFilter::Collections(ids), false)
}

fn with_system(filter: &StoredFilter) -> StoredFilter {
    StoredFilter::new(filter.documents().clone(), true)
}

fn contains(stored: &StoredFilter, asked: &StoredFilter) -> bool {
    stored.check(asked, &manifest()).is_ok()
}

fn refusal(stored: &StoredFilter, asked: &StoredFilter) -> String {
    stored.check(asked, &manifest()).unwrap_err().to_string()
}

#[test]
fn filter_contains_its_parts() {
    let chain = [all(true), all(false), scope(9), collections(&[9, 10]), collections(&[10])];
    for (at, wider) in chain.iter().enumerate() {
        for narrower in &chain[at..] {
            assert!(contains(wider, narrower), "{wider} > {narrower}");
            assert!(contains(&with_system(wider), narrower), "{wider} > {narrower}");
        }
        for wider_still in &chain[..at] {
            assert!(!contains(wider, wider_still), "{wider} > {wider_still}");
        }
    }
    assert!(!contains(&scope(9), &with_system(&scope(9))));
    assert!(!contains(&scope(9), &collections(&[9, 0])), "in another scope");
    assert!(!contains(&scope(9), &scope(10)));
    assert!(!contains(&collections(&[9, 10]), &scope(9)), "more may have been created in it");
}

#[test]
fn filter_without_the_system_scope_does_not_contain_it() {
    for system in [scope(8), collections(&[8]), collections(&[8, 9])] {
        assert!(!contains(&all(false), &system), "{system}");
        assert!(contains(&all(true), &system), "{system}");
        assert!(contains(&all(true), &with_system(&system)), "{system}");
    }
    assert!(contains(&all(true), &collections(&[99])), "nothing is left out, whatever it is");
    assert!(contains(&scope(8), &collections(&[8])), "named, it is delivered");
    assert!(!contains(&all(false), &scope(11)), "it may be the system scope of another manifest");
}

#[test]
fn filter_refusal_names_what_is_missing() {
    assert_eq!(
        refusal(&collections(&[9]), &collections(&[10, 9])),
        "made with collection shop.orders (0x9) without system documents; the stream also asks for \
         collection shop.carts (0xa), whose earlier changes it would miss"
    );
    assert_eq!(
        refusal(&scope(9), &all(true)),
        "made with scope shop (0x9) without system documents; the stream also asks for the whole \
         bucket and system documents, whose earlier changes it would miss"
    );
    assert_eq!(
        refusal(&collections(&[5, 9]), &collections(&[9, 10])),
        "made with collections 0x5 (dropped), shop.orders (0x9) without system documents; the \
         stream also asks for collection shop.carts (0xa), whose earlier changes it would miss (a \
         collection or scope that is created again has a new id)"
    );
    let many: Vec<u32> = (100..2000).collect();
    let text = refusal(&collections(&[9]), &collections(&many));
    assert!(text.len() < 400 && text.contains("1892 more"), "{text}");
    assert_eq!(all(false).to_string(), "the whole bucket without system documents");
    assert_eq!(with_system(&collections(&[9, 10])).to_string(), {
        "collections 0x9, 0xa with system documents"
    });
}

#[test]
fn filter_hashes_are_those_of_earlier_releases() {
    for (filter, hash) in [
        (all(true), 0x84b1_e683_aaee_08a1),
        (scope(8), 0x2afe_396e_20ab_b7c9),
        (collections(&[10, 9, 10]), 0x53a6_f4b7_41b3_2ac3),
    ] {
        assert_eq!(filter.legacy_hash(), hash, "{filter}");
    }
}

/// A filter for what the server is asked and for the patterns of what is delivered.
fn matching(documents: &StoredFilter, patterns: &[&str]) -> StoredFilter {
    let patterns = CollectionPatterns::new(patterns.iter().copied()).unwrap();
    documents.clone().with_patterns(patterns)
}

#[test]
fn filter_with_patterns_contains_what_they_surely_match() {
    let bucket = all(false);
    for (stored, asked, contained) in [
        // Patterns within a filter that has none.
        (bucket.clone(), matching(&bucket, &["shop.o*"]), true),
        (bucket.clone(), matching(&bucket, &["shop.*", "_system.*"]), false),
        (all(true), matching(&all(true), &["_system.*"]), true),
        (scope(9), matching(&scope(9), &["shop.o*"]), true),
        (scope(8), matching(&scope(8), &["_system.*"]), true),
        (collections(&[9]), matching(&scope(9), &["shop.o*"]), false),
        // Patterns within patterns: each is one of them, whatever it matches.
        (matching(&bucket, &["a.*", "shop.o*"]), matching(&bucket, &["shop.o*"]), true),
        (matching(&bucket, &["shop.o*"]), matching(&bucket, &["a.*", "shop.o*"]), false),
        (matching(&bucket, &["shop.*"]), matching(&bucket, &["shop.o*"]), false),
        // What has no patterns, within patterns.
        (matching(&bucket, &["*.*"]), bucket.clone(), false),
        (matching(&bucket, &["shop.*"]), scope(9), true),
        (matching(&bucket, &["shop.o*"]), scope(9), false),
        (matching(&bucket, &["shop.o*"]), collections(&[9]), true),
        (matching(&bucket, &["shop.o*"]), collections(&[9, 10]), false),
        (matching(&bucket, &["shop.o*", "*.carts"]), collections(&[9, 10]), true),
        (matching(&all(true), &["shop.*"]), collections(&[99]), false),
        (matching(&all(true), &["*.*"]), scope(99), false),
    ] {
        assert_eq!(contains(&stored, &asked), contained, "{stored} > {asked}");
        assert!(contains(&stored, &stored) && contains(&asked, &asked));
    }
    assert_eq!(
        refusal(&matching(&bucket, &["shop.o*"]), &matching(&bucket, &["shop.o*", "a.*"])),
        "made with collections shop.o* without system documents; the stream also asks for \
         collections a.*, shop.o*, whose earlier changes it would miss"
    );
    assert!(matching(&bucket, &["a.*"]).leaves_out() && !bucket.leaves_out());
}

#[test]
fn filter_includes_its_row_filter() {
    let rows = |key: &str| RowFilter::new(Some(vec![key.to_owned()]), None, None).unwrap();
    let stored = all(false).with_rows(rows("a*"));
    assert!(contains(&all(false), &stored) && contains(&stored, &stored));
    assert!(!contains(&stored, &all(false)));
    assert!(!contains(&stored, &all(false).with_rows(rows("b*"))));
    assert!(stored.leaves_out());
    assert_eq!(stored.to_string(), r#"the whole bucket without system documents, keys ["a*"]"#);
}

#[test]
fn filter_tells_dropped_collections_and_scopes_from_others() {
    for (stored, dropped) in [
        (all(false), false),
        (scope(9), false),
        (scope(99), true),
        (collections(&[9, 10]), false),
        (collections(&[9, 99]), true),
    ] {
        let text = refusal(&stored, &all(true));
        assert_eq!(text.contains("that is created again has a new id"), dropped, "{text}");
    }
}

/// Ids that the manifest has, and some that it has not.
fn any_filter() -> impl Strategy<Value = StoredFilter> {
    let documents = prop_oneof![
        Just(StreamFilter::All),
        (0_u32..12).prop_map(|id| StreamFilter::Scope(ScopeId(id))),
        proptest::collection::vec((0_u32..12).prop_map(CollectionId), 0..5)
            .prop_map(StreamFilter::Collections),
    ];
    (documents, any::<bool>()).prop_map(|(documents, system)| StoredFilter::new(documents, system))
}

/// Whether a stream delivers a document, which lies in a collection that the manifest has, or in
/// one that is created later.
fn delivers(filter: &StoredFilter, scope: u32, collection: Option<u32>, transaction: bool) -> bool {
    let is_named = filter.documents != StreamFilter::All;
    let is_system = transaction || (scope == 8 && !is_named);
    let passes = match &filter.documents {
        StreamFilter::All => true,
        StreamFilter::Scope(id) => id.0 == scope,
        StreamFilter::Collections(ids) => {
            collection.is_some_and(|id| ids.contains(&CollectionId(id)))
        }
    };
    passes && (filter.system_documents || !is_system)
}

proptest! {
    #[test]
    fn filter_containment_is_a_partial_order(a in any_filter(), b in any_filter(), c in any_filter()) {
        prop_assert!(contains(&a, &a));
        prop_assert!(!(contains(&a, &b) && contains(&b, &a)) || a == b);
        prop_assert!(!(contains(&a, &b) && contains(&b, &c)) || contains(&a, &c));
    }

    #[test]
    fn filter_that_is_contained_was_delivered(stored in any_filter(), asked in any_filter()) {
        prop_assume!(contains(&stored, &asked));
        let existing = [(0, 0), (8, 8), (9, 9), (9, 10)].map(|(scope, id)| (scope, Some(id)));
        let later = [0, 8, 9, 10].map(|scope| (scope, None));
        for (scope, collection) in existing.into_iter().chain(later) {
            for transaction in [false, true] {
                let by = |filter| delivers(filter, scope, collection, transaction);
                prop_assert!(by(&stored) || !by(&asked), "{collection:?} of scope {scope}");
            }
        }
    }
}
