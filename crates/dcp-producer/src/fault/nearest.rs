//! The known name that a mistyped one was probably meant to be.

/// The name of `known` with the fewest edits from `name`, capitals aside; empty if there is none.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> &'a str {
    let name = shortened(name);
    let edits_to = |known: &&str| edits(name.as_bytes(), known.to_ascii_lowercase().as_bytes());
    known.into_iter().min_by_key(edits_to).unwrap_or_default()
}

/// Names come from outside, and what is longer than any known one needs no exact distance.
fn shortened(name: &str) -> String {
    name.chars().take(64).collect::<String>().to_ascii_lowercase()
}

/// Insertions, removals and replacements between two texts.
fn edits(left: &[u8], right: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (done, l) in left.iter().enumerate() {
        let mut diagonal = done;
        let mut before = done + 1;
        if let Some(first) = row.first_mut() {
            *first = before;
        }
        for (cell, r) in row.iter_mut().skip(1).zip(right) {
            let replaced = diagonal + usize::from(l != r);
            diagonal = *cell;
            before = replaced.min(before + 1).min(*cell + 1);
            *cell = before;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (left, right, wanted) in
            [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("a", "a", 0)]
        {
            assert_eq!(edits(left.as_bytes(), right.as_bytes()), wanted, "{left} {right}");
        }
    }

    #[test]
    fn the_nearest_name_is_found_whatever_its_capitals() {
        assert_eq!(
            nearest("Dcp_mutatoin", ["DCP_DELETION", "DCP_MUTATION", "GET"]),
            "DCP_MUTATION"
        );
        assert_eq!(nearest("", []), "");
    }
}
