//! Skips JSON of any depth, with any escapes.

use std::borrow::Cow;

use jiter::{Jiter, Peek};

use super::malformed::Result;

/// Number of levels of arrays and objects in JSON text: 0 for a number; `None` if it is not JSON.
#[must_use]
pub fn json_depth(text: &[u8]) -> Option<usize> {
    let whole = whole_pairs(std::str::from_utf8(text).ok()?.as_bytes());
    let mut json = Jiter::new(&whole);
    let peek = json.peek().ok()?;
    let depth = skip(&mut json, peek).ok()?;
    json.finish().ok()?;
    Some(depth)
}

/// Skips a value of any depth, unlike `Jiter::known_skip`; returns the depth.
pub(super) fn skip(json: &mut Jiter<'_>, mut peek: Peek) -> Result<usize> {
    // Whether each open value is an object; the others are arrays.
    let mut open = Vec::new();
    let mut depth = 0;
    loop {
        if matches!(peek, Peek::Array | Peek::Object) {
            depth = depth.max(open.len() + 1);
        }
        let first = match peek {
            Peek::Array => json.known_array()?.map(|peek| (false, peek)),
            Peek::Object => match json.next_object_bytes()? {
                Some(_) => Some((true, json.peek()?)),
                None => None,
            },
            _ => {
                json.known_skip(peek)?;
                None
            }
        };
        if let Some((is_object, first)) = first {
            open.push(is_object);
            peek = first;
            continue;
        }
        peek = loop {
            let next = match open.last() {
                None => return Ok(depth),
                Some(true) => match json.next_key_bytes()? {
                    Some(_) => Some(json.peek()?),
                    None => None,
                },
                Some(false) => json.array_step()?,
            };
            if let Some(next) = next {
                break next;
            }
            open.pop();
        };
    }
}

/// Reads the next key of an object: where its quotes begin, and its text as it is between them.
///
/// `document` is what `json` reads, before [`whole_pairs`].
pub(super) fn raw_key<'j>(
    json: &mut Jiter<'_>,
    document: &'j [u8],
    is_first: bool,
) -> Result<Option<(usize, &'j [u8])>> {
    let key = if is_first { json.next_object_bytes()? } else { json.next_key_bytes()? };
    let Some(len) = key.map(<[u8]>::len) else { return Ok(None) };
    // After the key come its quote, perhaps spaces, and a colon.
    let before = document.get(..json.current_index()).unwrap_or_default();
    let end = before.iter().rposition(|byte| *byte == b'"').unwrap_or_default();
    let start = end.saturating_sub(len);
    Ok(Some((start.saturating_sub(1), before.get(start..end).unwrap_or_default())))
}

/// The text that is between quotes; `None` if it has half a surrogate pair.
pub(super) fn unescaped(raw: &[u8]) -> Option<Cow<'_, str>> {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Cow::Borrowed);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    let mut json = Jiter::new(&quoted);
    json.next_str().ok().map(|text| Cow::Owned(text.to_owned()))
}

/// Written instead of half a surrogate pair: a code point that is never a character.
pub(super) const HALF: char = '\u{fdd0}';
const HALF_HEX: &[u8; 4] = b"fdd0";

/// The document with [`HALF`] for each escape that is half a surrogate pair, at which `Jiter` ends
/// the document even if the value is skipped. No other byte is changed or moved.
pub(super) fn whole_pairs(document: &[u8]) -> Cow<'_, [u8]> {
    let mut whole = Cow::Borrowed(document);
    let unit = |at: usize| {
        let hex = document.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
    };
    let mut from = 0;
    while let Some(found) = document.iter().skip(from).position(|byte| *byte == b'\\') {
        let at = from + found;
        from = at + 2;
        match unit(at) {
            Some(0xd800..0xdc00) if matches!(unit(at + 6), Some(0xdc00..0xe000)) => from = at + 12,
            Some(0xd800..0xe000) => {
                if let Some(hex) = whole.to_mut().get_mut(at + 2..at + 6) {
                    hex.copy_from_slice(HALF_HEX);
                }
            }
            _ => {}
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_string_replaces_halves_of_surrogate_pairs_and_nothing_else() {
        for (text, expected) in [
            (r#"{"a\n": "\ud83d\ude00"}"#, None),
            (r#""\\ud800 \u0041 \uD83D\uDE00""#, None),
            (r#""\ud83dx""#, Some(r#""\ufdd0x""#)),
            (r#""\ude00\ud83d\ud83d\ude00""#, Some(r#""\ufdd0\ufdd0\ud83d\ude00""#)),
            (r#""\\\ud800""#, Some(r#""\\\ufdd0""#)),
            (r"\ud8", None),
            (r"\u+123", None),
            ("\\", None),
        ] {
            let whole = whole_pairs(text.as_bytes());
            assert_eq!(matches!(whole, Cow::Borrowed(_)), expected.is_none(), "{text}");
            assert_eq!(whole, expected.unwrap_or(text).as_bytes(), "{text}");
        }
    }

    #[test]
    fn json_is_a_whole_value_of_any_depth() {
        let deep = ["[".repeat(100_000), "]".repeat(100_000)].concat();
        for (text, depth) in [
            ("1", 0),
            (" {\"a\": [1e9, [], 2], \"b\": {}} \n", 3),
            ("null", 0),
            ("\"\\ud800\"", 0),
            ("[{\"a\": 1}, [[1]]]", 3),
            ("[[], []]", 2),
            (&deep, 100_000),
        ] {
            assert_eq!(json_depth(text.as_bytes()), Some(depth), "{text:.20}");
        }
        for text in ["", "{", "1 2", "NaN", "{\"a\" 1}", "[1,]", "\"a\nb\"", &deep[1..]] {
            assert_eq!(json_depth(text.as_bytes()), None, "{text:.20}");
        }
        assert_eq!(json_depth(b"\"\xff\""), None);
    }
}
