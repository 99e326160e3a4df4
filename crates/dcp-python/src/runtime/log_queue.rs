//! The queue of log records for Python.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tracing::field::{Field, Visit};
use tracing::{Event, Metadata};

/// Maximum number of queued records.
const MAX_ENTRIES: usize = 4096;

/// Maximum size of queued records in bytes.
const MAX_BYTES: usize = 1024 * 1024;

/// Maximum length of a message; longer ones are truncated.
const MAX_MESSAGE: usize = 16 * 1024;

/// Maximum length of the text of a field; longer ones are truncated.
const MAX_VALUE: usize = 1024;

/// Maximum number of records taken at a time, so that the end is noticed in between.
const MAX_TAKEN: usize = 64;

/// One record.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) metadata: &'static Metadata<'static>,
    /// The text, followed by the fields.
    pub(crate) message: String,
    pub(crate) fields: Vec<(&'static str, Value)>,
    pub(crate) time: SystemTime,
}

/// The value of a field.
#[derive(Debug)]
pub(crate) enum Value {
    Number(u64),
    Seconds(f64),
    Truth(bool),
    Text(String),
}

impl Entry {
    fn new(event: &Event<'_>) -> Self {
        let mut read = Reading { message: Bounded::at(MAX_MESSAGE), fields: Vec::new() };
        event.record(&mut read);
        Self {
            metadata: event.metadata(),
            message: read.message.text,
            fields: read.fields,
            time: SystemTime::now(),
        }
    }

    fn bytes(&self) -> usize {
        let fields = self.fields.iter().map(|(_, value)| match value {
            Value::Text(text) => size_of::<(&str, Value)>() + text.capacity(),
            _ => size_of::<(&str, Value)>(),
        });
        size_of::<Self>() + self.message.capacity() + fields.sum::<usize>()
    }
}

/// Reads the message and the fields of an event.
struct Reading {
    message: Bounded,
    fields: Vec<(&'static str, Value)>,
}

impl Reading {
    fn field(&mut self, field: &Field, shown: fmt::Arguments<'_>, value: Value) {
        let gap = if self.message.text.is_empty() { "" } else { " " };
        // An error only means that the message was truncated.
        let _cut_off = write!(self.message, "{gap}{}={shown}", field.name());
        self.fields.push((field.name(), value));
    }
}

impl Visit for Reading {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.field(field, format_args!("{value}"), Value::Number(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.field(field, format_args!("{value}"), Value::Seconds(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.field(field, format_args!("{value}"), Value::Truth(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text = Bounded::of(format_args!("{value}"), MAX_VALUE);
        self.field(field, format_args!("{value:?}"), Value::Text(text));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _cut_off = write!(self.message, "{value:?}");
            return;
        }
        let text = Bounded::of(format_args!("{value:?}"), MAX_VALUE);
        self.field(field, format_args!("{value:?}"), Value::Text(text));
    }
}

/// Text that is truncated.
struct Bounded {
    text: String,
    most: usize,
}

impl Bounded {
    const fn at(most: usize) -> Self {
        Self { text: String::new(), most }
    }

    fn of(shown: fmt::Arguments<'_>, most: usize) -> String {
        let mut text = Self::at(most);
        let _cut_off = text.write_fmt(shown);
        text.text
    }
}

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let left = self.most.saturating_sub(self.text.len()).min(text.len());
        let end = (0..=left).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
        self.text.push_str(text.get(..end).unwrap_or_default());
        if end < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Records taken from the queue for delivery.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) entries: VecDeque<Entry>,
    /// Number of records lost after these.
    pub(crate) lost: u64,
    /// Whether no more records follow.
    pub(crate) is_last: bool,
}

/// A FIFO queue of records, bounded in number and bytes.
///
/// Its lock is held for a few instructions and never across a call into Python.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// There is something to deliver, or the queue is ending.
    filled: Condvar,
    /// Something was delivered, or the delivering thread has ended.
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Records lost for lack of room and not reported yet.
    lost: u64,
    /// Number of records queued since the start.
    put: u64,
    /// Number of those delivered to Python.
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
    /// Queues a record, or counts it as lost if there is no room.
    pub(crate) fn push(&self, event: &Event<'_>) {
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
        // Formatting may take a while and any lock.
        let entry = Entry::new(event);
        let mut state = self.lock();
        state.bytes += entry.bytes();
        state.put += 1;
        state.entries.push_back(entry);
        drop(state);
        self.filled.notify_one();
    }

    /// Takes the next records; none if none arrive within `limit`.
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
        // Reported once the queue is empty: until then more may be lost.
        let lost = if is_empty { std::mem::take(&mut state.lost) } else { 0 };
        Taken { entries, lost, is_last: is_empty && state.is_ending }
    }

    /// Records that Python has received what was taken.
    pub(crate) fn handed_on(&self, taken: &Taken) {
        self.lock().handed_on += taken.entries.len() as u64;
        self.emptied.notify_all();
    }

    /// Whether Python has received every queued record.
    pub(crate) fn is_handed_on(&self) -> bool {
        let state = self.lock();
        state.handed_on == state.put
    }

    /// Waits up to `limit` until Python has received the records queued so far.
    pub(crate) fn flush(&self, limit: Duration) {
        let state = self.lock();
        let put = state.put;
        let is_left = |state: &mut State| state.handed_on < put && !state.has_ended;
        drop(self.emptied.wait_timeout_while(state, limit, is_left));
    }

    /// Refuses further records and waits up to `limit` until all have been delivered.
    pub(crate) fn end(&self, limit: Duration) {
        let mut state = self.lock();
        state.is_ending = true;
        self.filled.notify_one();
        let waited = self.emptied.wait_timeout_while(state, limit, |state| !state.has_ended);
        // Drop the remaining records, so that the thread ends after its current delivery.
        waited.unwrap_or_else(PoisonError::into_inner).0.entries.clear();
    }

    /// Called when the delivering thread has ended.
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
