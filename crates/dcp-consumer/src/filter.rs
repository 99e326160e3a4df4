//! Resolves a filter by names into one by ids.

use std::collections::BTreeMap;

use dcp_proto::CollectionPatterns;
use dcp_proto::checkpoint::StoredFilter;
use dcp_proto::consumer::{Exclusions, StreamFilter};
use dcp_proto::topology::{CollectionEntry, Manifest};
use dcp_wire::CollectionId;

use crate::{Error, Filter, StreamOptions};

/// The filter of a read, by ids.
///
/// # Errors
/// [`ErrorKind::Config`](crate::ErrorKind::Config) if there is no such scope or collection.
pub(crate) fn of(options: &StreamOptions, manifest: &Manifest) -> Result<StoredFilter, Error> {
    let filter = resolve(&options.filter, options.system_documents, manifest)?;
    Ok(filter.with_rows(options.rows.clone()))
}

/// The filter by ids, as checkpoints and offsets store it. A collection that is created again with
/// the same name has another id.
///
/// # Errors
/// [`ErrorKind::Config`](crate::ErrorKind::Config) if there is no such scope or collection.
pub(crate) fn resolve(
    filter: &Filter,
    system_documents: bool,
    manifest: &Manifest,
) -> Result<StoredFilter, Error> {
    let patterns = match filter {
        Filter::Collections(names) => patterns(names)?,
        Filter::Ids(_, patterns) => patterns.clone(),
        _ => CollectionPatterns::default(),
    };
    if patterns.is_all() || matches!(filter, Filter::Ids(..)) {
        let filter = StoredFilter::new(ids(filter, manifest)?, system_documents);
        return Ok(filter.with_patterns(patterns));
    }
    check_names(&patterns, manifest)?;
    // The smallest request that contains them all: an existing scope, or the bucket.
    let scope = patterns.only_scope().and_then(|name| manifest.scope_named(name));
    let Some(scope) = scope else {
        return Ok(StoredFilter::new(StreamFilter::All, system_documents).with_patterns(patterns));
    };
    let filter = StoredFilter::new(StreamFilter::Scope(scope.id), system_documents);
    let is_whole = patterns.choose_all_of(&scope.name);
    Ok(if is_whole { filter } else { filter.with_patterns(patterns) })
}

/// The names as patterns, if any of them has wildcards.
fn patterns(names: &[String]) -> Result<CollectionPatterns, Error> {
    if !names.iter().any(|name| CollectionPatterns::is_pattern(name)) {
        return Ok(CollectionPatterns::default());
    }
    let patterns = CollectionPatterns::new(names.iter().map(String::as_str));
    patterns.map_err(|error| Error::option(&["collections"], error.to_string()))
}

/// Refuses the name of a scope or collection that does not exist; a pattern may match later.
fn check_names(patterns: &CollectionPatterns, manifest: &Manifest) -> Result<(), Error> {
    for name in patterns.names() {
        let (scope, collection) = name.split_once('.').unwrap_or_default();
        if CollectionPatterns::is_pattern(scope) {
            continue;
        }
        if !CollectionPatterns::is_pattern(collection) {
            if manifest.collection_named(scope, collection).is_none() {
                return Err(no_collection(&name, manifest));
            }
        } else if manifest.scope_named(scope).is_none() {
            return Err(no_scope(scope));
        }
    }
    let matches_any = manifest.collections().any(|entry| {
        manifest.names(entry.id).is_some_and(|(scope, of)| patterns.choose(scope, of))
    });
    if !matches_any {
        let names = patterns.names().join(", ");
        tracing::warn!(name: "no_collection_matches", collections = %names, "no collection of the bucket matches yet");
    }
    Ok(())
}

fn ids(filter: &Filter, manifest: &Manifest) -> Result<StreamFilter, Error> {
    match filter {
        Filter::All => Ok(StreamFilter::All),
        Filter::Scope(name) => match manifest.scope_named(name) {
            Some(scope) => Ok(StreamFilter::Scope(scope.id)),
            None => Err(no_scope(name)),
        },
        Filter::Ids(ids, _) => Ok(ids.clone()),
        Filter::Collections(names) if names.is_empty() => {
            Err(Error::option(&["collections"], "names none: name one, or stream the bucket"))
        }
        Filter::Collections(names) => {
            let mut ids = Vec::with_capacity(names.len());
            for name in names {
                let Some((scope, collection)) = name.split_once('.') else {
                    let problem = format!("'{name}' must be given as scope.collection");
                    return Err(collections(name, problem));
                };
                let Some(entry) = manifest.collection_named(scope, collection) else {
                    return Err(no_collection(name, manifest));
                };
                ids.push(entry.id);
            }
            Ok(StreamFilter::Collections(ids))
        }
    }
}

/// What a filter leaves out.
pub(crate) fn exclusions_of(filter: &StoredFilter, manifest: &Manifest) -> Exclusions {
    let excluded = match (filter.system_documents(), filter.patterns().is_all()) {
        (true, _) => Exclusions::default(),
        (false, true) => exclusions(filter.documents(), manifest),
        // Patterns that do not name scope `_system` leave it out.
        (false, false) => Exclusions::default().with_transactions(),
    };
    excluded.with_patterns(filter.patterns(), manifest)
}

