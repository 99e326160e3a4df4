//! Why a document does not match its schema or format.

use std::fmt;

use jiter::{Jiter, JiterErrorType, JsonErrorType};

/// Why a document is malformed. Contains no part of the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    pub(super) problem: Problem,
    /// Byte offset in the document, from 0.
    pub(super) at: usize,
    /// Index of the schema's column, if the problem concerns one.
    pub(super) column: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The server does not mark it as JSON.
    NotJson,
    NotUtf8,
    Syntax(JsonErrorType),
    /// A value is not of this kind.
    Expected(&'static str),
    Duplicate,
    /// Its escapes are no characters.
    NotText,
    TooDeep,
    TooLarge,
}

impl Malformed {
    #[cold]
    pub(super) const fn new(problem: Problem, at: usize) -> Self {
        Self { problem, at, column: None }
    }

    /// A problem at the parser's current position.
    #[cold]
    pub(super) fn at(problem: Problem, json: &Jiter<'_>) -> Self {
        Self::new(problem, json.current_index())
    }

    /// The problem as text with the name of its column.
    pub(super) fn describe(&self, names: &[String]) -> String {
        let place = self.column.and_then(|column| names.get(column));
        let column = place.map(|name| format!("column {name:?}: ")).unwrap_or_default();
        match self.problem {
            Problem::NotJson => "the document is not JSON".to_owned(),
            _ => format!("the document is malformed: {column}{} at byte {}", self.problem, self.at),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJson => f.write_str("not JSON"),
            Self::NotUtf8 => f.write_str("not UTF-8"),
            // These two may contain a part of the document.
            Self::Syntax(JsonErrorType::DuplicateKey(_) | JsonErrorType::InternalError(_)) => {
                f.write_str("not JSON")
            }
            Self::Syntax(error) => write!(f, "{error}"),
            Self::Expected(what) => write!(f, "expected {what}"),
            Self::Duplicate => f.write_str("duplicate key"),
            Self::NotText => f.write_str("half a surrogate pair"),
            Self::TooDeep => f.write_str("nested too deep"),
            Self::TooLarge => f.write_str("takes too much memory"),
        }
    }
}

impl From<jiter::JiterError> for Malformed {
    #[cold]
    fn from(error: jiter::JiterError) -> Self {
        let problem = match error.error_type {
            JiterErrorType::JsonError(JsonErrorType::RecursionLimitExceeded) => Problem::TooDeep,
            JiterErrorType::JsonError(error) => Problem::Syntax(error),
            JiterErrorType::WrongType { .. } => Problem::Expected("something else"),
        };
        Self::new(problem, error.index)
    }
}

pub(super) type Result<T, E = Malformed> = std::result::Result<T, E>;
