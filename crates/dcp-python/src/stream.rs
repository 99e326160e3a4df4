//! Streams of changes.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::RecordBatch;
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use dcp_arrow::{PendingBatch, TableSchema};
use dcp_consumer::{
    Acknowledger, ChangeStream as EngineStream, Delivered, StreamEvent, VbucketStats,
};
use dcp_proto::checkpoint::Checkpoint as EngineCheckpoint;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::arrow_stream::StreamReader;
use crate::batch::ChangeBatch;
use crate::checkpoint::Checkpoint;
use crate::error::{Failure, Kind};
use crate::runtime::{ProcessBound, TICK, tick, wait};
use crate::schema::schema_capsule;

/// A stream as its readers share it.
///
/// The engine's stream is locked for one tick at a time, so that another thread which closes it or
/// asks for its numbers waits no longer than that.
#[derive(Debug)]
pub(crate) struct Shared {
    engine: tokio::sync::Mutex<Engine>,
    /// Where the reader stands: after the last batch it was given.
    checkpoint: Mutex<EngineCheckpoint>,
    acks: Acknowledger,
    table: TableSchema,
}

#[derive(Debug)]
struct Engine {
    stream: EngineStream<PendingBatch>,
    /// Fetched for an asynchronous reader that has not come for it yet.
    fetched: Option<Result<Delivered<PendingBatch>, Failure>>,
    /// Whether the stream has said that nothing more comes.
    is_over: bool,
    /// Whether the engine's checkpoint counts a batch that the reader will never get.
    is_ahead: bool,
}

impl Engine {
    /// Fetches the next batch unless `limit` is over before; true if there is one now, or never
    /// will be.
    async fn fetch(&mut self, limit: impl Future<Output = ()>) -> bool {
        if self.fetched.is_some() || self.is_over {
            return true;
        }
        // The engine's `next` may be dropped at any time without losing a batch.
        tokio::select! {
            biased;
            next = self.stream.next() => {
                self.is_over = !matches!(next, Some(Ok(_)));
                self.fetched = next.map(|next| next.map_err(Failure::from));
                true
            }
            () = limit => false,
        }
    }
}

/// What a look for the next batch found.
#[derive(Debug)]
pub(crate) enum Next {
    Batch(ChangeBatch),
    Over,
    NotYet,
}

impl Shared {
    pub(crate) const fn table(&self) -> &TableSchema {
        &self.table
    }

    /// Looks for the next batch until `limit` is over.
    async fn next_within(&self, limit: impl Future<Output = ()>) -> Result<Next, Failure> {
        let delivered = {
            let mut engine = self.engine.lock().await;
            let is_settled = engine.fetch(limit).await;
            match engine.fetched.take() {
                Some(fetched) => fetched?,
                None => {
                    // Positions move without a batch too: past what the filter leaves out.
                    if !engine.is_ahead {
                        self.keep(engine.stream.checkpoint());
                    }
                    return Ok(if is_settled { Next::Over } else { Next::NotYet });
                }
            }
        };
        // A batch that cannot be shown ends the stream: reading on would pass over its rows.
        let batch: RecordBatch = match delivered.batch.finish() {
            Ok(batch) => batch,
            Err(error) => {
                self.engine.lock().await.is_ahead = true;
                self.close().await;
                return Err(error.into());
            }
        };
        let Delivered { checkpoint, token, .. } = delivered;
        self.keep(checkpoint.clone());
        Ok(Next::Batch(ChangeBatch { batch, checkpoint, token }))
    }

    /// Waits for the next batch; `None` at the end of the stream.
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<ChangeBatch>> {
        py.check_signals()?;
        loop {
            match wait(py, || self.next_within(tick()))?? {
                Next::Batch(batch) => return Ok(Some(batch)),
                Next::Over => return Ok(None),
                Next::NotYet => py.check_signals()?,
            }
        }
    }

    /// Fetches the next batch and leaves it for [`Self::next_within`].
    async fn fetched(&self) {
        while !self.engine.lock().await.fetch(tokio::time::sleep(TICK)).await {}
    }

