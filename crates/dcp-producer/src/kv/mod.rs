//! Answers to all requests except DCP.
//!
//! A [`Session`] takes whole requests in order and appends the answer to each to a buffer. It does
//! no IO and starts no tasks. Answers to durable writes may come later than others.

mod cluster_map;
mod collections;
mod command;
mod counter;
mod credentials;
mod document;
mod durability;
mod error_map;
mod failure;
mod hello;
mod login;
mod meta;
mod pipeline;
mod seqnos;
mod session;
mod stats;
mod subdoc;
mod tokens;

pub(crate) use credentials::Credentials;
pub(crate) use session::{Flow, MapPush, Session};
