//! The change table: its columns and the choice of them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use thiserror::Error;

/// One column of the change table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Column {
    /// What happened.
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
    /// Position in the vBucket.
    Seqno,
    /// Rollbacks seen on the vBucket.
    Epoch,
    /// Version.
    Cas,
    /// Time of the change.
    Timestamp,
    /// Revision.
    Rev,
    /// When the document expires.
    Expiry,
    /// When the document was removed.
    DeletedAt,
    /// Application's own 32 bits.
    Flags,
    /// What the value is.
    Datatype,
    /// History branch.
    Vbuuid,
    /// First seqno of the snapshot.
    SnapshotStart,
    /// Last seqno of the snapshot.
    SnapshotEnd,
    /// Extended attributes.
    Xattrs,
    /// Collection id.
    CollectionId,
}

/// When a column is part of the table without being named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnSet {
    /// Always.
    Basic,
    /// With [`Detail::Full`].
    Full,
    /// Never: it must be named, or asked for by an option of its own.
    OnRequest,
}

/// What the change table says about one column.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSpec {
    /// The column.
    pub column: Column,
    /// Its name.
    pub name: &'static str,
    /// When it is there.
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
/// Types are those Spark has: signed integers, microseconds UTC, no dictionaries. The protocol's
/// unsigned 64-bit numbers that can exceed 2⁶³ − 1 (`cas`, `rev`) are given as two's complement;
/// seqnos and vBucket UUIDs (48 bits) cannot.
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
/// | `xattrs` | map\<utf8, utf8\> | request | the document has none |
/// | `collection_id` | int64 | request | `rollback`; a scope's `system_event` |
pub const COLUMNS: &[ColumnSpec] = &[
    column(
        Column::Op,
        "op",
        Basic,
        false,
        "what happened: mutation, deletion, expiration, rollback or system_event",
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
        "position in the vBucket; for a rollback the point above which everything comes again",
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
    column(Column::Rev, "rev", Full, true, "how many times the document has changed"),
    column(Column::Expiry, "expiry", Full, true, "when the document expires; null for never"),
    column(
        Column::DeletedAt,
        "deleted_at",
        Full,
        true,
        "when the document was removed or expired, to the second; null if not known",
    ),
    column(Column::Flags, "flags", Full, true, "the application's own 32 bits of a mutation"),
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
        Column::Xattrs,
        "xattrs",
        OnRequest,
        true,
        "extended attributes, each value as JSON text; null if there are none",
    ),
    column(Column::CollectionId, "collection_id", OnRequest, true, "collection id"),
];

impl Column {
    /// What the change table says about this column.
    #[must_use]
    pub fn spec(self) -> &'static ColumnSpec {
        // The table lists the variants in their order, which a test asserts.
        &COLUMNS[self as usize]
    }

    /// The column's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The column called `name`.
    ///
    /// # Errors
    /// [`SchemaError::UnknownColumn`], which names the nearest one there is.
    pub fn from_name(name: &str) -> Result<Self, SchemaError> {
        COLUMNS.iter().find_map(|spec| (spec.name == name).then_some(spec.column)).ok_or_else(
            || SchemaError::UnknownColumn { name: name.to_owned(), nearest: nearest(name) },
        )
    }

    fn data_type(self, key_type: KeyType) -> DataType {
        match self {
            Self::Op | Self::Scope | Self::Collection | Self::Datatype => DataType::Utf8,
            Self::Key => match key_type {
                KeyType::String => DataType::Utf8,
                KeyType::Binary => DataType::Binary,
            },
            Self::Value => DataType::Binary,
            Self::Vbucket | Self::Epoch => DataType::Int32,
            Self::Timestamp | Self::Expiry | Self::DeletedAt => {
                DataType::Timestamp(TimeUnit::Microsecond, Some(Arc::from(UTC)))
            }
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

/// Time zone of every timestamp.
pub(crate) const UTC: &str = "UTC";

/// The entries of the `xattrs` map; the names are those Arrow readers expect.
pub(crate) fn xattrs_entries() -> Field {
    let fields =
        vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Utf8, true)];
    Field::new("entries", DataType::Struct(fields.into()), false)
}

/// How much a table says about each change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// The basic columns.
    #[default]
    Basic,
    /// The basic columns and those on revision, expiry and history.
    Full,
}

/// Type of the `key` column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyType {
    /// Text: every key must be UTF-8.
    #[default]
    String,
    /// Bytes.
    Binary,
}

