//! librdkafka, as far as a transactional producer needs it. All unsafe code is here.
//!
//! The functions are those of `rdkafka.h`, whose ABI is stable: names and meanings do not change
//! within a major version, and 2.0 has all that are named here.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libloading::Library as Loaded;

use crate::error::{Error, Kind, kind};
use crate::records::Record;

/// Version 2.0.0, as `rd_kafka_version` has it.
const LOWEST: c_int = 0x0200_00ff;
const PRODUCER: c_int = 0;
const CONF_OK: c_int = 0;
const COPY: c_int = 0x2;
const RKT: c_int = 2;
const PARTITION: c_int = 3;
const VALUE: c_int = 4;
const KEY: c_int = 5;
const MSGFLAGS: c_int = 7;
const TIMESTAMP: c_int = 8;
const HEADER: c_int = 9;
const QUEUE_AND_FLIGHT: c_int = 0x1 | 0x2;

type Handle = *mut c_void;

/// `rd_kafka_vu_t`: a part of a record.
#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    kind: c_int,
    is: Value,
}

#[repr(C)]
#[derive(Clone, Copy)]
union Value {
    handle: Handle,
    int: c_int,
    i32: i32,
    i64: i64,
    bytes: Bytes,
    header: NamedBytes,
    size: [c_char; 64],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Bytes {
    start: *const c_void,
    len: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NamedBytes {
    name: *const c_char,
    start: *const c_void,
    len: isize,
}

impl Part {
    fn bytes(kind: c_int, bytes: Option<&[u8]>) -> Self {
        let bytes = Bytes {
            start: bytes.map_or(ptr::null(), |bytes| bytes.as_ptr().cast()),
            len: bytes.map_or(0, <[u8]>::len),
        };
        Self { kind, is: Value { bytes } }
    }
}

macro_rules! functions {
    ($($name:ident: fn($($of:ty),*) $(-> $gives:ty)?;)*) => {
        /// The functions, which are valid as long as the library is loaded.
        struct Functions { $($name: unsafe extern "C" fn($($of),*) $(-> $gives)?,)* }

        impl Functions {
            /// Finds them all.
            ///
            /// # Safety
            ///
            /// The library is librdkafka.
            unsafe fn of(library: &Loaded) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of `rdkafka.h`.
                Ok(Self { $($name: *unsafe { library.get(stringify!($name).as_bytes()) }?,)* })
            }
        }
    };
}

functions! {
    rd_kafka_version: fn() -> c_int;
    rd_kafka_version_str: fn() -> *const c_char;
    rd_kafka_conf_new: fn() -> Handle;
    rd_kafka_conf_destroy: fn(Handle);
    rd_kafka_conf_set: fn(Handle, *const c_char, *const c_char, *mut c_char, usize) -> c_int;
    rd_kafka_conf_set_log_cb: fn(Handle, Option<Log>);
    rd_kafka_new: fn(c_int, Handle, *mut c_char, usize) -> Handle;
    rd_kafka_destroy: fn(Handle);
    rd_kafka_poll: fn(Handle, c_int) -> c_int;
    rd_kafka_purge: fn(Handle, c_int) -> c_int;
    rd_kafka_topic_new: fn(Handle, *const c_char, Handle) -> Handle;
    rd_kafka_topic_destroy: fn(Handle);
    rd_kafka_produceva: fn(Handle, *const Part, usize) -> Handle;
    rd_kafka_init_transactions: fn(Handle, c_int) -> Handle;
    rd_kafka_begin_transaction: fn(Handle) -> Handle;
    rd_kafka_commit_transaction: fn(Handle, c_int) -> Handle;
    rd_kafka_abort_transaction: fn(Handle, c_int) -> Handle;
    rd_kafka_last_error: fn() -> c_int;
    rd_kafka_err2name: fn(c_int) -> *const c_char;
    rd_kafka_err2str: fn(c_int) -> *const c_char;
    rd_kafka_error_name: fn(Handle) -> *const c_char;
    rd_kafka_error_string: fn(Handle) -> *const c_char;
    rd_kafka_error_is_fatal: fn(Handle) -> c_int;
    rd_kafka_error_is_retriable: fn(Handle) -> c_int;
    rd_kafka_error_txn_requires_abort: fn(Handle) -> c_int;
    rd_kafka_error_destroy: fn(Handle);
}

type Log = unsafe extern "C" fn(*const c_void, c_int, *const c_char, *const c_char);

/// Passes a line of librdkafka's log on. It is called on any thread, and must not unwind.
unsafe extern "C" fn log(_: *const c_void, level: c_int, _: *const c_char, line: *const c_char) {
    // SAFETY: it is a text that ends with a NUL, which is there during the call.
    let line = unsafe { text(line) };
    // Its brokers come and go, which it deals with: what is wrong, a call returns as an error.
    let _ = std::panic::catch_unwind(|| match level {
        ..=2 => tracing::warn!(name: "librdkafka", "{line}"),
        3..=5 => tracing::info!(name: "librdkafka", "{line}"),
        _ => tracing::debug!(name: "librdkafka", "{line}"),
    });
}

/// # Safety
///
/// It is null, or a text that ends with a NUL and is there during the call.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The library, loaded.
pub(crate) struct Library {
    functions: Functions,
    // After the functions, which are part of it.
    _loaded: Loaded,
}

impl Library {
    pub(crate) fn load(path: &Path) -> Result<Arc<Self>, Error> {
        let failed = |error: libloading::Error| {
            let text = format!("{} cannot be loaded: {error}", path.display());
            Error::own(Kind::Library, "library", text)
        };
        // SAFETY: what a library does when it is loaded is its own; the caller says that it is
        // librdkafka, which has nothing but constants there.
        let loaded = unsafe { Loaded::new(path) }.map_err(failed)?;
        // SAFETY: as above.
        let functions = unsafe { Functions::of(&loaded) }.map_err(failed)?;
        let library = Self { functions, _loaded: loaded };
        // SAFETY: takes nothing.
        if unsafe { (library.functions.rd_kafka_version)() } < LOWEST {
            // SAFETY: returns a constant.
            let version = unsafe { text((library.functions.rd_kafka_version_str)()) };
            let text = format!("librdkafka {version} is too old: 2.0 or newer is needed");
            return Err(Error::own(Kind::Library, "version", text));
        }
        Ok(Arc::new(library))
    }

