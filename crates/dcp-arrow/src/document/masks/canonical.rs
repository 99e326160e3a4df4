//! The text of a value that is hashed: the same for values that are the same.
//!
//! * Text has only the escapes that it needs: of quotes, backslashes and the characters below
//!   U+0020, these as `\b`, `\f`, `\n`, `\r`, `\t` or `\u001f`; half a surrogate pair as `\ud800`.
//! * A number has no exponent and no zeros at the end of a fraction, so `1`, `1.0` and `1e0` are
//!   the same. One of more than 40 digits is its digits without zeros at either end, `e` and the
//!   power of ten of the last one.
//! * Members are in the order of the code points of their names; of a name that occurs twice, the
//!   last value counts.
//! * There is no white space.

use std::ops::Range;

use jiter::{Jiter, Peek};

use super::MAX_DEPTH;
use crate::document::malformed::{Malformed, Problem, Result};
use crate::document::skip::{raw_key, whole_pairs};

/// Maximum number of digits of a number without an exponent.
const MAX_DIGITS: usize = 40;

/// The canonical text of a JSON value.
pub(super) fn canonical(text: &[u8]) -> Result<Vec<u8>> {
    let whole = whole_pairs(text);
    let mut writer = Writer { json: Jiter::new(&whole), text, out: Vec::with_capacity(text.len()) };
    let peek = writer.json.peek()?;
    writer.value(peek, 0)?;
    Ok(writer.out)
}

struct Writer<'j> {
    json: Jiter<'j>,
    text: &'j [u8],
    out: Vec<u8>,
}

impl Writer<'_> {
    fn value(&mut self, peek: Peek, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Malformed::at(Problem::TooDeep, &self.json));
        }
        match peek {
            Peek::Object => return self.object(depth),
            Peek::Array => return self.array(depth),
            _ => {}
        }
        let start = self.json.current_index();
        self.json.known_skip(peek)?;
        let text = self.text.get(start..self.json.current_index()).unwrap_or_default();
        match peek {
            Peek::String => {
                let raw = text.get(1..text.len().saturating_sub(1)).unwrap_or_default();
                write_text(raw, &mut self.out);
            }
            peek if peek.is_num() => write_number(text, &mut self.out),
            _ => self.out.extend_from_slice(text),
        }
        Ok(())
    }

    fn array(&mut self, depth: usize) -> Result<()> {
        self.out.push(b'[');
        let begun = self.out.len();
        let mut next = self.json.known_array()?;
        while let Some(peek) = next {
            if self.out.len() > begun {
                self.out.push(b',');
            }
            self.value(peek, depth + 1)?;
            next = self.json.array_step()?;
        }
        self.out.push(b']');
        Ok(())
    }

    fn object(&mut self, depth: usize) -> Result<()> {
        self.out.push(b'{');
        let begun = self.out.len();
        let mut members = Vec::new();
        let mut next = raw_key(&mut self.json, self.text, true)?;
        while let Some((_, raw)) = next {
            let start = self.out.len();
            write_text(raw, &mut self.out);
            self.out.push(b':');
            let peek = self.json.peek()?;
            self.value(peek, depth + 1)?;
            members.push((code_points(raw), start..self.out.len()));
            next = raw_key(&mut self.json, self.text, false)?;
        }
        self.sort(begun, members);
        self.out.push(b'}');
        Ok(())
    }

    /// Puts the members that were written in order, with commas.
    fn sort(&mut self, begun: usize, mut members: Vec<(Vec<u8>, Range<usize>)>) {
        // It is stable, so the last of those with the same name stays the last.
        members.sort_by(|(name, _), (other, _)| name.cmp(other));
        let mut sorted = Vec::with_capacity(self.out.len() - begun + members.len());
        for (index, (name, place)) in members.iter().enumerate() {
            if members.get(index + 1).is_some_and(|(next, _)| next == name) {
                continue;
            }
            if !sorted.is_empty() {
                sorted.push(b',');
            }
            sorted.extend_from_slice(self.out.get(place.clone()).unwrap_or_default());
        }
        self.out.truncate(begun);
        self.out.extend_from_slice(&sorted);
    }
}

