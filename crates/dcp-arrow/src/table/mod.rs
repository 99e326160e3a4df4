//! The columns of a table.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::document::{Formats, variant_type};
use crate::nearest;
use crate::schema;
use crate::{
    COLUMNS, Column, ColumnSet, DocumentSchema, FieldMasks, KeyType, MALFORMED, MALFORMED_FIELDS,
    OnMalformed, SchemaError, ValueFormat,
};

/// Selects the columns of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Columns {
    /// The basic columns, followed by those of the documents' schema, which replace `value`.
    #[default]
    Basic,
    /// Those of [`Columns::Basic`] and the columns for revision, expiry and history.
    Full,
    /// The named columns, in the given order. If none of the documents' schema is named, all of
    /// them follow, and `_malformed_fields` if it is enabled. `_malformed` follows in any case if
    /// it is enabled. Without `value` and a documents' schema, the server need not send documents.
    Named(Vec<String>),
}

/// What a table contains.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableOptions {
    /// The columns.
    pub columns: Columns,
    /// Whether to add the column `xattrs`, unless columns are named.
    pub include_xattrs: bool,
    /// Whether to add the column `history`, unless columns are named.
    pub history: bool,
    /// Type of the `key` column.
    pub key_type: KeyType,
    /// Whether changes of collections and scopes become rows too.
    pub system_events: bool,
    /// Format of the `value` column.
    pub value_format: ValueFormat,
    /// The columns to decode documents to.
    pub document_schema: Option<DocumentSchema>,
    /// Prefix of the names of these columns.
    pub document_prefix: String,
    /// How to handle a document that does not match `document_schema` or `value_format`.
    pub on_malformed: OnMalformed,
    /// Fields that are taken out of documents before anything is made of them.
    pub masks: FieldMasks,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self {
            columns: Columns::Basic,
            include_xattrs: false,
            history: false,
            key_type: KeyType::String,
            system_events: false,
            value_format: ValueFormat::Binary,
            document_schema: None,
            document_prefix: String::new(),
            on_malformed: OnMalformed::Null,
            masks: FieldMasks::default(),
        }
    }
}

/// One column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// A column of the change table.
    Change(Column),
    /// A column of the documents' schema, by index.
    Document(usize),
    /// The bytes of malformed documents.
    Malformed,
    /// The notes of malformed fields.
    MalformedFields,
}

/// The columns of a table, in order.
#[derive(Clone, PartialEq, Eq)]
pub struct TableSchema {
    columns: Arc<[Column]>,
    slots: Arc<[Slot]>,
    key_type: KeyType,
    system_events: bool,
    formats: Formats,
    arrow: SchemaRef,
}

impl TableSchema {
    /// The table described by `options`.
    ///
    /// # Errors
    /// [`SchemaError`] if columns are unknown, duplicate, missing or contradict an option.
    pub fn new(options: &TableOptions) -> Result<Self, SchemaError> {
        check(options)?;
        options.document_schema.iter().try_for_each(|schema| options.masks.check(schema))?;
        let documents = document_names(options)?;
        let slots = match &options.columns {
            Columns::Named(names) => named(names, &documents, options)?,
            Columns::Basic | Columns::Full => by_set(&documents, options),
        };
        let columns: Arc<[Column]> = slots
            .iter()
            .filter_map(|slot| if let Slot::Change(column) = slot { Some(*column) } else { None })
            .collect();
        let decodes = columns.len() < slots.len();
        let has_documents = decodes || columns.contains(&Column::Value);
        let is_masked = has_documents && !options.masks.is_empty();
        if !options.masks.is_empty() && columns.contains(&Column::Xattrs) {
            let (options, problem) = (&["drop_fields", "hash_fields", "include"], XATTRS);
            return Err(SchemaError::Contradiction { options, problem });
        }
        let formats = Formats {
            value: columns.contains(&Column::Value).then_some(options.value_format),
            schema: options.document_schema.clone().filter(|_| decodes),
            names: documents.into(),
            on_malformed: options.on_malformed,
            notes: slots.contains(&Slot::MalformedFields),
            masks: is_masked.then(|| options.masks.clone()),
        };
        Ok(Self {
            arrow: Arc::new(Schema::new(fields(&slots, &formats, options))),
            columns,
            slots: slots.into(),
            key_type: options.key_type,
            system_events: options.system_events,
            formats,
        })
    }

