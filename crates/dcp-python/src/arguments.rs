//! Options passed from Python by name. Each is declared once, where it is read, with its default
//! and its range. Python's signatures repeat the defaults for `help()`; a test compares the two.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use dcp_wire::Vbid;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};

use crate::error::Failure;

/// The given options, and the defaults of all options that were read.
pub(crate) struct Arguments<'py> {
    given: Bound<'py, PyDict>,
    defaults: Bound<'py, PyDict>,
}

impl<'py> Arguments<'py> {
    pub(crate) fn new(given: Bound<'py, PyDict>) -> Self {
        let defaults = PyDict::new(given.py());
        Self { given, defaults }
    }

    pub(crate) fn py(&self) -> Python<'py> {
        self.given.py()
    }

    /// The defaults of the options that were read.
    pub(crate) fn into_defaults(self) -> Bound<'py, PyDict> {
        self.defaults
    }

    /// An option's value, if it was given.
    pub(crate) fn get(
        &self,
        name: &str,
        default: impl IntoPyObject<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.defaults.set_item(name, default)?;
        self.given.get_item(name)
    }

    /// The value of an option without a default, if it was given and is not `None`.
    pub(crate) fn optional(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(self.get(name, self.py().None())?.filter(|value| !value.is_none()))
    }

    pub(crate) fn flag(&self, name: &str, default: bool) -> PyResult<bool> {
        let Some(value) = self.get(name, default)? else { return Ok(default) };
        value.extract().map_err(|_| wrong_type(name, &value, "True or False"))
    }

    pub(crate) fn integer<T>(
        &self,
        name: &str,
        default: T,
        range: RangeInclusive<u64>,
    ) -> PyResult<T>
    where
        T: TryFrom<u64> + IntoPyObject<'py> + Copy,
    {
        let given = self.get(name, default)?;
        given.map_or(Ok(default), |value| integer(name, &value, &range))
    }

    /// A duration in seconds.
    pub(crate) fn seconds(
        &self,
        name: &str,
        default: Duration,
        range: RangeInclusive<f64>,
    ) -> PyResult<Duration> {
        let Some(value) = self.get(name, default.as_secs_f64())? else { return Ok(default) };
        if !(value.is_instance_of::<PyFloat>() || is_integer(&value)) {
            return Err(wrong_type(name, &value, "a number of seconds"));
        }
        let seconds = value.extract().ok().filter(|seconds| range.contains(seconds));
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            invalid(name, format!("{value} is not from {low} to {high} seconds"), &value)
        })
    }

    /// One of a few keywords, mapped to its value.
    pub(crate) fn word<T: Copy + PartialEq>(
        &self,
        name: &str,
        default: T,
        words: &[(&'static str, T)],
    ) -> PyResult<T> {
        let word = words.iter().find(|(_, meaning)| *meaning == default).map(|(word, _)| *word);
        let given = self.get(name, word)?;
        given.map_or(Ok(default), |value| one_of(name, &value, words, None))
    }

    /// The same without a default.
    pub(crate) fn optional_word<T: Copy>(
        &self,
        name: &str,
        words: &[(&'static str, T)],
    ) -> PyResult<Option<T>> {
        self.optional(name)?.map(|value| one_of(name, &value, words, None)).transpose()
    }

    pub(crate) fn text(&self, name: &str, default: &str) -> PyResult<String> {
        let given = self.get(name, default)?;
        given.map_or_else(|| Ok(default.to_owned()), |value| text(name, &value))
    }

    pub(crate) fn optional_text(&self, name: &str) -> PyResult<Option<String>> {
        self.optional(name)?.map(|value| text(name, &value)).transpose()
    }

    pub(crate) fn path(&self, name: &str) -> PyResult<Option<PathBuf>> {
        let path = |value: Bound<'py, PyAny>| {
            value.extract().map_err(|_| wrong_type(name, &value, "a path"))
        };
        self.optional(name)?.map(path).transpose()
    }

    /// A string, or the strings in any iterable.
    pub(crate) fn one_or_more(&self, name: &str, expected: &str) -> PyResult<Option<Vec<String>>> {
        self.optional(name)?.map(|value| one_or_more(name, &value, expected)).transpose()
    }

    /// Names in any iterable except a string.
    pub(crate) fn names(&self, name: &str) -> PyResult<Option<Vec<String>>> {
        self.optional(name)?.map(|value| names(name, &value, "a list of names")).transpose()
    }

    pub(crate) fn vbuckets(&self) -> PyResult<Option<Vec<Vbid>>> {
        let Some(given) = self.optional("vbuckets")? else { return Ok(None) };
        let numbers = each("vbuckets", &given, "a list of vBuckets", |number| {
            integer("vbuckets", number, &VBUCKETS).map(Vbid)
        })?;
        if numbers.is_empty() {
            return Err(invalid("vbuckets", "names no vBucket", &given));
        }
        Ok(Some(numbers))
    }
}

/// The range of vBucket numbers.
pub(crate) const VBUCKETS: RangeInclusive<u64> = 0..=u16::MAX as u64;

/// A day in seconds.
pub(crate) const DAY: f64 = 86_400.0;

/// The range of 64-bit numbers.
pub(crate) const ANY: RangeInclusive<u64> = 0..=u64::MAX;

pub(crate) fn integer<T: TryFrom<u64>>(
    name: &str,
    value: &Bound<'_, PyAny>,
    range: &RangeInclusive<u64>,
) -> PyResult<T> {
    integer_in(name, "", value, range)
}

/// A number in an option; errors call it `part`, which is text such as `seqno: `.
pub(crate) fn integer_in<T: TryFrom<u64>>(
    name: &str,
    part: &str,
    value: &Bound<'_, PyAny>,
    range: &RangeInclusive<u64>,
) -> PyResult<T> {
    if !is_integer(value) {
        let problem = format!("{part}must be a whole number, not {}", class_of(value));
        return Err(invalid(name, problem, value));
    }
    let number = value.extract().ok().filter(|number| range.contains(number));
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        let (low, high) = (range.start(), range.end());
        invalid(name, format!("{part}{value} is not from {low} to {high}"), value)
    })
}

