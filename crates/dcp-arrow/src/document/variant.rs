//! JSON as Spark's variant, byte for byte as Spark's `parse_json` encodes it.
//!
//! A variant consists of two byte strings: *metadata*, a dictionary of its keys, and *value*, in
//! which numbers have their smallest width, objects list their fields in the order of the keys, and
//! arrays and objects contain the offsets of their parts.

use std::collections::HashMap;

use jiter::{Jiter, Peek};

use super::malformed::{Malformed, Problem, Result};
use super::numbers;

/// Maximum size of a variant that every version of Spark reads, in bytes.
const MAX_BYTES: usize = 16 * 1024 * 1024;
/// Maximum nesting depth.
const MAX_DEPTH: usize = 128;

// The two lowest bits of a header are the value's basic type.
const SHORT_TEXT: u8 = 1;
const OBJECT: u8 = 2;
const ARRAY: u8 = 3;

/// Maximum length of a string whose length is part of its header, in bytes.
const MAX_SHORT_TEXT: usize = 0x3f;

/// Version 1 of the metadata, with unsorted keys.
const VERSION: u8 = 1;

/// A primitive value (short strings excepted): the header's other bits.
#[derive(Clone, Copy)]
enum Primitive {
    Null = 0,
    True = 1,
    False = 2,
    Int1 = 3,
    Int2 = 4,
    Int4 = 5,
    Int8 = 6,
    Double = 7,
    Decimal4 = 8,
    Decimal8 = 9,
    Decimal16 = 10,
    Text = 16,
}

/// Encodes documents as variants; reuses its memory.
#[derive(Debug, Default)]
pub(super) struct VariantEncoder {
    value: Vec<u8>,
    keys: Keys,
    /// Fields and elements of unfinished objects and arrays.
    parts: Vec<Part>,
    scratch: Vec<u8>,
}

/// A part of an object or array: its offset and key.
#[derive(Clone, Copy, Debug)]
struct Part {
    key: usize,
    start: usize,
}

impl VariantEncoder {
    /// The value and metadata of `document`.
    pub(super) fn encode(&mut self, document: &[u8]) -> Result<(&[u8], &[u8])> {
        if let Err(error) = std::str::from_utf8(document) {
            return Err(Malformed::new(Problem::NotUtf8, error.valid_up_to()));
        }
        self.value.clear();
        self.keys.begin();
        self.parts.clear();
        let mut json = Jiter::with_tape(document, std::mem::take(&mut self.scratch));
        let written = self.document(&mut json);
        self.scratch = json.into_tape();
        written?;
        Ok((&self.value, &self.keys.metadata))
    }

    fn document(&mut self, json: &mut Jiter<'_>) -> Result<()> {
        let peek = json.peek()?;
        self.write(json, peek, 0)?;
        json.finish()?;
        if !self.keys.finish() {
            return Err(Malformed::at(Problem::TooLarge, json));
        }
        Ok(())
    }

