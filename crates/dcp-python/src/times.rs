//! Timestamps and dates as those of Python's `datetime`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;

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

    /// The moment; exact, where a float of seconds would not be.
    pub(crate) fn datetime(&self, py: Python<'py>, micros: i64) -> PyResult<Bound<'py, PyAny>> {
        // As `pickle` makes one, which costs a quarter of adding a timedelta to the epoch.
        if let Some(state) = pickled(micros) {
            return self.datetime.call1((PyBytes::new(py, &state), &self.utc));
        }
        let epoch = self.datetime.call1((1970, 1, 1, 0, 0, 0, 0, &self.utc))?;
        epoch.add(self.timedelta.call1((0, 0, micros))?)
    }

    /// A time that is not said to be of a place.
    pub(crate) fn local(&self, micros: i64) -> PyResult<Bound<'py, PyAny>> {
        let epoch = self.datetime.call1((1970, 1, 1))?;
        epoch.add(self.timedelta.call1((0, 0, micros))?)
    }

    /// The day so many days after 1970-01-01.
    pub(crate) fn date(&self, days: i32) -> PyResult<Bound<'py, PyAny>> {
        let (year, month, day) = civil(i64::from(days));
        self.date.call1((year, month, day))
    }
}

/// The ten bytes `datetime.__reduce__` stands for a moment with: year, month, day, hour, minute,
/// second, microsecond. `None` outside the years it has.
fn pickled(micros: i64) -> Option<[u8; 10]> {
    let (seconds, micros) =
        (micros.div_euclid(MICROS_PER_SECOND), micros.rem_euclid(MICROS_PER_SECOND));
    let (days, second) = (seconds.div_euclid(SECONDS_PER_DAY), seconds.rem_euclid(SECONDS_PER_DAY));
    let (year, month, day) = civil(days);
    if !(1..=9999).contains(&year) {
        return None;
    }
    let [.., high, low] = year.to_be_bytes();
    let [.., micro2, micro1, micro0] = micros.to_be_bytes();
    let small = |number: i64| u8::try_from(number).ok();
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    Some([
        high,
        low,
        small(month)?,
        small(day)?,
        small(hour)?,
        small(minute)?,
        small(second)?,
        micro2,
        micro1,
        micro0,
    ])
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
///
/// Years are taken to begin in March, so that the leap day is their last one.
const fn civil(days: i64) -> (i64, i64, i64) {
    const DAYS_PER_ERA: i64 = 146_097;
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(DAYS_PER_ERA), days.rem_euclid(DAYS_PER_ERA));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + if month <= 2 { 1 } else { 0 };
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_fall_on_their_dates() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (-1, (1969, 12, 31)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_413, (2025, 11, 21)),
            (-719_162, (1, 1, 1)),
            (2_932_896, (9999, 12, 31)),
        ] {
            assert_eq!(civil(days), date, "{days}");
        }
    }

    #[test]
    fn a_moment_is_pickled_field_by_field() {
        let micros = 20_413 * SECONDS_PER_DAY * MICROS_PER_SECOND + 43_081_123_456;
        let state = [0x07, 0xe9, 11, 21, 11, 58, 1, 0x01, 0xe2, 0x40];
        assert_eq!(pickled(micros), Some(state));
        assert_eq!(pickled(i64::MAX), None);
        assert_eq!(pickled(i64::MIN), None);
    }
}