/// The code points of text as it is between its quotes, in UTF-8, also those of surrogates.
fn code_points(raw: &[u8]) -> Vec<u8> {
    let mut found = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'\\' {
            found.push(*byte);
            continue;
        }
        let Some((escape, after)) = rest.split_first() else { break };
        rest = after;
        let plain = match escape {
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let (code, len) = code_point(rest);
                rest = rest.get(len..).unwrap_or_default();
                push_code_point(code, &mut found);
                continue;
            }
            other => *other,
        };
        found.push(plain);
    }
    found
}

/// The code point of the digits after `\u`, with the pair's second half, and how long that is.
fn code_point(digits: &[u8]) -> (u32, usize) {
    let unit = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits.get(..4)?).ok()?;
        u32::from_str_radix(digits, 16).ok()
    };
    let first = unit(digits).unwrap_or_default();
    let second = digits.get(4..).and_then(|rest| rest.strip_prefix(b"\\u")).and_then(unit);
    match (first, second) {
        (0xd800..0xdc00, Some(second @ 0xdc00..0xe000)) => {
            (0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00), 10)
        }
        _ => (first, 4),
    }
}

fn push_code_point(code: u32, found: &mut Vec<u8>) {
    if let Some(char) = char::from_u32(code) {
        found.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
    } else {
        // A surrogate: three bytes, as any other code point of its size.
        let low = |shift: u32| 0x80 | ((code >> shift) & 0x3f);
        let bytes = [0xe0 | (code >> 12), low(6), low(0)];
        found.extend(bytes.iter().filter_map(|byte| u8::try_from(*byte).ok()));
    }
}

/// Writes text, given as it is between its quotes.
fn write_text(raw: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    if raw.contains(&b'\\') {
        write_escaped(&code_points(raw), out);
    } else {
        out.extend_from_slice(raw);
    }
    out.push(b'"');
}

fn write_escaped(text: &[u8], out: &mut Vec<u8>) {
    let mut index = 0;
    while let Some(byte) = text.get(index) {
        index += 1;
        match (byte, text.get(index)) {
            (b'"' | b'\\', _) => out.extend_from_slice(&[b'\\', *byte]),
            (8, _) => out.extend_from_slice(b"\\b"),
            (12, _) => out.extend_from_slice(b"\\f"),
            (b'\n', _) => out.extend_from_slice(b"\\n"),
            (b'\r', _) => out.extend_from_slice(b"\\r"),
            (b'\t', _) => out.extend_from_slice(b"\\t"),
            (0..0x20, _) => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            // A surrogate.
            (0xed, Some(second @ 0xa0..)) => {
                let third = text.get(index + 1).copied().unwrap_or_default();
                let code = 0xd000 | u32::from(second & 0x3f) << 6 | u32::from(third & 0x3f);
                out.extend_from_slice(format!("\\u{code:04x}").as_bytes());
                index += 2;
            }
            _ => out.push(*byte),
        }
    }
}