    /// The error of a call that returns one, or null.
    fn check(&self, error: Handle) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        let f = &self.functions;
        // SAFETY: the error is ours, and is destroyed once, after its texts were copied.
        Err(unsafe {
            let name = text((f.rd_kafka_error_name)(error));
            let is_fatal = (f.rd_kafka_error_is_fatal)(error) != 0;
            let found = Error {
                kind: kind(&name),
                text: text((f.rd_kafka_error_string)(error)),
                is_retriable: (f.rd_kafka_error_is_retriable)(error) != 0,
                needs_abort: (f.rd_kafka_error_txn_requires_abort)(error) != 0,
                is_fatal,
                name,
            };
            (f.rd_kafka_error_destroy)(error);
            found
        })
    }

    fn last_error(&self) -> Error {
        // SAFETY: returns constants.
        let (name, text) = unsafe {
            let code = (self.functions.rd_kafka_last_error)();
            (
                text((self.functions.rd_kafka_err2name)(code)),
                text((self.functions.rd_kafka_err2str)(code)),
            )
        };
        Error { kind: kind(&name), ..Error::own(Kind::Other, &name, text) }
    }
}

/// A producer of librdkafka.
pub(crate) struct Client {
    handle: Handle,
    library: Arc<Library>,
}

// SAFETY: librdkafka's functions may be called from any thread, and from several at a time.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    pub(crate) fn new(library: Arc<Library>, config: &[(CString, CString)]) -> Result<Self, Error> {
        let f = &library.functions;
        let mut why = [0; 512];
        // SAFETY: the configuration is ours until `rd_kafka_new` takes it, which it does unless it
        // fails. Texts end with NUL, and the buffer has the length that is given.
        let handle = unsafe {
            let conf = (f.rd_kafka_conf_new)();
            (f.rd_kafka_conf_set_log_cb)(conf, Some(log));
            for (name, value) in config {
                let (name, value) = (name.as_ptr(), value.as_ptr());
                if (f.rd_kafka_conf_set)(conf, name, value, why.as_mut_ptr(), why.len()) != CONF_OK
                {
                    (f.rd_kafka_conf_destroy)(conf);
                    return Err(Error::own(Kind::Config, "_INVALID_ARG", text(why.as_ptr())));
                }
            }
            let handle = (f.rd_kafka_new)(PRODUCER, conf, why.as_mut_ptr(), why.len());
            if handle.is_null() {
                (f.rd_kafka_conf_destroy)(conf);
                return Err(Error::own(Kind::Config, "_INVALID_ARG", text(why.as_ptr())));
            }
            handle
        };
        Ok(Self { handle, library })
    }

    pub(crate) fn poll(&self, timeout: Duration) {
        // SAFETY: the handle is valid until this value is dropped.
        unsafe { (self.library.functions.rd_kafka_poll)(self.handle, millis(timeout)) };
    }

    pub(crate) fn init_transactions(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: as above.
        let error = unsafe {
            (self.library.functions.rd_kafka_init_transactions)(self.handle, millis(timeout))
        };
        self.library.check(error)
    }

    pub(crate) fn begin_transaction(&self) -> Result<(), Error> {
        // SAFETY: as above.
        let error = unsafe { (self.library.functions.rd_kafka_begin_transaction)(self.handle) };
        self.library.check(error)
    }

    pub(crate) fn commit_transaction(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: as above.
        let error = unsafe {
            (self.library.functions.rd_kafka_commit_transaction)(self.handle, millis(timeout))
        };
        self.library.check(error)
    }

    pub(crate) fn abort_transaction(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: as above.
        let error = unsafe {
            (self.library.functions.rd_kafka_abort_transaction)(self.handle, millis(timeout))
        };
        self.library.check(error)
    }

    pub(crate) fn topic<'a>(&'a self, name: &CStr) -> Result<Topic<'a>, Error> {
        // SAFETY: as above; without a configuration, the topic has the producer's.
        let handle = unsafe {
            (self.library.functions.rd_kafka_topic_new)(self.handle, name.as_ptr(), ptr::null_mut())
        };
        if handle.is_null() {
            return Err(self.library.last_error());
        }
        Ok(Topic { handle, client: self, parts: Vec::new() })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let f = &self.library.functions;
        // SAFETY: the handle is not used afterwards, and topics, which borrow it, are gone. What
        // is still queued belongs to a transaction that was not committed.
        unsafe {
            (f.rd_kafka_purge)(self.handle, QUEUE_AND_FLIGHT);
            (f.rd_kafka_destroy)(self.handle);
        }
    }
}