/// What a table is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Names of the columns in their order; `None` takes the columns that belong to `detail`.
    pub columns: Option<Vec<String>>,
    /// How much to say about each change.
    pub detail: Detail,
    /// Whether documents are part of the table; otherwise the server need not send them.
    pub include_value: bool,
    /// Whether extended attributes are part of the table.
    pub include_xattrs: bool,
    /// Type of the `key` column.
    pub key_type: KeyType,
    /// Whether changes of collections and scopes are rows too.
    pub system_events: bool,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self {
            columns: None,
            detail: Detail::Basic,
            include_value: true,
            include_xattrs: false,
            key_type: KeyType::String,
            system_events: false,
        }
    }
}

/// Why columns do not make a table.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SchemaError {
    /// There is no column of that name.
    #[error("columns: there is no column {name:?}; did you mean {nearest:?}?")]
    UnknownColumn {
        /// What was asked for.
        name: String,
        /// The column whose name is most like it.
        nearest: &'static str,
    },
    /// A column is named twice.
    #[error("columns: {0:?} is named twice")]
    DuplicateColumn(&'static str),
    /// No column is named.
    #[error("columns: name at least one column")]
    NoColumns,
    /// The column contradicts another option.
    #[error("columns: {column:?} needs {option}=true")]
    Excluded {
        /// The column.
        column: &'static str,
        /// The option that leaves it out.
        option: &'static str,
    },
}

/// The columns of a table, in order.
#[derive(Clone, PartialEq, Eq)]
pub struct TableSchema {
    columns: Arc<[Column]>,
    key_type: KeyType,
    system_events: bool,
    arrow: SchemaRef,
}

impl TableSchema {
    /// The table `options` describe.
    ///
    /// # Errors
    /// [`SchemaError`] if columns are unknown, doubled, missing or contradict an option.
    pub fn new(options: &TableOptions) -> Result<Self, SchemaError> {
        let columns = match &options.columns {
            Some(names) => Self::named(names, options)?,
            None => Self::by_detail(options),
        };
        let fields: Vec<Field> = columns
            .iter()
            .map(|column| {
                let spec = column.spec();
                Field::new(spec.name, column.data_type(options.key_type), spec.nullable)
            })
            .collect();
        Ok(Self {
            columns: columns.into(),
            key_type: options.key_type,
            system_events: options.system_events,
            arrow: Arc::new(Schema::new(fields)),
        })
    }

    fn named(names: &[String], options: &TableOptions) -> Result<Vec<Column>, SchemaError> {
        let mut seen = BTreeMap::new();
        let mut columns = Vec::with_capacity(names.len());
        for name in names {
            let column = Column::from_name(name)?;
            if seen.insert(column, ()).is_some() {
                return Err(SchemaError::DuplicateColumn(column.name()));
            }
            if column == Column::Value && !options.include_value {
                return Err(SchemaError::Excluded { column: "value", option: "include_value" });
            }
            columns.push(column);
        }
        if columns.is_empty() {
            return Err(SchemaError::NoColumns);
        }
        Ok(columns)
    }

    fn by_detail(options: &TableOptions) -> Vec<Column> {
        COLUMNS
            .iter()
            .filter(|spec| match (spec.column, spec.set) {
                (Column::Value, _) => options.include_value,
                (Column::Xattrs, _) => options.include_xattrs,
                (_, Basic) => true,
                (_, Full) => options.detail == Detail::Full,
                (_, OnRequest) => false,
            })
            .map(|spec| spec.column)
            .collect()
    }

    /// The columns in order.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Whether the table has `column`.
    ///
    /// Without [`Column::Value`] the server may be asked to strip documents, without
    /// [`Column::Xattrs`] to leave extended attributes out.
    #[must_use]
    pub fn has(&self, column: Column) -> bool {
        self.columns.contains(&column)
    }

    /// Type of the `key` column.
    #[must_use]
    pub const fn key_type(&self) -> KeyType {
        self.key_type
    }

    /// Whether changes of collections and scopes are rows too.
    #[must_use]
    pub const fn system_events(&self) -> bool {
        self.system_events
    }

    /// The schema as Arrow has it.
    #[must_use]
    pub fn arrow(&self) -> SchemaRef {
        Arc::clone(&self.arrow)
    }
}

impl fmt::Debug for TableSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableSchema")
            .field("columns", &self.columns.iter().map(|column| column.name()).collect::<Vec<_>>())
            .field("key_type", &self.key_type)
            .finish_non_exhaustive()
    }
}

