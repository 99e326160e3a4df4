//! What connections call themselves in the server's logs and statistics.
//!
//! `cbstats` groups DCP connections by what is before the first colon (`dcpagg`), and logs whole
//! names, so that operators can search for the program, its version, the machine, the process and
//! what it does.

use crate::{ConnectOptions, Dial};

/// Longest name of a DCP connection that the server advises: its statistics put a prefix and a
/// suffix around it.
const MAX_LEN: usize = 200;

/// Longest name of this machine that is shown, in bytes.
const MAX_HOST_LEN: usize = 64;

/// Digits that make a name unique.
const UNIQUE_LEN: usize = 32;

/// Whether `name` can be the last part of a name.
pub(super) fn is_name(name: &str) -> bool {
    (1..=32).contains(&name.len()) && name.chars().all(is_plain)
}

/// `agent/host/pid/name`.
pub(super) fn of(options: &ConnectOptions) -> String {
    let ConnectOptions { agent, name, dialer, .. } = options;
    // What a run does must not depend on where it is repeated.
    let is_repeatable = dialer.as_deref().and_then(Dial::seed).is_some();
    let (host, pid) =
        if is_repeatable { (String::new(), 0) } else { (host_name(), std::process::id()) };
    let mut identity = format!("{agent}/{}/{pid}/{name}", plain(&host));
    let most = MAX_LEN - UNIQUE_LEN - 1;
    while identity.len() > most {
        identity.pop();
    }
    identity
}

/// A name that no other connection has.
pub(super) fn unique(identity: &str, number: u128) -> String {
    format!("{identity}/{number:032x}")
}

/// A name that needs no quotes anywhere; `-` if there is none.
fn plain(host: &str) -> String {
    let plain = host.chars().map(|c| if is_plain(c) { c } else { '_' }).take(MAX_HOST_LEN);
    if host.is_empty() { "-".to_owned() } else { plain.collect() }
}

fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric() || "-_.".contains(character)
}

/// This machine's name.
#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// This machine's name.
#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_names_say_who_it_is_and_are_unique() {
        let identity = of(&ConnectOptions::new("couchbase://h").with_name("orders"));
        let parts: Vec<_> = identity.split('/').collect();
        let pid = std::process::id().to_string();
        let program = concat!("dcp_rs:", env!("CARGO_PKG_VERSION"));
        assert_eq!((parts.len(), parts[0], parts[2], parts[3]), (4, program, &*pid, "orders"));
        assert!(!parts[1].is_empty() && parts[1].len() <= MAX_HOST_LEN, "{identity}");
        let name = unique(&identity, 7);
        assert_eq!(name, format!("{identity}/00000000000000000000000000000007"));
    }

    #[test]
    fn connection_names_are_never_longer_than_servers_take() {
        for agent in ["x".repeat(500), "\u{20ac}".repeat(100), String::new()] {
            let options = ConnectOptions { agent, ..ConnectOptions::new("couchbase://h") };
            let name = unique(&of(&options), u128::MAX);
            assert!(name.len() <= MAX_LEN, "{} bytes", name.len());
        }
    }

    #[test]
    fn connection_names_hold_nothing_that_has_to_be_quoted() {
        assert_eq!(plain("node-1.example"), "node-1.example");
        assert_eq!(plain("b\u{fc}ro 1/2:3\""), "b_ro_1_2_3_");
        assert_eq!(plain(""), "-");
        assert_eq!(plain(&"x".repeat(500)).len(), MAX_HOST_LEN);
        for name in ["", "a b", "a/b", "a:b", "caf\u{e9}", &"x".repeat(33)] {
            assert!(!is_name(name), "{name}");
        }
        assert!(is_name("orders-v2_a.b") && is_name(&"x".repeat(32)));
    }
}
