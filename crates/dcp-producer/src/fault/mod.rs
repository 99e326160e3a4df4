//! Faults as data: rules of a condition and a reaction, changeable while the cluster runs.
//!
//! * [`Rule`], [`Condition`] and [`Reaction`] describe faults; [`parse_rules`] reads them from
//!   JSON.
//! * `registry` holds the rules of a cluster and counts how often each fired.
//! * `tap` sits between the machines of one connection and its socket. Without rules, it costs one
//!   check of a version number per turn of the connection, and packets bypass it.

mod error;
mod json;
mod matching;
mod reaction;
mod registry;
mod rule;
mod tap;

pub use error::RuleError;
pub use json::parse_rules;
pub use reaction::{Direction, Reaction};
pub use rule::{Condition, ConnectionIs, Probability, Rule};

pub(crate) use registry::Faults;
pub(crate) use tap::{Refusal, RequestFault, Tap};
