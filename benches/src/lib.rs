//! What the benchmarks share: frames to feed, the references they are compared with, measuring
//! and printing.
//!
//! Every figure is printed with the shape of its work and as a ratio to a reference measured in
//! the same run, round by round in turn, because absolute figures move with the machine and its
//! load. A run in which anything failed prints no figures and exits with an error.
#![forbid(unsafe_code)]

pub mod columns;
pub mod drain;
pub mod drive;
pub mod footprint;
pub mod frames;
pub mod listening;
pub mod machine;
pub mod measure;
pub mod relay;
pub mod report;
pub mod sender;
pub mod snappy;
mod window;
pub mod writes;

/// Whatever went wrong; a benchmark only reports it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
