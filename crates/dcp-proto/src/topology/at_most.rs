//! Lists whose length a peer decides.

use core::fmt;
use core::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// A list with a limited number of members: parsing fails at the first one beyond the limit.
///
/// A member takes at least three bytes of JSON, and many times as much memory.
pub(super) struct AtMost<T, const MAX: usize>(pub(super) Vec<T>);

impl<T, const MAX: usize> Default for AtMost<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for AtMost<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Members(PhantomData))
    }
}

struct Members<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Members<T, MAX> {
    type Value = AtMost<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX} members")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(member) = members.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(MAX, &self));
            }
            list.push(member);
        }
        Ok(AtMost(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str) -> Result<Vec<u8>, String> {
        let parsed = serde_json::from_str::<AtMost<u8, 2>>(json);
        parsed.map(|list| list.0).map_err(|error| error.to_string())
    }

    #[test]
    fn json_list_with_one_member_too_many_is_refused() {
        assert_eq!(parsed("[]"), Ok(vec![]));
        assert_eq!(parsed("[1,2]"), Ok(vec![1, 2]));
        for json in ["[1,2,3]", "[1,2,3,4]", "{}", "7"] {
            let error = parsed(json).unwrap_err();
            assert!(error.contains("expected a list of at most 2 members"), "{error}");
        }
    }
}
