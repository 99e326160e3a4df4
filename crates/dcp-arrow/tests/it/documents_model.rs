//! Any documents against what `serde_json` makes of them.

use std::collections::BTreeSet;
use std::fmt;

use dcp_arrow::TableOptions;
use proptest::prelude::*;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::bytes;
use crate::documents::{cell, decoded, decoding};
use crate::malformed_fields::{keeping, notes};

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

/// JSON with the entries of its objects in their order, also those of a key that occurs twice.
#[derive(Clone, Debug)]
enum Tree {
    Leaf(Value),
    Array(Vec<Self>),
    Object(Vec<(String, Self)>),
}

impl Tree {
    fn is_unique(&self) -> bool {
        match self {
            Self::Leaf(_) => true,
            Self::Array(elements) => elements.iter().all(Self::is_unique),
            Self::Object(entries) => {
                let keys: BTreeSet<_> = entries.iter().map(|(key, _)| key).collect();
                keys.len() == entries.len() && entries.iter().all(|(_, value)| value.is_unique())
            }
        }
    }

    /// Without all but the last entry of a key.
    fn value(&self) -> Value {
        match self {
            Self::Leaf(value) => value.clone(),
            Self::Array(elements) => elements.iter().map(Self::value).collect(),
            Self::Object(entries) => {
                entries.iter().map(|(key, value)| (key.clone(), value.value())).collect()
            }
        }
    }
}

impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |texts: Vec<String>| texts.join(",");
        match self {
            Self::Leaf(value) => write!(f, "{value}"),
            Self::Array(elements) => {
                write!(f, "[{}]", list(elements.iter().map(Self::to_string).collect()))
            }
            Self::Object(entries) => {
                let entry = |(key, value): &(String, Self)| format!("{}:{value}", json!(key));
                write!(f, "{{{}}}", list(entries.iter().map(entry).collect()))
            }
        }
    }
}

impl From<Value> for Tree {
    fn from(value: Value) -> Self {
        match value {
            Value::Array(elements) => Self::Array(elements.into_iter().map(Self::from).collect()),
            Value::Object(entries) => {
                Self::Object(entries.into_iter().map(|(key, value)| (key, value.into())).collect())
            }
            leaf => Self::Leaf(leaf),
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Trees)
    }
}

struct Trees;