fn write_number(text: &[u8], out: &mut Vec<u8>) {
    let (is_negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let at = text.iter().position(|byte| matches!(byte, b'e' | b'E')).unwrap_or(text.len());
    let (mantissa, power) = text.split_at_checked(at).unwrap_or_default();
    let point = mantissa.iter().position(|byte| *byte == b'.').unwrap_or(mantissa.len());
    let decimals = mantissa.len().saturating_sub(point + 1);
    let mut digits: Vec<u8> = mantissa.iter().copied().filter(u8::is_ascii_digit).collect();
    let mut power = exponent(power).saturating_sub(i64::try_from(decimals).unwrap_or(i64::MAX));
    let len = digits.iter().rposition(|digit| *digit != b'0').map_or(0, |last| last + 1);
    power = power.saturating_add(i64::try_from(digits.len() - len).unwrap_or(i64::MAX));
    digits.truncate(len);
    let first = digits.iter().position(|digit| *digit != b'0').unwrap_or_default();
    digits.drain(..first);
    if digits.is_empty() {
        out.push(b'0');
        return;
    }
    if is_negative {
        out.push(b'-');
    }
    write_digits(&digits, power, out);
}

/// The exponent of a number from its `e` on.
fn exponent(text: &[u8]) -> i64 {
    let digits = text.get(1..).unwrap_or_default();
    let (sign, digits) = match digits.split_first() {
        Some((b'-', rest)) => (-1, rest),
        Some((b'+', rest)) => (1, rest),
        _ => (1, digits),
    };
    let number = digits.iter().fold(0_i64, |number, digit| {
        number.saturating_mul(10).saturating_add(i64::from(digit.wrapping_sub(b'0')))
    });
    sign * number
}

/// Writes digits, of which the last has a power of ten.
fn write_digits(digits: &[u8], power: i64, out: &mut Vec<u8>) {
    let most = i64::try_from(MAX_DIGITS).unwrap_or_default();
    let len = i64::try_from(digits.len()).unwrap_or(i64::MAX);
    // Digits before the point; zero or less if the number is less than one.
    let before = len.saturating_add(power);
    if len.max(before).max(power.saturating_neg().saturating_add(1)) > most {
        out.extend_from_slice(digits);
        out.extend_from_slice(format!("e{power}").as_bytes());
        return;
    }
    let zeros = |count: i64| vec![b'0'; usize::try_from(count).unwrap_or_default()];
    if let Ok(before @ 1..) = usize::try_from(before) {
        let (whole, fraction) = digits.split_at_checked(before).unwrap_or((digits, &[]));
        out.extend_from_slice(whole);
        out.extend_from_slice(&zeros(power));
        if !fraction.is_empty() {
            out.push(b'.');
            out.extend_from_slice(fraction);
        }
    } else {
        out.extend_from_slice(b"0.");
        out.extend_from_slice(&zeros(-before));
        out.extend_from_slice(digits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_text_is_the_same_for_the_same_value() {
        let whole = format!("1{}", "0".repeat(39));
        for (text, expected) in [
            ("1.0", "1"),
            ("1e0", "1"),
            ("-0.0", "0"),
            ("0e999999999999999999999", "0"),
            ("-12.50E+1", "-125"),
            ("9007199254740993", "9007199254740993"),
            ("0.10", "0.1"),
            ("1e-7", "0.0000001"),
            ("1e39", &whole),
            ("1e40", "1e40"),
            ("1500e300", "15e302"),
            ("1e-39", "0.000000000000000000000000000000000000001"),
            ("1e-40", "1e-40"),
            ("true", "true"),
            ("null", "null"),
            (r#""\u0061\/\u00e9\u0001\u000a\"\\""#, r#""a/é\u0001\n\"\\""#),
            (r#""\ud83d\ude00""#, "\"😀\""),
            (r#""\uD800\ud83dx""#, r#""\ud800\ud83dx""#),
            ("[ 1.0 , [] , { } ]", "[1,[],{}]"),
            (
                r#"{ "b": 1, "a": {"d": 2.0, "c": 3}, "\u0061a": 0}"#,
                r#"{"a":{"c":3,"d":2},"aa":0,"b":1}"#,
            ),
            (r#"{"a": 1, "b": 2, "\u0061": 3}"#, r#"{"a":3,"b":2}"#),
            // Not in the order of UTF-16.
            (
                r#"{"\ud83d\ude00": 1, "\uff5e": 2, "\ud800": 3}"#,
                "{\"\\ud800\":3,\"～\":2,\"😀\":1}",
            ),
        ] {
            let found = canonical(text.as_bytes()).unwrap();
            assert_eq!(std::str::from_utf8(&found), Ok(expected), "{text}");
        }
        let deep = "[".repeat(MAX_DEPTH + 2) + &"]".repeat(MAX_DEPTH + 2);
        assert_eq!(canonical(deep.as_bytes()).unwrap_err().problem, Problem::TooDeep);
    }
}
