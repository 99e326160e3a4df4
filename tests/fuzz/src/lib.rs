//! What hostile bytes must not do: one function per fuzz target.
//!
//! Each takes any bytes and panics if something is not as it must be. libFuzzer calls them through
//! the programs in `fuzz/`, and an ordinary test replays the committed corpora through the same
//! functions. None of them does IO or sleeps.
#![forbid(unsafe_code)]

mod bytes_in;
mod checkpoints;
mod client;
mod cluster;
mod corpora;
mod documents;
mod framing;
mod login;
mod messages;
mod setup;
mod topology;
mod values;

pub use checkpoints::checkpoint;
pub use client::client;
pub use cluster::cluster;
pub use corpora::corpora;
pub use documents::documents;
pub use framing::framing;
pub use login::sasl;
pub use messages::messages;
pub use setup::setup;
pub use topology::{cluster_config, connection_string, manifest};
pub use values::{snappy, system_events, xattrs};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// Every target by its name.
pub const TARGETS: &[(&str, Target)] = &[
    ("framing", framing),
    ("messages", messages),
    ("system_events", system_events),
    ("xattrs", xattrs),
    ("snappy", snappy),
    ("sasl", sasl),
    ("cluster_config", cluster_config),
    ("manifest", manifest),
    ("checkpoint", checkpoint),
    ("connection_string", connection_string),
    ("documents", documents),
    ("setup", setup),
    ("client", client),
    ("cluster", cluster),
];

/// What may be held beyond four times what was received, in bytes.
const ALLOWANCE: usize = 64 << 10;

/// Fails if more was held than so many bytes received may cause.
#[track_caller]
fn assert_bounded(most: usize, received: usize) {
    let allowed = 4 * received + ALLOWANCE;
    assert!(most <= allowed, "{most} bytes held for {received} received, {allowed} are allowed");
}
