//! The columns of the change table.

use std::sync::Arc;

use arrow_schema::{DataType, Field};
use thiserror::Error;

use crate::document::TIMESTAMP;
use crate::{DdlError, MaskError};

/// One column of the change table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Column {
    /// Kind of change.
    Op,
    /// Document key.
    Key,
    /// Document.
    Value,
    /// Scope name.
    Scope,
    /// Collection name.
    Collection,
    /// vBucket number.
    Vbucket,
    /// Seqno in the vBucket.
    Seqno,
    /// Number of rollbacks seen on the vBucket.
    Epoch,
    /// CAS.
    Cas,
    /// Time of the change.
    Timestamp,
    /// Revision number.
    Rev,
    /// When the document expires.
    Expiry,
    /// When the document was removed.
    DeletedAt,
    /// Flags set by the application.
    Flags,
    /// Kind of value.
    Datatype,
    /// History branch.
    Vbuuid,
    /// First seqno of the snapshot.
    SnapshotStart,
    /// Last seqno of the snapshot.
    SnapshotEnd,
    /// Whether the snapshot contains several versions of a key.
    History,
    /// Extended attributes.
    Xattrs,
    /// Collection id.
    CollectionId,
}

/// Type of the `key` column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyType {
    /// UTF-8 text: any other key is an error.
    #[default]
    String,
    /// Bytes.
    Binary,
}

/// Whether a column is part of the table without being named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnSet {
    /// Always.
    Basic,
    /// With [`Columns::Full`](crate::Columns::Full).
    Full,
    /// Only if named, or enabled by its own option.
    OnRequest,
}

/// Description of one column of the change table.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSpec {
    /// The column.
    pub column: Column,
    /// Its name.
    pub name: &'static str,
    /// When the table has it.
    pub set: ColumnSet,
    /// Whether it can hold nulls.
    pub nullable: bool,
    /// What it means and when it is null.
    pub meaning: &'static str,
}

const fn column(
    column: Column,
    name: &'static str,
    set: ColumnSet,
    nullable: bool,
    meaning: &'static str,
) -> ColumnSpec {
    ColumnSpec { column, name, set, nullable, meaning }
}

use ColumnSet::{Basic, Full, OnRequest};

/// The change table, in the order of its columns.
///
/// Types are those that Spark supports: signed integers, microseconds UTC, no dictionaries.
/// Unsigned 64-bit numbers of the protocol that can exceed 2⁶³ − 1 (`cas`, `rev`) are stored as
/// two's complement; seqnos and vBucket UUIDs (48 bits) cannot.
///
/// | column | Arrow type | set | null when |
/// |---|---|---|---|
/// | `op` | utf8 | basic | never |
/// | `key` | utf8, or binary on request | basic | `rollback` |
/// | `value` | binary | basic | not a `mutation` or `system_event` |
/// | `scope` | utf8 | basic | `rollback`; its name is not known |
/// | `collection` | utf8 | basic | `rollback`, event of a scope; its name is not known |
/// | `vbucket` | int32 | basic | never |
/// | `seqno` | int64 | basic | never |
/// | `epoch` | int32 | basic | never |
/// | `cas` | int64 | basic | not a document's change |
/// | `timestamp` | timestamp\[us, UTC\] | basic | no CAS |
/// | `rev` | int64 | full | not a document's change |
/// | `expiry` | timestamp\[us, UTC\] | full | the document does not expire |
/// | `deleted_at` | timestamp\[us, UTC\] | full | not removed, or time not known |
/// | `flags` | int64 | full | not a `mutation` |
/// | `datatype` | utf8: `json`, `binary` | full | not a `mutation` |
/// | `vbuuid` | int64 | full | `system_event` |
/// | `snapshot_start` | int64 | full | not a document's change |
/// | `snapshot_end` | int64 | full | not a document's change |
/// | `history` | boolean | request | not a document's change |
/// | `xattrs` | map\<utf8, utf8\> | request | the document has none |
/// | `collection_id` | int64 | request | `rollback`; a scope's `system_event` |
pub const COLUMNS: &[ColumnSpec] = &[
    column(
        Column::Op,
        "op",
        Basic,
        false,
        "what happened: mutation, deletion, expiration, rollback, system_event or caught_up",
    ),
    column(
        Column::Key,
        "key",
        Basic,
        true,
        "document key; the name in a system event; null for a rollback",
    ),
    column(
        Column::Value,
        "value",
        Basic,
        true,
        "document, decompressed and without xattrs; null unless op is mutation or system_event",
    ),
    column(Column::Scope, "scope", Basic, true, "scope name, by its id; null if it is not known"),
    column(
        Column::Collection,
        "collection",
        Basic,
        true,
        "collection name, by its id; null if it is not known",
    ),
    column(Column::Vbucket, "vbucket", Basic, false, "vBucket number"),
    column(
        Column::Seqno,
        "seqno",
        Basic,
        false,
        "position in the vBucket; for a rollback, the seqno above which changes are sent again",
    ),
    column(
        Column::Epoch,
        "epoch",
        Basic,
        false,
        "rollbacks this consumer has seen on the vBucket: (epoch, seqno) orders a key's changes",
    ),
    column(
        Column::Cas,
        "cas",
        Basic,
        true,
        "version of the document, two's complement of the unsigned number",
    ),
    column(
        Column::Timestamp,
        "timestamp",
        Basic,
        true,
        "time of the change, from the CAS (hybrid logical clock)",
    ),
    column(Column::Rev, "rev", Full, true, "revision seqno, which each change raises"),
    column(Column::Expiry, "expiry", Full, true, "when the document expires; null for never"),
    column(
        Column::DeletedAt,
        "deleted_at",
        Full,
        true,
        "when the document was removed or expired, to the second; null if not known",
    ),
    column(Column::Flags, "flags", Full, true, "32 bits set by the application with a mutation"),
    column(Column::Datatype, "datatype", Full, true, "json or binary: what the value is"),
    column(
        Column::Vbuuid,
        "vbuuid",
        Full,
        true,
        "history branch that holds the seqno; 0 for a rollback to the beginning",
    ),
    column(
        Column::SnapshotStart,
        "snapshot_start",
        Full,
        true,
        "first seqno of the snapshot the change came in, or one below it",
    ),
    column(
        Column::SnapshotEnd,
        "snapshot_end",
        Full,
        true,
        "last seqno of the snapshot the change came in",
    ),
    column(
        Column::History,
        "history",
        OnRequest,
        true,
        "whether the snapshot keeps every version where a collection has change history",
    ),
    column(
        Column::Xattrs,
        "xattrs",
        OnRequest,
        true,
        "extended attributes, each value as JSON text; null if there are none",
    ),
    column(Column::CollectionId, "collection_id", OnRequest, true, "collection id"),
];

