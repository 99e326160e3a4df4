//! Credentials and tokens from Python functions.

use std::sync::Arc;

use dcp_consumer::{
    Credentials, CredentialsError, CredentialsSource, ProvideCredentials, ProvideToken,
};
use pyo3::prelude::*;

/// A function without arguments that returns user name and password.
struct Callable(Py<PyAny>);

/// Calls `function` for the credentials of each connection.
pub(crate) fn callable(function: Py<PyAny>) -> CredentialsSource {
    CredentialsSource::Provider(Arc::new(Callable(function)))
}

/// A function without arguments that returns a token.
struct TokenCallable(Py<PyAny>);

/// Calls `function` for the token of each connection, and for newer ones.
pub(crate) fn token_callable(function: Py<PyAny>) -> CredentialsSource {
    CredentialsSource::TokenProvider(Arc::new(TokenCallable(function)))
}

impl ProvideCredentials for Callable {
    /// Called on its own thread, which may wait for the interpreter.
    fn credentials(&self) -> Result<Credentials, CredentialsError> {
        let (username, password) =
            call::<(String, String)>(&self.0, "credentials", "(username, password) as text")?;
        Ok(Credentials::new(username, password))
    }
}

impl ProvideToken for TokenCallable {
    /// Called on its own thread, which may wait for the interpreter.
    fn token(&self) -> Result<String, CredentialsError> {
        call(&self.0, "token", "a token as text")
    }
}

/// What a function returns, which must be `wanted`.
fn call<T: for<'a, 'py> FromPyObject<'a, 'py>>(
    function: &Py<PyAny>,
    name: &str,
    wanted: &str,
) -> Result<T, CredentialsError> {
    let given = Python::try_attach(|py| {
        let given = function.bind(py).call0().map_err(|error| raised(py, &error))?;
        // Do not show the value: it may be the secret.
        given.extract::<T>().map_err(|_| {
            let class = given.get_type().name().map_or_else(|_| String::new(), |n| n.to_string());
            format!("it must return {wanted}, not {class}")
        })
    });
    let given = given.unwrap_or_else(|| Err("Python is shutting down".to_owned()));
    given.map_err(|error| format!("{name}(): {error}").into())
}

/// The exception that a function raised, as the last line of its traceback.
fn raised(py: Python<'_>, error: &PyErr) -> String {
    let class = error.get_type(py).name().map_or_else(|_| "error".to_owned(), |n| n.to_string());
    match error.value(py).str().map(|text| text.to_string_lossy().into_owned()) {
        Ok(text) if !text.is_empty() => format!("{class}: {text}"),
        _ => class,
    }
}
