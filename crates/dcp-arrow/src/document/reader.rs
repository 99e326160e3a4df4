//! Reads documents that fit their columns.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use jiter::{Jiter, Peek};

use super::builders::{Builder, Objects};
use super::malformed::{Malformed, Problem, Result};
use super::primitives::{Texts, Variants};
use super::{numbers, timestamps};

/// Maximum decoded size of a document in bytes.
///
/// A few bytes of JSON can become many: `{}` in an array of structs takes a row in each of their
/// columns.
pub(super) const MAX_DOCUMENT_BYTES: usize = 128 * 1024 * 1024;

/// Parser state within a document.
pub(super) struct Reader<'j> {
    json: Jiter<'j>,
    /// Remaining memory budget of the document in bytes.
    budget: usize,
    /// Whether a number that its column would round does not fit.
    is_exact: bool,
    has_unmapped: bool,
}

impl<'j> Reader<'j> {
    /// Reads UTF-8 text; `scratch` is reused memory.
    pub(super) fn new(text: &'j [u8], budget: usize, scratch: Vec<u8>) -> Self {
        let json = Jiter::with_tape(text, scratch);
        Self { json, budget, is_exact: false, has_unmapped: false }
    }

    /// The same; with `is_exact`, a number that its column would round does not fit, nor does text
    /// in a column of numbers.
    pub(super) const fn exact_if(mut self, is_exact: bool) -> Self {
        self.is_exact = is_exact;
        self
    }

    /// Whether an object had a field, other than null, that is no column.
    pub(super) const fn has_unmapped(&self) -> bool {
        self.has_unmapped
    }

    /// Returns the rest of the budget and the scratch memory.
    pub(super) fn into_rest(self) -> (usize, Vec<u8>) {
        (self.budget, self.json.into_tape())
    }

    #[cold]
    fn malformed(&self, problem: Problem) -> Malformed {
        Malformed::at(problem, &self.json)
    }

    #[inline]
    fn spend(&mut self, bytes: usize) -> Result<()> {
        match self.budget.checked_sub(bytes) {
            Some(rest) => {
                self.budget = rest;
                Ok(())
            }
            None => Err(self.malformed(Problem::TooLarge)),
        }
    }

    /// Reads one value into the next row of `column`.
    pub(super) fn read(&mut self, column: &mut Builder, peek: Peek) -> Result<()> {
        if peek == Peek::Null {
            self.json.known_null()?;
            column.push_null();
            return Ok(());
        }
        match column {
            Builder::String(texts) => self.text(texts, peek)?,
            Builder::Long(numbers) => numbers.push(self.integer(peek)?),
            Builder::Int(numbers) => numbers.push(self.small(peek, "an INT")?),
            Builder::Short(numbers) => numbers.push(self.small(peek, "a SMALLINT")?),
            Builder::Byte(numbers) => numbers.push(self.small(peek, "a TINYINT")?),
            Builder::Double(numbers) => numbers.push(self.double(peek)?),
            Builder::Float(numbers) => numbers.push(self.float(peek)?),
            Builder::Boolean(flags) => flags.push(match peek {
                Peek::True | Peek::False => self.json.known_bool(peek)?,
                _ => return Err(self.malformed(Problem::Expected("true or false"))),
            }),
            Builder::Decimal { numbers, precision, scale } => {
                numbers.push(self.decimal(peek, *precision, *scale)?);
            }
            Builder::Binary(bytes) => self.binary(bytes, peek)?,
            Builder::Date(days) => days.push(self.parsed_time(peek, "a date", timestamps::date)?),
            Builder::Timestamp(micros) => micros.push(self.timestamp(peek)?),
            Builder::TimestampNtz(micros) => {
                let local = |text: &str| {
                    let moment = timestamps::time(text)?;
                    moment.offset_seconds.is_none().then_some(moment.local_micros)
                };
                micros.push(self.parsed_time(peek, "a time without an offset", local)?);
            }
            Builder::Variant(variants) => self.variant(variants, peek)?,
            Builder::Array { ranges, elements, width } => {
                self.array(elements, *width, peek)?;
                ranges.push(elements.len(), true);
            }
            Builder::Map { ranges, keys, values, width } => {
                let first = ranges.elements();
                self.map(keys, values, *width, peek)?;
                if keys.has_duplicates(first) {
                    return Err(self.malformed(Problem::Duplicate));
                }
                ranges.push(keys.len(), true);
            }
            Builder::Struct { valid, fields } => {
                let row = valid.len();
                self.object(fields, row, peek)?;
                valid.push(true);
            }
        }
        Ok(())
    }

