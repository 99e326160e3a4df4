//! Panics of a run's tasks, which nobody waits for.

use std::cell::RefCell;
use std::panic;
use std::sync::Once;

thread_local! {
    /// The first panic on this thread since it was last asked for: a seed runs on one thread.
    static FIRST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Lets every panic from now on be kept, beside being told.
pub(crate) fn watch() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let told = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            FIRST.with_borrow_mut(|first| first.get_or_insert_with(|| info.to_string()).len());
            told(info);
        }));
    });
}

/// The first panic since this was last asked for.
pub(crate) fn take() -> Option<String> {
    FIRST.take()
}