/// What is left out by default: transaction records, and documents in scope `_system` unless the
/// filter names it.
pub(crate) fn exclusions(filter: &StreamFilter, manifest: &Manifest) -> Exclusions {
    let exclusions = Exclusions::default().with_transactions();
    if *filter != StreamFilter::All {
        return exclusions;
    }
    let scope = manifest.scope_named("_system").map(|scope| scope.id);
    let lies_in_it = |entry: &&CollectionEntry| Some(entry.scope_id) == scope;
    let collections = manifest.collections().filter(lies_in_it).map(|entry| entry.id);
    exclusions.with_system_scope(scope, collections)
}

/// The collections whose documents a filter delivers, as `scope.collection`.
pub(crate) fn delivered(
    filter: &StoredFilter,
    manifest: &Manifest,
) -> BTreeMap<String, CollectionId> {
    let (documents, patterns) = (filter.documents(), filter.patterns());
    let hides_system = *documents == StreamFilter::All && patterns.is_all();
    let system = manifest.scope_named("_system").filter(|_| hides_system).map(|scope| scope.id);
    manifest
        .collections()
        .filter(|entry| match documents {
            StreamFilter::All => Some(entry.scope_id) != system,
            StreamFilter::Scope(id) => entry.scope_id == *id,
            StreamFilter::Collections(ids) => ids.contains(&entry.id),
        })
        .filter_map(|entry| Some((manifest.names(entry.id)?, entry.id)))
        .filter(|((scope, of), _)| patterns.is_all() || patterns.choose(scope, of))
        .map(|((scope, of), id)| (format!("{scope}.{of}"), id))
        .collect()
}

/// A filter without what the manifest no longer has; `None` if nothing is left.
pub(crate) fn remaining(filter: &StreamFilter, manifest: &Manifest) -> Option<StreamFilter> {
    match filter {
        StreamFilter::All => Some(StreamFilter::All),
        StreamFilter::Scope(id) => manifest.scope(*id).map(|_| filter.clone()),
        StreamFilter::Collections(ids) => {
            let there = ids.iter().copied().filter(|id| manifest.collection(*id).is_some());
            let ids: Vec<_> = there.collect();
            (!ids.is_empty()).then_some(StreamFilter::Collections(ids))
        }
    }
}

fn no_scope(name: &str) -> Error {
    collections(name, format!("there is no scope '{name}' in the bucket"))
}

fn no_collection(name: &str, manifest: &Manifest) -> Error {
    let scope = name.strip_prefix("_default.").filter(|of| manifest.scope_named(of).is_some());
    let hint = scope.map(|of| format!("; did you mean all of scope '{of}', which is '{of}.*'?"));
    let hint = hint.unwrap_or_default();
    collections(name, format!("there is no collection '{name}' in the bucket{hint}"))
}

fn collections(name: &str, problem: String) -> Error {
    Error::option(&["collections"], problem).with_value(name)
}

#[cfg(test)]
mod tests {
    use dcp_wire::ScopeId;

    use super::*;

