//! Filters of documents' changes beyond those that a server offers.

use core::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::{Change, Op};

/// Most patterns of a filter: each is matched against each change.
const MAX_PATTERNS: usize = 256;

/// Longest pattern in bytes. Keys have 250 at most, and each may be escaped.
const MAX_PATTERN_LEN: usize = 512;

/// Bits of a CAS that count changes within one tick of its clock.
const COUNTER: u64 = 0xffff;

/// Which changes of documents reach the sink, by key, operation and time. Positions move past the
/// others. The default passes all changes.
///
/// In key patterns, `*` matches any text, `?` one character, and a backslash escapes the character
/// after it. A pattern is matched against the whole key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowFilter(Option<Arc<Rows>>);

#[derive(Debug, Default, PartialEq, Eq)]
struct Rows {
    /// Ascending, each once.
    keys: Option<Vec<String>>,
    /// Ascending, each once.
    ops: Option<Vec<Op>>,
    /// In nanoseconds since 1970, without the bits that a CAS counts in; 0 for all.
    since: u64,
}

/// Why a filter is invalid.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidRowFilter {
    /// No key could ever match.
    #[error("names no pattern")]
    NoKeys,
    /// No operation could ever match.
    #[error("names no operation")]
    NoOps,
    /// There are too many patterns.
    #[error("{0} patterns are too many, at most {MAX_PATTERNS} are allowed")]
    TooManyKeys(usize),
    /// A pattern is empty, or longer than any key.
    #[error("a pattern has {0} bytes, 1 to {MAX_PATTERN_LEN} are allowed")]
    PatternLength(usize),
}

impl InvalidRowFilter {
    /// The argument of [`RowFilter::new`] that is wrong.
    #[must_use]
    pub const fn option(self) -> &'static str {
        match self {
            Self::NoOps => "ops",
            Self::NoKeys | Self::TooManyKeys(_) | Self::PatternLength(_) => "keys",
        }
    }
}

impl RowFilter {
    /// Passes changes whose key matches one of `keys`, whose operation is one of `ops`, and which
    /// were made at `since` or later, in nanoseconds since 1970.
    ///
    /// # Errors
    /// [`InvalidRowFilter`] if nothing could pass, or there are too many or too long patterns.
    pub fn new(
        mut keys: Option<Vec<String>>,
        mut ops: Option<Vec<Op>>,
        since: Option<u64>,
    ) -> Result<Self, InvalidRowFilter> {
        if let Some(keys) = &mut keys {
            keys.sort_unstable();
            keys.dedup();
            match keys.len() {
                0 => return Err(InvalidRowFilter::NoKeys),
                1..=MAX_PATTERNS => {}
                many => return Err(InvalidRowFilter::TooManyKeys(many)),
            }
            let wrong =
                keys.iter().map(String::len).find(|len| !(1..=MAX_PATTERN_LEN).contains(len));
            if let Some(len) = wrong {
                return Err(InvalidRowFilter::PatternLength(len));
            }
        }
        if let Some(ops) = &mut ops {
            ops.sort_unstable_by_key(|op| op.name());
            ops.dedup();
            if ops.is_empty() {
                return Err(InvalidRowFilter::NoOps);
            }
        }
        // The counter bits are not part of the time: changes that may be recent enough pass.
        let since = since.unwrap_or(0) & !COUNTER;
        let is_all = keys.is_none() && ops.is_none() && since == 0;
        Ok(Self((!is_all).then(|| Arc::new(Rows { keys, ops, since }))))
    }

    /// Whether everything passes.
    #[inline]
    #[must_use]
    pub const fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// The patterns, if keys are filtered.
    #[must_use]
    pub fn keys(&self) -> Option<&[String]> {
        self.0.as_ref()?.keys.as_deref()
    }

    /// The operations, if they are filtered.
    #[must_use]
    pub fn ops(&self) -> Option<&[Op]> {
        self.0.as_ref()?.ops.as_deref()
    }

    /// The earliest time, in nanoseconds since 1970, if there is one.
    #[must_use]
    pub fn since(&self) -> Option<u64> {
        self.0.as_ref().map(|rows| rows.since).filter(|since| *since > 0)
    }

