//! Streams of changes.

mod arrow_stream;

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use dcp_arrow::{PendingBatch, TableSchema};
use dcp_consumer::{ChangeStream as EngineStream, StreamEvent, VbucketStats};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule, PyDict};

use self::arrow_stream::StreamReader;
use crate::batch::ChangeBatch;
use crate::checkpoint::Checkpoint;
use crate::classes::{Class, make};
use crate::error::{Failure, Kind};
use crate::runtime::notify::Call;
use crate::runtime::{ProcessBound, current, flush_log, wait_a_tick};
use crate::schema::schema_capsule;
use crate::shared::{Next, Shared, Turn};
use crate::unmatched::Watch;

/// The turn of an asynchronous reader.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct AsyncTurn {
    turn: Turn,
    /// The callback that the stream wakes.
    call: Mutex<Option<Arc<Call>>>,
}

impl AsyncTurn {
    fn replace(&self, call: Arc<Call>) -> Arc<Call> {
        let mut last = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(Arc::clone(&call));
        call
    }

    /// Cancels the callback: the stream may keep its waker for long.
    fn forget(&self) {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(call.and_then(|call| call.take()));
    }
}

/// How the stream is read; the first read decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    None,
    Iterator,
    Arrow,
    Closed,
}

/// A stream of changes.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct ChangeStream {
    shared: ProcessBound<Arc<Shared>>,
    reader: Mutex<Reader>,
}

impl ChangeStream {
    pub(crate) fn new(
        py: Python<'_>,
        stream: EngineStream<PendingBatch>,
        table: TableSchema,
        watch: Arc<Watch>,
    ) -> PyResult<Self> {
        let shared = Arc::new(Shared::new(stream, table, watch));
        Ok(Self {
            shared: ProcessBound::new(py, "stream", shared)?,
            reader: Mutex::new(Reader::None),
        })
    }

    fn reader(&self) -> std::sync::MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream, for reading by iteration.
    fn for_iterator(&self) -> PyResult<&Arc<Shared>> {
        let shared = self.shared.get()?;
        let mut reader = self.reader();
        match *reader {
            Reader::None | Reader::Iterator => *reader = Reader::Iterator,
            Reader::Arrow => return Err(taken()),
            Reader::Closed => return Err(closed()),
        }
        Ok(shared)
    }
}

/// Waits for the next batch; `None` at the end of the stream, and after `until`.
fn next_batch(
    py: Python<'_>,
    shared: &Shared,
    until: Option<Instant>,
) -> PyResult<Option<ChangeBatch>> {
    let turn = shared.new_turn();
    py.check_signals()?;
    loop {
        let most = until.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
        wait_a_tick(py, most, || poll_fn(|context| shared.poll(turn, context)))?;
        // A signal handler may raise, or read the stream itself, so hold neither the batch nor the
        // turn meanwhile.
        shared.leave(turn);
        py.check_signals()?;
        match shared.take(turn) {
            Ok(Next::Batch(batch)) => return Ok(Some(batch)),
            Ok(Next::NotYet) if most.is_zero() => return Ok(None),
            Ok(Next::NotYet) => {}
            // Flush the log first, so that records about the end precede it.
            ended => {
                flush_log(py);
                return ended.map(|_| None).map_err(Into::into);
            }
        }
    }
}

static STREAM_STATS: Class = Class::new("dcp_rs.stream", "StreamStats");
static VBUCKET_STATS: Class = Class::new("dcp_rs.stream", "VbucketStats");
static STREAM_EVENT: Class = Class::new("dcp_rs.stream", "StreamEvent");

