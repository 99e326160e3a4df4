//! Shared parts of the benchmarks: input frames, references to compare with, measurement and
//! output.
//!
//! Every result is printed with the shape of its work and as a ratio to a reference measured in the
//! same run, alternating by round, because absolute figures depend on the machine and its load. A
//! run with any failure prints no results and exits with an error.
#![forbid(unsafe_code)]

pub mod columns;
pub mod documents;
pub mod drain;
pub mod drive;
pub mod footprint;
pub mod frames;
pub mod listening;
pub mod machine;
pub mod measure;
pub mod mutations;
pub mod relay;
pub mod report;
pub mod sender;
pub mod snappy;
mod window;
pub mod writes;

/// Any error; benchmarks only report it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
