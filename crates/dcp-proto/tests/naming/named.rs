//! Which rows of the conformance tables files name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Text of every file with one of the extensions below a folder.
pub(crate) fn texts(folder: &Path, extensions: &[&str], into: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            texts(&path, extensions, into);
        } else if extension.is_some_and(|extension| extensions.contains(&extension))
            && !path.to_string_lossy().ends_with("conformance.json")
        {
            into.push(fs::read_to_string(&path).expect("text"));
        }
    }
}

/// The rows that a text names: as `SS-01`, as `ss_01`, or as `ss_01_to_ss_04`.
pub(crate) fn named(text: &str, table: &str, into: &mut BTreeSet<u64>) {
    let lower = table.to_lowercase();
    for prefix in [format!("{table}-"), format!("{table}_"), format!("{lower}_")] {
        let mut last = None;
        for (at, _) in text.match_indices(&prefix) {
            let rest = &text[at + prefix.len()..];
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let Ok(number) = rest[..digits].parse::<u64>() else { continue };
            if let Some(first) = last.filter(|_| text[..at].ends_with("_to_")) {
                into.extend(first..number);
            }
            into.insert(number);
            last = Some(number);
        }
    }
}
