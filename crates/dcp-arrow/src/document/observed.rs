//! What the fields of documents hold, and the types of columns that lose none of it.

use std::collections::HashMap;

use jiter::{Jiter, Peek};

use super::malformed::Result;
use super::numbers::{self, Extent};
use super::skip::{HALF, skip, whole_pairs};
use super::{Field, Kind};

/// Maximum number of fields that are told apart, nested ones included: each may become a column.
pub(super) const MAX_FIELDS: usize = 1_000;
/// Maximum depth of objects whose members are told apart.
const MAX_DEPTH: usize = 16;
/// Maximum length of the text of an example in bytes.
const MAX_EXAMPLE_BYTES: usize = 64;
/// Maximum number of digits of a decimal.
const MAX_PRECISION: u64 = 38;
/// Maximum length of a column's name in bytes: that of PostgreSQL.
pub(super) const MAX_NAME_BYTES: usize = 63;
/// What the name of a field is preceded by if the column's would be that of another column.
pub(super) const PREFIX: &str = "doc_";
/// Digits after the point of a decimal that replaces another type, so that not every longer
/// fraction changes the type again.
const SCALES: [u8; 3] = [0, 9, 18];

/// What becomes of objects within documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nested {
    /// A column of JSON text.
    #[default]
    Json,
    /// A column of structs.
    Struct,
    /// A column for each member, named by its path: `geo__lat`.
    Columns,
}

/// What the documents of a collection were seen to have.
///
/// Only names of up to 59 bytes are told apart, at most 1,000 of them in objects up to 16 levels
/// deep.
#[derive(Debug, Default)]
pub struct Observations {
    /// Documents that are JSON objects.
    pub objects: u64,
    /// Documents that are other JSON.
    pub others: u64,
    /// Documents that are not JSON.
    pub binary: u64,
    pub(super) members: Members,
    /// Fields so far.
    count: usize,
    keeps_examples: bool,
}

/// A field that documents were seen to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedField {
    /// Names from the document to the field.
    pub path: Vec<String>,
    /// Type of a column that holds it; `None` if only nulls were seen.
    pub kind: Option<String>,
    /// Documents, or objects around it, that have the field.
    pub count: u64,
    /// The beginning of the first value's JSON text, if examples are kept.
    pub example: Option<String>,
}

/// The members of objects, in the order in which they were first seen.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) list: Vec<(Box<str>, Observed)>,
    by_name: HashMap<Box<str>, usize>,
}

/// The values of a field.
#[derive(Debug, Default)]
pub(super) struct Observed {
    count: u64,
    booleans: bool,
    strings: bool,
    arrays: bool,
    objects: bool,
    pub(super) numbers: Option<Numbers>,
    pub(super) members: Members,
    example: Option<Box<str>>,
}

/// The numbers of a field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// Smallest and largest of them, if all are whole numbers that fit 64 bits.
    range: Option<(i64, i64)>,
    /// Whether a double holds each.
    are_doubles: bool,
    /// Whether a finite 32-bit number is near each.
    are_floats: bool,
    pub(super) whole_digits: u64,
    pub(super) fraction_digits: u64,
}

impl Numbers {
    fn new() -> Self {
        Self {
            range: Some((i64::MAX, i64::MIN)),
            are_doubles: true,
            are_floats: true,
            whole_digits: 0,
            fraction_digits: 0,
        }
    }

    fn add(&mut self, text: &[u8]) {
        let whole = numbers::integer(text);
        self.range =
            self.range.zip(whole).map(|((low, high), number)| (low.min(number), high.max(number)));
        self.are_doubles = self.are_doubles && numbers::exact_double(text).is_some();
        let near: Option<f32> = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        self.are_floats = self.are_floats && near.is_some_and(f32::is_finite);
        // A number of too many digits to count fits no decimal.
        let extent = Extent::of(text);
        let whole_digits = extent.map_or(u64::MAX, |extent| extent.whole_digits);
        let fraction_digits = extent.map_or(u64::MAX, |extent| extent.fraction_digits);
        self.whole_digits = self.whole_digits.max(whole_digits);
        self.fraction_digits = self.fraction_digits.max(fraction_digits);
    }

    fn kind(&self) -> Kind {
        if self.range.is_some() {
            Kind::Long
        } else if self.are_doubles {
            Kind::Double
        } else {
            decimal(self.whole_digits, self.fraction_digits).unwrap_or(Kind::String)
        }
    }

    fn are_between(&self, low: i64, high: i64) -> bool {
        self.range.is_some_and(|(least, most)| low <= least && most <= high)
    }

