//! Operations on one JSON text.

use std::ops::Range;

use dcp_wire::{Opcode, Status};
use serde_json::Value;

use super::json_text::{Container, Located, container, locate};
use super::path::{self, Component};
use crate::value::is_json;

/// Sub-document opcodes that occur only inside multi-path requests here.
pub(super) mod op {
    use dcp_wire::Opcode;

    pub(crate) const GET: Opcode = Opcode(0xc5);
    pub(crate) const EXISTS: Opcode = Opcode(0xc6);
    pub(crate) const DICT_ADD: Opcode = Opcode(0xc7);
    pub(crate) const DICT_UPSERT: Opcode = Opcode(0xc8);
    pub(crate) const DELETE: Opcode = Opcode(0xc9);
    pub(crate) const REPLACE: Opcode = Opcode(0xca);
    pub(crate) const ARRAY_PUSH_LAST: Opcode = Opcode(0xcb);
    pub(crate) const ARRAY_PUSH_FIRST: Opcode = Opcode(0xcc);
    pub(crate) const ARRAY_INSERT: Opcode = Opcode(0xcd);
    pub(crate) const ARRAY_ADD_UNIQUE: Opcode = Opcode(0xce);
    pub(crate) const COUNTER: Opcode = Opcode(0xcf);
    pub(crate) const GET_COUNT: Opcode = Opcode(0xd2);
}

/// Reads the target of a path.
pub(super) fn look_up(text: &[u8], opcode: Opcode, path: &[u8]) -> Result<Vec<u8>, Status> {
    let components = path::parse(path)?;
    let Located::Value { range, .. } = locate(text, &components)? else {
        return Err(Status::SUBDOC_PATH_ENOENT);
    };
    match opcode {
        op::GET => Ok(text.get(range).unwrap_or_default().to_vec()),
        op::EXISTS => Ok(Vec::new()),
        op::GET_COUNT => {
            let found = container(text, range.start).ok_or(Status::SUBDOC_PATH_MISMATCH)?;
            Ok(found.elements.len().to_string().into_bytes())
        }
        _ => Err(Status::SUBDOC_INVALID_COMBO),
    }
}

/// Changes the target of a path; returns the operation's result for the client.
pub(super) fn mutate(
    text: &mut Vec<u8>,
    opcode: Opcode,
    path: &[u8],
    value: &[u8],
    create_path: bool,
) -> Result<Vec<u8>, Status> {
    let components = path::parse(path)?;
    let mut edit = Edit { text, components: &components, value, create_path };
    match opcode {
        op::DICT_ADD => edit.put(false)?,
        op::DICT_UPSERT => edit.put(true)?,
        op::DELETE => edit.delete()?,
        op::REPLACE => edit.replace()?,
        op::ARRAY_PUSH_LAST => edit.push(false)?,
        op::ARRAY_PUSH_FIRST => edit.push(true)?,
        op::ARRAY_INSERT => edit.insert()?,
        op::ARRAY_ADD_UNIQUE => edit.add_unique()?,
        op::COUNTER => return edit.count(),
        _ => return Err(Status::SUBDOC_INVALID_COMBO),
    }
    Ok(Vec::new())
}

struct Edit<'a> {
    text: &'a mut Vec<u8>,
    components: &'a [Component],
    value: &'a [u8],
    create_path: bool,
}

