//! Over loopback.
fn main() {}