    /// Whether a change passes. One without a CAS has no known time, so it passes.
    pub(crate) fn passes(&self, change: &Change<'_>) -> bool {
        let Some(rows) = &self.0 else { return true };
        let cas = change.cas.0;
        (cas == 0 || cas >= rows.since)
            && rows.ops.as_ref().is_none_or(|ops| ops.contains(&change.op))
            && rows
                .keys
                .as_ref()
                .is_none_or(|keys| keys.iter().any(|key| matches(key.as_bytes(), change.key)))
    }

    /// What `asked` passes but this filter may not, in words. A pattern counts as contained only if
    /// it is one of this filter's.
    pub(crate) fn beyond(&self, asked: &Self) -> Vec<String> {
        let mut beyond = Vec::new();
        if let Some(own) = self.keys() {
            match asked.keys() {
                None => beyond.push("all keys".to_owned()),
                Some(keys) => {
                    let more: Vec<_> = keys.iter().filter(|key| !own.contains(key)).collect();
                    if !more.is_empty() {
                        beyond.push(format!("keys {more:?}"));
                    }
                }
            }
        }
        if let Some(own) = self.ops() {
            let asked = asked.ops().unwrap_or(&Op::ALL);
            let more: Vec<_> = asked.iter().filter(|op| !own.contains(op)).collect();
            if !more.is_empty() {
                beyond.push(format!("operations {}", names(more)));
            }
        }
        if self.since() > asked.since() {
            beyond.push(match asked.since() {
                Some(since) => format!("changes since {} ns after 1970", since),
                None => "changes from any time".to_owned(),
            });
        }
        beyond
    }
}

impl fmt::Display for RowFilter {
    /// Nothing if all pass.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(keys) = self.keys() {
            write!(f, ", keys {keys:?}")?;
        }
        if let Some(ops) = self.ops() {
            write!(f, ", operations {}", names(ops))?;
        }
        match self.since() {
            Some(since) => write!(f, ", since {since} ns after 1970"),
            None => Ok(()),
        }
    }
}

fn names<'a>(ops: impl IntoIterator<Item = &'a Op>) -> String {
    ops.into_iter().map(|op| op.name()).collect::<Vec<_>>().join(", ")
}

/// One step of a pattern.
enum Step {
    Any,
    One,
    Byte(u8),
}

/// The first step of a pattern, and the rest of the pattern.
fn step(pattern: &[u8]) -> Option<(Step, &[u8])> {
    Some(match pattern {
        [] => return None,
        [b'*', rest @ ..] => (Step::Any, rest),
        [b'?', rest @ ..] => (Step::One, rest),
        [b'\\', byte, rest @ ..] | [byte, rest @ ..] => (Step::Byte(*byte), rest),
    })
}

/// Whether the pattern matches all of `text`. The worst-case time is the product of their lengths:
/// only the last `*` is ever revisited.
pub(crate) fn matches(mut pattern: &[u8], mut text: &[u8]) -> bool {
    let mut retry: Option<(&[u8], &[u8])> = None;
    loop {
        let rest = match (step(pattern), text) {
            (Some((Step::Any, behind)), _) => {
                retry = Some((behind, text));
                pattern = behind;
                continue;
            }
            (None, []) => return true,
            (Some((Step::One, behind)), [_, _, ..] | [_]) => Some((behind, after_character(text))),
            (Some((Step::Byte(byte), behind)), [first, rest @ ..]) if byte == *first => {
                Some((behind, rest))
            }
            _ => None,
        };
        if let Some(rest) = rest {
            (pattern, text) = rest;
            continue;
        }
        let Some((behind, [_, later @ ..])) = retry else { return false };
        retry = Some((behind, later));
        (pattern, text) = (behind, later);
    }
}

/// The text after the first character, or after the first byte if that is not UTF-8.
fn after_character(text: &[u8]) -> &[u8] {
    let [first, rest @ ..] = text else { return text };
    let most = match first {
        0xc2..=0xdf => 1,
        0xe0..=0xef => 2,
        0xf0..=0xf4 => 3,
        _ => 0,
    };
    let len = rest.iter().take(most).take_while(|byte| **byte & 0xc0 == 0x80).count();
    if len == most { rest.get(len..).unwrap_or_default() } else { rest }
}

