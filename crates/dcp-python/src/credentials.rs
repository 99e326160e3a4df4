//! Credentials from a Python function.

use std::sync::Arc;

use dcp_consumer::{Credentials, CredentialsError, CredentialsSource, ProvideCredentials};
use pyo3::prelude::*;

/// A function without arguments that returns user name and password.
struct Callable(Py<PyAny>);

/// Calls `function` for the credentials of each connection.
pub(crate) fn callable(function: Py<PyAny>) -> CredentialsSource {
    CredentialsSource::Provider(Arc::new(Callable(function)))
}

impl ProvideCredentials for Callable {
    /// Called on its own thread, which may wait for the interpreter.
    fn credentials(&self) -> Result<Credentials, CredentialsError> {
        let given = Python::try_attach(|py| {
            let given = self.0.bind(py).call0().map_err(|error| raised(py, &error))?;
            // Do not show the value: it may be the password.
            given.extract::<(String, String)>().map_err(|_| {
                let class =
                    given.get_type().name().map_or_else(|_| String::new(), |n| n.to_string());
                format!("it must return (username, password) as text, not {class}")
            })
        });
        let given = given.unwrap_or_else(|| Err("Python is shutting down".to_owned()));
        let (username, password) = given.map_err(|error| format!("credentials(): {error}"))?;
        Ok(Credentials::new(username, password))
    }
}

/// The exception that a function raised, as the last line of its traceback.
fn raised(py: Python<'_>, error: &PyErr) -> String {
    let class = error.get_type(py).name().map_or_else(|_| "error".to_owned(), |n| n.to_string());
    match error.value(py).str().map(|text| text.to_string_lossy().into_owned()) {
        Ok(text) if !text.is_empty() => format!("{class}: {text}"),
        _ => class,
    }
}
