//! Classes of the package whose objects the engine makes: frozen dataclasses and named tuples.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// A class of the package, imported once.
pub(crate) struct Class {
    module: &'static str,
    name: &'static str,
    class: PyOnceLock<Py<PyType>>,
}

impl Class {
    pub(crate) const fn new(module: &'static str, name: &'static str) -> Self {
        Self { module, name, class: PyOnceLock::new() }
    }

    /// Makes an object from its fields by name; see [`make`].
    pub(crate) fn call<'py>(&self, fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        self.class.import(fields.py(), self.module, self.name)?.call((), Some(fields))
    }
}

/// Makes an object of a [`Class`] from its fields by name.
macro_rules! make {
    ($class:expr, $py:expr, { $($field:ident: $value:expr),+ $(,)? }) => {{
        let fields = pyo3::types::PyDict::new($py);
        $(pyo3::types::PyDictMethods::set_item(
            &fields,
            pyo3::intern!($py, stringify!($field)),
            $value,
        )?;)+
        $class.call(&fields)
    }};
}

pub(crate) use make;