#[cfg(test)]
mod tests {
    use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};

    use super::*;
    use crate::Snapshot;

    #[test]
    fn key_pattern_matches_the_whole_key() {
        for (pattern, text, matched) in [
            ("order::*", "order::1", true),
            ("order::*", "order::", true),
            ("order::*", "an order::1", false),
            ("order::?1", "order::21", true),
            ("order::?1", "order::1", false),
            ("order::?", "order::\u{fc}", true),
            ("order::??", "order::\u{fc}", false),
            ("order", "order", true),
            ("order", "orders", false),
            ("*a*b", "xaxxbxab", true),
            ("*a*b", "xaxxbxa", false),
            ("**", "", true),
            ("a\\*", "a*", true),
            ("a\\*", "ab", false),
            ("a\\", "a\\", true),
        ] {
            let found = matches(pattern.as_bytes(), text.as_bytes());
            assert_eq!(found, matched, "{pattern} {text}");
        }
        assert!(matches(b"a?b", b"a\xffb"), "a byte that is no text is one character");
        assert!(matches(b"a?b*", b"a\xc3b\xc3"), "so is the beginning of one that is cut");
    }

    #[test]
    fn key_pattern_of_many_stars_takes_no_long_time() {
        let pattern = "*a".repeat(256);
        assert!(!matches(pattern.as_bytes(), &[b'a'; 250]));
        assert!(!matches(format!("{}b", "*a".repeat(200)).as_bytes(), &[b'a'; 250]));
    }

    fn filter(keys: &[&str], ops: &[Op], since: Option<u64>) -> RowFilter {
        let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
        let (keys, ops) = ((!keys.is_empty()).then_some(keys), (!ops.is_empty()).then_some(ops));
        RowFilter::new(keys, ops.map(<[Op]>::to_vec), since).unwrap()
    }

    #[test]
    fn row_filter_contains_itself_and_narrower_ones() {
        let (all, hour) = (RowFilter::default(), 3_600_000_000_000);
        let both = filter(&["a*", "b*"], &[], None);
        let one = filter(&["b*"], &[Op::Mutation], Some(hour));
        assert_eq!(all.beyond(&one), [""; 0]);
        assert_eq!(both.beyond(&one), [""; 0]);
        assert_eq!(one.beyond(&one), [""; 0]);
        assert_eq!(one.beyond(&filter(&["b*"], &[Op::Mutation], Some(2 * hour))), [""; 0]);
        assert_eq!(one.beyond(&both).len(), 3);
        assert_eq!(one.beyond(&all).len(), 3);
        assert_eq!(both.beyond(&filter(&["ab*"], &[], None)), ["keys [\"ab*\"]"]);
        let earlier = filter(&["b*"], &[Op::Mutation], Some(hour / 2));
        assert_eq!(one.beyond(&earlier).len(), 1);
    }

    #[test]
    fn row_filter_that_can_let_nothing_pass_is_refused() {
        let keys = |keys: Vec<String>| RowFilter::new(Some(keys), None, None).unwrap_err();
        assert_eq!(keys(vec![]), InvalidRowFilter::NoKeys);
        assert_eq!(keys(vec![String::new()]), InvalidRowFilter::PatternLength(0));
        assert_eq!(keys(vec!["a".repeat(513)]), InvalidRowFilter::PatternLength(513));
        let many = (0..257).map(|n| n.to_string()).collect();
        assert_eq!(keys(many), InvalidRowFilter::TooManyKeys(257));
        assert_eq!(RowFilter::new(None, Some(vec![]), None), Err(InvalidRowFilter::NoOps));
        assert!(RowFilter::new(None, None, Some(0)).unwrap().is_all());
    }

    fn passes(filter: &RowFilter, op: Op, key: &str, cas: u64) -> bool {
        filter.passes(&Change {
            op,
            vbid: Vbid(0),
            seqno: Seqno(1),
            vbuuid: Vbuuid(1),
            epoch: 0,
            snapshot: Snapshot::at(Seqno(1)),
            history: false,
            collection_id: CollectionId::DEFAULT,
            key: key.as_bytes(),
            value: b"",
            datatype: Datatype::RAW,
            cas: Cas(cas),
            rev_seqno: RevSeqno(1),
            flags: 0,
            expiry: 0,
            delete_time: 0,
        })
    }

    #[test]
    fn row_filter_passes_a_change_by_key_operation_and_time() {
        let since = 0x0012_3456_0000_0000;
        let all = filter(&["a*", "b*"], &[Op::Mutation, Op::Expiration], Some(since));
        for (op, is_op) in [(Op::Mutation, true), (Op::Deletion, false), (Op::Expiration, true)] {
            for (key, is_key) in [("a", true), ("bc", true), ("ca", false)] {
                for (cas, is_time) in [(0, true), (since - 1, false), (since, true), (!0, true)] {
                    let wanted = is_op && is_key && is_time;
                    assert_eq!(passes(&all, op, key, cas), wanted, "{op:?} {key} {cas:#x}");
                    assert!(passes(&RowFilter::default(), op, key, cas));
                    assert_eq!(passes(&filter(&["a*", "b*"], &[], None), op, key, cas), is_key);
                    let ops = filter(&[], &[Op::Mutation, Op::Expiration], None);
                    assert_eq!(passes(&ops, op, key, cas), is_op);
                    assert_eq!(passes(&filter(&[], &[], Some(since)), op, key, cas), is_time);
                }
            }
        }
    }

    #[test]
    fn row_filter_since_ignores_the_counter_bits_of_a_cas() {
        let filter = filter(&[], &[], Some(0x5_ffff));
        assert_eq!(filter.since(), Some(0x5_0000));
        assert!(passes(&filter, Op::Mutation, "k", 0x5_0000));
        assert!(!passes(&filter, Op::Mutation, "k", 0x4_ffff));
        assert!(RowFilter::new(None, None, Some(0xffff)).unwrap().is_all());
    }

    #[test]
    fn row_filter_says_what_it_filters_by() {
        assert_eq!(RowFilter::default().to_string(), "");
        assert_eq!(RowFilter::default().keys(), None);
        assert_eq!(RowFilter::default().ops(), None);
        assert_eq!(RowFilter::default().since(), None);
        let hour = 0x3_0000;
        let all = filter(&["b*", "a*", "b*"], &[Op::Mutation, Op::Deletion], Some(hour));
        assert_eq!(all.keys().unwrap(), ["a*", "b*"]);
        assert_eq!(all.ops().unwrap(), [Op::Deletion, Op::Mutation]);
        assert_eq!(
            all.to_string(),
            r#", keys ["a*", "b*"], operations deletion, mutation, since 196608 ns after 1970"#
        );
        assert_eq!(
            all.beyond(&RowFilter::default()),
            ["all keys", "operations expiration", "changes from any time"]
        );
        let other = filter(&["a*", "c"], &[Op::Expiration], Some(hour - 0x1_0000));
        assert_eq!(
            all.beyond(&other),
            [r#"keys ["c"]"#, "operations expiration", "changes since 131072 ns after 1970"]
        );
    }

    #[test]
    fn key_patterns_are_taken_up_to_their_number_and_length() {
        let many = (0..256).map(|n| n.to_string()).collect();
        assert_eq!(RowFilter::new(Some(many), None, None).unwrap().keys().unwrap().len(), 256);
        for len in [1, 512] {
            assert!(RowFilter::new(Some(vec!["a".repeat(len)]), None, None).is_ok());
        }
    }

    #[test]
    fn key_pattern_of_one_character_takes_all_its_utf8_bytes() {
        for (text, len) in [
            (&b"ab"[..], 1),
            (b"\x7fb", 1),
            ("\u{80}b".as_bytes(), 2),
            ("\u{7ff}b".as_bytes(), 2),
            ("\u{800}b".as_bytes(), 3),
            ("\u{ffff}b".as_bytes(), 3),
            ("\u{10000}b".as_bytes(), 4),
            ("\u{10ffff}b".as_bytes(), 4),
            // Not UTF-8: a byte alone, one cut off, and one that begins nothing.
            (b"\x80b", 1),
            (b"\xc1\x80", 1),
            (b"\xc3b", 1),
            (b"\xe2\x82", 1),
            (b"\xf0\x9f\x98b", 1),
            (b"\xf5\x80\x80\x80", 1),
            (b"\xff", 1),
        ] {
            assert_eq!(after_character(text), &text[len..], "{text:x?}");
        }
        assert_eq!(after_character(b""), b"");
    }
}