/// The column whose name takes the fewest edits to become.
fn nearest(name: &str) -> &'static str {
    COLUMNS
        .iter()
        .map(|spec| spec.name)
        .min_by_key(|candidate| edit_distance(name, candidate))
        .unwrap_or_default()
}

/// Levenshtein distance in characters, of which only the first 64 of `from` are looked at.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (deleted, from) in from.chars().take(64).enumerate() {
        let mut diagonal = deleted;
        let mut left = deleted + 1;
        row[0] = left;
        for (cell, to) in row[1..].iter_mut().zip(&to) {
            let substituted = diagonal + usize::from(!from.eq_ignore_ascii_case(to));
            diagonal = *cell;
            left = substituted.min(*cell + 1).min(left + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> TableOptions {
        TableOptions {
            columns: Some(names.iter().map(ToString::to_string).collect()),
            ..TableOptions::default()
        }
    }

    fn names(options: &TableOptions) -> Vec<&'static str> {
        let schema = TableSchema::new(options).unwrap();
        schema.columns().iter().map(|column| column.name()).collect()
    }

    #[test]
    fn the_table_lists_every_column_in_the_order_of_the_variants() {
        for (index, spec) in COLUMNS.iter().enumerate() {
            assert_eq!(spec.column as usize, index, "{}", spec.name);
            assert_eq!(Column::from_name(spec.name), Ok(spec.column));
        }
        assert_eq!(COLUMNS.len(), Column::CollectionId as usize + 1);
    }

    #[test]
    fn the_sets_are_those_of_the_documentation() {
        let basic = [
            "op",
            "key",
            "value",
            "scope",
            "collection",
            "vbucket",
            "seqno",
            "epoch",
            "cas",
            "timestamp",
        ];
        assert_eq!(names(&TableOptions::default()), basic);
        let full = TableOptions { detail: Detail::Full, ..TableOptions::default() };
        let more = [
            "rev",
            "expiry",
            "deleted_at",
            "flags",
            "datatype",
            "vbuuid",
            "snapshot_start",
            "snapshot_end",
        ];
        assert_eq!(names(&full), [&basic[..], &more[..]].concat());
        let with = TableOptions { include_xattrs: true, include_value: false, ..full };
        let names = names(&with);
        assert!(names.contains(&"xattrs") && !names.contains(&"value"), "{names:?}");
    }

    #[test]
    fn types_are_sparks_and_never_unsigned_or_dictionaries() {
        let all: Vec<&str> = COLUMNS.iter().map(|spec| spec.name).collect();
        let schema = TableSchema::new(&named(&all)).unwrap().arrow();
        let nullable: Vec<_> = schema
            .fields()
            .iter()
            .filter(|f| !f.is_nullable())
            .map(|f| f.name().as_str())
            .collect();
        assert_eq!(nullable, ["op", "vbucket", "seqno", "epoch"]);
        for field in schema.fields() {
            let expected = match field.name().as_str() {
                "op" | "key" | "scope" | "collection" | "datatype" => "Utf8",
                "value" => "Binary",
                "vbucket" | "epoch" => "Int32",
                "timestamp" | "expiry" | "deleted_at" => "Timestamp(µs, \"UTC\")",
                "xattrs" => {
                    "Map(\"entries\": non-null Struct(\"key\": non-null Utf8, \"value\": Utf8), unsorted)"
                }
                _ => "Int64",
            };
            assert_eq!(field.data_type().to_string(), expected, "{}", field.name());
        }
    }

    #[test]
    fn a_projection_keeps_its_order() {
        assert_eq!(names(&named(&["seqno", "key"])), ["seqno", "key"]);
        let binary = TableOptions { key_type: KeyType::Binary, ..named(&["key"]) };
        let schema = TableSchema::new(&binary).unwrap();
        assert_eq!(schema.arrow().field(0).data_type(), &DataType::Binary);
    }

    #[test]
    fn wrong_columns_are_named_in_the_error() {
        let error = |options| TableSchema::new(&options).unwrap_err().to_string();
        assert_eq!(
            error(named(&["Seq_no"])),
            "columns: there is no column \"Seq_no\"; did you mean \"seqno\"?"
        );
        assert_eq!(error(named(&["op", "op"])), "columns: \"op\" is named twice");
        assert_eq!(error(named(&[])), "columns: name at least one column");
        let without = TableOptions { include_value: false, ..named(&["value"]) };
        assert_eq!(error(without), "columns: \"value\" needs include_value=true");
    }
}
