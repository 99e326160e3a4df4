//! Log records on their way to Python.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use log::{Level, Record};

/// Most records that wait for Python.
const MAX_ENTRIES: usize = 4096;

/// Most bytes that they take.
const MAX_BYTES: usize = 1024 * 1024;

/// Longest message; the rest of a longer one is cut off.
const MAX_MESSAGE: usize = 16 * 1024;

/// Most records that are taken at a time, so that an end is seen in between.
const MAX_TAKEN: usize = 64;

/// One record.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) level: Level,
    pub(crate) target: String,
    pub(crate) message: String,
    pub(crate) file: Option<String>,
    pub(crate) line: Option<u32>,
    pub(crate) time: SystemTime,
}

impl Entry {
    fn new(record: &Record<'_>) -> Self {
        let mut message = Bounded(String::new());
        // It fails where it is cut off, and there only.
        let _cut_off = message.write_fmt(*record.args());
        Self {
            level: record.level(),
            target: record.target().to_owned(),
            message: message.0,
            file: record.file().map(str::to_owned),
            line: record.line(),
            time: SystemTime::now(),
        }
    }

    fn bytes(&self) -> usize {
        let file = self.file.as_ref().map_or(0, String::capacity);
        size_of::<Self>() + self.target.capacity() + self.message.capacity() + file
    }
}

/// Text that ends at [`MAX_MESSAGE`].
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let left = MAX_MESSAGE.saturating_sub(self.0.len()).min(text.len());
        let end = (0..=left).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
        self.0.push_str(text.get(..end).unwrap_or_default());
        if end < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// What was taken to be handed on.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) entries: VecDeque<Entry>,
    /// How many records were lost after these.
    pub(crate) lost: u64,
    /// Whether nothing comes any more.
    pub(crate) is_last: bool,
}

/// Records in the order they were made, bounded in number and bytes.
///
/// Its lock is held for a few instructions and never across a call into Python.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// There is something to hand on, or the end has come.
    filled: Condvar,
    /// Something was handed on, or the thread that does it has ended.
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Records that found no room, and have not been told of.
    lost: u64,
    /// Records put in, and those of them that Python has, since the start.
    put: u64,
    handed_on: u64,
    is_ending: bool,
    has_ended: bool,
}

impl State {
    fn is_full(&self) -> bool {
        self.entries.len() >= MAX_ENTRIES || self.bytes >= MAX_BYTES
    }
}

impl Queue {
    /// Puts a record in, or counts it as lost if there is no room.
    pub(crate) fn push(&self, record: &Record<'_>) {
        {
            let mut state = self.lock();
            if state.is_ending {
                return;
            }
            if state.is_full() {
                state.lost = state.lost.saturating_add(1);
                return;
            }
        }
        // Formatting may take a while and any lock there is.
        let entry = Entry::new(record);
        let mut state = self.lock();
        state.bytes += entry.bytes();
        state.put += 1;
        state.entries.push_back(entry);
        drop(state);
        self.filled.notify_one();
    }

    /// Takes the next records, none if none come within `limit`.
    pub(crate) fn take(&self, limit: Duration) -> Taken {
        let (mut state, _) = self
            .filled
            .wait_timeout_while(self.lock(), limit, |state| {
                state.entries.is_empty() && !state.is_ending
            })
            .unwrap_or_else(PoisonError::into_inner);
        let count = state.entries.len().min(MAX_TAKEN);
        let entries: VecDeque<_> = state.entries.drain(..count).collect();
        state.bytes -= entries.iter().map(Entry::bytes).sum::<usize>();
        let is_empty = state.entries.is_empty();
        // Told once the queue is empty: before that there may be more of them.
        let lost = if is_empty { std::mem::take(&mut state.lost) } else { 0 };
        Taken { entries, lost, is_last: is_empty && state.is_ending }
    }

    /// Notes that Python has what was taken.
    pub(crate) fn handed_on(&self, taken: &Taken) {
        self.lock().handed_on += taken.entries.len() as u64;
        self.emptied.notify_all();
    }

    /// Whether Python has every record that was put in.
    pub(crate) fn is_handed_on(&self) -> bool {
        let state = self.lock();
        state.handed_on == state.put
    }

    /// Waits, at most for `limit`, until Python has what was put in so far.
    pub(crate) fn flush(&self, limit: Duration) {
        let state = self.lock();
        let put = state.put;
        let is_left = |state: &mut State| state.handed_on < put && !state.has_ended;
        drop(self.emptied.wait_timeout_while(state, limit, is_left));
    }

    /// Takes no more records, and waits, at most for `limit`, until all were handed on.
    pub(crate) fn end(&self, limit: Duration) {
        let mut state = self.lock();
        state.is_ending = true;
        self.filled.notify_one();
        let waited = self.emptied.wait_timeout_while(state, limit, |state| !state.has_ended);
        // What is left is given up, so that the thread ends with what it is about to hand on.
        waited.unwrap_or_else(PoisonError::into_inner).0.entries.clear();
    }

    /// The thread that hands records on has ended.
    pub(crate) fn ended(&self) {
        let mut state = self.lock();
        state.is_ending = true;
        state.has_ended = true;
        self.emptied.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