/// A topic to write to.
pub(crate) struct Topic<'a> {
    handle: Handle,
    client: &'a Client,
    // Of the last record; kept for the memory.
    parts: Vec<Part>,
}

impl Topic<'_> {
    /// Puts a record, which is copied, into the queue.
    pub(crate) fn produce<'b>(
        &mut self,
        record: &Record<'_>,
        millis: i64,
        headers: impl Iterator<Item = (&'b CStr, &'b [u8])>,
    ) -> Result<(), Error> {
        self.parts.clear();
        self.parts.extend([
            Part { kind: RKT, is: Value { handle: self.handle } },
            Part { kind: PARTITION, is: Value { i32: record.partition } },
            Part { kind: MSGFLAGS, is: Value { int: COPY } },
            Part { kind: TIMESTAMP, is: Value { i64: millis } },
            Part::bytes(KEY, record.key),
            Part::bytes(VALUE, record.value),
        ]);
        self.parts.extend(headers.map(|(name, bytes)| {
            let header = NamedBytes {
                name: name.as_ptr(),
                start: bytes.as_ptr().cast(),
                len: isize::try_from(bytes.len()).unwrap_or(0),
            };
            Part { kind: HEADER, is: Value { header } }
        }));
        let library = &self.client.library;
        // SAFETY: both handles are valid, each part has the value of its kind, and what they point
        // to is borrowed for the call, which copies it.
        let error = unsafe {
            (library.functions.rd_kafka_produceva)(
                self.client.handle,
                self.parts.as_ptr(),
                self.parts.len(),
            )
        };
        self.parts.clear();
        library.check(error)
    }
}

impl Drop for Topic<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is not used afterwards.
        unsafe { (self.client.library.functions.rd_kafka_topic_destroy)(self.handle) };
    }
}

fn millis(time: Duration) -> c_int {
    c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)
}
