//! Dates and times in documents: ISO 8601 strings of the years 1 to 9999.

use std::ops::Range;

use chrono::NaiveDate;

const SECONDS_PER_DAY: i64 = 86_400;
const MICROS_PER_SECOND: i64 = 1_000_000;

/// The years 1 to 9999 in microseconds since 1970: what Spark and Python can show.
const CALENDAR: Range<i64> = -62_135_596_800_000_000..253_402_300_800_000_000;

/// Parses a date (`2024-02-29`) as days since 1970-01-01.
pub(super) fn date(text: &str) -> Option<i32> {
    let mut scan = Scan(text.as_bytes());
    let days = scan.date()?;
    scan.0.is_empty().then_some(days)
}

/// A timestamp, with or without an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParsedTime {
    /// Microseconds since 1970-01-01 in local time.
    pub(super) local_micros: i64,
    /// Offset of local time from UTC in seconds; `None` if the text has none.
    pub(super) offset_seconds: Option<i64>,
}

impl ParsedTime {
    /// Microseconds since 1970-01-01 in UTC, which is assumed if there is no offset.
    pub(super) fn utc_micros(self) -> Option<i64> {
        let offset = self.offset_seconds.unwrap_or_default();
        in_calendar(self.local_micros - offset * MICROS_PER_SECOND)
    }
}

/// Parses `2024-02-29`, `2024-02-29T13:45` or `2024-02-29 13:45:10.123456+01:00`.
///
/// Digits beyond microseconds are truncated.
pub(super) fn time(text: &str) -> Option<ParsedTime> {
    let mut scan = Scan(text.as_bytes());
    let days = scan.date()?;
    let (mut micros, mut offset_seconds) = (0, None);
    if !scan.0.is_empty() {
        if !scan.take(b'T') && !scan.take(b't') && !scan.take(b' ') {
            return None;
        }
        micros = scan.time_of_day()?;
        offset_seconds = scan.offset()?;
    }
    let local_micros = i64::from(days) * SECONDS_PER_DAY * MICROS_PER_SECOND + micros;
    Some(ParsedTime { local_micros, offset_seconds })
}

/// Whole seconds since 1970 as microseconds.
pub(super) fn seconds(seconds: i64) -> Option<i64> {
    seconds.checked_mul(MICROS_PER_SECOND).and_then(in_calendar)
}

fn in_calendar(micros: i64) -> Option<i64> {
    CALENDAR.contains(&micros).then_some(micros)
}

struct Scan<'a>(&'a [u8]);