fn is_integer(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>()
}

pub(crate) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.extract().map_err(|_| wrong_type(name, value, "text"))
}

/// A string, or the strings in any iterable.
pub(crate) fn one_or_more(
    name: &str,
    value: &Bound<'_, PyAny>,
    expected: &str,
) -> PyResult<Vec<String>> {
    if value.is_instance_of::<PyString>() {
        return Ok(vec![text(name, value)?]);
    }
    names(name, value, expected)
}

pub(crate) fn names(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyResult<Vec<String>> {
    if value.is_instance_of::<PyString>() {
        return Err(wrong_type(name, value, expected));
    }
    each(name, value, expected, |item| text(name, item))
}

/// The items of any iterable.
fn each<'py, T>(
    name: &str,
    value: &Bound<'py, PyAny>,
    expected: &str,
    item: impl Fn(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let items = value.try_iter().map_err(|_| wrong_type(name, value, expected))?;
    items.map(|each| item(&each?)).collect()
}

/// The value of a keyword; `or` describes other accepted values. Suggests the most similar keyword.
pub(crate) fn one_of<T: Copy>(
    name: &str,
    value: &Bound<'_, PyAny>,
    words: &[(&'static str, T)],
    or: Option<&str>,
) -> PyResult<T> {
    let mut choices: Vec<String> = words.iter().map(|(word, _)| format!("'{word}'")).collect();
    choices.extend(or.map(str::to_owned));
    let last = choices.pop().unwrap_or_default();
    let expected =
        if choices.is_empty() { last } else { format!("{} or {last}", choices.join(", ")) };
    let Ok(given) = value.extract::<String>() else {
        return Err(wrong_type(name, value, &expected));
    };
    if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == given) {
        return Ok(*meaning);
    }
    let known: Vec<String> = words.iter().map(|(word, _)| word.to_lowercase()).collect();
    let near: Vec<String> = value
        .py()
        .import("difflib")?
        .call_method1("get_close_matches", (given.to_lowercase(), known, 1, 0.7))?
        .extract()?;
    let near = words.iter().find(|(word, _)| near.contains(&word.to_lowercase()));
    let near = near.map_or_else(String::new, |(word, _)| format!("; did you mean '{word}'?"));
    Err(invalid(name, format!("must be {expected}, not {}{near}", value.repr()?), value))
}

/// The error for a value of the wrong type; the value itself is not shown.
pub(crate) fn wrong_type(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    invalid(name, format!("must be {expected}, not {}", class_of(value)), value)
}

fn class_of(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "that".to_owned(), |name| name.to_string())
}

/// The error for a wrong value.
pub(crate) fn invalid(option: &str, problem: impl Into<String>, value: &Bound<'_, PyAny>) -> PyErr {
    Failure::option(&[option], problem).with_value(value).into()
}

/// The error for options that do not go together.
pub(crate) fn conflict(options: &[&str], problem: impl Into<String>) -> PyErr {
    Failure::option(options, problem).into()
}
