//! Records in columns.

use std::ffi::{CStr, CString};

use crate::error::{Error, Kind};
use crate::partition::murmur2;

/// A column of bytes, of which some may be null.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    offsets: &'a [i32],
    first: usize,
    data: &'a [u8],
    /// 1 for each that is null; empty if none is.
    nulls: &'a [u8],
}

impl<'a> Column<'a> {
    /// A column by the offsets of its values, one more than values, and their bytes, of which the
    /// first is at the first offset.
    ///
    /// # Errors
    ///
    /// The offsets do not ascend, or go beyond the bytes, or there are not as many nulls.
    pub fn new(offsets: &'a [i32], data: &'a [u8], nulls: &'a [u8]) -> Result<Self, Error> {
        let first = offsets.first().and_then(|first| usize::try_from(*first).ok());
        let end = offsets.last().and_then(|end| usize::try_from(*end).ok());
        let invalid = || invalid("the offsets are not within the bytes");
        let (first, end) = first.zip(end).ok_or_else(invalid)?;
        let is_within = offsets.is_sorted() && end - first <= data.len();
        if !is_within || !(nulls.is_empty() || nulls.len() + 1 == offsets.len()) {
            return Err(invalid());
        }
        Ok(Self { offsets, first, data, nulls })
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A value; `None` if it is null.
    #[must_use]
    pub fn get(&self, row: usize) -> Option<&'a [u8]> {
        if self.nulls.get(row).is_some_and(|null| *null != 0) {
            return None;
        }
        let start = usize::try_from(*self.offsets.get(row)?).ok()?;
        let end = usize::try_from(*self.offsets.get(row + 1)?).ok()?;
        self.data.get(start.checked_sub(self.first)?..end.checked_sub(self.first)?)
    }
}

/// A header of every record, as a number in decimal or as one of some words.
#[derive(Clone, Debug)]
pub struct Header<'a> {
    name: CString,
    numbers: &'a [i64],
    words: Vec<String>,
}

impl<'a> Header<'a> {
    /// A record whose number is this has no such header.
    pub const NONE: i64 = i64::MIN;

    /// A header by its number in each record, which is the place of a word if there are any.
    ///
    /// # Errors
    ///
    /// The name has a NUL, or a number is that of no word.
    pub fn new(name: &str, numbers: &'a [i64], words: Vec<String>) -> Result<Self, Error> {
        let name = CString::new(name).map_err(|_| invalid("the name of a header has a NUL"))?;
        let is_word = |number: &i64| {
            *number == Self::NONE || usize::try_from(*number).is_ok_and(|at| at < words.len())
        };
        if !words.is_empty() && !numbers.iter().all(is_word) {
            return Err(invalid("a header has a number without a word"));
        }
        Ok(Self { name, numbers, words })
    }

    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }

    /// Writes the value in a record to the end of a text; says whether it has one.
    fn write(&self, row: usize, text: &mut String) -> bool {
        let Some(number) = self.numbers.get(row).filter(|number| **number != Self::NONE) else {
            return false;
        };
        if self.words.is_empty() {
            text.push_str(itoa::Buffer::new().format(*number));
        } else if let Some(word) = usize::try_from(*number).ok().and_then(|at| self.words.get(at)) {
            text.push_str(word);
        }
        true
    }
}

/// Records of one topic.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    /// Name of the only header, which has the values of all.
    joined: Option<CString>,
    keys: Column<'a>,
    values: Column<'a>,
    partitions: &'a [i32],
    headers: Vec<Header<'a>>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Record<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) value: Option<&'a [u8]>,
    pub(crate) partition: i32,
}

impl<'a> Records<'a> {
    /// Records by their columns. A partition below 0 is chosen by the key.
    ///
    /// # Errors
    ///
    /// The columns do not have the same length.
    pub fn new(
        keys: Column<'a>,
        values: Column<'a>,
        partitions: &'a [i32],
        headers: Vec<Header<'a>>,
    ) -> Result<Self, Error> {
        let rows = keys.len();
        let are_equal = values.len() == rows
            && partitions.len() == rows
            && headers.iter().all(|header| header.numbers.len() == rows);
        if are_equal {
            Ok(Self { joined: None, keys, values, partitions, headers })
        } else {
            Err(invalid("the columns differ in length"))
        }
    }

