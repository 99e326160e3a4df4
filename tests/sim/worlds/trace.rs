//! What happened in a world, for people.

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;
use std::sync::LazyLock;

use dcp_wire::describe::{Keys, describe};
use dcp_wire::{Frame, MAX_BODY_LEN};
use tokio::time::Instant;

/// Set to print what happens as it happens.
pub(crate) const VERBOSE: &str = "DCP_SIM_VERBOSE";

/// Set to print every packet that passes, too.
pub(crate) const PACKETS: &str = "DCP_SIM_PACKETS";

/// Prints a packet of a connection, where that is wanted.
pub(crate) fn packet(connection: u64, is_down: bool, packet: &[u8]) {
    static SHOWN: LazyLock<bool> = LazyLock::new(|| std::env::var_os(PACKETS).is_some());
    if !*SHOWN {
        return;
    }
    let direction = if is_down { "to client" } else { "to node" };
    let described = match Frame::parse(packet, MAX_BODY_LEN) {
        Ok(Some((frame, _))) => describe(&frame, Keys::WithCollection).to_string(),
        unreadable => format!("{unreadable:?}"),
    };
    let _ =
        writeln!(std::io::stderr(), "{:>11} connection {connection} {direction}: {described}", "");
}

/// What happened, with its simulated time.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    lines: Rc<RefCell<Vec<String>>>,
    begin: Instant,
    is_shown: bool,
}

impl Trace {
    pub(crate) fn new() -> Self {
        let is_shown = std::env::var_os(VERBOSE).is_some();
        Self { lines: Rc::default(), begin: Instant::now(), is_shown }
    }

    pub(crate) fn add(&self, what: impl Into<String>) {
        let line = format!("{:>9.3} {}", self.begin.elapsed().as_secs_f64(), what.into());
        if self.is_shown {
            // Not by a macro: what those print is kept for the end of the test.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
        self.lines.borrow_mut().push(line);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        self.lines.take()
    }
}