    /// Whether a column holds each of them.
    fn fit(&self, kind: &Kind) -> bool {
        match kind {
            Kind::Byte => self.are_between(i8::MIN.into(), i8::MAX.into()),
            Kind::Short => self.are_between(i16::MIN.into(), i16::MAX.into()),
            Kind::Int => self.are_between(i32::MIN.into(), i32::MAX.into()),
            Kind::Long => self.range.is_some(),
            Kind::Double => self.are_doubles,
            // Whose columns round by choice.
            Kind::Float => self.are_floats,
            Kind::Decimal { precision, scale } => {
                self.fraction_digits <= u64::from(*scale)
                    && self.whole_digits <= u64::from(precision - scale)
            }
            _ => false,
        }
    }

    /// The smallest type that holds each of them and all that a type of numbers holds.
    fn joined(&self, kind: &Kind) -> Kind {
        let (whole, fraction) = match kind {
            Kind::Byte | Kind::Short | Kind::Int if self.range.is_some() => return Kind::Long,
            Kind::Byte => (3, 0),
            Kind::Short => (5, 0),
            Kind::Int => (10, 0),
            Kind::Long => (19, 0),
            Kind::Decimal { precision, scale } => (u64::from(precision - scale), u64::from(*scale)),
            Kind::Float if self.are_doubles => return Kind::Double,
            _ => return Kind::String,
        };
        decimal(self.whole_digits.max(whole), self.fraction_digits.max(fraction))
            .unwrap_or(Kind::String)
    }
}

/// A decimal with so many digits, and room for more.
fn decimal(whole: u64, fraction: u64) -> Option<Kind> {
    let precision = u8::try_from(MAX_PRECISION).ok()?;
    let fits = |scale: u8| {
        u64::from(scale) >= fraction && whole <= MAX_PRECISION.saturating_sub(scale.into())
    };
    let exact = u8::try_from(fraction).ok().into_iter().filter(|scale| *scale <= precision);
    let scale = SCALES.into_iter().chain(exact).find(|scale| fits(*scale))?;
    Some(Kind::Decimal { precision, scale })
}

impl Observed {
    /// How many types of JSON the values have, besides null.
    fn types(&self) -> usize {
        [self.booleans, self.strings, self.arrays, self.objects, self.numbers.is_some()]
            .into_iter()
            .filter(|is_seen| *is_seen)
            .count()
    }

    /// The type of a column that holds every value; `None` if there are only nulls.
    pub(super) fn kind(&self, nested: Nested) -> Option<Kind> {
        match (self.types(), &self.numbers) {
            (0, _) => None,
            (1, _) if self.booleans => Some(Kind::Boolean),
            (1, Some(numbers)) => Some(numbers.kind()),
            (1, _) if self.has_members(nested) => {
                let fields: Vec<Field> = self.members.fields(nested).collect();
                // Nothing is known of objects that were all empty.
                Some(if fields.is_empty() { Kind::String } else { Kind::Struct(fields) })
            }
            // Text as it is, and the JSON text of everything else.
            _ => Some(Kind::String),
        }
    }

    /// Whether the values are objects whose members have columns of their own.
    pub(super) fn has_members(&self, nested: Nested) -> bool {
        nested != Nested::Json && self.objects && self.types() == 1
    }

    /// The smallest type that holds every value and all that `kind` holds; `None` if there is no
    /// such type to which the column could be changed.
    pub(super) fn joined(&self, kind: &Kind) -> Option<Kind> {
        let fits = match (kind, self.types(), &self.numbers) {
            (_, 0, _) | (Kind::String, ..) => true,
            (Kind::Boolean, 1, _) => self.booleans,
            (kind, 1, Some(numbers)) => numbers.fit(kind),
            _ => false,
        };
        if fits {
            return Some(kind.clone());
        }
        match (kind, self.types(), &self.numbers) {
            // What is there cannot be told from its text any more.
            (
                Kind::Date
                | Kind::Timestamp
                | Kind::TimestampNtz
                | Kind::Binary
                | Kind::Variant
                | Kind::Array(_)
                | Kind::Map(_)
                | Kind::Struct(_),
                ..,
            ) => None,
            (kind, 1, Some(numbers)) => Some(numbers.joined(kind)),
            _ => Some(Kind::String),
        }
    }
}

impl Members {
    /// The fields that columns can be made of.
    pub(super) fn fields(&self, nested: Nested) -> impl Iterator<Item = Field> {
        self.list.iter().filter_map(move |(name, observed)| {
            Some(Field { name: name.to_string(), kind: observed.kind(nested)? })
        })
    }

    fn get(&mut self, name: &str, count: &mut usize) -> Option<&mut Observed> {
        if let Some(index) = self.by_name.get(name) {
            return self.list.get_mut(*index).map(|(_, observed)| observed);
        }
        if *count >= MAX_FIELDS || !can_be_column(name) {
            return None;
        }
        *count += 1;
        self.by_name.insert(name.into(), self.list.len());
        self.list.push((name.into(), Observed::default()));
        self.list.last_mut().map(|(_, observed)| observed)
    }