    fn write(&mut self, json: &mut Jiter<'_>, peek: Peek, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Malformed::at(Problem::TooDeep, json));
        }
        match peek {
            Peek::Null => {
                json.known_null()?;
                self.header(Primitive::Null);
            }
            Peek::True | Peek::False => {
                let is_true = json.known_bool(peek)?;
                self.header(if is_true { Primitive::True } else { Primitive::False });
            }
            Peek::String => self.text(json.known_str()?),
            Peek::Array => self.array(json, depth)?,
            Peek::Object => self.object(json, depth)?,
            _ => {
                let number = json.known_number_bytes(peek)?;
                if !self.number(number) {
                    return Err(Malformed::at(
                        Problem::Expected("a number that fits a DOUBLE"),
                        json,
                    ));
                }
            }
        }
        if self.value.len() > MAX_BYTES {
            return Err(Malformed::at(Problem::TooLarge, json));
        }
        Ok(())
    }

    fn header(&mut self, primitive: Primitive) {
        self.value.push((primitive as u8) << 2);
    }

    fn text(&mut self, text: &str) {
        match u8::try_from(text.len()) {
            Ok(len) if text.len() <= MAX_SHORT_TEXT => self.value.push((len << 2) | SHORT_TEXT),
            _ => {
                self.header(Primitive::Text);
                put(&mut self.value, text.len(), 4);
            }
        }
        self.value.extend_from_slice(text.as_bytes());
    }

    /// Writes a JSON number; false if no type of the variant can hold it.
    fn number(&mut self, text: &[u8]) -> bool {
        if let Some(number) = numbers::integer(text) {
            self.integer(number);
            return true;
        }
        if let Some((digits, precision, scale)) = numbers::plain_decimal(text) {
            self.decimal(digits, precision.max(scale), scale);
            return true;
        }
        let number: Option<f64> = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        let Some(number) = number.filter(|number| number.is_finite()) else { return false };
        self.header(Primitive::Double);
        self.value.extend_from_slice(&number.to_le_bytes());
        true
    }

    fn integer(&mut self, number: i64) {
        if let Ok(number) = i8::try_from(number) {
            self.header(Primitive::Int1);
            self.value.extend_from_slice(&number.to_le_bytes());
        } else if let Ok(number) = i16::try_from(number) {
            self.header(Primitive::Int2);
            self.value.extend_from_slice(&number.to_le_bytes());
        } else if let Ok(number) = i32::try_from(number) {
            self.header(Primitive::Int4);
            self.value.extend_from_slice(&number.to_le_bytes());
        } else {
            self.header(Primitive::Int8);
            self.value.extend_from_slice(&number.to_le_bytes());
        }
    }

    /// Writes a decimal of up to `size` digits, including those after the point.
    fn decimal(&mut self, digits: i128, size: u8, scale: u8) {
        let (primitive, bytes) = match size {
            0..=9 => (Primitive::Decimal4, 4),
            10..=18 => (Primitive::Decimal8, 8),
            _ => (Primitive::Decimal16, 16),
        };
        self.header(primitive);
        self.value.push(scale);
        let digits = digits.to_le_bytes();
        self.value.extend_from_slice(digits.get(..bytes).unwrap_or(&digits));
    }

    fn array(&mut self, json: &mut Jiter<'_>, depth: usize) -> Result<()> {
        let (start, first) = (self.value.len(), self.parts.len());
        let mut next = json.known_array()?;
        while let Some(peek) = next {
            self.parts.push(Part { key: 0, start: self.value.len() - start });
            self.write(json, peek, depth + 1)?;
            next = json.array_step()?;
        }
        self.close(start, first, ARRAY, None);
        Ok(())
    }

    fn object(&mut self, json: &mut Jiter<'_>, depth: usize) -> Result<()> {
        let (start, first) = (self.value.len(), self.parts.len());
        let mut next = json.known_object()?.map(|key| self.keys.id(key));
        while let Some(key) = next {
            self.parts.push(Part { key, start: self.value.len() - start });
            let peek = json.peek()?;
            self.write(json, peek, depth + 1)?;
            next = json.next_key()?.map(|key| self.keys.id(key));
        }
        let (keys, parts) = (&self.keys, self.parts.get_mut(first..).unwrap_or_default());
        parts.sort_by(|a, b| keys.compare(a.key, b.key));
        if parts.windows(2).any(|pair| matches!(pair, [a, b] if a.key == b.key)) {
            return Err(Malformed::at(Problem::Duplicate, json));
        }
        let largest = parts.iter().map(|part| part.key).max().unwrap_or_default();
        self.close(start, first, OBJECT, Some(largest));
        Ok(())
    }

    /// Inserts the header and offsets before the parts written from `start` on.
    fn close(&mut self, start: usize, first: usize, kind: u8, largest_key: Option<usize>) {
        let parts = self.parts.get(first..).unwrap_or_default();
        let data_bytes = self.value.len() - start;
        let is_large = parts.len() > usize::from(u8::MAX);
        let offset_width = width(data_bytes);
        let mut header = Vec::with_capacity(6 + parts.len() * 8);
        let size_bits = u8::from(is_large);
        let offset_bits = (offset_width - 1) << 2;
        header.push(match largest_key {
            Some(key) => (size_bits << 6) | ((width(key) - 1) << 4) | offset_bits | kind,
            None => (size_bits << 4) | offset_bits | kind,
        });
        put(&mut header, parts.len(), if is_large { 4 } else { 1 });
        if let Some(largest) = largest_key {
            for part in parts {
                put(&mut header, part.key, width(largest));
            }
        }
        for part in parts {
            put(&mut header, part.start, offset_width);
        }
        put(&mut header, data_bytes, offset_width);
        self.value.splice(start..start, header);
        self.parts.truncate(first);
    }
}

