//! Forwards the engine's log records to Python's `logging`.
//!
//! Records are made on any thread, including the runtime's, and under the engine's locks, whereas
//! passing one to Python requires the interpreter, for which a thread may wait for seconds. So they
//! are put into a [`Queue`], and a dedicated thread per process delivers them.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Event, Level, Metadata, callsite};

use super::Process;
use super::log_queue::{Entry, Queue, Value};

/// Interval between checks of the levels of Python's loggers.
const LOOK: Duration = Duration::from_millis(200);

/// Maximum time that a returning call waits for its records to reach Python. It must be bounded: a
/// handler may wait for a lock that the caller holds.
const FLUSH: Duration = Duration::from_millis(100);

/// Maximum time that the interpreter's shutdown waits for the remaining records.
const END: Duration = Duration::from_secs(2);

/// Prefix of all targets of the engine.
const ALL: &str = "dcp_";

/// The module of the Python package that uses `logging`.
const MODULE: &str = "dcp_rs._logging";

thread_local! {
    /// Whether this is the delivering thread, which cannot wait for itself.
    static HANDS_ON: Cell<bool> = const { Cell::new(false) };
}

/// The finest level that any logger accepts, by its place in [`LEVELS`].
static FINEST: AtomicU8 = AtomicU8::new(0);

const LEVELS: [LevelFilter; 5] = [
    LevelFilter::OFF,
    LevelFilter::ERROR,
    LevelFilter::WARN,
    LevelFilter::INFO,
    LevelFilter::DEBUG,
];

/// Receives events from all threads; each goes to the queue of its process.
struct Sink;

/// Installs the sink. It accepts no events before the process has a runtime.
pub(crate) fn install() {
    // A second import of the module keeps the first one.
    let _installed = set_global_default(Sink);
}

/// Sets the finest level. Disabled events then cost only a comparison.
fn set_finest(level: LevelFilter) {
    let place = LEVELS.iter().position(|each| *each == level).unwrap_or_default();
    let place = u8::try_from(place).unwrap_or_default();
    if FINEST.swap(place, Ordering::AcqRel) != place {
        // Takes no lock, as there is one subscriber: a process may be forked meanwhile.
        callsite::rebuild_interest_cache();
    }
}

impl Subscriber for Sink {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        let is_ours = metadata.is_event() && metadata.target().starts_with(ALL);
        if is_ours { Interest::sometimes() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        LEVELS.get(usize::from(FINEST.load(Ordering::Acquire))).copied()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        target.starts_with(ALL)
            && Process::own().is_some_and(|process| process.log.wants(target, *metadata.level()))
    }

    fn event(&self, event: &Event<'_>) {
        // The macros of `tracing` have already checked that it is enabled.
        if let Some(process) = Process::own() {
            process.log.queue.push(event);
        }
    }

    // The engine has no spans.
    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Logging state of one process.
#[derive(Debug)]
pub(crate) struct Log {
    queue: Queue,
    /// Levels enabled by Python's loggers, by target.
    levels: RwLock<Vec<(String, LevelFilter)>>,
}

impl Log {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let log = Self { queue: Queue::default(), levels: RwLock::default() };
        log.look_at_levels(py)?;
        Ok(log)
    }

    /// Starts the delivering thread.
    pub(crate) fn start(&'static self) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("dcp_rs-log".to_owned());
        let started = thread.spawn(|| {
            HANDS_ON.set(true);
            Python::try_attach(|py| self.hand_on_all(py));
            self.queue.ended();
        });
        if started.is_err() {
            self.queue.ended();
        }
        started.map(drop)
    }

    /// Delivers records until the queue ends.
    fn hand_on_all(&self, py: Python<'_>) {
        let mut looked = Instant::now();
        loop {
            let taken = py.detach(|| self.queue.take(LOOK));
            for entry in &taken.entries {
                report(py, hand_on(py, entry));
            }
            if taken.lost > 0 {
                report(py, tell_lost(py, taken.lost));
            }
            self.queue.handed_on(&taken);
            if taken.is_last {
                return;
            }
            if looked.elapsed() >= LOOK {
                report(py, self.look_at_levels(py));
                looked = Instant::now();
            }
        }
    }