impl Edit<'_> {
    fn locate(&self) -> Result<Located, Status> {
        locate(self.text, self.components)
    }

    fn checked_value(&self) -> Result<&[u8], Status> {
        if is_json(self.value) { Ok(self.value) } else { Err(Status::SUBDOC_VALUE_CANTINSERT) }
    }

    /// DICT_ADD, DICT_UPSERT.
    fn put(&mut self, may_exist: bool) -> Result<(), Status> {
        if !matches!(self.components.last(), Some(Component::Name(_))) {
            return Err(Status::SUBDOC_PATH_EINVAL);
        }
        let value = self.checked_value()?.to_vec();
        match self.locate()? {
            Located::Value { .. } if !may_exist => Err(Status::SUBDOC_PATH_EEXISTS),
            Located::Value { range, .. } => {
                self.splice(range, &value);
                Ok(())
            }
            Located::Missing { container, component } => self.create(&container, component, &value),
        }
    }

    fn delete(&mut self) -> Result<(), Status> {
        match self.locate()? {
            Located::Missing { .. } => Err(Status::SUBDOC_PATH_ENOENT),
            Located::Value { place: None, .. } => Err(Status::SUBDOC_PATH_EINVAL),
            Located::Value { place: Some((container, index)), .. } => {
                let end_of = |index: usize| container.elements.get(index).map(|e| e.whole.end);
                let start_of = |index: usize| container.elements.get(index).map(|e| e.whole.start);
                // The comma goes with it: the one after, or for the last element the one before.
                let start = index
                    .checked_sub(1)
                    .and_then(end_of)
                    .filter(|_| index + 1 == container.elements.len());
                let start = start.or_else(|| start_of(index)).unwrap_or(container.open + 1);
                let end = start_of(index + 1).or_else(|| end_of(index)).unwrap_or(start);
                self.splice(start..end, b"");
                Ok(())
            }
        }
    }

    fn replace(&mut self) -> Result<(), Status> {
        if self.components.is_empty() {
            return Err(Status::SUBDOC_PATH_EINVAL);
        }
        let value = self.checked_value()?.to_vec();
        match self.locate()? {
            Located::Missing { .. } => Err(Status::SUBDOC_PATH_ENOENT),
            Located::Value { range, .. } => {
                self.splice(range, &value);
                Ok(())
            }
        }
    }

    /// ARRAY_PUSH_LAST, ARRAY_PUSH_FIRST.
    fn push(&mut self, first: bool) -> Result<(), Status> {
        // Several values with commas between them may be pushed at once.
        let list = [b"[".as_slice(), self.value, b"]"].concat();
        if !is_json(&list) || self.value.iter().all(u8::is_ascii_whitespace) {
            return Err(Status::SUBDOC_VALUE_CANTINSERT);
        }
        match self.locate()? {
            Located::Value { range, .. } => {
                let array = self.array_at(range.start)?;
                let index = if first { 0 } else { array.elements.len() };
                self.insert_element(&array, index, self.value);
                Ok(())
            }
            Located::Missing { container, component } if self.create_path => {
                self.create(&container, component, &list)
            }
            Located::Missing { .. } => Err(Status::SUBDOC_PATH_ENOENT),
        }
    }

    /// ARRAY_INSERT: the elements from the index on move up.
    fn insert(&mut self) -> Result<(), Status> {
        let Some((&Component::Index(index), parent)) = self.components.split_last() else {
            return Err(Status::SUBDOC_PATH_EINVAL);
        };
        let value = self.checked_value()?.to_vec();
        let Located::Value { range, .. } = locate(self.text, parent)? else {
            return Err(Status::SUBDOC_PATH_ENOENT);
        };
        let array = self.array_at(range.start)?;
        if index > array.elements.len() {
            return Err(Status::SUBDOC_PATH_ENOENT);
        }
        self.insert_element(&array, index, &value);
        Ok(())
    }

    fn add_unique(&mut self) -> Result<(), Status> {
        let value = self.checked_value()?.to_vec();
        let parsed: Value =
            serde_json::from_slice(&value).map_err(|_| Status::SUBDOC_VALUE_CANTINSERT)?;
        if parsed.is_array() || parsed.is_object() {
            return Err(Status::SUBDOC_VALUE_CANTINSERT);
        }
        match self.locate()? {
            Located::Value { range, .. } => {
                let array = self.array_at(range.start)?;
                for element in &array.elements {
                    let text = self.text.get(element.value.clone()).unwrap_or_default();
                    match serde_json::from_slice::<Value>(text) {
                        Ok(Value::Array(_) | Value::Object(_)) | Err(_) => {
                            return Err(Status::SUBDOC_PATH_MISMATCH);
                        }
                        Ok(present) if present == parsed => {
                            return Err(Status::SUBDOC_PATH_EEXISTS);
                        }
                        Ok(_) => {}
                    }
                }
                self.insert_element(&array, array.elements.len(), &value);
                Ok(())
            }
            Located::Missing { container, component } if self.create_path => {
                let list = [b"[".as_slice(), &value, b"]"].concat();
                self.create(&container, component, &list)
            }
            Located::Missing { .. } => Err(Status::SUBDOC_PATH_ENOENT),
        }
    }

    fn count(&mut self) -> Result<Vec<u8>, Status> {
        let delta: i64 = str::from_utf8(self.value)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|&delta| delta != 0)
            .ok_or(Status::SUBDOC_DELTA_EINVAL)?;
        match self.locate()? {
            Located::Value { range, .. } => {
                let text = self.text.get(range.clone()).unwrap_or_default();
                let Ok(Value::Number(number)) = serde_json::from_slice(text) else {
                    return Err(Status::SUBDOC_PATH_MISMATCH);
                };
                if number.is_f64() {
                    return Err(Status::SUBDOC_PATH_MISMATCH);
                }
                let number = number.as_i64().ok_or(Status::SUBDOC_NUM_ERANGE)?;
                let sum = number.checked_add(delta).ok_or(Status::SUBDOC_VALUE_CANTINSERT)?;
                let sum = sum.to_string().into_bytes();
                self.splice(range, &sum);
                Ok(sum)
            }
            Located::Missing { container, component } => {
                let sum = delta.to_string().into_bytes();
                self.create(&container, component, &sum)?;
                Ok(sum)
            }
        }
    }

    /// Adds `value` under the components from number `component` on, the first of which is missing
    /// in `container`; creates objects in between only if requested.
    fn create(
        &mut self,
        container: &Container,
        component: usize,
        value: &[u8],
    ) -> Result<(), Status> {
        let missing = self.components.get(component..).unwrap_or_default();
        if missing.len() > 1 && !self.create_path {
            return Err(Status::SUBDOC_PATH_ENOENT);
        }
        let mut member = value.to_vec();
        for (number, component) in missing.iter().enumerate().rev() {
            let Component::Name(name) = component else {
                return Err(Status::SUBDOC_PATH_ENOENT);
            };
            let name = Value::from(String::from_utf8_lossy(name)).to_string();
            member = [name.as_bytes(), b":", &member].concat();
            if number > 0 {
                member = [b"{".as_slice(), &member, b"}"].concat();
            }
        }
        self.insert_element(container, container.elements.len(), &member);
        Ok(())
    }

    fn array_at(&self, at: usize) -> Result<Container, Status> {
        container(self.text, at)
            .filter(|container| !container.is_object)
            .ok_or(Status::SUBDOC_PATH_MISMATCH)
    }

    /// Puts `element` before the one of that index, or at the end.
    fn insert_element(&mut self, container: &Container, index: usize, element: &[u8]) {
        let mut inserted = element.to_vec();
        let at = match container.elements.get(index) {
            Some(next) => {
                inserted.push(b',');
                next.whole.start
            }
            None => match container.elements.last() {
                Some(last) => {
                    inserted.insert(0, b',');
                    last.whole.end
                }
                None => container.close,
            },
        };
        self.splice(at..at, &inserted);
    }

    fn splice(&mut self, range: Range<usize>, with: &[u8]) {
        self.text.splice(range, with.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str, opcode: Opcode, path: &str, value: &str) -> Result<String, Status> {
        let mut text = text.as_bytes().to_vec();
        mutate(&mut text, opcode, path.as_bytes(), value.as_bytes(), true)?;
        assert!(is_json(&text), "{}", text.escape_ascii());
        Ok(String::from_utf8(text).unwrap())
    }

    fn found(text: &str, opcode: Opcode, path: &str) -> Result<String, Status> {
        look_up(text.as_bytes(), opcode, path.as_bytes())
            .map(|found| String::from_utf8(found).unwrap())
    }

    #[test]
    fn subdoc_lookup_returns_the_text_as_it_stands() {
        let text = r#" {"a" : {"b": [1.0, {"c\"d": "x,}]"}]}, "e":null} "#;
        for (path, expected) in [
            ("a.b[0]", "1.0"),
            ("a.b[-1].`c\"d`", "\"x,}]\""),
            ("a.b", r#"[1.0, {"c\"d": "x,}]"}]"#),
            ("e", "null"),
        ] {
            assert_eq!(found(text, op::GET, path).as_deref(), Ok(expected), "{path}");
        }
        assert_eq!(found(text, op::GET_COUNT, "a.b").as_deref(), Ok("2"));
        assert_eq!(found(text, op::GET_COUNT, "").as_deref(), Ok("2"));
        assert_eq!(found(text, op::EXISTS, "a.x"), Err(Status::SUBDOC_PATH_ENOENT));
        assert_eq!(found(text, op::GET, "a.b[2]"), Err(Status::SUBDOC_PATH_ENOENT));
        assert_eq!(found(text, op::GET, "a[0]"), Err(Status::SUBDOC_PATH_MISMATCH));
        assert_eq!(found(text, op::GET, "e.f"), Err(Status::SUBDOC_PATH_MISMATCH));
        assert_eq!(found(text, op::GET_COUNT, "e"), Err(Status::SUBDOC_PATH_MISMATCH));
    }

    #[test]
    fn subdoc_edit_leaves_the_rest_of_the_text_alone() {
        let text = r#"{ "a": 1.50, "b": [1, 2, 3], "c": {} }"#;
        for (opcode, path, value, expected) in [
            (op::DICT_UPSERT, "a", "2", r#"{ "a": 2, "b": [1, 2, 3], "c": {} }"#),
            (op::DICT_ADD, "c.x.y", "0", r#"{ "a": 1.50, "b": [1, 2, 3], "c": {"x":{"y":0}} }"#),
            (op::DICT_ADD, "d", "0", r#"{ "a": 1.50, "b": [1, 2, 3], "c": {},"d":0 }"#),
            (op::REPLACE, "b[1]", "9", r#"{ "a": 1.50, "b": [1, 9, 3], "c": {} }"#),
            (op::DELETE, "a", "", r#"{ "b": [1, 2, 3], "c": {} }"#),
            (op::DELETE, "b[-1]", "", r#"{ "a": 1.50, "b": [1, 2], "c": {} }"#),
            (op::DELETE, "c", "", r#"{ "a": 1.50, "b": [1, 2, 3] }"#),
            (op::ARRAY_PUSH_FIRST, "b", "7,8", r#"{ "a": 1.50, "b": [7,8,1, 2, 3], "c": {} }"#),
            (op::ARRAY_PUSH_LAST, "b", "4", r#"{ "a": 1.50, "b": [1, 2, 3,4], "c": {} }"#),
            (op::ARRAY_PUSH_LAST, "c.l", "4", r#"{ "a": 1.50, "b": [1, 2, 3], "c": {"l":[4]} }"#),
            (op::ARRAY_INSERT, "b[1]", "0", r#"{ "a": 1.50, "b": [1, 0,2, 3], "c": {} }"#),
            (op::ARRAY_INSERT, "b[3]", "0", r#"{ "a": 1.50, "b": [1, 2, 3,0], "c": {} }"#),
            (op::ARRAY_ADD_UNIQUE, "b", "5", r#"{ "a": 1.50, "b": [1, 2, 3,5], "c": {} }"#),
            (op::COUNTER, "b[0]", "-3", r#"{ "a": 1.50, "b": [-2, 2, 3], "c": {} }"#),
            (op::COUNTER, "c.n", "5", r#"{ "a": 1.50, "b": [1, 2, 3], "c": {"n":5} }"#),
        ] {
            assert_eq!(edited(text, opcode, path, value).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn subdoc_edits_that_are_impossible_are_refused_with_their_reason() {
        let text = r#"{"a":"x","b":[1,{}],"f":1.5,"big":18446744073709551615}"#;
        for (opcode, path, value, status) in [
            (op::DICT_ADD, "a", "1", Status::SUBDOC_PATH_EEXISTS),
            (op::DICT_UPSERT, "a.b", "1", Status::SUBDOC_PATH_MISMATCH),
            (op::DICT_UPSERT, "", "1", Status::SUBDOC_PATH_EINVAL),
            (op::DICT_UPSERT, "b[0]", "1", Status::SUBDOC_PATH_EINVAL),
            (op::DICT_UPSERT, "n[0].x", "1", Status::SUBDOC_PATH_ENOENT),
            (op::DICT_UPSERT, "n", "{", Status::SUBDOC_VALUE_CANTINSERT),
            (op::REPLACE, "n", "1", Status::SUBDOC_PATH_ENOENT),
            (op::DELETE, "n", "", Status::SUBDOC_PATH_ENOENT),
            (op::DELETE, "", "", Status::SUBDOC_PATH_EINVAL),
            (op::ARRAY_PUSH_LAST, "a", "1", Status::SUBDOC_PATH_MISMATCH),
            (op::ARRAY_PUSH_LAST, "b", "1,", Status::SUBDOC_VALUE_CANTINSERT),
            (op::ARRAY_INSERT, "b[3]", "1", Status::SUBDOC_PATH_ENOENT),
            (op::ARRAY_INSERT, "b[-1]", "1", Status::SUBDOC_PATH_EINVAL),
            (op::ARRAY_ADD_UNIQUE, "b", "1", Status::SUBDOC_PATH_EEXISTS),
            (op::ARRAY_ADD_UNIQUE, "b", "2", Status::SUBDOC_PATH_MISMATCH),
            (op::ARRAY_ADD_UNIQUE, "b", "[]", Status::SUBDOC_VALUE_CANTINSERT),
            (op::COUNTER, "a", "1", Status::SUBDOC_PATH_MISMATCH),
            (op::COUNTER, "f", "1", Status::SUBDOC_PATH_MISMATCH),
            (op::COUNTER, "big", "1", Status::SUBDOC_NUM_ERANGE),
            (op::COUNTER, "n", "0", Status::SUBDOC_DELTA_EINVAL),
            (op::COUNTER, "n", "x", Status::SUBDOC_DELTA_EINVAL),
        ] {
            assert_eq!(edited(text, opcode, path, value), Err(status), "{opcode:?} {path}");
        }
    }
}
