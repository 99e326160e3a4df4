//! Parses schemas in Spark SQL's syntax: `name STRING, geo STRUCT<lat: DOUBLE>`.

use std::collections::BTreeSet;
use std::fmt;
use std::iter::Peekable;
use std::str::CharIndices;

use thiserror::Error;

use super::{Field, Kind};
use crate::nearest;

/// A schema that cannot be parsed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{what}, at character {at}")]
pub struct DdlError {
    /// What is wrong, and how to correct it.
    pub what: String,
    /// Position in characters, from 1.
    pub at: usize,
}

/// Maximum length of the schema text in bytes.
const MAX_TEXT_BYTES: usize = 1024 * 1024;
/// Maximum number of fields and elements, nested ones included: each is a column.
const MAX_FIELDS: usize = 10_000;
/// Maximum nesting depth.
const MAX_DEPTH: usize = 32;
/// Maximum precision of a decimal.
const MAX_PRECISION: u8 = 38;

/// The types without parameters. Of synonyms, Spark's usual name comes first.
const SIMPLE: &[(&str, Kind)] = &[
    ("BOOLEAN", Kind::Boolean),
    ("TINYINT", Kind::Byte),
    ("BYTE", Kind::Byte),
    ("SMALLINT", Kind::Short),
    ("SHORT", Kind::Short),
    ("INT", Kind::Int),
    ("INTEGER", Kind::Int),
    ("BIGINT", Kind::Long),
    ("LONG", Kind::Long),
    ("FLOAT", Kind::Float),
    ("REAL", Kind::Float),
    ("DOUBLE", Kind::Double),
    ("STRING", Kind::String),
    ("BINARY", Kind::Binary),
    ("DATE", Kind::Date),
    ("TIMESTAMP", Kind::Timestamp),
    ("TIMESTAMP_LTZ", Kind::Timestamp),
    ("TIMESTAMP_NTZ", Kind::TimestampNtz),
    ("VARIANT", Kind::Variant),
];
const WITH_PARAMETERS: &[&str] = &["DECIMAL", "DEC", "NUMERIC", "ARRAY", "MAP", "STRUCT"];

/// The fields listed in `text`, or those of a single `STRUCT<...>`.
pub(super) fn parse(text: &str) -> Result<Vec<Field>, DdlError> {
    if text.len() > MAX_TEXT_BYTES {
        let what = format!("the schema is longer than {MAX_TEXT_BYTES} bytes");
        return Err(DdlError { what, at: 1 });
    }
    let mut parser = Parser { chars: text.char_indices().peekable(), text, fields: 0 };
    parser.space();
    let before = parser.clone();
    if let Ok(word) = parser.name()
        && word.eq_ignore_ascii_case("STRUCT")
        && parser.take('<')
    {
        let fields = parser.fields(Some('>'), 1)?;
        parser.end()?;
        return Ok(fields);
    }
    parser = before;
    parser.fields(None, 1)
}

/// The text of fields, with a sign between each name and type.
pub(super) fn fields(fields: &[Field], sign: &str) -> String {
    let text = |field: &Field| format!("{}{sign}{}", quoted(&field.name), field.kind);
    fields.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// A name, in backticks if it needs them.
fn quoted(name: &str) -> String {
    if name.chars().all(|char| char.is_alphanumeric() || char == '_') {
        return name.to_owned();
    }
    format!("`{}`", name.replace('`', "``"))
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decimal { precision, scale } => write!(f, "DECIMAL({precision}, {scale})"),
            Self::Array(element) => write!(f, "ARRAY<{element}>"),
            Self::Map(value) => write!(f, "MAP<STRING, {value}>"),
            Self::Struct(members) => write!(f, "STRUCT<{}>", fields(members, ": ")),
            _ => {
                let name = SIMPLE.iter().find(|(_, kind)| kind == self).map(|(name, _)| *name);
                f.write_str(name.unwrap_or("STRING"))
            }
        }
    }
}