    /// Updates which records Python accepts.
    pub(crate) fn look_at_levels(&self, py: Python<'_>) -> PyResult<()> {
        let found: Vec<(String, u32)> = py.import(MODULE)?.call_method0("levels")?.extract()?;
        let levels: Vec<_> =
            found.into_iter().map(|(logger, level)| (target_of(&logger), filter(level))).collect();
        let most = levels.iter().map(|(_, level)| *level).max().unwrap_or(LevelFilter::OFF);
        *self.levels.write().unwrap_or_else(PoisonError::into_inner) = levels;
        set_finest(most);
        Ok(())
    }

    /// Whether the logger of `target`, or its nearest existing ancestor, accepts `level`.
    fn wants(&self, target: &str, level: Level) -> bool {
        let levels = self.levels.read().unwrap_or_else(PoisonError::into_inner);
        let above = |logger: &str| {
            target
                .strip_prefix(logger)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with("::") || logger == ALL)
        };
        let nearest = levels.iter().filter(|(logger, _)| above(logger));
        nearest.max_by_key(|(logger, _)| logger.len()).is_some_and(|(_, filter)| level <= *filter)
    }

    /// Waits briefly until Python has received the records so far.
    pub(crate) fn flush(&self, py: Python<'_>) {
        if !HANDS_ON.get() && !self.queue.is_handed_on() {
            py.detach(|| self.queue.flush(FLUSH));
        }
    }

    /// Delivers remaining records, within a time limit, and ends the thread.
    pub(crate) fn end(&self) {
        set_finest(LevelFilter::OFF);
        self.queue.end(END);
    }
}

/// Converts `dcp_rs.consumer.connect` to the engine's `dcp_consumer::connect`.
fn target_of(logger: &str) -> String {
    let below = logger.strip_prefix("dcp_rs").unwrap_or_default();
    format!("{ALL}{}", below.trim_start_matches('.').replace('.', "::"))
}

/// Converts `dcp_consumer::connect` to Python's `dcp_rs.consumer.connect`.
fn logger_of(target: &str) -> String {
    format!("dcp_rs.{}", target.strip_prefix(ALL).unwrap_or(target).replace("::", "."))
}

/// The filter for a Python logger's level. Records below `Debug` never reach Python.
const fn filter(level: u32) -> LevelFilter {
    match level {
        ..=10 => LevelFilter::DEBUG,
        11..=20 => LevelFilter::INFO,
        21..=30 => LevelFilter::WARN,
        31..=40 => LevelFilter::ERROR,
        _ => LevelFilter::OFF,
    }
}

const fn number(level: Level) -> u32 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG | Level::TRACE => 10,
    }
}

fn hand_on(py: Python<'_>, entry: &Entry) -> PyResult<()> {
    let metadata = entry.metadata;
    let (logger, level) = (logger_of(metadata.target()), number(*metadata.level()));
    let time = entry.time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    // `tracing` names an event without a name by its place.
    let name = Some(metadata.name()).filter(|name| !name.starts_with("event "));
    let fields = PyDict::new(py);
    for (field, value) in &entry.fields {
        match value {
            Value::Number(number) => fields.set_item(field, number)?,
            Value::Seconds(seconds) => fields.set_item(field, seconds)?,
            Value::Truth(truth) => fields.set_item(field, truth)?,
            Value::Text(text) => fields.set_item(field, text)?,
        }
    }
    let place = (metadata.file(), metadata.line(), time);
    let call = (logger, level, place, (entry.message.as_str(), name, fields));
    py.import(MODULE)?.call_method1("hand_on", call)?;
    Ok(())
}

fn tell_lost(py: Python<'_>, lost: u64) -> PyResult<()> {
    py.import(MODULE)?.call_method1("tell_lost", (lost,))?;
    Ok(())
}

/// Continue if a handler raises: Python prints the exception as unraisable.
fn report(py: Python<'_>, done: PyResult<()>) {
    if let Err(error) = done {
        error.write_unraisable(py, None);
    }
}