    /// A string as it is, any other value as its JSON text.
    #[inline]
    fn text(&mut self, texts: &mut Texts, peek: Peek) -> Result<()> {
        let before = texts.len_bytes();
        if peek == Peek::String {
            texts.push(self.json.known_str()?.as_bytes());
        } else {
            let start = self.json.current_index();
            self.json.known_skip(peek)?;
            texts.push(self.json.slice_to_current(start));
        }
        self.spend(texts.len_bytes() - before)
    }

    fn number(&mut self, peek: Peek, expected: &'static str) -> Result<&[u8]> {
        if !peek.is_num() {
            return Err(self.malformed(Problem::Expected(expected)));
        }
        Ok(self.json.known_number_bytes(peek)?)
    }

    fn integer(&mut self, peek: Peek) -> Result<i64> {
        let expected = "a whole number that fits a BIGINT";
        let number = numbers::integer(self.number(peek, expected)?);
        number.ok_or_else(|| self.malformed(Problem::Expected(expected)))
    }

    fn small<T: TryFrom<i64>>(&mut self, peek: Peek, expected: &'static str) -> Result<T> {
        let number = numbers::integer(self.number(peek, expected)?);
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| self.malformed(Problem::Expected(expected)))
    }

    fn double(&mut self, peek: Peek) -> Result<f64> {
        if !peek.is_num() {
            return Err(self.malformed(Problem::Expected("a number")));
        }
        if self.is_exact {
            let expected = "a number that a DOUBLE holds";
            let number = numbers::exact_double(self.number(peek, expected)?);
            return number.ok_or_else(|| self.malformed(Problem::Expected(expected)));
        }
        let number = self.json.known_float(peek)?;
        if number.is_finite() {
            return Ok(number);
        }
        Err(self.malformed(Problem::Expected("a number that fits a DOUBLE")))
    }

    fn float(&mut self, peek: Peek) -> Result<f32> {
        // Not through a double, which would round twice.
        let text = std::str::from_utf8(self.number(peek, "a number")?);
        let number: Option<f32> = text.ok().and_then(|text| text.parse().ok());
        let number = number.filter(|number| number.is_finite());
        number.ok_or_else(|| self.malformed(Problem::Expected("a number that fits a FLOAT")))
    }

    fn decimal(&mut self, peek: Peek, precision: u8, scale: u8) -> Result<i128> {
        let expected = "a number that fits the DECIMAL";
        let decimal = if self.is_exact { numbers::exact_decimal } else { numbers::decimal };
        // Amounts of money are often written as strings; `1.10` may be a version as well.
        let number = if peek == Peek::String && !self.is_exact {
            let mut text = Jiter::new(self.json.known_str()?.as_bytes());
            let number = match text.next_number_bytes() {
                Ok(number) => decimal(number, precision, scale),
                Err(_) => None,
            };
            number.filter(|_| text.finish().is_ok())
        } else {
            decimal(self.number(peek, expected)?, precision, scale)
        };
        number.ok_or_else(|| self.malformed(Problem::Expected(expected)))
    }

    fn binary(&mut self, bytes: &mut Texts, peek: Peek) -> Result<()> {
        const BASE64: GeneralPurpose = GeneralPurpose::new(
            &STANDARD,
            GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
        );
        let expected = Problem::Expected("a base64 string");
        if peek != Peek::String {
            return Err(self.malformed(expected));
        }
        let before = bytes.len_bytes();
        let text = self.json.known_str()?;
        bytes
            .push_with(|bytes| BASE64.decode_vec(text, bytes))
            .map_err(|_| self.malformed(expected))?;
        self.spend(bytes.len_bytes() - before)
    }

    /// Any value, from its JSON text: the variant's dictionary then contains only its own keys.
    fn variant(&mut self, variants: &mut Variants, peek: Peek) -> Result<()> {
        let before = variants.len_bytes();
        let start = self.json.current_index();
        self.json.known_skip(peek)?;
        variants
            .push(self.json.slice_to_current(start))
            .map_err(|malformed| Malformed { at: start + malformed.at, ..malformed })?;
        self.spend(variants.len_bytes() - before)
    }

    fn parsed_time<T>(
        &mut self,
        peek: Peek,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T> {
        if peek != Peek::String {
            return Err(self.malformed(Problem::Expected(expected)));
        }
        let parsed = parse(self.json.known_str()?);
        parsed.ok_or_else(|| self.malformed(Problem::Expected(expected)))
    }

    fn timestamp(&mut self, peek: Peek) -> Result<i64> {
        let expected = "a time or whole seconds";
        if peek.is_num() {
            let seconds = numbers::integer(self.number(peek, expected)?);
            let micros = seconds.and_then(timestamps::seconds);
            return micros.ok_or_else(|| self.malformed(Problem::Expected(expected)));
        }
        let utc = |text: &str| timestamps::time(text).and_then(timestamps::ParsedTime::utc_micros);
        self.parsed_time(peek, expected, utc)
    }

    fn array(&mut self, elements: &mut Builder, width: usize, peek: Peek) -> Result<()> {
        if peek != Peek::Array {
            return Err(self.malformed(Problem::Expected("an array")));
        }
        let mut next = self.json.known_array()?;
        while let Some(peek) = next {
            self.spend(width)?;
            self.read(elements, peek)?;
            next = self.json.array_step()?;
        }
        Ok(())
    }

    fn map(
        &mut self,
        keys: &mut Texts,
        values: &mut Builder,
        width: usize,
        peek: Peek,
    ) -> Result<()> {
        let before = keys.len_bytes();
        let mut push = |key: &str| keys.push(key.as_bytes());
        let mut has_next = self.first_key(peek)?.map(&mut push).is_some();
        while has_next {
            self.spend(width)?;
            let peek = self.json.peek()?;
            self.read(values, peek)?;
            has_next = self.json.next_key()?.map(&mut push).is_some();
        }
        self.spend(keys.len_bytes() - before)
    }

    /// Reads an object into row `row` of its fields' columns.
    fn object(&mut self, fields: &mut Objects, row: usize, peek: Peek) -> Result<()> {
        let mut guess = 0;
        let mut next = self.first_key(peek)?.map(|key| fields.find(key, guess));
        while let Some(found) = next {
            if let Some(index) = found {
                // The outermost object is the last to set the column, so it wins.
                self.field(fields, index, row)
                    .map_err(|malformed| Malformed { column: Some(index), ..malformed })?;
                guess = index + 1;
            } else {
                let peek = self.json.peek()?;
                self.has_unmapped |= peek != Peek::Null;
                self.json.known_skip(peek)?;
            }
            next = self.json.next_key()?.map(|key| fields.find(key, guess));
        }
        fields.end_row(row);
        Ok(())
    }

    fn field(&mut self, fields: &mut Objects, index: usize, row: usize) -> Result<()> {
        let Some(column) = fields.columns.get_mut(index) else { return Ok(()) };
        if column.len() > row {
            return Err(self.malformed(Problem::Duplicate));
        }
        let peek = self.json.peek()?;
        if peek == Peek::Null
            && let Some(had_none) = fields.had_none.get_mut(index)
        {
            *had_none = true;
        }
        self.read(column, peek)
    }

    fn first_key(&mut self, peek: Peek) -> Result<Option<&str>> {
        if peek != Peek::Object {
            return Err(self.malformed(Problem::Expected("an object")));
        }
        Ok(self.json.known_object()?)
    }

    /// Reads a whole document.
    pub(super) fn document(&mut self, fields: &mut Objects, row: usize) -> Result<()> {
        let peek = self.json.peek()?;
        self.object(fields, row, peek)?;
        Ok(self.json.finish()?)
    }
}
