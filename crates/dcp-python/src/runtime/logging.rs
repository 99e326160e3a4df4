//! The engine's log records, in Python's `logging`.
//!
//! Records are made on any thread, the runtime's among them, and under the engine's locks; handing
//! one to Python takes the interpreter, for which a thread may wait for seconds. So they are put
//! into a [`Queue`], and one thread per process, which has nothing else to do, hands them on.

use std::cell::Cell;
use std::io;
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant, UNIX_EPOCH};

use log::{Level, LevelFilter, Metadata, Record};
use pyo3::prelude::*;

use super::Process;
use super::log_queue::{Entry, Queue};

/// How often the levels of Python's loggers are looked at.
const LOOK: Duration = Duration::from_millis(200);

/// For how long a call that returns waits for its records to reach Python. A handler may wait for a
/// lock that the caller holds, so this must end.
const FLUSH: Duration = Duration::from_millis(100);

/// For how long the end of the interpreter waits for the records that are left.
const END: Duration = Duration::from_secs(2);

/// What all targets of the engine begin with.
const ALL: &str = "dcp_";

/// The module of the Python package that knows `logging`.
const MODULE: &str = "dcp_rs._logging";

thread_local! {
    /// Whether this thread hands records on: it cannot wait for itself.
    static HANDS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Takes records from everywhere; each finds the queue of its process.
struct Sink;

/// Makes the engine's records come here. None is wanted before the process has a runtime.
pub(crate) fn install() {
    // A second import of the module keeps what the first has set.
    let _installed = log::set_logger(&Sink);
}

impl log::Log for Sink {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        target.starts_with(ALL)
            && Process::own().is_some_and(|process| process.log.wants(target, metadata.level()))
    }

    fn log(&self, record: &Record<'_>) {
        // The macros of `tracing` and `log` have asked whether it is wanted.
        if let Some(process) = Process::own() {
            process.log.queue.push(record);
        }
    }

    fn flush(&self) {}
}

/// The log of one process.
#[derive(Debug)]
pub(crate) struct Log {
    queue: Queue,
    /// What Python's loggers take, by the target they are for.
    levels: RwLock<Vec<(String, LevelFilter)>>,
}

impl Log {
    pub(crate) fn new(py: Python<'_>) -> PyResult<Self> {
        let log = Self { queue: Queue::default(), levels: RwLock::default() };
        log.look_at_levels(py)?;
        Ok(log)
    }

    /// Starts the thread that hands records on.
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

    /// Hands on what comes until the queue is ended.
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

    /// Notes which records Python wants now.
    pub(crate) fn look_at_levels(&self, py: Python<'_>) -> PyResult<()> {
        let found: Vec<(String, u32)> = py.import(MODULE)?.call_method0("levels")?.extract()?;
        let levels: Vec<_> =
            found.into_iter().map(|(logger, level)| (target_of(&logger), filter(level))).collect();
        let most = levels.iter().map(|(_, level)| *level).max().unwrap_or(LevelFilter::Off);
        *self.levels.write().unwrap_or_else(PoisonError::into_inner) = levels;
        // What no logger wants is never more than a comparison.
        log::set_max_level(most);
        Ok(())
    }

    /// Whether the logger for `target`, or the nearest above it that exists, takes `level`.
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

    /// Waits a little until Python has the records made so far.
    pub(crate) fn flush(&self, py: Python<'_>) {
        if !HANDS_ON.get() && !self.queue.is_handed_on() {
            py.detach(|| self.queue.flush(FLUSH));
        }
    }

    /// Hands on what there is, for a while, and ends the thread.
    pub(crate) fn end(&self) {
        log::set_max_level(LevelFilter::Off);
        self.queue.end(END);
    }
}

/// `dcp_rs.consumer.connect` as the engine calls it: `dcp_consumer::connect`.
fn target_of(logger: &str) -> String {
    let below = logger.strip_prefix("dcp_rs").unwrap_or_default();
    format!("{ALL}{}", below.trim_start_matches('.').replace('.', "::"))
}

/// `dcp_consumer::connect` as Python calls it: `dcp_rs.consumer.connect`.
fn logger_of(target: &str) -> String {
    format!("dcp_rs.{}", target.strip_prefix(ALL).unwrap_or(target).replace("::", "."))
}

/// What a Python logger of a level takes. Records below `Debug` never reach Python.
const fn filter(level: u32) -> LevelFilter {
    match level {
        ..=10 => LevelFilter::Debug,
        11..=20 => LevelFilter::Info,
        21..=30 => LevelFilter::Warn,
        31..=40 => LevelFilter::Error,
        _ => LevelFilter::Off,
    }
}

const fn number(level: Level) -> u32 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug | Level::Trace => 10,
    }
}

fn hand_on(py: Python<'_>, entry: &Entry) -> PyResult<()> {
    let (logger, level) = (logger_of(&entry.target), number(entry.level));
    let place = (entry.file.as_deref(), entry.line);
    let time = entry.time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let call = (logger, level, place, entry.message.as_str(), time);
    py.import(MODULE)?.call_method1("hand_on", call)?;
    Ok(())
}

fn tell_lost(py: Python<'_>, lost: u64) -> PyResult<()> {
    py.import(MODULE)?.call_method1("tell_lost", (lost,))?;
    Ok(())
}

/// A handler that raises is no reason to stop: Python shows the exception, as of a destructor.
fn report(py: Python<'_>, done: PyResult<()>) {
    if let Err(error) = done {
        error.write_unraisable(py, None);
    }
}