#[derive(Clone)]
struct Parser<'a> {
    chars: Peekable<CharIndices<'a>>,
    text: &'a str,
    /// Number of fields and elements so far.
    fields: usize,
}

impl Parser<'_> {
    fn fields(&mut self, end: Option<char>, depth: usize) -> Result<Vec<Field>, DdlError> {
        let mut fields = Vec::new();
        let mut seen = BTreeSet::new();
        loop {
            self.count(depth)?;
            let before = self.clone();
            let name = self.name()?;
            if !seen.insert(name.clone()) {
                return Err(before.error(format!("the field {} is named twice", shown(&name))));
            }
            self.take(':');
            let kind = self.kind(depth)?;
            self.not_null()?;
            self.comment()?;
            fields.push(Field { name, kind });
            if self.take(',') {
                continue;
            }
            match end {
                Some(end) => self.expect(end, "a comma or the end of STRUCT<...>")?,
                None => self.end()?,
            }
            return Ok(fields);
        }
    }

    fn kind(&mut self, depth: usize) -> Result<Kind, DdlError> {
        let before = self.clone();
        let word =
            self.name().map_err(|error| DdlError { what: "expected a type".into(), ..error })?;
        let upper = word.to_ascii_uppercase();
        if let Some((_, kind)) = SIMPLE.iter().find(|(name, _)| *name == upper) {
            return Ok(kind.clone());
        }
        match upper.as_str() {
            "DECIMAL" | "DEC" | "NUMERIC" => self.decimal(),
            "ARRAY" => {
                self.expect('<', "ARRAY<type>")?;
                self.count(depth + 1)?;
                let element = self.kind(depth + 1)?;
                self.expect('>', "ARRAY<type>")?;
                Ok(Kind::Array(Box::new(element)))
            }
            "MAP" => {
                self.expect('<', "MAP<STRING, type>")?;
                let before = self.clone();
                if self.kind(depth + 1)? != Kind::String {
                    let what = "the keys of a JSON object are strings: write MAP<STRING, type>";
                    return Err(before.error(what.to_owned()));
                }
                self.expect(',', "MAP<STRING, type>")?;
                self.count(depth + 1)?;
                let value = self.kind(depth + 1)?;
                self.expect('>', "MAP<STRING, type>")?;
                Ok(Kind::Map(Box::new(value)))
            }
            "STRUCT" => {
                self.expect('<', "STRUCT<name: type, ...>")?;
                Ok(Kind::Struct(self.fields(Some('>'), depth + 1)?))
            }
            "CHAR" | "CHARACTER" | "VARCHAR" => Err(before.error("write STRING".to_owned())),
            _ => {
                let known =
                    SIMPLE.iter().map(|(name, _)| *name).chain(WITH_PARAMETERS.iter().copied());
                let hint = match nearest(&word, known) {
                    Some(nearest) => format!("; did you mean {nearest}?"),
                    None => ": write one such as STRING, BIGINT or DOUBLE".to_owned(),
                };
                Err(before.error(format!("there is no type {}{hint}", shown(&word))))
            }
        }
    }

    fn decimal(&mut self) -> Result<Kind, DdlError> {
        if !self.take('(') {
            return Ok(Kind::Decimal { precision: 10, scale: 0 });
        }
        let before = self.clone();
        let precision = self.number()?;
        let scale = if self.take(',') { self.number()? } else { 0 };
        self.expect(')', "DECIMAL(precision, scale)")?;
        if !(1..=MAX_PRECISION).contains(&precision) || scale > precision {
            let what = format!(
                "DECIMAL has a precision from 1 to {MAX_PRECISION} and a scale up to the precision"
            );
            return Err(before.error(what));
        }
        Ok(Kind::Decimal { precision, scale })
    }

    fn not_null(&mut self) -> Result<(), DdlError> {
        let before = self.clone();
        if self.word("NOT") {
            let what = "a document may lack any field: leave NOT NULL out";
            return Err(before.error(what.to_owned()));
        }
        Ok(())
    }

    /// Skips `COMMENT '...'`.
    fn comment(&mut self) -> Result<(), DdlError> {
        if !self.word("COMMENT") {
            return Ok(());
        }
        let Some((_, quote @ ('\'' | '"'))) = self.chars.next() else {
            return Err(self.error("expected a quoted string after COMMENT".to_owned()));
        };
        while let Some((_, char)) = self.chars.next() {
            if char == '\\' {
                self.chars.next();
            } else if char == quote {
                self.space();
                return Ok(());
            }
        }
        Err(self.error("the string after COMMENT is not closed".to_owned()))
    }

    /// A name, in backticks if it contains anything but letters, digits and underscores.
    fn name(&mut self) -> Result<String, DdlError> {
        let mut name = String::new();
        if self.take_here('`') {
            loop {
                match self.chars.next() {
                    Some((_, '`')) if self.take_here('`') => name.push('`'),
                    Some((_, '`')) => break,
                    Some((_, char)) => name.push(char),
                    None => return Err(self.error("a backtick is not closed".to_owned())),
                }
            }
        } else {
            let is_plain = |char: &(usize, char)| char.1.is_alphanumeric() || char.1 == '_';
            while let Some((_, char)) = self.chars.next_if(is_plain) {
                name.push(char);
            }
        }
        if name.is_empty() {
            let what = "expected a name; put names with characters other than letters, digits and \
                        _ in backticks";
            return Err(self.error(what.to_owned()));
        }
        self.space();
        Ok(name)
    }

    fn number(&mut self) -> Result<u8, DdlError> {
        let mut digits = String::new();
        while let Some((_, digit)) = self.chars.next_if(|(_, char)| char.is_ascii_digit()) {
            digits.push(digit);
        }
        self.space();
        digits.parse().map_err(|_| self.error("expected a small number".to_owned()))
    }

    /// Takes the next word if it is `word`.
    fn word(&mut self, word: &str) -> bool {
        let before = self.clone();
        let is_it = self.name().is_ok_and(|name| name.eq_ignore_ascii_case(word));
        if !is_it {
            *self = before;
        }
        is_it
    }

    fn take_here(&mut self, sign: char) -> bool {
        self.chars.next_if(|(_, char)| *char == sign).is_some()
    }

    fn take(&mut self, sign: char) -> bool {
        let is_taken = self.take_here(sign);
        self.space();
        is_taken
    }

    fn expect(&mut self, sign: char, what: &str) -> Result<(), DdlError> {
        if self.take(sign) { Ok(()) } else { Err(self.error(format!("expected {what}"))) }
    }

    fn end(&mut self) -> Result<(), DdlError> {
        match self.chars.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("expected a comma or the end".to_owned())),
        }
    }

    fn space(&mut self) {
        while self.chars.next_if(|(_, char)| char.is_whitespace()).is_some() {}
    }

    fn count(&mut self, depth: usize) -> Result<(), DdlError> {
        self.fields += 1;
        if self.fields > MAX_FIELDS {
            return Err(self.error(format!("the schema has more than {MAX_FIELDS} fields")));
        }
        if depth > MAX_DEPTH {
            return Err(self.error(format!("types are nested more than {MAX_DEPTH} deep")));
        }
        Ok(())
    }

    #[cold]
    fn error(&self, what: String) -> DdlError {
        let byte = self.chars.clone().next().map_or(self.text.len(), |(byte, _)| byte);
        let before = self.text.get(..byte).unwrap_or_default();
        DdlError { what, at: before.chars().count() + 1 }
    }
}

