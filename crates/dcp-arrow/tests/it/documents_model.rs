//! Any documents against what `serde_json` makes of them.

use std::collections::BTreeSet;
use std::fmt;

use dcp_arrow::TableOptions;
use proptest::prelude::*;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::bytes;
use crate::documents::{cell, decoded, decoding};

/// The types of the model.
#[derive(Clone, Debug)]
enum Kind {
    Text,
    Flag,
    Small,
    Large,
    Number,
    Array(Box<Self>),
    Map(Box<Self>),
    Object(Vec<(&'static str, Self)>),
}

impl Kind {
    fn ddl(&self) -> String {
        match self {
            Self::Text => "STRING".to_owned(),
            Self::Flag => "BOOLEAN".to_owned(),
            Self::Small => "TINYINT".to_owned(),
            Self::Large => "BIGINT".to_owned(),
            Self::Number => "DOUBLE".to_owned(),
            Self::Array(element) => format!("ARRAY<{}>", element.ddl()),
            Self::Map(value) => format!("MAP<STRING, {}>", value.ddl()),
            Self::Object(fields) => format!("STRUCT<{}>", list(fields)),
        }
    }

    /// What a cell of this type is for `value`; none if it does not fit.
    fn of(&self, value: &Value) -> Option<Value> {
        match (self, value) {
            (_, Value::Null) => Some(Value::Null),
            (Self::Text, Value::String(_)) | (Self::Flag, Value::Bool(_)) => Some(value.clone()),
            // Documents of the model are written by the same code, so the text is the same.
            (Self::Text, other) => Some(json!(other.to_string())),
            (Self::Small, Value::Number(number)) => {
                Some(json!(i8::try_from(number.as_i64()?).ok()?))
            }
            (Self::Large, Value::Number(number)) => Some(json!(number.as_i64()?)),
            (Self::Number, Value::Number(number)) => Some(json!(number.as_f64()?)),
            (Self::Array(element), Value::Array(values)) => {
                values.iter().map(|value| element.of(value)).collect()
            }
            (Self::Map(kind), Value::Object(values)) => {
                values.iter().map(|(key, value)| Some((key.clone(), kind.of(value)?))).collect()
            }
            (Self::Object(fields), Value::Object(values)) => fields
                .iter()
                .map(|(name, kind)| {
                    let value = values.get(*name).unwrap_or(&Value::Null);
                    Some(((*name).to_owned(), kind.of(value)?))
                })
                .collect(),
            _ => None,
        }
    }
}

fn list(fields: &[(&str, Kind)]) -> String {
    let fields = fields.iter().map(|(name, kind)| format!("{name}: {}", kind.ddl()));
    fields.collect::<Vec<_>>().join(", ")
}

/// More fields than are looked through one by one.
fn schema() -> Vec<(&'static str, Kind)> {
    let inner = vec![("x", Kind::Small), ("y", Kind::Text)];
    vec![
        ("text", Kind::Text),
        ("flag", Kind::Flag),
        ("small", Kind::Small),
        ("large", Kind::Large),
        ("number", Kind::Number),
        ("numbers", Kind::Array(Box::new(Kind::Large))),
        ("names", Kind::Array(Box::new(Kind::Array(Box::new(Kind::Text))))),
        ("map", Kind::Map(Box::new(Kind::Array(Box::new(Kind::Flag))))),
        ("object", Kind::Object(inner.clone())),
        ("objects", Kind::Array(Box::new(Kind::Object(inner)))),
    ]
}

/// A value of a type, at times another.
fn fitting(kind: &Kind) -> BoxedStrategy<Value> {
    let right = match kind {
        Kind::Text => any::<String>().prop_map(Value::from).boxed(),
        Kind::Flag => any::<bool>().prop_map(Value::from).boxed(),
        Kind::Small => any::<i8>().prop_map(Value::from).boxed(),
        Kind::Large => any::<i64>().prop_map(Value::from).boxed(),
        Kind::Number => prop_oneof![
            any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
        ]
        .boxed(),
        Kind::Array(element) => {
            prop::collection::vec(fitting(element), 0..4).prop_map(Value::from).boxed()
        }
        Kind::Map(value) => prop::collection::btree_map("[a-c]{0,2}", fitting(value), 0..12)
            .prop_map(|map| map.into_iter().collect::<Map<_, _>>().into())
            .boxed(),
        Kind::Object(fields) => object(fields),
    };
    prop_oneof![40 => right, 2 => Just(Value::Null), 1 => anything()].boxed()
}

fn anything() -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{0,3}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<Map<_, _>>().into()),
        ]
    })
    .boxed()
}

