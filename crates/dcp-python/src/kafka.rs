//! Records for Kafka, which are given as columns.

use std::mem;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dcp_kafka::{Column, Error, Header, Kind as KafkaKind, Producer, Records};
use dcp_proto::topology;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Failure, Kind};

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error.kind {
            KafkaKind::Config => Self::option(&["target"], text),
            KafkaKind::Library => Self::option(&[], text),
            kind => Self::new(class(kind), text),
        }
    }
}

const fn class(kind: KafkaKind) -> Kind {
    match kind {
        KafkaKind::Fenced => Kind::ConcurrentWriter,
        KafkaKind::Authentication => Kind::Authentication,
        KafkaKind::Authorization => Kind::AccessDenied,
        KafkaKind::Unreachable => Kind::Connect,
        KafkaKind::Timeout => Kind::Timeout,
        KafkaKind::TooLarge => Kind::Data,
        _ => Kind::Dcp,
    }
}

/// Offsets, the bytes that they refer to, and 1 for each value that is null.
type Bytes = (PyBuffer<i32>, PyBuffer<u8>, PyBuffer<u8>);

/// A column of bytes, copied from Python's buffers.
#[derive(Debug, Default)]
struct Given {
    offsets: Vec<i32>,
    data: Vec<u8>,
    nulls: Vec<u8>,
}

impl Given {
    fn read(&mut self, py: Python<'_>, (offsets, data, nulls): &Bytes) -> PyResult<()> {
        copy(py, offsets, &mut self.offsets)?;
        copy(py, data, &mut self.data)?;
        copy(py, nulls, &mut self.nulls)
    }

    fn column(&self) -> Result<Column<'_>, Error> {
        Column::new(&self.offsets, &self.data, &self.nulls)
    }
}

/// Columns copied from Python, whose memory serves again: the pages of a new copy cost as much as
/// the copy.
#[derive(Debug, Default)]
struct Copied {
    keys: Given,
    values: Given,
    partitions: Vec<i32>,
    numbers: Vec<Vec<i64>>,
}

impl Copied {
    /// More bytes of values than this are not kept.
    const KEPT: usize = 16 << 20;

    fn read(
        &mut self,
        py: Python<'_>,
        keys: &Bytes,
        values: &Bytes,
        partitions: &PyBuffer<i32>,
        numbers: &[(String, PyBuffer<i64>, Vec<String>)],
    ) -> PyResult<()> {
        self.keys.read(py, keys)?;
        self.values.read(py, values)?;
        copy(py, partitions, &mut self.partitions)?;
        self.numbers.resize_with(numbers.len(), Vec::new);
        for ((_, from, _), to) in numbers.iter().zip(&mut self.numbers) {
            copy(py, from, to)?;
        }
        Ok(())
    }
}

fn copy<T: Element + Default>(py: Python<'_>, from: &PyBuffer<T>, to: &mut Vec<T>) -> PyResult<()> {
    to.resize(from.item_count(), T::default());
    from.copy_to_slice(py, to)
}

/// A transactional producer of librdkafka.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct KafkaProducer {
    producer: Mutex<Option<Arc<Producer>>>,
    copied: Mutex<Copied>,
}

impl KafkaProducer {
    fn attempt(
        &self,
        py: Python<'_>,
        attempt: impl FnOnce(&Producer) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        let producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let closed = || Failure::new(Kind::Closed, "the producer is closed");
        let producer = producer.ok_or_else(closed)?;
        py.detach(|| attempt(&producer)).map_err(|error| Failure::from(error).into())
    }
}

#[pymethods]
impl KafkaProducer {
    /// Loads librdkafka from a path, and creates a producer with its options.
    #[new]
    fn new(py: Python<'_>, library: PathBuf, config: Vec<(String, String)>) -> PyResult<Self> {
        let made = py.detach(|| Producer::new(&library, &config)).map_err(Failure::from)?;
        Ok(Self { producer: Mutex::new(Some(Arc::new(made))), copied: Mutex::default() })
    }

    fn init(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.attempt(py, |producer| producer.init(seconds(timeout)))
    }

    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.attempt(py, Producer::begin)
    }

    fn commit(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.attempt(py, |producer| producer.commit(seconds(timeout)))
    }

    fn abort(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.attempt(py, |producer| producer.abort(seconds(timeout)))
    }

    /// Adds records. A partition below 0 is chosen by the key. A header has its number in each
    /// record, and the words that these are of, if it is no number itself.
    #[expect(clippy::too_many_arguments, reason = "columns of records")]
    fn send(
        &self,
        py: Python<'_>,
        topic: &str,
        count: u32,
        keys: Bytes,
        values: Bytes,
        partitions: PyBuffer<i32>,
        headers: Vec<(String, PyBuffer<i64>, Vec<String>)>,
        joined: Option<&str>,
        timeout: f64,
    ) -> PyResult<()> {
        // Taken out, as a thread may not wait for a lock while it holds the interpreter's.
        let mut copied =
            mem::take(&mut *self.copied.lock().unwrap_or_else(PoisonError::into_inner));
        copied.read(py, &keys, &values, &partitions, &headers)?;
        self.attempt(py, |producer| {
            let headers = headers
                .iter()
                .zip(&copied.numbers)
                .map(|((name, _, words), numbers)| Header::new(name, numbers, words.clone()))
                .collect::<Result<_, _>>()?;
            let (keys, values) = (copied.keys.column()?, copied.values.column()?);
            let mut records = Records::new(keys, values, &copied.partitions, headers)?;
            if let Some(name) = joined {
                records = records.joined(name)?;
            }
            producer.send(topic, count, &records, seconds(timeout))
        })?;
        if copied.values.data.capacity() <= Copied::KEPT {
            *self.copied.lock().unwrap_or_else(PoisonError::into_inner) = copied;
        }
        Ok(())
    }

    fn close(&self, py: Python<'_>) {
        let producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its threads are joined.
        py.detach(|| drop(producer));
    }
}

/// The vBucket of a document key.
#[pyfunction]
pub(crate) fn vbucket_of_key(key: &[u8], num_vbuckets: u16) -> u16 {
    topology::vbucket_of_key(key, num_vbuckets).0
}

/// Those of many keys, as native numbers of 16 bits one after the other.
#[pyfunction]
pub(crate) fn vbuckets_of_keys<'py>(
    py: Python<'py>,
    keys: Bytes,
    num_vbuckets: u16,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut given = Given::default();
    given.read(py, &keys)?;
    let column = given.column().map_err(Failure::from)?;
    let of = |row| topology::vbucket_of_key(column.get(row).unwrap_or_default(), num_vbuckets).0;
    let found: Vec<u8> = (0..column.len()).flat_map(|row| of(row).to_ne_bytes()).collect();
    Ok(PyBytes::new(py, &found))
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(60))
}