    fn manifest() -> Manifest {
        let json = r#"{"uid":"3","scopes":[{"name":"_default","uid":"0","collections":
            [{"name":"_default","uid":"0"}]},{"name":"shop","uid":"8","collections":
            [{"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]}]}"#;
        Manifest::parse(json.as_bytes()).unwrap()
    }

    fn documents(filter: &Filter, manifest: &Manifest) -> Result<StreamFilter, Error> {
        Ok(resolve(filter, false, manifest)?.documents().clone())
    }

    fn collections(names: &[&str]) -> Result<StreamFilter, Error> {
        let names = names.iter().map(ToString::to_string).collect();
        documents(&Filter::Collections(names), &manifest())
    }

    #[test]
    fn filter_does_not_depend_on_the_order_of_its_collections() {
        let one = collections(&["shop.orders", "shop.carts"]).unwrap();
        let other = collections(&["shop.carts", "shop.orders", "shop.carts"]).unwrap();
        assert_eq!(one, StreamFilter::Collections(vec![CollectionId(9), CollectionId(10)]));
        assert_eq!(one, other);
    }

    #[test]
    fn filter_of_a_collection_recreated_under_its_name_is_another() {
        let anew = r#"{"uid":"5","scopes":[{"name":"shop","uid":"8","collections":
            [{"name":"orders","uid":"b"}]}]}"#;
        let names = Filter::Collections(vec!["shop.orders".to_owned()]);
        let anew = Manifest::parse(anew.as_bytes()).unwrap();
        let old = resolve(&names, false, &manifest()).unwrap();
        let new = resolve(&names, false, &anew).unwrap();
        assert!(old.check(&new, &anew).is_err(), "a checkpoint of the old one is refused");
    }

    #[test]
    fn system_scope_is_hidden_unless_the_filter_names_it() {
        let json = r#"{"uid":"3","scopes":[{"name":"_default","uid":"0","collections":
            [{"name":"_default","uid":"0"}]},{"name":"_system","uid":"8","collections":
            [{"name":"_query","uid":"9"},{"name":"_mobile","uid":"a"}]}]}"#;
        let system = Manifest::parse(json.as_bytes()).unwrap();
        let all = Exclusions::default().with_transactions();
        // In any order, as the manifest has none.
        let ids = [CollectionId(9), CollectionId(10)];
        let reversed = [CollectionId(10), CollectionId(9)];
        let scope = Some(ScopeId(8));
        let found = exclusions(&StreamFilter::All, &system);
        assert!(
            found == all.clone().with_system_scope(scope, ids)
                || found == all.clone().with_system_scope(scope, reversed)
        );
        assert_eq!(exclusions(&StreamFilter::Scope(ScopeId(8)), &system), all);
        let none_yet = all.with_system_scope(None, []);
        assert_eq!(exclusions(&StreamFilter::All, &manifest()), none_yet);
    }

    #[test]
    fn filter_delivers_the_collections_that_it_chooses() {
        let json = r#"{"uid":"3","scopes":[{"name":"_system","uid":"7","collections":
            [{"name":"_query","uid":"8"}]},{"name":"shop","uid":"9","collections":
            [{"name":"orders","uid":"a"},{"name":"carts","uid":"b"}]},
            {"name":"test","uid":"c","collections":[{"name":"orders","uid":"d"}]}]}"#;
        let manifest = Manifest::parse(json.as_bytes()).unwrap();
        let found = |filter: &Filter| {
            let found = delivered(&resolve(filter, false, &manifest).unwrap(), &manifest);
            found.into_iter().map(|(name, id)| (name, id.0)).collect::<Vec<_>>()
        };
        let of = |names: &[&str]| {
            found(&Filter::Collections(names.iter().map(ToString::to_string).collect()))
        };
        let named = |name: &str, id| (name.to_owned(), id);
        let (carts, orders) = (named("shop.carts", 0xb), named("shop.orders", 0xa));
        let tests = named("test.orders", 0xd);
        assert_eq!(found(&Filter::All), [carts.clone(), orders.clone(), tests.clone()]);
        assert_eq!(of(&["shop.*"]), [carts, orders.clone()]);
        assert_eq!(of(&["*.orders"]), [orders, tests.clone()]);
        assert_eq!(of(&["test.orders"]), [tests]);
        assert_eq!(of(&["_system._query"]), [named("_system._query", 8)]);
    }

    #[test]
    fn filter_drops_collections_that_were_dropped() {
        let both = collections(&["shop.orders", "shop.carts"]).unwrap();
        assert_eq!(remaining(&both, &manifest()), Some(both.clone()));
        let less = r#"{"uid":"5","scopes":[{"name":"shop","uid":"8","collections":
            [{"name":"orders","uid":"b"},{"name":"carts","uid":"a"}]}]}"#;
        let less = Manifest::parse(less.as_bytes()).unwrap();
        let carts = StreamFilter::Collections(vec![CollectionId(10)]);
        assert_eq!(remaining(&both, &less), Some(carts), "the new one is not meant");
        let orders = collections(&["shop.orders"]).unwrap();
        assert_eq!(remaining(&orders, &less), None);
        let scope = documents(&Filter::Scope("shop".to_owned()), &less).unwrap();
        assert_eq!(remaining(&scope, &less), Some(scope.clone()));
        assert_eq!(remaining(&scope, &Manifest::default()), None);
        assert_eq!(remaining(&StreamFilter::All, &less), Some(StreamFilter::All));
    }

    #[test]
    fn filter_with_names_that_do_not_exist_is_refused() {
        for names in [&["shop.nope"][..], &["orders"], &[]] {
            assert_eq!(collections(names).unwrap_err().options(), ["collections"], "{names:?}");
        }
        let error = documents(&Filter::Scope("nope".to_owned()), &manifest()).unwrap_err();
        assert!(error.to_string().contains("no scope 'nope'"), "{error}");
        for names in [&["nope.*"][..], &["shop.*", "nope.orders?"]] {
            let error = collections(names).unwrap_err();
            assert!(error.to_string().contains("no scope 'nope'"), "{error}");
        }
        let later = collections(&["no?e.*", "shop.new*"]);
        assert_eq!(later.unwrap(), StreamFilter::All, "a scope may match later");
    }

    #[test]
    fn scope_name_is_not_taken_for_a_collection() {
        for names in [&["_default.shop"][..], &["_default.shop", "shop.*"]] {
            let error = collections(names).unwrap_err().to_string();
            assert!(error.ends_with("did you mean all of scope 'shop', which is 'shop.*'?"));
        }
        let whole = StreamFilter::Scope(ScopeId(8));
        assert_eq!(collections(&["shop.*"]).unwrap(), whole);
        assert_eq!(collections(&["shop.orders", "shop.*"]).unwrap(), whole);
    }
}