    /// Has one header, with the values of all, separated by commas: each header takes as long as
    /// the rest of a record.
    ///
    /// # Errors
    ///
    /// The name has a NUL.
    pub fn joined(mut self, name: &str) -> Result<Self, Error> {
        let name = CString::new(name).map_err(|_| invalid("the name of a header has a NUL"))?;
        self.joined = Some(name);
        Ok(self)
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn get(&self, row: usize, partitions: u32) -> Record<'a> {
        let key = self.keys.get(row);
        let given = self.partitions.get(row).copied().unwrap_or(-1);
        let partition = if given < 0 {
            let chosen = murmur2(key.unwrap_or_default()) % partitions.max(1);
            i32::try_from(chosen).unwrap_or(0)
        } else {
            given
        };
        Record { key, value: self.values.get(row), partition }
    }

    /// Writes the headers of a record, as text one after the other, and where each ends.
    pub(crate) fn headers(&self, row: usize, text: &mut String, ends: &mut Vec<(usize, usize)>) {
        text.clear();
        ends.clear();
        for (place, header) in self.headers.iter().enumerate() {
            if self.joined.is_some() {
                if place > 0 {
                    text.push(',');
                }
                header.write(row, text);
            } else if header.write(row, text) {
                ends.push((place, text.len()));
            }
        }
        if self.joined.is_some() {
            ends.push((0, text.len()));
        }
    }

    pub(crate) fn header(&self, place: usize) -> Option<&CStr> {
        self.joined.as_deref().or_else(|| self.headers.get(place).map(Header::name))
    }
}

fn invalid(text: &str) -> Error {
    Error::own(Kind::Records, "records", text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{Column, Header, Records};

    #[test]
    fn columns_are_checked_before_they_are_read() {
        assert!(Column::new(&[0, 3], b"abc", &[]).is_ok());
        assert!(Column::new(&[0, 4], b"abc", &[]).is_err());
        assert!(Column::new(&[4, 7], b"abc", &[]).is_ok());
        assert!(Column::new(&[4, 8], b"abc", &[]).is_err());
        assert!(Column::new(&[2, 1], b"abc", &[]).is_err());
        assert!(Column::new(&[2, 1, 2], b"abc", &[]).is_err());
        assert!(Column::new(&[-1, 1], b"abc", &[]).is_err());
        assert!(Column::new(&[], b"", &[]).is_err());
        assert!(Column::new(&[0, 1, 2], b"abc", &[0]).is_err());
        assert!(Header::new("a\0b", &[], vec![]).is_err());
        assert!(Header::new("op", &[1], vec!["mutation".into()]).is_err());
        let one = Column::new(&[0, 1], b"k", &[]).unwrap();
        let two = Column::new(&[0, 1, 1], b"v", &[0, 1]).unwrap();
        assert!(Records::new(one, two, &[-1], vec![]).is_err());
        assert!(Records::new(one, one, &[], vec![]).is_err());
    }

    #[test]
    fn a_record_has_its_headers_and_a_partition_by_its_key() {
        // As those of a slice.
        let keys = Column::new(&[6, 8, 10], b"2121", &[]).unwrap();
        let values = Column::new(&[0, 1, 1], b"v", &[0, 1]).unwrap();
        let headers = vec![
            Header::new("seqno", &[7, -3], vec![]).unwrap(),
            Header::new("op", &[Header::NONE, 0], vec!["deletion".into()]).unwrap(),
        ];
        let records = Records::new(keys, values, &[-1, 5], headers).unwrap();
        // 21 hashes to -973932308, as an unsigned number without the sign 1173551340.
        assert_eq!(records.get(0, 7).partition, 1_173_551_340 % 7);
        assert_eq!((records.get(1, 7).partition, records.get(1, 7).value), (5, None));
        let (mut text, mut ends) = (String::new(), vec![]);
        records.headers(0, &mut text, &mut ends);
        assert_eq!((text.as_str(), ends.as_slice()), ("7", &[(0, 1)][..]));
        records.headers(1, &mut text, &mut ends);
        assert_eq!((text.as_str(), ends.as_slice()), ("-3deletion", &[(0, 2), (1, 10)][..]));
        let records = records.joined("dcp").unwrap();
        records.headers(0, &mut text, &mut ends);
        assert_eq!((text.as_str(), ends.as_slice()), ("7,", &[(0, 2)][..]));
        assert_eq!(records.header(0), Some(c"dcp"));
    }
}