/// A name as shown in errors.
fn shown(name: &str) -> String {
    name.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<(String, Kind)> {
        parse(text).unwrap().into_iter().map(|field| (field.name, field.kind)).collect()
    }

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn ddl_fields_are_listed_as_in_sql() {
        let lat = Field { name: "lat".to_owned(), kind: Kind::Double };
        let lon = Field { name: "lon".to_owned(), kind: Kind::Double };
        let geo = Kind::Struct(vec![lat, lon]);
        let expected = [("name".to_owned(), Kind::String), ("geo".to_owned(), geo)];
        assert_eq!(kinds("name STRING, geo STRUCT<lat: DOUBLE, lon: DOUBLE>"), expected);
        assert_eq!(kinds(" name string ,geo struct<lat:double,lon double > "), expected);
        assert_eq!(kinds("struct<name:string,geo:struct<lat:double,lon:double>>"), expected);
        assert_eq!(kinds("struct int"), [("struct".to_owned(), Kind::Int)]);
    }

    #[test]
    fn ddl_types_have_all_their_names() {
        for (name, kind) in SIMPLE {
            assert_eq!(kinds(&format!("a {name}")), [("a".to_owned(), kind.clone())]);
            assert_eq!(kinds(&format!("{name} {name}")), [((*name).to_owned(), kind.clone())]);
        }
        let decimal = |text: &str| kinds(text).remove(0).1;
        assert_eq!(decimal("a decimal"), Kind::Decimal { precision: 10, scale: 0 });
        assert_eq!(decimal("a NUMERIC(5)"), Kind::Decimal { precision: 5, scale: 0 });
        assert_eq!(decimal("a DEC ( 38 , 38 )"), Kind::Decimal { precision: 38, scale: 38 });
        let nested = decimal("a MAP<STRING, ARRAY<MAP<STRING, INT>>>");
        let map = Kind::Map(Box::new(Kind::Int));
        assert_eq!(nested, Kind::Map(Box::new(Kind::Array(Box::new(map)))));
    }

    #[test]
    fn ddl_names_may_be_quoted_and_commented() {
        let text = "`first name` STRING COMMENT 'as it\\'s, printed', `a``b`: INT, größe INT";
        let names: Vec<String> = kinds(text).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["first name", "a`b", "größe"]);
    }

    #[test]
    fn ddl_error_says_what_to_write_and_where() {
        assert_eq!(error("a FLOTE"), "there is no type FLOTE; did you mean FLOAT?, at character 3");
        assert_eq!(error("a INT, a INT"), "the field a is named twice, at character 8");
        assert_eq!(
            error("a INT NOT NULL"),
            "a document may lack any field: leave NOT NULL out, at character 7"
        );
        assert_eq!(error("ä MAP<INT, INT>").rsplit_once(' ').unwrap().1, "7");
        assert_eq!(error("a DECIMAL(39, 2)").rsplit_once(' ').unwrap().1, "11");
        for (text, said) in [
            ("", "expected a name"),
            ("a", "expected a type"),
            ("a INT b INT", "expected a comma or the end"),
            ("a STRUCT<>", "expected a name"),
            ("a STRUCT<b INT", "a comma or the end of STRUCT"),
            ("a ARRAY<INT", "ARRAY<type>"),
            ("a DECIMAL(5, 6)", "scale up to the precision"),
            ("a DECIMAL(x)", "a small number"),
            ("`a INT", "a backtick is not closed"),
            ("a INT COMMENT 'x", "is not closed"),
            ("a VARCHAR(5)", "write STRING"),
            ("a-b INT", "expected a type"),
        ] {
            assert!(error(text).contains(said), "{text}: {}", error(text));
        }
    }

    #[test]
    fn ddl_schemas_are_bounded() {
        let deep = format!("a {}INT{}", "ARRAY<".repeat(100_000), ">".repeat(100_000));
        assert!(error(&deep).contains("nested more than"), "{}", error(&deep));
        let deep = format!("a {}INT{}", "STRUCT<a ".repeat(33), ">".repeat(33));
        assert!(error(&deep).contains("nested more than"), "{}", error(&deep));
        let wide: Vec<String> = (0..10_001).map(|number| format!("f{number} INT")).collect();
        assert!(error(&wide.join(",")).contains("more than 10000 fields"));
        assert!(parse(&wide[1..].join(",")).is_ok());
        assert!(error(&" ".repeat(MAX_TEXT_BYTES + 1)).contains("longer than"));
    }
}
