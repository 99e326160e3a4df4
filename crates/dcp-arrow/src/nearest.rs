//! Names for "did you mean".

/// The one of `names` that takes the fewest edits to become.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let nearest = names.min_by_key(|candidate| edit_distance(name, candidate));
    nearest.unwrap_or_default().to_owned()
}

/// Levenshtein distance in characters, of which only the first 64 of `from` are looked at.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (deleted, from) in from.chars().take(64).enumerate() {
        let mut diagonal = deleted;
        let mut left = deleted + 1;
        row[0] = left;
        for (cell, to) in row[1..].iter_mut().zip(&to) {
            let substituted = diagonal + usize::from(!from.eq_ignore_ascii_case(to));
            diagonal = *cell;
            left = substituted.min(*cell + 1).min(left + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or_default()
}
