//! Columns with the same text in every row, cached and shared by batches.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{Array, StringArray};
use arrow_buffer::OffsetBuffer;

/// Cache of constant columns. Most batches have a few: operation, scope, collection.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatedTexts {
    /// The longest column made of each text, oldest first.
    columns: Arc<Mutex<Vec<Remembered>>>,
}

type Remembered = (Box<str>, StringArray);

impl RepeatedTexts {
    /// Maximum number of cached texts.
    const MAX_TEXTS: usize = 8;

    /// Maximum size of a cached column, in bytes.
    const MAX_COLUMN_BYTES: usize = 1024 * 1024;

    /// A column with `text` in every row.
    pub(crate) fn column(&self, text: &str, rows: usize) -> StringArray {
        // No invariant can be broken by a panic here.
        let mut columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner);
        let known = columns.iter().position(|(known, _)| &**known == text);
        if let Some((_, column)) = known.and_then(|index| columns.get(index))
            && column.len() >= rows
        {
            return column.slice(0, rows);
        }
        // Batches have similar sizes: avoid making a slightly longer column for each.
        let longer = rows.next_power_of_two();
        let bytes = (text.len() + size_of::<i32>()).saturating_mul(longer);
        if bytes > Self::MAX_COLUMN_BYTES {
            return repeated(text, rows);
        }
        if let Some(index) = known {
            columns.remove(index);
        } else if columns.len() == Self::MAX_TEXTS {
            columns.remove(0);
        }
        let column = repeated(text, longer);
        columns.push((text.into(), column.clone()));
        column.slice(0, rows)
    }
}

/// A column with `text` in every row.
fn repeated(text: &str, rows: usize) -> StringArray {
    let offsets = OffsetBuffer::from_repeated_length(text.len(), rows);
    StringArray::new(offsets, text.repeat(rows).into_bytes().into(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_text_columns_share_their_memory_whatever_their_length() {
        let texts = RepeatedTexts::default();
        let long = texts.column("mutation", 1000);
        let short = texts.column("mutation", 10);
        assert_eq!((long.len(), short.len()), (1000, 10));
        assert_eq!(long.values().as_ptr(), short.values().as_ptr());
        assert!(long.iter().chain(&short).all(|text| text == Some("mutation")));
        let longer = texts.column("mutation", 1025);
        assert_eq!((longer.len(), longer.value(1024)), (1025, "mutation"));
        assert_eq!(texts.column("mutation", 0).len(), 0);
    }

    #[test]
    fn repeated_texts_remember_few_texts_and_no_long_columns() {
        let texts = RepeatedTexts::default();
        for number in 0..100 {
            let text = format!("collection {number}");
            assert_eq!(texts.column(&text, 3).value(2), text);
        }
        assert_eq!(texts.columns.lock().unwrap().len(), RepeatedTexts::MAX_TEXTS);
        let first = texts.column("long", RepeatedTexts::MAX_COLUMN_BYTES);
        let second = texts.column("long", RepeatedTexts::MAX_COLUMN_BYTES);
        assert_ne!(first.values().as_ptr(), second.values().as_ptr());
    }
}
