//! Paths of fields, such as `items[].price`, as notes of malformed fields have them.

use std::fmt;

use crate::document::malformed_fields::push_name;

/// Maximum number of names in a path.
const MAX_NAMES: usize = 32;
/// Maximum length of a path's text in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// Names from a document to a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) names: Vec<Box<str>>,
    /// Whether it means the elements of the field's array.
    pub(super) is_of_elements: bool,
}

impl Path {
    /// Parses a path; the error says what it is not.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(format!("is longer than {MAX_TEXT_BYTES} bytes"));
        }
        let mut path = Self { names: Vec::new(), is_of_elements: false };
        let mut rest = text;
        while !rest.is_empty() || path.names.is_empty() {
            if let Some(after) = rest.strip_prefix("[]")
                && !path.names.is_empty()
                && !path.is_of_elements
            {
                (rest, path.is_of_elements) = (after, true);
                continue;
            }
            let name;
            (name, rest) = if let Some(quoted) = rest.strip_prefix('[') {
                quoted_name(quoted)?
            } else {
                let bare = match path.names.is_empty() {
                    true => rest,
                    false => rest.strip_prefix('.').ok_or_else(|| wrong(rest))?,
                };
                let end = bare.find(|char| !is_plain(char)).unwrap_or(bare.len());
                let (name, after) = bare.split_at_checked(end).unwrap_or_default();
                if name.is_empty() {
                    return Err(wrong(bare));
                }
                (name.into(), after)
            };
            path.names.push(name);
            path.is_of_elements = false;
            if path.names.len() > MAX_NAMES {
                return Err(format!("has more than {MAX_NAMES} names"));
            }
        }
        Ok(path)
    }
}

fn is_plain(char: char) -> bool {
    char.is_alphanumeric() || matches!(char, '_' | '-')
}

/// A name as a JSON string, up to the bracket after it, and what follows.
fn quoted_name(text: &str) -> Result<(Box<str>, &str), String> {
    let mut names = serde_json::Deserializer::from_str(text).into_iter::<String>();
    let name = names.next().and_then(Result::ok).ok_or_else(|| wrong(text))?;
    let rest = text.get(names.byte_offset()..).unwrap_or_default();
    let rest = rest.strip_prefix(']').ok_or_else(|| wrong(rest))?;
    Ok((name.into(), rest))
}

fn wrong(rest: &str) -> String {
    let at = match rest.chars().next() {
        Some(',') => return "has several paths: give each by itself".to_owned(),
        Some(char) => format!("at {char:?}"),
        None => "at its end".to_owned(),
    };
    format!(
        "is no path of a field, {at}: names are joined by dots, as in items.price; write one that \
         is not of letters, digits, _ and - as [\"a name\"], and [] at the end for the elements of \
         an array"
    )
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.names.iter().for_each(|name| push_name(&mut text, name));
        f.write_str(&text)?;
        f.write_str(if self.is_of_elements { "[]" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_path_is_parsed_as_notes_write_it() {
        for (text, names, is_of_elements, shown) in [
            ("a", &["a"][..], false, "a"),
            ("a.b", &["a", "b"], false, "a.b"),
            ("items[].price", &["items", "price"], false, "items.price"),
            ("tags[]", &["tags"], true, "tags[]"),
            (r#"["a b"].c["x.\"y\u0041"][]"#, &["a b", "c", "x.\"yA"], true, "_"),
            (r#"a[""]"#, &["a", ""], false, r#"a[""]"#),
            ("e-mail", &["e-mail"], false, r#"["e-mail"]"#),
            ("größe.1", &["größe", "1"], false, r#"["größe"]["1"]"#),
        ] {
            let path = Path::parse(text).unwrap();
            assert_eq!(
                path.names.iter().map(AsRef::as_ref).collect::<Vec<&str>>(),
                names,
                "{text}"
            );
            assert_eq!(path.is_of_elements, is_of_elements, "{text}");
            if shown != "_" {
                assert_eq!(path.to_string(), shown);
            }
            assert_eq!(Path::parse(&path.to_string()), Ok(path));
        }
    }

    #[test]
    fn mask_path_that_is_none_is_refused() {
        let long = "a.".repeat(40) + "a";
        for text in [
            "",
            ".",
            ".a",
            "a.",
            "a..b",
            "a b",
            "[]",
            "[].a",
            "a[][]",
            "a[0]",
            "a[\"b\"",
            "a[\"b]",
            "a]",
            "*",
            "a.*",
            "`a`",
            "$.a",
            "a[b]",
            "a[\"b\"]c",
            "a\0",
            &long,
            &"a".repeat(5000),
        ] {
            assert!(Path::parse(text).is_err(), "{text:.20}");
        }
    }
}
