//! The producer's machines against rows of the protocol's conformance tables.
//!
//! Rows that are nothing but inputs and outcomes lie in `tests/rows/*.json`; a failure names the
//! row. Histories of collections are data as well, each with a test; other scenarios are tests of
//! their own, with the rows they stand for in their names.

mod client;
mod collection_rows;
mod collections;
mod flow_control;
mod hostile;
mod noop;
mod passes;
mod recorded;
mod replica;
mod rows;
mod scenarios;
mod script;
mod seen;
mod snapshots;
mod stream_end;
mod values;