impl Scan<'_> {
    fn take(&mut self, sign: u8) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if *first == sign => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    fn digit(&mut self) -> Option<i64> {
        let (first, rest) = self.0.split_first()?;
        first.is_ascii_digit().then(|| {
            self.0 = rest;
            i64::from(first - b'0')
        })
    }

    /// A number of exactly `digits` digits, at most `most`.
    fn number(&mut self, digits: usize, most: i64) -> Option<i64> {
        let mut number = 0;
        for _ in 0..digits {
            number = number * 10 + self.digit()?;
        }
        (number <= most).then_some(number)
    }

    fn date(&mut self) -> Option<i32> {
        let year = i32::try_from(self.number(4, 9999)?).ok().filter(|year| *year > 0)?;
        let month = self.take(b'-').then(|| self.number(2, 12))??;
        let day = self.take(b'-').then(|| self.number(2, 31))??;
        let (month, day) = (u32::try_from(month).ok()?, u32::try_from(day).ok()?);
        Some(NaiveDate::from_ymd_opt(year, month, day)?.to_epoch_days())
    }

    fn time_of_day(&mut self) -> Option<i64> {
        let hour = self.number(2, 23)?;
        let minute = self.take(b':').then(|| self.number(2, 59))??;
        let (mut second, mut micros) = (0, 0);
        if self.take(b':') {
            second = self.number(2, 59)?;
            if self.take(b'.') {
                micros = self.fraction()?;
            }
        }
        Some(((hour * 60 + minute) * 60 + second) * MICROS_PER_SECOND + micros)
    }

    fn fraction(&mut self) -> Option<i64> {
        let (mut micros, mut unit) = (self.digit()? * 100_000, 10_000);
        while let Some(digit) = self.digit() {
            micros += digit * unit;
            unit /= 10;
        }
        Some(micros)
    }

    /// The rest of the text: nothing, `Z`, or an offset in hours and minutes.
    #[expect(clippy::option_option, reason = "no offset is not the same as a wrong one")]
    fn offset(&mut self) -> Option<Option<i64>> {
        if self.0.is_empty() {
            return Some(None);
        }
        let is_utc = self.take(b'Z') || self.take(b'z');
        let offset = if is_utc {
            0
        } else {
            let sign = if self.take(b'-') { -1 } else { self.take(b'+').then_some(1)? };
            let hours = self.number(2, 18)?;
            let has_minutes = self.take(b':') || !self.0.is_empty();
            let minutes = if has_minutes { self.number(2, 59)? } else { 0 };
            sign * (hours * 60 + minutes) * 60
        };
        self.0.is_empty().then_some(Some(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn date_is_days_since_1970() {
        for (text, days) in [
            ("1970-01-01", 0),
            ("1969-12-31", -1),
            ("2000-02-29", 11_016),
            ("2025-11-21", 20_413),
            ("0001-01-01", -719_162),
            ("9999-12-31", 2_932_896),
        ] {
            assert_eq!(date(text), Some(days), "{text}");
        }
        for text in [
            "",
            "2024",
            "2024-1-1",
            "2024-13-01",
            "2024-00-01",
            "2023-02-29",
            "1900-02-29",
            "2024-02-30",
            "2024-01-00",
            "0000-12-31",
            "2024-01-01 ",
            "20240101",
            "-001-01-01",
            "2024-01-01T00:00",
        ] {
            assert_eq!(date(text), None, "{text}");
        }
    }

    #[test]
    fn timestamp_has_a_fraction_and_a_time_zone() {
        let day = 20_413 * SECONDS_PER_DAY * MICROS_PER_SECOND;
        let hour = 3600 * MICROS_PER_SECOND;
        for (text, micros) in [
            ("2025-11-21", day),
            ("2025-11-21T13:00Z", day + 13 * hour),
            ("2025-11-21 13:00:01", day + 13 * hour + 1_000_000),
            ("2025-11-21T13:00:00.5+01:00", day + 12 * hour + 500_000),
            ("2025-11-21T13:00:00.123456789-0130", day + 14 * hour + hour / 2 + 123_456),
            ("2025-11-21t00:00:00z", day),
            ("2025-11-21T00:00:00+02", day - 2 * hour),
        ] {
            assert_eq!(time(text).and_then(ParsedTime::utc_micros), Some(micros), "{text}");
        }
        for text in [
            "2025-11-21T",
            "2025-11-21T13",
            "2025-11-21T24:00",
            "2025-11-21T13:60",
            "2025-11-21T13:00:60",
            "2025-11-21T13:00:00.",
            "2025-11-21T13:00:00,5",
            "2025-11-21T13:00:00+",
            "2025-11-21T13:00:00+01:",
            "2025-11-21T13:00:00+19:00",
            "2025-11-21T13:00:00Zx",
            "2025-11-21T13:00:00 Europe/Berlin",
            "13:00:00",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
        assert_eq!(time("2025-11-21T00:00").unwrap().offset_seconds, None);
        assert_eq!(time("2025-11-21T00:00Z").unwrap().offset_seconds, Some(0));
    }

    #[test]
    fn timestamps_before_year_1_and_after_9999_are_none() {
        let (first, last) = (-62_135_596_800, 253_402_300_799);
        for second in [first, -1, last] {
            assert_eq!(seconds(second), Some(second * MICROS_PER_SECOND));
        }
        // The last but one counts milliseconds.
        for second in [i64::MIN, first - 1, last + 1, 1_700_000_000_000, i64::MAX] {
            assert_eq!(seconds(second), None, "{second}");
        }
        let utc = |text| time(text).and_then(ParsedTime::utc_micros);
        assert_eq!(utc("0001-01-01T01:00+01:00"), Some(CALENDAR.start));
        assert_eq!(utc("9999-12-31T22:59:59.999999-01:00"), Some(CALENDAR.end - 1));
        for text in ["0001-01-01T00:59+01:00", "9999-12-31T23:00-01:00", "0000-06-30T00:00Z"] {
            assert_eq!(utc(text), None, "{text}");
        }
    }
}