/// The `dcp_rs.StreamEvent`.
fn stream_event(py: Python<'_>, event: StreamEvent) -> PyResult<Bound<'_, PyAny>> {
    let text = String::new;
    let (kind, vbid, node, message, cause) = match event {
        StreamEvent::Opened { vbid, node } => ("opened", Some(vbid), Some(node), text(), None),
        StreamEvent::Ended { vbid, reason, cause } => {
            ("ended", Some(vbid), None, reason, Some(cause))
        }
        StreamEvent::RolledBack(rollback) => {
            let message = format!("from seqno {} to {}", rollback.from_seqno, rollback.seqno);
            ("rolled_back", Some(rollback.vbid), None, message, Some("rollback".to_owned()))
        }
        StreamEvent::CaughtUp(caught_up) => {
            let message = format!("at seqno {}", caught_up.seqno);
            ("caught_up", Some(caught_up.vbid), None, message, None)
        }
        StreamEvent::Moved { vbid, node } => {
            ("moved", Some(vbid), Some(node), text(), Some("map_changed".to_owned()))
        }
        StreamEvent::BackingOff { vbid, wait, cause } => {
            let message = format!("for {} ms", wait.as_millis());
            ("backing_off", Some(vbid), None, message, Some(cause))
        }
        StreamEvent::ConnectionLost { node, error, cause } => {
            ("connection_lost", None, Some(node), error, Some(cause.code().to_owned()))
        }
        StreamEvent::Lagging { vbid, seqno, high_seqno, still } => {
            let still = still.as_secs();
            let message = format!("at seqno {seqno} of {high_seqno} for {still} s");
            ("lagging", Some(vbid), None, message, None)
        }
        StreamEvent::Unpersisted { vbid, waits } => {
            let message = format!("changes wait to be persisted for {} s", waits.as_secs());
            ("unpersisted", Some(vbid), None, message, None)
        }
        StreamEvent::NothingPersisted => {
            let message =
                "the bucket has no disk: changes are delivered although no copy has persisted them";
            ("nothing_persisted", None, None, message.to_owned(), None)
        }
        StreamEvent::Dropped(count) => {
            ("dropped", None, None, format!("{count} events that were not read"), None)
        }
        event => ("other", None, None, format!("{event:?}"), None),
    };
    make!(STREAM_EVENT, py, {
        kind: kind,
        vbucket: vbid.map(|vbid| vbid.0),
        node: node,
        message: message,
        cause: cause,
    })
}

fn taken() -> PyErr {
    let message = "the stream is read as an Arrow stream already, which is possible once: \
                   open another one";
    Failure::new(Kind::Closed, message).into()
}

fn closed() -> PyErr {
    Failure::new(Kind::Closed, "the stream is closed: open another one").into()
}

#[pymethods]
impl ChangeStream {
    /// The next batch; `None` at the end, and after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<ChangeBatch>> {
        let most = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let until = most.and_then(|most| Instant::now().checked_add(most));
        next_batch(py, self.for_iterator()?, until)
    }

    /// Whether the stream has ended.
    #[getter]
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let shared = self.shared.get()?;
        Ok(py.detach(|| shared.is_over()))
    }

    /// Polls for the next batch on the reader's turn; raises `StopAsyncIteration` at the end of the
    /// stream, and returns `None` if there is none yet. In that case the turn lasts until `leave`,
    /// and `notify` is called once, from another thread, when it is time to poll again.
    fn poll_next(
        &self,
        py: Python<'_>,
        turn: &AsyncTurn,
        notify: Py<PyAny>,
    ) -> PyResult<Option<ChangeBatch>> {
        let shared = self.for_iterator()?;
        py.check_signals()?;
        let call = Call::new(current(py)?, notify, shared, turn.turn);
        let (waker, turn) = (Waker::from(turn.replace(call)), turn.turn);
        let next = py.detach(|| match shared.poll(turn, &mut Context::from_waker(&waker)) {
            Poll::Ready(()) => shared.take(turn),
            Poll::Pending => Ok(Next::NotYet),
        });
        match next {
            Ok(Next::Batch(batch)) => Ok(Some(batch)),
            Ok(Next::NotYet) => Ok(None),
            ended => {
                flush_log(py);
                Err(ended.map_or_else(Into::into, |_| PyStopAsyncIteration::new_err(())))
            }
        }
    }

    /// A turn for `poll_next`; readers are served in order of arrival.
    fn new_turn(&self) -> PyResult<AsyncTurn> {
        Ok(AsyncTurn { turn: self.shared.get()?.new_turn(), call: Mutex::default() })
    }

    /// Releases the reader's turn.
    fn leave(&self, py: Python<'_>, turn: &AsyncTurn) {
        if let Some(shared) = self.shared.own() {
            py.detach(|| shared.leave(turn.turn));
            turn.forget();
        }
    }

    #[getter]
    fn checkpoint(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        let shared = self.shared.get()?;
        Ok(Checkpoint(py.detach(|| shared.checkpoint())))
    }

    /// Whether batches have to be acknowledged with `ack`.
    #[getter]
    fn is_manual(&self) -> PyResult<bool> {
        Ok(self.shared.get()?.acks().is_manual())
    }

    /// Acknowledges a batch.
    fn ack(&self, batch: &ChangeBatch) -> PyResult<()> {
        Ok(self.shared.get()?.acks().ack(batch.token).map_err(Failure::from)?)
    }

    #[getter]
    fn column_names(&self) -> PyResult<Vec<&str>> {
        Ok(self.shared.get()?.table().names().collect())
    }

    /// As `dcp_rs.StreamStats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let shared = self.shared.get()?;
        let (stats, (malformed, partly_malformed)) =
            py.detach(|| (shared.stats(), shared.malformed()));
        make!(STREAM_STATS, py, {
            opening: stats.opening,
            streaming: stats.streaming,
            backing_off: stats.backing_off,
            complete: stats.complete,
            failed: stats.failed,
            connections: stats.connections,
            reconnects: stats.reconnects,
            batches: stats.batches,
            rows: stats.rows,
            malformed: malformed,
            partly_malformed: partly_malformed,
            buffered_bytes: stats.buffered_bytes,
            unpersisted_rows: stats.unpersisted_rows,
            unpersisted_bytes: stats.unpersisted_bytes,
            unpersisted_seconds: stats.unpersisted_for.as_secs_f64(),
            diverged: stats.diverged,
            disconnected: stats.disconnected,
            lag: stats.lag,
            max_lag: stats.max_lag,
            elapsed: stats.elapsed.as_secs_f64(),
        })
    }

    /// `dcp_rs.VbucketStats` of every vBucket.
    fn vbucket_stats<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let shared = self.shared.get()?;
        let stats = py.detach(|| shared.vbucket_stats());
        let of = |vbucket: VbucketStats| {
            make!(VBUCKET_STATS, py, {
                vbucket: vbucket.vbid.0,
                state: vbucket.state.as_str(),
                seqno: vbucket.seqno.0,
                high_seqno: vbucket.high_seqno.map(|seqno| seqno.0),
                persisted_seqno: vbucket.persisted_seqno.map(|seqno| seqno.0),
                unpersisted_seconds: vbucket.unpersisted_for.map(|held| held.as_secs_f64()),
                is_diverged: vbucket.is_diverged,
                is_disconnected: vbucket.is_disconnected,
            })
        };
        stats.into_iter().map(of).collect()
    }

    /// How many seqnos the server is ahead, by the name of the collection.
    fn collection_lag<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shared = self.shared.get()?;
        let lags = py.detach(|| shared.collection_lag());
        lags.into_iter().map(|each| (each.name, each.lag)).into_py_dict(py)
    }

    /// Events since the last call, as `dcp_rs.StreamEvent`.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let shared = self.shared.get()?;
        let events = py.detach(|| shared.take_events());
        events.into_iter().map(|event| stream_event(py, event)).collect()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.close_soon(py)?;
        flush_log(py);
        Ok(())
    }

    /// Like `close`, for an event loop; does not wait for `logging`.
    fn close_soon(&self, py: Python<'_>) -> PyResult<()> {
        let shared = self.shared.get()?;
        *self.reader() = Reader::Closed;
        py.detach(|| shared.close());
        Ok(())
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.shared.get()?.table().arrow())
    }

    /// The requested schema is a hint that the protocol lets a producer ignore; the caller sees the
    /// actual schema.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _wish = requested_schema;
        let shared = self.shared.get()?;
        if shared.acks().is_manual() {
            let problem = "a stream with 'manual' is read batch by batch, because the batches of \
                           an Arrow stream cannot be acknowledged: use 'next'";
            return Err(Failure::option(&["ack"], problem).into());
        }
        {
            let mut reader = self.reader();
            match *reader {
                // Switching from iteration to Arrow is allowed.
                Reader::None | Reader::Iterator => *reader = Reader::Arrow,
                Reader::Arrow => return Err(taken()),
                Reader::Closed => return Err(closed()),
            }
        }
        let reader = StreamReader::new(py, Arc::clone(shared))?;
        let stream = FFI_ArrowArrayStream::new(Box::new(reader));
        PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
    }
}