    /// The columns of the change table, in order, without those of documents.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Names of all columns in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.arrow.fields().iter().map(|field| field.name().as_str())
    }

    /// Whether the table has `column`.
    #[must_use]
    pub fn has(&self, column: Column) -> bool {
        self.columns.contains(&column)
    }

    /// Whether changes must include what `column` holds: the table has it, or decodes it.
    ///
    /// If [`Column::Value`] is not needed, the server can be asked to strip documents; if
    /// [`Column::Xattrs`] is not, to omit extended attributes.
    #[must_use]
    pub fn needs(&self, column: Column) -> bool {
        let decodes = match column {
            Column::Value => self.formats.decodes(),
            Column::Datatype => self.formats.wants_json(),
            _ => false,
        };
        decodes || self.has(column)
    }

    /// Type of the `key` column.
    #[must_use]
    pub const fn key_type(&self) -> KeyType {
        self.key_type
    }

    /// Whether changes of collections and scopes become rows too.
    #[must_use]
    pub const fn system_events(&self) -> bool {
        self.system_events
    }

    /// Paths of the fields that are masked in documents, with their places.
    pub fn masked_paths(&self) -> impl Iterator<Item = (usize, &str)> {
        self.formats.masks.iter().flat_map(FieldMasks::paths).enumerate()
    }

    /// Names of the fields that documents are decoded to, with their places; not of those that are
    /// dropped.
    pub fn decoded_fields(&self) -> impl Iterator<Item = (usize, &str)> {
        let Formats { schema, masks, .. } = &self.formats;
        let names = schema.iter().flat_map(DocumentSchema::names).enumerate();
        names.filter(|(_, name)| masks.as_ref().is_none_or(|masks| !masks.drops(name)))
    }

    /// The Arrow schema.
    #[must_use]
    pub fn arrow(&self) -> SchemaRef {
        Arc::clone(&self.arrow)
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(crate) const fn formats(&self) -> &Formats {
        &self.formats
    }
}

impl fmt::Debug for TableSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableSchema")
            .field("columns", &self.names().collect::<Vec<_>>())
            .field("key_type", &self.key_type)
            .finish_non_exhaustive()
    }
}

/// Why extended attributes do not go with masks: transactions keep whole documents in them.
const XATTRS: &str = "fields are masked in documents only, and extended attributes may have copies: \
                      leave xattrs out";

/// Refuses contradictory options.
fn check(options: &TableOptions) -> Result<(), SchemaError> {
    let decodes = options.document_schema.is_some();
    let formats = options.value_format != ValueFormat::Binary;
    let (options, problem): (&[_], _) = if !options.document_prefix.is_empty() && !decodes {
        (&["document_schema"], "a prefix needs a schema: give one, or leave the prefix out")
    } else if options.on_malformed != OnMalformed::Null
        && !decodes
        && !formats
        && options.masks.is_empty()
    {
        let problem = "documents are not decoded: give their schema, or another format of values";
        (&["on_malformed"], problem)
    } else {
        return Ok(());
    };
    Err(SchemaError::Contradiction { options, problem })
}

/// Names of the documents' columns.
fn document_names(options: &TableOptions) -> Result<Vec<String>, SchemaError> {
    let Some(schema) = &options.document_schema else { return Ok(Vec::new()) };
    let prefixed = |name: &str| format!("{}{name}", options.document_prefix);
    let names: Vec<String> = schema.names().map(prefixed).collect();
    // Spark's column names are case-insensitive.
    let is_taken = |name: &&String| {
        schema::names()
            .chain([MALFORMED, MALFORMED_FIELDS])
            .any(|known| known.eq_ignore_ascii_case(name))
    };
    match names.iter().find(is_taken) {
        Some(name) => Err(SchemaError::NameTaken(name.clone())),
        None => Ok(names),
    }
}

/// Whether values that do not fit are noted.
fn has_notes(options: &TableOptions) -> bool {
    options.document_schema.is_some() && options.on_malformed == OnMalformed::Null
}

