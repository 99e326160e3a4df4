//! Fields of documents that no reader gets, or only as a hash.
//!
//! Every value of a masked field is replaced in the text of its document before anything is made
//! of it: the column of values, those of a schema, notes and errors. A document of which that is
//! not certain, because it is not JSON, becomes an empty one, which is malformed.

mod canonical;
mod paths;
mod rewrite;

use std::collections::HashMap;
use std::fmt;
use std::fmt::Write as _;
use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use paths::Path;

use super::{DocumentSchema, Field, Kind};

/// Maximum number of paths.
const MAX_PATHS: usize = 1_000;
/// Maximum depth of objects and arrays on the way to a masked field, and within a hashed value.
const MAX_DEPTH: usize = 128;
/// Minimum length of a key in bytes: whoever has a hash could find a shorter one by trying.
const MIN_KEY_BYTES: usize = 16;
/// Number of bytes of the hash that tells keys apart.
const FINGERPRINT_BYTES: usize = 8;

/// The options are no masks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct MaskError {
    /// The options, by name.
    pub options: &'static [&'static str],
    problem: String,
}

impl MaskError {
    fn new(options: &'static [&'static str], problem: String) -> Self {
        Self { options, problem }
    }
}

/// What becomes of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Drop,
    Hash,
}

/// Fields that are dropped from documents, and fields of which only a hash is left.
///
/// A path names members from the document on, such as `address.street`; a name that is more than
/// letters, digits, `_` and `-` is written as `["a name"]`. It leads into every element of the
/// arrays on its way, and `[]` at its end stands for the elements of an array instead of the array.
///
/// ```
/// use dcp_arrow::FieldMasks;
///
/// let masks = FieldMasks::new(&["cards.number"], &["email"], None)?;
/// assert_eq!(masks.to_json(), r#"{"drop":["cards.number"],"hash":["email"],"key":null}"#);
/// # Ok::<(), dcp_arrow::MaskError>(())
/// ```
#[derive(Clone)]
pub struct FieldMasks {
    inner: Arc<Inner>,
}

struct Inner {
    root: Node,
    /// As given.
    paths: Vec<String>,
    dropped: Vec<String>,
    hashed: Vec<String>,
    key: Option<Key>,
}

/// A key, ready to hash with.
struct Key {
    mac: Hmac<Sha256>,
    /// Tells it from others.
    fingerprint: String,
}

/// What paths say of a value.
#[derive(Debug, Default)]
struct Node {
    members: HashMap<Box<str>, Self>,
    /// What becomes of the value.
    action: Option<Action>,
    /// What becomes of its elements, or of the value if it is no array.
    of_elements: Option<Action>,
    /// Place of the path, if the value or its elements are masked.
    index: usize,
}

impl FieldMasks {
    /// Masks for paths of fields to drop and to hash; with `key`, hashes are HMACs.
    ///
    /// # Errors
    /// [`MaskError`] if a path is none, is within another one, or the key is of no use.
    pub fn new(
        dropped: &[impl AsRef<str>],
        hashed: &[impl AsRef<str>],
        key: Option<&[u8]>,
    ) -> Result<Self, MaskError> {
        const KEY: &[&str] = &["hash_key"];
        if key.is_some() && hashed.is_empty() {
            let problem = "is for hashes, and no field is hashed: leave it out, or name fields";
            return Err(MaskError::new(KEY, problem.to_owned()));
        }
        if key.is_some_and(|key| key.len() < MIN_KEY_BYTES) {
            let problem = format!(
                "is shorter than {MIN_KEY_BYTES} bytes, and could be found by trying: give 32 random \
                 bytes"
            );
            return Err(MaskError::new(KEY, problem));
        }
        let (mut root, mut texts) = (Node::default(), [Vec::new(), Vec::new()]);
        let mut paths = Vec::new();
        let given = dropped.iter().map(|path| (path.as_ref(), Action::Drop));
        let given = given.chain(hashed.iter().map(|path| (path.as_ref(), Action::Hash)));
        for (count, (text, action)) in given.enumerate() {
            let [drops, hashes] = &mut texts;
            let (options, texts): (&[_], _) = match action {
                Action::Drop => (&["drop_fields"], drops),
                Action::Hash => (&["hash_fields"], hashes),
            };
            let wrong = |problem| MaskError::new(options, problem);
            if count >= MAX_PATHS {
                return Err(wrong(format!("names more than {MAX_PATHS} fields")));
            }
            let path = Path::parse(text).map_err(|why| wrong(format!("{text:?} {why}")))?;
            root.add(&path, action, count).ok_or_else(|| {
                wrong(format!("{text:?} is named twice, or is within another field: name it once"))
            })?;
            texts.push(path.to_string());
            paths.push(text.to_owned());
        }
        texts.iter_mut().for_each(|texts| texts.sort());
        let [dropped, hashed] = texts;
        let key = key.and_then(Key::new);
        Ok(Self { inner: Arc::new(Inner { root, paths, dropped, hashed, key }) })
    }

