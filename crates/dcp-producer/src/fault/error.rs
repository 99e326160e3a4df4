//! Errors in fault rules.

use thiserror::Error;

/// Why a list of fault rules was refused. The previous rules stay in force.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RuleError {
    /// The text is not JSON.
    #[error("the fault rules are not JSON")]
    Json(#[from] serde_json::Error),
    /// An unknown name.
    #[error("{path}: there is no {what} {name:?}; did you mean {nearest:?}?")]
    UnknownName {
        /// Where, as `[2].condition`.
        path: String,
        /// What kind of name it should be.
        what: &'static str,
        /// The name.
        name: String,
        /// The known name that looks most like it.
        nearest: String,
    },
    /// A required member is missing.
    #[error("{path}: {member:?} is missing")]
    Missing {
        /// Where.
        path: String,
        /// The member.
        member: &'static str,
    },
    /// A member has an invalid value, or one that contradicts the rest of the rule.
    #[error("{path}: must be {expected}")]
    Invalid {
        /// Where.
        path: String,
        /// What it must be.
        expected: String,
    },
}

impl RuleError {
    pub(super) fn invalid(path: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), expected: expected.into() }
    }
}
