//! The wire crate against recorded traffic, golden packets and arbitrary bytes.
#![expect(clippy::print_stdout, reason = "a test over a folder tells how much it has seen")]

mod traces;