impl Column {
    /// The description of this column.
    #[must_use]
    pub fn spec(self) -> &'static ColumnSpec {
        // The table has the order of the variants, as a test asserts.
        &COLUMNS[self as usize]
    }

    /// The column's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The column named `name`.
    ///
    /// # Errors
    /// [`SchemaError::UnknownColumn`], with the most similar column.
    pub fn from_name(name: &str) -> Result<Self, SchemaError> {
        COLUMNS.iter().find_map(|spec| (spec.name == name).then_some(spec.column)).ok_or_else(
            || SchemaError::UnknownColumn {
                name: name.to_owned(),
                nearest: crate::nearest(name, names()),
            },
        )
    }

    /// The column's type; for `value`, that of documents as bytes.
    pub(crate) fn data_type(self, key_type: KeyType) -> DataType {
        match self {
            Self::Op | Self::Scope | Self::Collection | Self::Datatype => DataType::Utf8,
            Self::Key => match key_type {
                KeyType::String => DataType::Utf8,
                KeyType::Binary => DataType::Binary,
            },
            Self::Value => DataType::Binary,
            Self::Vbucket | Self::Epoch => DataType::Int32,
            Self::History => DataType::Boolean,
            Self::Timestamp | Self::Expiry | Self::DeletedAt => TIMESTAMP.clone(),
            Self::Seqno
            | Self::Cas
            | Self::Rev
            | Self::Flags
            | Self::Vbuuid
            | Self::SnapshotStart
            | Self::SnapshotEnd
            | Self::CollectionId => DataType::Int64,
            Self::Xattrs => DataType::Map(Arc::new(xattrs_entries()), false),
        }
    }
}

/// What to do about an unknown column.
fn hint(nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean {nearest:?}?"),
        None => ": a field of documents needs a document schema that declares it".to_owned(),
    }
}

/// Why a table cannot be made of the columns.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SchemaError {
    /// Unknown column.
    #[error("there is no column {name:?}{}", hint(nearest.as_deref()))]
    UnknownColumn {
        /// The given name.
        name: String,
        /// The most similar column, if any is similar.
        nearest: Option<String>,
    },
    /// A column is named twice.
    #[error("{0:?} is named twice")]
    DuplicateColumn(String),
    /// No column is named.
    #[error("name at least one column")]
    NoColumns,
    /// Options contradict each other.
    #[error("{problem}")]
    Contradiction {
        /// The options, by name.
        options: &'static [&'static str],
        /// What is wrong with them.
        problem: &'static str,
    },
    /// A field of documents has the name of another column.
    #[error("the column {0:?} would appear twice: give a prefix, such as doc_")]
    NameTaken(String),
    /// The schema of documents cannot be parsed.
    #[error("{0}")]
    DocumentSchema(#[from] DdlError),
    /// Fields cannot be masked so.
    #[error("{0}")]
    Masks(#[from] MaskError),
}

impl SchemaError {
    /// The options that are wrong, by name.
    #[must_use]
    pub const fn options(&self) -> &'static [&'static str] {
        match self {
            Self::UnknownColumn { .. } | Self::DuplicateColumn(_) | Self::NoColumns => &["columns"],
            Self::Contradiction { options, .. } => options,
            Self::NameTaken(_) | Self::DocumentSchema(_) => &["document_schema"],
            Self::Masks(error) => error.options,
        }
    }

    /// The value that is wrong, if it is one of a list.
    #[must_use]
    pub fn value(&self) -> Option<&str> {
        match self {
            Self::UnknownColumn { name, .. }
            | Self::DuplicateColumn(name)
            | Self::NameTaken(name) => Some(name),
            Self::NoColumns
            | Self::Contradiction { .. }
            | Self::DocumentSchema(_)
            | Self::Masks(_) => None,
        }
    }
}

/// The entries of the `xattrs` map, with the names that Arrow readers expect.
pub(crate) fn xattrs_entries() -> Field {
    let fields =
        vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Utf8, true)];
    Field::new("entries", DataType::Struct(fields.into()), false)
}

/// Names of the table's columns.
pub(crate) fn names<'a>() -> impl Iterator<Item = &'a str> {
    COLUMNS.iter().map(|spec| spec.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_lists_every_column_in_the_order_of_the_variants() {
        for (index, spec) in COLUMNS.iter().enumerate() {
            assert_eq!(spec.column as usize, index, "{}", spec.name);
            assert_eq!(Column::from_name(spec.name), Ok(spec.column));
        }
        assert_eq!(COLUMNS.len(), Column::CollectionId as usize + 1);
    }
}
