//! The wire crate against recorded traffic, golden packets and arbitrary bytes.

mod traces;