impl<'de> Visitor<'de> for Trees {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Tree, E> {
        Ok(Tree::Leaf(flag.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Tree, E> {
        Ok(Tree::Leaf(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Tree, E> {
        Ok(Tree::Leaf(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Tree, E> {
        Ok(Tree::Leaf(number.into()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Tree, E> {
        Ok(Tree::Leaf(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Tree, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = values.next_element()? {
            elements.push(element);
        }
        Ok(Tree::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> Result<Tree, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = values.next_entry()? {
            entries.push(entry);
        }
        Ok(Tree::Object(entries))
    }
}

/// Where a value is, and what it is.
type Misfit = (String, String);

impl Kind {
    /// What a cell of this type is for `tree` if only what does not fit is null.
    fn kept(&self, tree: &Tree, path: &str, misfits: &mut Vec<Misfit>) -> Value {
        match (self, tree) {
            (Self::Array(kind), Tree::Array(elements)) => elements
                .iter()
                .enumerate()
                .map(|(index, element)| kind.kept(element, &format!("{path}[{index}]"), misfits))
                .collect(),
            (Self::Map(kind), Tree::Object(entries)) => {
                let mut map = Map::new();
                for (key, value) in entries {
                    // The keys of the model are plain names, but for the empty one.
                    let path = match key.as_str() {
                        "" => format!("{path}[\"\"]"),
                        key => format!("{path}.{key}"),
                    };
                    let value = if map.contains_key(key) {
                        misfits.push((path, value.to_string()));
                        Value::Null
                    } else {
                        kind.kept(value, &path, misfits)
                    };
                    map.insert(key.clone(), value);
                }
                map.into()
            }
            (Self::Object(fields), Tree::Object(entries)) => {
                let mut found = Map::new();
                for (key, value) in entries {
                    let Some((name, kind)) = fields.iter().find(|(name, _)| name == key) else {
                        continue;
                    };
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    let value = if found.contains_key(*name) {
                        misfits.push((path, value.to_string()));
                        Value::Null
                    } else {
                        kind.kept(value, &path, misfits)
                    };
                    found.insert(key.clone(), value);
                }
                for (name, _) in fields {
                    found.entry(*name).or_insert(Value::Null);
                }
                found.into()
            }
            (Self::Text, tree @ (Tree::Array(_) | Tree::Object(_))) => json!(tree.to_string()),
            (kind, tree) => kind.of(&tree.value()).unwrap_or_else(|| {
                misfits.push((path.to_owned(), tree.to_string()));
                Value::Null
            }),
        }
    }
}

/// Repeats a key of the object that comes after `skipped` others.
fn repeat_key(tree: &mut Tree, skipped: &mut usize, which: &prop::sample::Index, value: &Value) {
    match tree {
        Tree::Leaf(_) => {}
        Tree::Array(elements) => {
            elements.iter_mut().for_each(|each| repeat_key(each, skipped, which, value));
        }
        Tree::Object(entries) => {
            if *skipped == 0 && !entries.is_empty() {
                let key = entries[which.index(entries.len())].0.clone();
                entries.push((key, value.clone().into()));
            }
            *skipped = skipped.wrapping_sub(1);
            entries.iter_mut().for_each(|(_, each)| repeat_key(each, skipped, which, value));
        }
    }
}

/// Documents, with keys that occur twice in some of them.
fn trees() -> impl Strategy<Value = Tree> {
    let repeated = (0..6_usize, any::<prop::sample::Index>(), anything());
    (object(&schema()), prop::collection::vec(repeated, 0..3)).prop_map(|(document, repeated)| {
        let mut tree = Tree::from(document);
        for (mut skipped, which, value) in repeated {
            repeat_key(&mut tree, &mut skipped, &which, &value);
        }
        tree
    })
}

/// The paths and texts of a document's notes; those beyond the bound are only counted.
fn noted(misfits: &[Misfit]) -> Value {
    let note = |(path, text): &Misfit| {
        let beginning: String = text
            .chars()
            .scan(0, |bytes, char| {
                *bytes += char.len_utf8();
                (*bytes <= 256).then_some(char)
            })
            .collect();
        let more = if beginning.len() < text.len() { "…" } else { "" };
        json!([path, format!("{beginning}{more}")])
    };
    let more = (misfits.len() > 16).then(|| json!([null, null]));
    misfits.iter().take(16).map(note).chain(more).collect()
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
    fn document_that_serde_json_refuses_is_malformed_and_no_other(
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
        match serde_json::from_slice::<Tree>(&text) {
            // A number it cannot hold, in a field that is passed over, is none of our concern.
            Err(error) if error.to_string().contains("number out of range") => {}
            Err(error) => prop_assert!(is_malformed, "{error}"),
            Ok(tree) => {
                let fits = Kind::Object(schema()).of(&tree.value()).is_some_and(|fields| !fields.is_null());
                if tree.is_unique() {
                    prop_assert_eq!(is_malformed, !fits, "{}", tree);
                } else {
                    prop_assert!(is_malformed || fits);
                }
            }
        }
    }

    #[test]
    fn value_that_serde_json_cannot_fit_is_null_and_noted_and_no_other(
        trees in prop::collection::vec(trees(), 1..20),
    ) {
        // What fits is read by the fast path, and by the slow one if something else does not fit.
        let texts: Vec<String> = trees.iter().flat_map(|tree| {
            let Tree::Object(mut entries) = tree.clone() else { unreachable!() };
            entries.push(("last".to_owned(), Tree::Leaf(json!("wrong"))));
            [tree.to_string(), Tree::Object(entries).to_string()]
        }).collect();
        let texts: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
        let options = keeping(&format!("{}, last BOOLEAN", list(&schema())));
        let batch = decoded(&options, &texts);
        let notes = notes(&batch);
        for (row, tree) in (0..texts.len()).map(|row| (row, &trees[row / 2])) {
            let mut misfits = Vec::new();
            let expected = Kind::Object(schema()).kept(tree, "", &mut misfits);
            for (name, _) in schema() {
                let cell = cell(batch.column_by_name(name).unwrap(), row);
                prop_assert_eq!(&cell, &expected[name], "{} of {}", name, tree);
            }
            if row % 2 == 1 {
                misfits.push(("last".to_owned(), "\"wrong\"".to_owned()));
            }
            let found = notes[row].clone().unwrap_or_else(|| json!([]));
            let found: Value = found.as_array().unwrap().iter()
                .map(|note| json!([note["path"], note["text"]])).collect();
            prop_assert_eq!(found, noted(&misfits), "{}", tree);
        }
    }

    #[test]
    fn document_that_serde_json_refuses_has_no_columns_and_all_others_have(
        document in object(&schema()),
        edits in prop::collection::vec(edit(), 1..4),
    ) {
        let mut text = document.to_string().into_bytes();
        for edit in edits {
            edit.apply(&mut text);
        }
        let batch = decoded(&keeping(&list(&schema())), &[&text, b"{}"]);
        let notes = notes(&batch);
        prop_assert_eq!(&notes[1], &None);
        let paths: Vec<Value> = notes[0].iter().flat_map(|notes| notes.as_array().unwrap())
            .map(|note| note["path"].clone()).collect();
        let is_whole = paths == [json!("")];
        match serde_json::from_slice::<Tree>(&text) {
            Err(error) if ["number out of range", "surrogate", "hex escape"].iter()
                .any(|what| error.to_string().contains(what)) => {}
            Ok(tree @ Tree::Object(_)) => {
                let mut misfits = Vec::new();
                let expected = Kind::Object(schema()).kept(&tree, "", &mut misfits);
                let expected_paths = noted(&misfits);
                let expected_paths: Vec<Value> = expected_paths.as_array().unwrap().iter()
                    .map(|note| note[0].clone()).collect();
                prop_assert_eq!(paths, expected_paths, "{}", tree);
                // serde_json may write other text, and reads some numbers a little wrong.
                let is_exact = |kind: &Kind| !["STRING", "DOUBLE"].iter().any(|ddl| kind.ddl().contains(ddl));
                for (name, _) in schema().iter().filter(|(_, kind)| is_exact(kind)) {
                    let cell = cell(batch.column_by_name(name).unwrap(), 0);
                    prop_assert_eq!(&cell, &expected[name], "{} of {}", name, tree);
                }
            }
            not_an_object => prop_assert!(is_whole, "{not_an_object:?} {paths:?}"),
        }
    }
}
