//! Collections chosen by name patterns.

use core::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::row_filter::matches;

/// Most patterns: each is matched against each collection.
const MAX_PATTERNS: usize = 256;

/// Longest pattern in bytes. Names of scopes and collections have 251 at most.
const MAX_PATTERN_LEN: usize = 512;

/// Scope in which servers and services keep their own documents.
const SYSTEM_SCOPE: &str = "_system";

/// Patterns of the names of collections, as `scope.collection`: `*` matches any text, `?` one
/// character. Matching collections that are created later are chosen as well. By default there are
/// no patterns, and every collection is chosen.
///
/// Wildcards do not match scope `_system`, which must be named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectionPatterns(Option<Arc<[Pattern]>>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pattern {
    scope: Box<str>,
    collection: Box<str>,
}

impl Pattern {
    fn matches_scope(&self, scope: &str) -> bool {
        (scope != SYSTEM_SCOPE || &*self.scope == SYSTEM_SCOPE)
            && matches(self.scope.as_bytes(), scope.as_bytes())
    }

    fn matches(&self, scope: &str, collection: &str) -> bool {
        self.matches_scope(scope) && matches(self.collection.as_bytes(), collection.as_bytes())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.scope, self.collection)
    }
}

/// Why patterns are invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidPatterns {
    /// No collection could ever match.
    #[error("names no collection")]
    None,
    /// A pattern lacks the scope or the collection.
    #[error("{0:?} must be given as scope.collection")]
    Form(String),
    /// A pattern is longer than any name.
    #[error("a pattern has {0} bytes, at most {MAX_PATTERN_LEN} are allowed")]
    Length(usize),
    /// There are too many.
    #[error("{0} patterns are too many, at most {MAX_PATTERNS} are allowed")]
    TooMany(usize),
}

impl CollectionPatterns {
    /// Whether a name contains wildcards.
    #[must_use]
    pub fn is_pattern(name: &str) -> bool {
        name.contains(['*', '?'])
    }

    /// Chooses the collections that match one of `patterns`, which may include plain names.
    ///
    /// # Errors
    /// [`InvalidPatterns`] if nothing could match, or they are too many or too long.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidPatterns> {
        let pattern = |text: &str| {
            if text.len() > MAX_PATTERN_LEN {
                return Err(InvalidPatterns::Length(text.len()));
            }
            match text.split_once('.') {
                Some((scope, collection)) if !scope.is_empty() && !collection.is_empty() => {
                    Ok(Pattern { scope: scope.into(), collection: collection.into() })
                }
                _ => Err(InvalidPatterns::Form(text.to_owned())),
            }
        };
        let patterns: Result<Vec<_>, _> = patterns.into_iter().map(pattern).collect();
        let mut patterns = patterns?;
        patterns.sort_unstable();
        patterns.dedup();
        match patterns.len() {
            0 => Err(InvalidPatterns::None),
            1..=MAX_PATTERNS => Ok(Self(Some(patterns.into()))),
            many => Err(InvalidPatterns::TooMany(many)),
        }
    }

    fn patterns(&self) -> &[Pattern] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Whether every collection is chosen.
    #[must_use]
    pub const fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a collection is chosen.
    #[must_use]
    pub fn choose(&self, scope: &str, collection: &str) -> bool {
        self.is_all() || self.patterns().iter().any(|pattern| pattern.matches(scope, collection))
    }

    /// Whether some collection of a scope may be chosen.
    #[must_use]
    pub fn may_choose_in(&self, scope: &str) -> bool {
        self.is_all() || self.patterns().iter().any(|pattern| pattern.matches_scope(scope))
    }

    /// Whether one pattern chooses every collection of a scope.
    #[must_use]
    pub fn choose_all_of(&self, scope: &str) -> bool {
        let is_whole = |of: &Pattern| &*of.collection == "*" && of.matches_scope(scope);
        self.is_all() || self.patterns().iter().any(is_whole)
    }

    /// The scope that every pattern names.
    #[must_use]
    pub fn only_scope(&self) -> Option<&str> {
        let (first, rest) = self.patterns().split_first()?;
        let is_only = !Self::is_pattern(&first.scope)
            && rest.iter().all(|pattern| pattern.scope == first.scope);
        is_only.then_some(&first.scope)
    }

    /// Whether a pattern names scope `_system`.
    pub(crate) fn name_system_scope(&self) -> bool {
        self.patterns().iter().any(|pattern| &*pattern.scope == SYSTEM_SCOPE)
    }

    /// Whether each pattern of `asked` is one of these.
    pub(crate) fn contain(&self, asked: &Self) -> bool {
        asked.patterns().iter().all(|pattern| self.patterns().contains(pattern))
    }

    /// Each as `scope.collection`.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.patterns().iter().map(ToString::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(names: &[&str]) -> CollectionPatterns {
        CollectionPatterns::new(names.iter().copied()).unwrap()
    }

    #[test]
    fn collection_pattern_must_match_scope_and_collection() {
        for (pattern, scope, collection, chosen) in [
            ("inventory.*", "inventory", "airline", true),
            ("inventory.*", "inventory2", "airline", false),
            ("*.events", "a", "events", true),
            ("*.events", "a", "events2", false),
            ("tenant_?.event*", "tenant_1", "events", true),
            ("tenant_?.event*", "tenant_12", "events", false),
            ("*.*", "_default", "_default", true),
            ("*.*", "_system", "_query", false),
            ("_system.*", "_system", "_query", true),
            ("_sys*.*", "_system", "_query", false),
            ("a.b", "a", "b", true),
        ] {
            assert_eq!(patterns(&[pattern]).choose(scope, collection), chosen, "{pattern}");
        }
        let several = patterns(&["a.*", "*.b"]);
        assert!(several.choose("a", "x") && several.choose("x", "b") && !several.choose("x", "y"));
        assert!(several.choose_all_of("a") && !several.choose_all_of("x"));
        assert!(several.may_choose_in("x") && !patterns(&["a.*"]).may_choose_in("x"));
        assert!(CollectionPatterns::default().choose("_system", "_query"));
    }

    #[test]
    fn collection_patterns_that_share_a_scope_request_it_alone() {
        assert_eq!(patterns(&["a.*", "a.b"]).only_scope(), Some("a"));
        assert_eq!(patterns(&["a.*", "b.*"]).only_scope(), None);
        assert_eq!(patterns(&["?.b"]).only_scope(), None);
    }

    #[test]
    fn collection_pattern_that_can_match_nothing_is_refused() {
        let refused = |names: &[&str]| CollectionPatterns::new(names.iter().copied()).unwrap_err();
        assert_eq!(refused(&[]), InvalidPatterns::None);
        assert_eq!(refused(&["a*"]), InvalidPatterns::Form("a*".to_owned()));
        assert_eq!(refused(&[".*"]), InvalidPatterns::Form(".*".to_owned()));
        assert_eq!(refused(&[&"a".repeat(513)]), InvalidPatterns::Length(513));
        let many: Vec<_> = (0..257).map(|n| format!("a.{n}*")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(refused(&many), InvalidPatterns::TooMany(257));
    }
}