    fn list(&self, path: &[&str], nested: Nested, found: &mut Vec<ObservedField>) {
        for (name, observed) in &self.list {
            let path = [path, &[name]].concat();
            let kind = observed.kind(nested);
            found.push(ObservedField {
                path: path.iter().map(ToString::to_string).collect(),
                kind: kind.as_ref().map(ToString::to_string),
                count: observed.count,
                example: observed.example.as_deref().map(str::to_owned),
            });
            if matches!(kind, Some(Kind::Struct(_))) {
                observed.members.list(&path, nested, found);
            }
        }
    }
}

impl Observations {
    /// Keeps the first value of each field as an example.
    #[must_use]
    pub const fn with_examples(mut self) -> Self {
        self.keeps_examples = true;
        self
    }

    /// Adds a document, which the server has to mark as JSON unless it is binary.
    pub fn add(&mut self, document: &[u8], is_json: bool) {
        let Some(text) = std::str::from_utf8(document).ok().filter(|_| is_json) else {
            self.binary += 1;
            return;
        };
        let whole = whole_pairs(text.as_bytes());
        // A document that is not JSON must leave nothing behind.
        if !is_whole(&whole) {
            self.binary += 1;
            return;
        }
        if !whole.trim_ascii_start().starts_with(b"{") {
            self.others += 1;
            return;
        }
        self.objects += 1;
        let mut walk = Walk {
            json: Jiter::new(&whole),
            text: &whole,
            count: self.count,
            keeps_examples: self.keeps_examples,
        };
        let _was_checked_above = walk.object(&mut self.members, 1);
        self.count = walk.count;
    }

    /// The fields, members after the object that they are in.
    #[must_use]
    pub fn fields(&self, nested: Nested) -> Vec<ObservedField> {
        let mut found = Vec::new();
        self.members.list(&[], nested, &mut found);
        found
    }
}

/// Whether a column can have the name of a field, in every target.
fn can_be_column(name: &str) -> bool {
    !name.trim().is_empty()
        && name.len() + PREFIX.len() <= MAX_NAME_BYTES
        && !name.contains(|char: char| char.is_control() || matches!(char, '`' | '"'))
}

fn is_whole(text: &[u8]) -> bool {
    let mut json = Jiter::new(text);
    let Ok(peek) = json.peek() else { return false };
    skip(&mut json, peek).is_ok() && json.finish().is_ok()
}

/// Reads a document.
struct Walk<'j> {
    json: Jiter<'j>,
    text: &'j [u8],
    count: usize,
    keeps_examples: bool,
}

impl Walk<'_> {
    fn object(&mut self, members: &mut Members, depth: usize) -> Result<()> {
        let mut next = self.json.next_object_bytes()?.map(name_of);
        while let Some(name) = next {
            let observed = name.and_then(|name| members.get(&name, &mut self.count));
            let peek = self.json.peek()?;
            match observed {
                Some(observed) => self.value(observed, peek, depth)?,
                None => {
                    skip(&mut self.json, peek)?;
                }
            }
            next = self.json.next_key_bytes()?.map(name_of);
        }
        Ok(())
    }

    fn value(&mut self, observed: &mut Observed, peek: Peek, depth: usize) -> Result<()> {
        observed.count += 1;
        let start = self.json.current_index();
        match peek {
            Peek::Null => {}
            Peek::True | Peek::False => observed.booleans = true,
            Peek::String => observed.strings = true,
            Peek::Array => observed.arrays = true,
            Peek::Object => observed.objects = true,
            _ => {
                let text = self.json.known_number_bytes(peek)?;
                observed.numbers.get_or_insert_with(Numbers::new).add(text);
            }
        }
        match peek {
            Peek::Object if depth < MAX_DEPTH => self.object(&mut observed.members, depth + 1)?,
            Peek::Null | Peek::True | Peek::False | Peek::String | Peek::Array | Peek::Object => {
                skip(&mut self.json, peek)?;
            }
            _ => {}
        }
        if self.keeps_examples && observed.example.is_none() && peek != Peek::Null {
            let text = self.text.get(start..self.json.current_index()).unwrap_or_default();
            let beginning = text.get(..MAX_EXAMPLE_BYTES).unwrap_or(text);
            let valid = beginning.utf8_chunks().next().map_or("", |chunk| chunk.valid());
            observed.example = Some(valid.into());
        }
        Ok(())
    }
}

/// The name that is between quotes; `None` if it has half a surrogate pair.
fn name_of(raw: &[u8]) -> Option<Box<str>> {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Into::into);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    let mut json = Jiter::new(&quoted);
    let name = json.next_str().ok()?;
    (!name.contains(HALF)).then(|| name.into())
}