    /// Whether no field is masked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.dropped.is_empty() && self.inner.hashed.is_empty()
    }

    /// The paths as they were given, those to drop first.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &str> {
        self.inner.paths.iter().map(String::as_str)
    }

    /// Checks that columns of text take the hashes.
    ///
    /// # Errors
    /// [`MaskError`] if a hashed field has a column of another type, which would be null.
    pub(crate) fn check(&self, schema: &DocumentSchema) -> Result<(), MaskError> {
        let Some((index, kind)) = self.inner.root.unfit(&schema.fields) else { return Ok(()) };
        let path = self.inner.paths.get(index).map_or("", String::as_str);
        let problem =
            format!("{path:?} is hashed, and a hash is text: declare it STRING, not {kind}");
        Err(MaskError::new(&["hash_fields", "document_schema"], problem))
    }

    /// Whether no document has a field of this name any more.
    pub(crate) fn drops(&self, name: &str) -> bool {
        let member = self.inner.root.members.get(name);
        member.is_some_and(|member| member.action == Some(Action::Drop))
    }

    /// The masks as a JSON object, the same for those that do the same. Of a key, it has a hash of
    /// which the key cannot be found, unless it can be guessed.
    #[must_use]
    pub fn to_json(&self) -> String {
        let key = self.fingerprint();
        json!({"drop": self.inner.dropped, "hash": self.inner.hashed, "key": key}).to_string()
    }

    fn fingerprint(&self) -> Option<&str> {
        self.inner.key.as_ref().map(|key| key.fingerprint.as_str())
    }

    /// The hash of a value's canonical text.
    fn hash(&self, canonical: &[u8]) -> String {
        match &self.inner.key {
            Some(key) => hex(&key.mac.clone().chain_update(canonical).finalize().into_bytes()),
            None => hex(&Sha256::digest(canonical)),
        }
    }
}

impl Key {
    fn new(key: &[u8]) -> Option<Self> {
        // A key of any length is one.
        let mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
        let about = mac.clone().chain_update(b"dcp_rs key of hashes").finalize().into_bytes();
        let fingerprint = hex(about.get(..FINGERPRINT_BYTES)?);
        Some(Self { mac, fingerprint })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _always_written = write!(text, "{byte:02x}");
        text
    })
}

impl Node {
    /// Adds a path; `None` if it leads into another one, or another one into it.
    fn add(&mut self, path: &Path, action: Action, index: usize) -> Option<()> {
        let mut node = self;
        for name in &path.names {
            if node.is_masked() {
                return None;
            }
            node = node.members.entry(name.clone()).or_default();
        }
        if node.is_masked() || !node.members.is_empty() {
            return None;
        }
        if path.is_of_elements {
            node.of_elements = Some(action);
        } else {
            node.action = Some(action);
        }
        node.index = index;
        Some(())
    }

    /// The place of a path that is hashed, and its type, which takes no hash.
    fn unfit<'a>(&self, fields: &'a [Field]) -> Option<(usize, &'a Kind)> {
        fields.iter().find_map(|field| self.members.get(&*field.name)?.unfit_in(&field.kind))
    }

    fn unfit_in<'a>(&self, kind: &'a Kind) -> Option<(usize, &'a Kind)> {
        let takes_text = |kind: &Kind| matches!(kind, Kind::String | Kind::Variant);
        match (self.action, self.of_elements, kind) {
            (_, Some(Action::Hash), Kind::Array(element)) => {
                (!takes_text(element)).then_some((self.index, element.as_ref()))
            }
            (Some(Action::Hash), _, _) | (_, Some(Action::Hash), _) => {
                (!takes_text(kind)).then_some((self.index, kind))
            }
            (_, _, Kind::Array(element)) => self.unfit_in(element),
            (_, _, Kind::Struct(fields)) => self.unfit(fields),
            (_, _, Kind::Map(value)) => {
                self.members.values().find_map(|member| member.unfit_in(value))
            }
            _ => None,
        }
    }

    fn is_masked(&self) -> bool {
        self.action.is_some() || self.of_elements.is_some()
    }
}

impl fmt::Debug for FieldMasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_json())
    }
}

impl Default for FieldMasks {
    fn default() -> Self {
        let (root, paths) = (Node::default(), Vec::new());
        let inner = Inner { root, paths, dropped: Vec::new(), hashed: Vec::new(), key: None };
        Self { inner: Arc::new(inner) }
    }
}

impl PartialEq for FieldMasks {
    fn eq(&self, other: &Self) -> bool {
        let parts = |masks: &Self| {
            let Inner { dropped, hashed, .. } = &*masks.inner;
            (dropped.clone(), hashed.clone(), masks.fingerprint().map(str::to_owned))
        };
        Arc::ptr_eq(&self.inner, &other.inner) || parts(self) == parts(other)
    }
}

impl Eq for FieldMasks {}