/// The columns given by name. If none of the documents' schema is named, all of it is appended: a
/// schema without any of its columns would be pointless.
fn named(
    names: &[String],
    documents: &[String],
    options: &TableOptions,
) -> Result<Vec<Slot>, SchemaError> {
    let mut seen = BTreeSet::new();
    let mut slots = Vec::with_capacity(names.len());
    for name in names {
        let slot = slot(name, documents, options)?;
        if !seen.insert(name) {
            return Err(SchemaError::DuplicateColumn(name.clone()));
        }
        slots.push(slot);
    }
    if slots.is_empty() {
        return Err(SchemaError::NoColumns);
    }
    if !slots.iter().any(|slot| !matches!(slot, Slot::Change(_))) {
        slots.extend((0..documents.len()).map(Slot::Document));
        slots.extend(has_notes(options).then_some(Slot::MalformedFields));
    }
    if options.on_malformed == OnMalformed::Column && !slots.contains(&Slot::Malformed) {
        slots.push(Slot::Malformed);
    }
    if options.value_format != ValueFormat::Binary && !slots.contains(&Slot::Change(Column::Value))
    {
        return Err(SchemaError::Contradiction {
            options: &["columns", "value_format"],
            problem: "a format applies to the column value: name it, or leave the format out",
        });
    }
    Ok(slots)
}

fn slot(name: &str, documents: &[String], options: &TableOptions) -> Result<Slot, SchemaError> {
    if let Some(index) = documents.iter().position(|known| known == name) {
        return Ok(Slot::Document(index));
    }
    if name == MALFORMED_FIELDS {
        return match has_notes(options) {
            true => Ok(Slot::MalformedFields),
            false => Err(SchemaError::Contradiction {
                options: &["columns", "document_schema", "on_malformed"],
                problem: "\"_malformed_fields\" needs a schema of documents and 'null'",
            }),
        };
    }
    if name == MALFORMED {
        return match options.on_malformed {
            OnMalformed::Column => Ok(Slot::Malformed),
            _ => Err(SchemaError::Contradiction {
                options: &["columns", "on_malformed"],
                problem: "\"_malformed\" needs 'column'",
            }),
        };
    }
    match Column::from_name(name) {
        Ok(column) => Ok(Slot::Change(column)),
        Err(_) => {
            let known = schema::names().chain(documents.iter().map(String::as_str));
            let nearest = nearest(name, known);
            Err(SchemaError::UnknownColumn { name: name.to_owned(), nearest })
        }
    }
}

/// The columns of a set, and those that other options add.
fn by_set(documents: &[String], options: &TableOptions) -> Vec<Slot> {
    // The documents' own columns replace it, unless another format of it was requested.
    let has_value = documents.is_empty() || options.value_format != ValueFormat::Binary;
    let mut slots: Vec<Slot> = COLUMNS
        .iter()
        .filter(|spec| match (spec.column, spec.set) {
            (Column::Value, _) => has_value,
            (Column::Xattrs, _) => options.include_xattrs,
            (Column::History, _) => options.history,
            (_, ColumnSet::Basic) => true,
            (_, ColumnSet::Full) => options.columns == Columns::Full,
            (_, ColumnSet::OnRequest) => false,
        })
        .map(|spec| Slot::Change(spec.column))
        .collect();
    slots.extend((0..documents.len()).map(Slot::Document));
    slots.extend(has_notes(options).then_some(Slot::MalformedFields));
    if options.on_malformed == OnMalformed::Column {
        slots.push(Slot::Malformed);
    }
    slots
}

fn fields(slots: &[Slot], formats: &Formats, options: &TableOptions) -> Vec<Field> {
    let documents: Vec<Field> = options
        .document_schema
        .iter()
        .flat_map(DocumentSchema::arrow)
        .zip(formats.names.iter())
        .map(|(field, name)| field.with_name(name))
        .collect();
    let field = |slot: &Slot| match slot {
        Slot::Change(column) => {
            let data_type = match (column, options.value_format) {
                (Column::Value, ValueFormat::String) => DataType::Utf8,
                (Column::Value, ValueFormat::Variant) => variant_type(),
                _ => column.data_type(options.key_type),
            };
            Some(Field::new(column.name(), data_type, column.spec().nullable))
        }
        Slot::Document(index) => documents.get(*index).cloned(),
        Slot::Malformed => Some(Field::new(MALFORMED, DataType::Binary, true)),
        Slot::MalformedFields => Some(Field::new(MALFORMED_FIELDS, DataType::Utf8, true)),
    };
    slots.iter().filter_map(field).collect()
}

#[cfg(test)]
mod tests;
