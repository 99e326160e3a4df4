//! Timestamps and dates as Python's `datetime` objects.

use chrono::{DateTime, Datelike, NaiveDate, Timelike};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Makes `datetime` objects in UTC from microseconds since 1970.
pub(crate) struct Times<'py> {
    date: Bound<'py, PyAny>,
    datetime: Bound<'py, PyAny>,
    timedelta: Bound<'py, PyAny>,
    utc: Bound<'py, PyAny>,
}

impl<'py> Times<'py> {
    pub(crate) fn new(py: Python<'py>) -> PyResult<Self> {
        let module = py.import("datetime")?;
        Ok(Self {
            date: module.getattr("date")?,
            datetime: module.getattr("datetime")?,
            timedelta: module.getattr("timedelta")?,
            utc: module.getattr("UTC")?,
        })
    }

    /// The timestamp; exact, unlike a float of seconds.
    pub(crate) fn datetime(&self, py: Python<'py>, micros: i64) -> PyResult<Bound<'py, PyAny>> {
        // The constructor that `pickle` uses; it costs a quarter of adding a timedelta to the
        // epoch.
        if let Some(state) = pickled(micros) {
            return self.datetime.call1((PyBytes::new(py, &state), &self.utc));
        }
        let epoch = self.datetime.call1((1970, 1, 1, 0, 0, 0, 0, &self.utc))?;
        epoch.add(self.timedelta.call1((0, 0, micros))?)
    }

    /// A timestamp without a time zone.
    pub(crate) fn local(&self, micros: i64) -> PyResult<Bound<'py, PyAny>> {
        let epoch = self.datetime.call1((1970, 1, 1))?;
        epoch.add(self.timedelta.call1((0, 0, micros))?)
    }

    /// The date this number of days after 1970-01-01.
    pub(crate) fn date(&self, days: i32) -> PyResult<Bound<'py, PyAny>> {
        let date = NaiveDate::from_epoch_days(days);
        let date = date.ok_or_else(|| PyOverflowError::new_err("date value out of range"))?;
        self.date.call1((date.year(), date.month(), date.day()))
    }
}

/// The ten bytes with which `datetime.__reduce__` encodes a timestamp: year, month, day, hour,
/// minute, second, microsecond. `None` if the year is out of range.
fn pickled(micros: i64) -> Option<[u8; 10]> {
    let moment = DateTime::from_timestamp_micros(micros)?;
    let year = u16::try_from(moment.year()).ok().filter(|year| (1..=9999).contains(year))?;
    let [high, low] = year.to_be_bytes();
    let [_, micro2, micro1, micro0] = moment.timestamp_subsec_micros().to_be_bytes();
    let [month, day, hour, minute, second] =
        [moment.month(), moment.day(), moment.hour(), moment.minute(), moment.second()]
            .map(|small| small.to_le_bytes()[0]);
    Some([high, low, month, day, hour, minute, second, micro2, micro1, micro0])
}
