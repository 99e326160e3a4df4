//! Test support: scripted peers, recorded traffic and golden packets.
//!
//! * [`packet`] and [`words`] encode and decode whole packets, and messages in a short notation.
//! * [`conformance`] records which rows of the conformance tables were tested.
//! * [`peer`] is one end of a connection over any transport, and [`login`] the server's side of
//!   connection set-up.
//! * [`harness`] is a consumer's machine with a scripted server, [`bucket`] the data source of a
//!   producer's machine, and [`pair`] both machines under one simulated clock.
//! * [`tokens`] signs tokens, as an issuer does.
//! * [`traces`] reads the packets recorded from real servers.
//! * [`facts`] compares changes with facts recorded outside the stream.
//! * [`vectors`] reads golden packets, written by hand from the protocol's specification.
//! * [`scripted_server`] replays the server's side of a recording to a client over loopback.
//!
//! Both ends built in this workspace share one codec, so their agreement proves nothing about
//! bytes: recordings and golden packets do.
#![forbid(unsafe_code)]

#[cfg(feature = "machines")]
pub mod bucket;
mod canary;
pub mod conformance;
pub mod facts;
#[cfg(feature = "machines")]
pub mod harness;
pub mod login;
pub mod packet;
#[cfg(feature = "machines")]
pub mod pair;
pub mod peer;
pub mod scripted_server;
pub mod tokens;
pub mod traces;
pub mod vectors;
pub mod words;

use std::path::{Path, PathBuf};

/// Returns `value` after applying `change`, for options that cannot be built with struct syntax.
pub fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

/// A path in the workspace's `tests` folder.
fn tests_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(name)
}

/// Parses hex digits; spaces are ignored.
pub fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_ascii_whitespace())
        .map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|[high, low]| (high << 4) | low).collect())
}