    /// Where the reader stands; in a stream whose batches it acknowledges, after those.
    fn stands_at(&self) -> EngineCheckpoint {
        self.acks.checkpoint().unwrap_or_else(|| {
            self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner).clone()
        })
    }

    fn keep(&self, checkpoint: EngineCheckpoint) {
        *self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner) = checkpoint;
    }

    pub(crate) async fn close(&self) {
        let mut engine = self.engine.lock().await;
        engine.stream.close();
        engine.is_ahead |= engine.fetched.take().is_some();
        engine.is_over = true;
    }
}

/// Who reads the stream; there is one way to read it, chosen by the first read.
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
    ) -> PyResult<Self> {
        let checkpoint = Mutex::new(stream.checkpoint());
        let acks = stream.acknowledger();
        let engine = tokio::sync::Mutex::new(Engine {
            stream,
            fetched: None,
            is_over: false,
            is_ahead: false,
        });
        let shared = Arc::new(Shared { engine, checkpoint, acks, table });
        Ok(Self {
            shared: ProcessBound::new(py, "stream", shared)?,
            reader: Mutex::new(Reader::None),
        })
    }

    fn reader(&self) -> std::sync::MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream for a reader by iteration.
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

/// Id, state, seqnos (last one taken, highest of the server, up to which all copies persist), seconds
/// that changes have waited for that, and whether for copies on different branches.
type VbucketParts = (u16, &'static str, (u64, Option<u64>, Option<u64>), Option<f64>, bool);

/// Kind, vBucket, node, and the rest as text.
type EventParts = (&'static str, Option<u16>, Option<String>, String);

fn event_parts(event: StreamEvent) -> EventParts {
    match event {
        StreamEvent::Opened { vbid, node } => ("opened", Some(vbid.0), Some(node), String::new()),
        StreamEvent::Ended { vbid, reason } => ("ended", Some(vbid.0), None, reason),
        StreamEvent::RolledBack(rollback) => {
            let message = format!("from seqno {} to {}", rollback.from_seqno, rollback.seqno);
            ("rolled_back", Some(rollback.vbid.0), None, message)
        }
        StreamEvent::Moved { vbid, node } => ("moved", Some(vbid.0), Some(node), String::new()),
        StreamEvent::BackingOff { vbid, wait } => {
            ("backing_off", Some(vbid.0), None, format!("for {} ms", wait.as_millis()))
        }
        StreamEvent::ConnectionLost { node, error } => ("connection_lost", None, Some(node), error),
        StreamEvent::Lagging { vbid, seqno, high_seqno, still } => {
            let still = still.as_secs();
            let message = format!("at seqno {seqno} of {high_seqno} for {still} s");
            ("lagging", Some(vbid.0), None, message)
        }
        StreamEvent::Held { vbid, waits } => {
            let message = format!("changes wait to be persisted for {} s", waits.as_secs());
            ("held", Some(vbid.0), None, message)
        }
        StreamEvent::NothingPersisted => {
            let message = "the bucket lives in memory only: persisted_only has no effect";
            ("nothing_persisted", None, None, message.to_owned())
        }
        StreamEvent::Dropped(count) => {
            ("dropped", None, None, format!("{count} events that nobody took"))
        }
        event => ("other", None, None, format!("{event:?}")),
    }
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
    /// The next batch, `None` at the end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<ChangeBatch>> {
        self.for_iterator()?.next(py)
    }

    /// The next batch if it is there: `(batch, False)`; `(None, True)` at the end of the stream,
    /// `(None, False)` if it is yet to come.
    fn next_now(&self, py: Python<'_>) -> PyResult<(Option<ChangeBatch>, bool)> {
        let shared = self.for_iterator()?;
        Ok(match wait(py, || shared.next_within(std::future::ready(())))?? {
            Next::Batch(batch) => (Some(batch), false),
            Next::Over => (None, true),
            Next::NotYet => (None, false),
        })
    }

    /// Calls `notify` from another thread once the next batch is there, or never will be.
    fn notify(&self, py: Python<'_>, notify: Py<PyAny>) -> PyResult<()> {
        let shared = Arc::clone(self.for_iterator()?);
        let runtime = crate::runtime::current(py)?;
        runtime.spawn(async move {
            shared.fetched().await;
            // Attaching to Python may wait for other Python threads: not on the engine's.
            let call = move || {
                Python::try_attach(|py| {
                    // The event loop may be closed by now; then nobody waits any more.
                    let _ignored = notify.call0(py);
                });
            };
            tokio::task::spawn_blocking(call);
        });
        Ok(())
    }

    #[getter]
    fn checkpoint(&self) -> PyResult<Checkpoint> {
        Ok(Checkpoint(self.shared.get()?.stands_at()))
    }

    /// Whether batches wait for `ack`.
    #[getter]
    fn is_manual(&self) -> PyResult<bool> {
        Ok(self.shared.get()?.acks.is_manual())
    }

    /// The reader has done with a batch.
    fn ack(&self, batch: &ChangeBatch) -> PyResult<()> {
        Ok(self.shared.get()?.acks.ack(batch.token).map_err(Failure::from)?)
    }

    #[getter]
    fn column_names(&self) -> PyResult<Vec<&str>> {
        Ok(self.shared.get()?.table().names().collect())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shared = self.shared.get()?;
        let stats = wait(py, || async { shared.engine.lock().await.stream.stats() })?;
        let dict = PyDict::new(py);
        for (name, count) in [
            ("opening", stats.opening),
            ("streaming", stats.streaming),
            ("backing_off", stats.backing_off),
            ("complete", stats.complete),
            ("failed", stats.failed),
            ("settling", stats.settling),
            ("connections", stats.connections),
        ] {
            dict.set_item(name, count)?;
        }
        for (name, count) in [
            ("reconnects", stats.reconnects),
            ("batches", stats.batches),
            ("rows", stats.rows),
            ("buffered_bytes", stats.buffered_bytes),
            ("held_rows", stats.held_rows),
            ("held_bytes", stats.held_bytes),
        ] {
            dict.set_item(name, count)?;
        }
        dict.set_item("held_seconds", stats.held_for.as_secs_f64())?;
        dict.set_item("elapsed", stats.elapsed.as_secs_f64())?;
        Ok(dict)
    }

    /// Where every vBucket stands.
    fn vbucket_stats(&self, py: Python<'_>) -> PyResult<Vec<VbucketParts>> {
        let shared = self.shared.get()?;
        let stats = wait(py, || async { shared.engine.lock().await.stream.vbucket_stats() })?;
        let of = |vbucket: VbucketStats| {
            let high_seqno = vbucket.high_seqno.map(|seqno| seqno.0);
            let persisted_seqno = vbucket.persisted_seqno.map(|seqno| seqno.0);
            let held_seconds = vbucket.held_for.map(|held| held.as_secs_f64());
            let (state, is_settling) = (vbucket.state.as_str(), vbucket.is_settling);
            let seqnos = (vbucket.seqno.0, high_seqno, persisted_seqno);
            (vbucket.vbid.0, state, seqnos, held_seconds, is_settling)
        };
        Ok(stats.into_iter().map(of).collect())
    }

    /// What has happened since the last call: kind, vBucket, node and the rest as text.
    fn events(&self, py: Python<'_>) -> PyResult<Vec<EventParts>> {
        let shared = self.shared.get()?;
        let events = wait(py, || async { shared.engine.lock().await.stream.take_events() })?;
        Ok(events.into_iter().map(event_parts).collect())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let shared = self.shared.get()?;
        *self.reader() = Reader::Closed;
        wait(py, || shared.close())
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.shared.get()?.table().arrow())
    }

    /// The schema that is asked for is a wish, which the protocol lets a producer pass over; the
    /// caller sees what it got.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _wish = requested_schema;
        let shared = self.shared.get()?;
        if shared.acks.is_manual() {
            let message = "a stream with ack=\"manual\" is read batch by batch: nobody would \
                           acknowledge the batches of an Arrow stream";
            return Err(Failure::new(Kind::Config, message).into());
        }
        {
            let mut reader = self.reader();
            match *reader {
                // One that iterated so far may hand over the rest.
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
