//! The flow-control buffer of a connection, as tracked by its sender.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::Error;

/// The flow-control buffer of a connection.
#[derive(Debug, Default)]
pub(crate) struct Window {
    state: Mutex<WindowState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WindowState {
    /// 0 for no flow control.
    limit: u64,
    outstanding: u64,
    closed: bool,
}

impl Window {
    fn change(&self, change: impl FnOnce(&mut WindowState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.change(|state| state.limit = limit);
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.change(|state| state.outstanding = state.outstanding.saturating_sub(bytes));
    }

    pub(crate) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    pub(crate) fn sent(&self, bytes: u64) {
        self.change(|state| state.outstanding += bytes);
    }

    /// Waits until something may be sent; returns how much fits the buffer.
    pub(crate) fn room(&self) -> Result<u64, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.closed {
                return Err("the connection was closed".into());
            }
            if state.limit == 0 {
                return Ok(u64::MAX);
            }
            if state.outstanding < state.limit {
                return Ok(state.limit - state.outstanding);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
