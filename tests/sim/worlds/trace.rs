//! What happened in a world, for people.

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;

use tokio::time::Instant;

/// Set to print what happens as it happens.
pub(crate) const VERBOSE: &str = "DCP_SIM_VERBOSE";

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
