//! Schemas that grow with the documents, and the names of their columns.

use std::collections::HashSet;

use super::observed::{
    MAX_FIELDS, MAX_NAME_BYTES, Members, Nested, Observations, Observed, PREFIX,
};
use super::{DocumentSchema, Field, Kind};

/// Between the names of a path.
const SEPARATOR: &str = "__";

/// What the columns of documents are called.
///
/// A column has the name of its field. If that is reserved, it begins with `doc_`. With
/// [`Nested::Columns`], the members of an object have columns named by their path. Names that
/// differ in case only are one to many targets, so the first field has the column.
#[derive(Clone, Debug, Default)]
pub struct Names {
    nested: Nested,
    reserved: HashSet<String>,
}

impl Names {
    /// Names of columns beside others.
    #[must_use]
    pub fn new(nested: Nested, reserved: impl IntoIterator<Item = String>) -> Self {
        let reserved = reserved.into_iter().map(|name| name.to_lowercase()).collect();
        Self { nested, reserved }
    }

    /// What becomes of objects.
    #[must_use]
    pub const fn nested(&self) -> Nested {
        self.nested
    }

    /// The names of the columns of a schema.
    #[must_use]
    pub fn columns(&self, schema: &DocumentSchema) -> Vec<String> {
        schema.fields.iter().flat_map(|field| self.of(&[], field)).collect()
    }

    /// The columns of a field within objects.
    fn of(&self, path: &[&str], field: &Field) -> Vec<String> {
        let path = [path, &[field.name.as_str()]].concat();
        match &field.kind {
            Kind::Struct(fields) if self.nested == Nested::Columns => {
                fields.iter().flat_map(|field| self.of(&path, field)).collect()
            }
            _ => {
                let name = path.join(SEPARATOR);
                let is_free = !self.reserved.contains(&name.to_lowercase());
                vec![if is_free { name } else { format!("{PREFIX}{name}") }]
            }
        }
    }

    /// The schema whose columns hold what was observed; `None` if no column can be made.
    #[must_use]
    pub fn inferred(&self, observations: &Observations) -> Option<DocumentSchema> {
        let grown = self.grown(&DocumentSchema { fields: [].into() }, observations, true, true);
        (!grown.fields.is_empty()).then_some(grown)
    }

    /// A schema whose columns hold what was observed, too.
    ///
    /// Whatever a column of `schema` can hold, the same column of the result can hold. A field
    /// that no column can be made of stays without, and so do those beyond 1,000 columns.
    #[must_use]
    pub fn grown(
        &self,
        schema: &DocumentSchema,
        observations: &Observations,
        adds_fields: bool,
        widens_types: bool,
    ) -> DocumentSchema {
        let columns = self.columns(schema);
        let taken = columns.iter().map(|name| name.to_lowercase()).collect();
        let mut growth = Growth { names: self, taken, adds_fields, widens_types };
        let mut fields = schema.fields.to_vec();
        growth.grow(&mut fields, &observations.members, &[]);
        DocumentSchema { fields: fields.into() }
    }
}

struct Growth<'a> {
    names: &'a Names,
    /// Names of the columns so far, in lower case.
    taken: HashSet<String>,
    adds_fields: bool,
    widens_types: bool,
}

impl Growth<'_> {
    fn grow(&mut self, fields: &mut Vec<Field>, members: &Members, path: &[&str]) {
        for (name, observed) in &members.list {
            match fields.iter_mut().find(|field| *field.name == **name) {
                Some(field) => self.widen(field, observed, path),
                None if self.adds_fields => fields.extend(self.added(name, observed, path)),
                None => {}
            }
        }
    }

    fn widen(&mut self, field: &mut Field, observed: &Observed, path: &[&str]) {
        let Field { name, kind } = field;
        match kind {
            Kind::Struct(fields) if observed.has_members(self.names.nested) => {
                let path = [path, &[name.as_str()]].concat();
                self.grow(fields, &observed.members, &path);
            }
            _ if self.widens_types => {
                if let Some(joined) = observed.joined(kind) {
                    *kind = joined;
                }
            }
            _ => {}
        }
    }

    /// The field with a column that is free; an object as JSON if its members have none.
    fn added(&mut self, name: &str, observed: &Observed, path: &[&str]) -> Option<Field> {
        let kind = observed.kind(self.names.nested)?;
        let field = Field { name: name.to_owned(), kind };
        if self.take(path, &field) {
            return Some(field);
        }
        let as_json = Field { kind: Kind::String, ..field };
        (matches!(observed.kind(self.names.nested)?, Kind::Struct(_)) && self.take(path, &as_json))
            .then_some(as_json)
    }

    fn take(&mut self, path: &[&str], field: &Field) -> bool {
        let columns = self.names.of(path, field);
        let mut lowered: Vec<_> = columns.iter().map(|name| name.to_lowercase()).collect();
        let fit = columns.iter().all(|name| name.len() <= MAX_NAME_BYTES);
        lowered.sort_unstable();
        let are_distinct = lowered.windows(2).all(|pair| pair.first() != pair.last());
        let are_free = lowered
            .iter()
            .all(|name| !self.taken.contains(name) && !self.names.reserved.contains(name.as_str()));
        let have_room = self.taken.len() + lowered.len() <= MAX_FIELDS;
        if fit && are_distinct && are_free && have_room {
            self.taken.extend(lowered);
            return true;
        }
        false
    }
}
