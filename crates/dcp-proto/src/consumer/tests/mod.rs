//! Scripts of whole connections: what the server sends, what comes of it.

mod conformance;
mod delivery;
mod flow;
mod harness;
mod hostile;
mod rules;
mod runs;
