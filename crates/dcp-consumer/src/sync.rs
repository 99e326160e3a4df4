//! What the queue and the watermark synchronize with. `tests/loom` compiles those two files with
//! types of loom under these names.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) use tokio::sync::Notify;