/// An object with most of the fields, and others.
fn object(fields: &[(&'static str, Kind)]) -> BoxedStrategy<Value> {
    let known: Vec<_> = fields
        .iter()
        .map(|(name, kind)| prop::option::weighted(0.8, (Just(*name), fitting(kind))))
        .collect();
    let extra = prop::collection::btree_map("[A-Z]{1,3}", anything(), 0..3);
    (known, extra)
        .prop_map(|(known, extra)| {
            let known = known.into_iter().flatten().map(|(name, value)| (name.to_owned(), value));
            known.chain(extra).collect::<Map<_, _>>().into()
        })
        .boxed()
}

/// JSON in which no object has a key twice, which `serde_json` alone lets pass.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self, A::Error> {
        while values.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        let mut keys = BTreeSet::new();
        while let Some((key, Self)) = entries.next_entry::<String, Self>()? {
            if !keys.insert(key) {
                return Err(A::Error::custom("a key is there twice"));
            }
        }
        Ok(self)
    }
}

/// One byte of a text changed, left out or put in, or the rest cut off.
#[derive(Clone, Debug)]
enum Edit {
    Change(prop::sample::Index, u8),
    Remove(prop::sample::Index),
    Insert(prop::sample::Index, u8),
    Cut(prop::sample::Index),
}

impl Edit {
    fn apply(&self, text: &mut Vec<u8>) {
        match self {
            _ if text.is_empty() => {}
            Self::Change(index, byte) => {
                let at = index.index(text.len());
                text[at] = *byte;
            }
            Self::Remove(index) => {
                text.remove(index.index(text.len()));
            }
            Self::Insert(index, byte) => text.insert(index.index(text.len()), *byte),
            Self::Cut(index) => text.truncate(index.index(text.len())),
        }
    }
}

fn edit() -> impl Strategy<Value = Edit> {
    let byte = || prop_oneof![prop::sample::select(&b"{}[]\",:\\0189.eE+-tfn \n"[..]), any::<u8>()];
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (index(), byte()).prop_map(|(index, byte)| Edit::Change(index, byte)),
        2 => index().prop_map(Edit::Remove),
        4 => (index(), byte()).prop_map(|(index, byte)| Edit::Insert(index, byte)),
        1 => index().prop_map(Edit::Cut),
    ]
}

fn options() -> TableOptions {
    decoding(&list(&schema()))
}

proptest! {
    #[test]
    fn columns_hold_what_serde_json_reads(
        documents in prop::collection::vec(object(&schema()), 1..20),
    ) {
        let texts: Vec<String> = documents.iter().map(Value::to_string).collect();
        let texts: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
        let batch = decoded(&options(), &texts);
        let malformed = bytes(&batch, "_malformed");
        for (row, document) in documents.iter().enumerate() {
            let expected = Kind::Object(schema()).of(document);
            prop_assert_eq!(malformed[row].is_none(), expected.is_some(), "{}", document);
            for (name, _) in schema() {
                let cell = cell(batch.column_by_name(name).unwrap(), row);
                let expected = expected.as_ref().map_or(&Value::Null, |fields| &fields[name]);
                prop_assert_eq!(&cell, expected, "{} of {}", name, document);
            }
        }
    }

    #[test]
    fn what_serde_json_refuses_is_malformed_and_nothing_else(
        document in object(&schema()),
        edits in prop::collection::vec(edit(), 1..4),
    ) {
        let mut text = document.to_string().into_bytes();
        for edit in edits {
            edit.apply(&mut text);
        }
        let batch = decoded(&options(), &[&text, b"{}"]);
        let malformed = bytes(&batch, "_malformed");
        prop_assert_eq!(&malformed[1], &None);
        let is_malformed = malformed[0].is_some();
        match serde_json::from_slice::<Value>(&text) {
            // A number it cannot hold, in a field that is passed over, is none of our concern.
            Err(error) if error.to_string().contains("number out of range") => {}
            Err(error) => prop_assert!(is_malformed, "{error}"),
            Ok(value) => {
                let fits = Kind::Object(schema()).of(&value).is_some_and(|fields| !fields.is_null());
                let is_unique = serde_json::from_slice::<Unique>(&text).is_ok();
                if is_unique {
                    prop_assert_eq!(is_malformed, !fits, "{}", value);
                } else {
                    prop_assert!(is_malformed || fits);
                }
            }
        }
    }
}