/// Number of bytes for numbers up to `largest`.
const fn width(largest: usize) -> u8 {
    match largest {
        0..=0xff => 1,
        0x100..=0xffff => 2,
        0x1_0000..=0xff_ffff => 3,
        _ => 4,
    }
}

/// Appends the lowest bytes of a number in little-endian order.
fn put(to: &mut Vec<u8>, number: usize, width: u8) {
    let bytes = number.to_le_bytes();
    to.extend_from_slice(bytes.get(..usize::from(width)).unwrap_or(&bytes));
}

/// The distinct keys of a document, numbered in order of occurrence.
///
/// Most documents have the keys of the one before, in the same order. So those are kept, and with them
/// what was made of them: a key is compared with the one that is expected before it is looked for.
#[derive(Debug, Default)]
struct Keys {
    bytes: String,
    /// End of each key.
    ends: Vec<usize>,
    /// How many of them the document has so far; the others are of the one before.
    used: usize,
    /// The key that was found last among those.
    last: usize,
    /// Whether the document has keys that the one before lacks, or in another order.
    is_new: bool,
    /// Numbers by key, if there are more than a few.
    by_key: HashMap<Box<str>, usize>,
    /// Places of the first keys in the order of lookups.
    ranks: Vec<usize>,
    /// The dictionary; empty until it is made.
    metadata: Vec<u8>,
}

impl Keys {
    /// Up to this number of keys, a linear search is faster than a map.
    const FEW: usize = 64;

    /// Begins a document.
    fn begin(&mut self) {
        let is_same = !self.is_new && self.used == self.ends.len();
        if is_same && self.ranks.len() < self.used {
            let mut order: Vec<usize> = (0..self.used).collect();
            order.sort_by(|a, b| self.compare(*a, *b));
            self.ranks.resize(self.used, 0);
            for (place, id) in order.into_iter().enumerate() {
                if let Some(rank) = self.ranks.get_mut(id) {
                    *rank = place;
                }
            }
        }
        (self.used, self.last, self.is_new) = (0, 0, false);
    }

    fn get(&self, id: usize) -> &str {
        let start = id.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        let end = self.ends.get(id).copied().unwrap_or_default();
        self.bytes.get(start.unwrap_or_default()..end).unwrap_or_default()
    }

    /// The number of a key, assigned now if it is new.
    fn id(&mut self, key: &str) -> usize {
        // Keys differ, so that one which is expected is not among those before.
        if self.used < self.ends.len() && self.get(self.used) == key {
            self.used += 1;
            return self.used - 1;
        }
        // As in the objects of an array.
        let next = self.last + 1;
        let known = if next < self.used && self.get(next) == key {
            Some(next)
        } else if self.used <= Self::FEW {
            (0..self.used).find(|id| self.get(*id) == key)
        } else {
            self.by_key.get(key).copied().filter(|id| *id < self.used)
        };
        if let Some(id) = known {
            self.last = id;
            return id;
        }
        self.forget_unused();
        self.add(key)
    }

    fn add(&mut self, key: &str) -> usize {
        let id = self.ends.len();
        self.bytes.push_str(key);
        self.ends.push(self.bytes.len());
        if id == Self::FEW {
            for id in 0..=id {
                self.by_key.insert(self.get(id).into(), id);
            }
        } else if id > Self::FEW {
            self.by_key.insert(key.into(), id);
        }
        self.metadata.clear();
        (self.used, self.is_new) = (id + 1, true);
        id
    }

