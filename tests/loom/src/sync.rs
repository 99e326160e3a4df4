//! The names of `dcp-consumer`'s `sync` module.

use std::future::poll_fn;
use std::task::{Poll, Waker};

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};

/// `tokio::sync::Notify` for one task that waits: a permit, and who waits for it.
#[derive(Debug, Default)]
pub(crate) struct Notify {
    state: Mutex<(bool, Option<Waker>)>,
}

impl Notify {
    pub(crate) fn notify_one(&self) {
        let waker = {
            let mut state = self.state.lock().unwrap();
            state.0 = true;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) async fn notified(&self) {
        poll_fn(|context| {
            let mut state = self.state.lock().unwrap();
            if std::mem::take(&mut state.0) {
                return Poll::Ready(());
            }
            state.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