    /// Forgets the keys that the document does not have, or not yet.
    fn forget_unused(&mut self) {
        if self.used == self.ends.len() {
            return;
        }
        if self.used <= Self::FEW {
            self.by_key.clear();
        } else {
            self.by_key.retain(|_, id| *id < self.used);
        }
        self.ends.truncate(self.used);
        self.bytes.truncate(self.ends.last().copied().unwrap_or_default());
        self.ranks.truncate(self.used);
        self.metadata.clear();
        self.is_new = true;
    }

    /// Spark's lookup order of keys: by UTF-16 code units.
    fn compare(&self, a: usize, b: usize) -> std::cmp::Ordering {
        if let (Some(a), Some(b)) = (self.ranks.get(a), self.ranks.get(b)) {
            return a.cmp(b);
        }
        let (a, b) = (self.get(a), self.get(b));
        if a.is_ascii() && b.is_ascii() { a.cmp(b) } else { a.encode_utf16().cmp(b.encode_utf16()) }
    }

    /// Makes the dictionary of the document; `false` if it is too large.
    fn finish(&mut self) -> bool {
        self.forget_unused();
        if !self.metadata.is_empty() {
            return true;
        }
        let offset_width = width(self.bytes.len().max(self.ends.len()));
        let offsets = (self.ends.len() + 2) * usize::from(offset_width);
        let len = 1 + offsets + self.bytes.len();
        if len > MAX_BYTES {
            return false;
        }
        self.metadata.reserve(len);
        self.metadata.push(VERSION | ((offset_width - 1) << 6));
        put(&mut self.metadata, self.ends.len(), offset_width);
        put(&mut self.metadata, 0, offset_width);
        for end in &self.ends {
            put(&mut self.metadata, *end, offset_width);
        }
        self.metadata.extend_from_slice(self.bytes.as_bytes());
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::subsequence;

    use super::*;

    fn encode(document: &str) -> (Vec<u8>, Vec<u8>) {
        let mut encoder = VariantEncoder::default();
        let (value, metadata) = encoder.encode(document.as_bytes()).unwrap();
        (value.to_vec(), metadata.to_vec())
    }

    fn value(document: &str) -> Vec<u8> {
        encode(document).0
    }

    /// What Spark 4.3 makes of these with `parse_json`.
    #[test]
    fn variant_values_have_their_smallest_width() {
        assert_eq!(value("null"), [0]);
        assert_eq!(value("true"), [4]);
        assert_eq!(value("false"), [8]);
        assert_eq!(value("-1"), [12, 0xff]);
        assert_eq!(value("300"), [16, 0x2c, 1]);
        assert_eq!(value("70000"), [20, 0x70, 0x11, 1, 0]);
        assert_eq!(value("5000000000"), [24, 0, 0xf2, 5, 0x2a, 1, 0, 0, 0]);
        assert_eq!(value("1.5"), [32, 1, 15, 0, 0, 0]);
        assert_eq!(value("0.0000000001"), [36, 10, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(value("1e0"), [28, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
        assert_eq!(value("\"ab\""), [9, b'a', b'b']);
        let long = "x".repeat(64);
        assert_eq!(value(&format!("\"{long}\""))[..6], [64, 64, 0, 0, 0, b'x']);
    }

    #[test]
    fn variant_objects_list_their_fields_by_key() {
        let (value, metadata) = encode(r#"{"b": 1, "a": [true, {"b": null}]}"#);
        assert_eq!(metadata, [1, 2, 0, 1, 2, b'b', b'a']);
        let inner = [2, 1, 0, 0, 1, 0];
        let array = [&[3, 2, 0, 1, 7, 4][..], &inner].concat();
        let expected = [&[2, 2, 1, 0, 2, 0, 14, 12, 1][..], &array].concat();
        assert_eq!(value, expected);
        assert_eq!(encode("[]"), (vec![3, 0, 0], vec![1, 0, 0]));
        assert_eq!(encode("{}"), (vec![2, 0, 0], vec![1, 0, 0]));
    }

    #[test]
    fn variant_offsets_widen_with_many_keys_and_long_parts() {
        let fields: Vec<String> = (0..300).map(|n| format!("\"k{n:03}\": {n}")).collect();
        let (value, metadata) = encode(&format!("{{{}}}", fields.join(",")));
        // More than 255 fields, ids and offsets of two bytes.
        assert_eq!(value[..5], [0b101_0110, 0x2c, 1, 0, 0]);
        assert_eq!(metadata[0], 0b0100_0001);
        assert_eq!(metadata.len(), 1 + 2 * 302 + 300 * 4);
    }

    #[test]
    fn variant_that_is_not_valid_is_malformed() {
        let mut encoder = VariantEncoder::default();
        let mut problem = |document: &[u8]| encoder.encode(document).unwrap_err().problem;
        assert_eq!(problem(br#"{"a": 1, "a": 2}"#), Problem::Duplicate);
        assert_eq!(problem(b"[\"\xff\"]"), Problem::NotUtf8);
        assert_eq!(problem(b"1e999"), Problem::Expected("a number that fits a DOUBLE"));
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(problem(deep.as_bytes()), Problem::TooDeep);
        let large = format!("\"{}\"", "x".repeat(MAX_BYTES));
        assert_eq!(problem(large.as_bytes()), Problem::TooLarge);
        assert!(matches!(problem(b"[1,"), Problem::Syntax(_)));
        assert!(matches!(problem(b"1 2"), Problem::Syntax(_)));
        assert!(matches!(problem(b""), Problem::Syntax(_)));
        assert!(encoder.encode(b"{}").is_ok(), "goes on after malformed ones");
    }

    #[test]
    fn variant_key_keeps_its_number_however_many_there_are() {
        let mut keys = Keys::default();
        for round in 0..2 {
            for number in 0..100 {
                assert_eq!(keys.id(&format!("key {number}")), number, "{round}");
            }
        }
        assert_eq!(keys.get(0), "key 0");
        assert_eq!(keys.get(99), "key 99");
        assert_eq!(keys.get(100), "");
    }

    /// A document whose keys are named by numbers, the nested ones of a second object.
    fn document(keys: &[u8], nested: &[u8]) -> String {
        let object = |keys: &[u8]| {
            let fields = keys.iter().map(|key| format!("\"key {}é{key}\":{key}", key % 7));
            fields.collect::<Vec<_>>().join(",")
        };
        let (first, second) = (object(keys), object(nested));
        let comma = if keys.is_empty() { "" } else { "," };
        format!("{{{first}{comma}\"parts\":[{{{second}}},{{{second}}}]}}")
    }

    proptest! {
        #[test]
        fn variant_does_not_depend_on_the_documents_before(
            all in vec((
                prop_oneof![subsequence((0..100).collect::<Vec<u8>>(), 0..100), Just(vec![1, 2, 3])],
                prop_oneof![subsequence((0..100).collect::<Vec<u8>>(), 0..8), Just(vec![3, 200])],
                any::<bool>(),
            ), 1..8),
        ) {
            let mut encoder = VariantEncoder::default();
            for (mut keys, nested, is_reversed) in all {
                if is_reversed {
                    keys.reverse();
                }
                let document = document(&keys, &nested);
                // Some end early, and the next begins with what is left of them.
                for len in [document.len() / 2, document.len(), document.len()] {
                    let part = &document.as_bytes()[..len];
                    let anew = VariantEncoder::default().encode(part).map(owned);
                    prop_assert_eq!(encoder.encode(part).map(owned), anew, "{}", document);
                }
            }
        }
    }

    fn owned((value, metadata): (&[u8], &[u8])) -> (Vec<u8>, Vec<u8>) {
        (value.to_vec(), metadata.to_vec())
    }
}
