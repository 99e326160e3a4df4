//! A batch split by collection.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{RecordBatch, UInt32Array};
use arrow_schema::ArrowError;
use arrow_select::take::take_record_batch;

use crate::Column;

/// Splits the rows of a batch by the ID of their collection, in the order of their first rows; those
/// without one are under `None`. Each part has its rows in order.
///
/// # Errors
/// [`ArrowError`] if the batch has no column `collection_id`, or a part cannot be made.
pub fn by_collection(batch: &RecordBatch) -> Result<Vec<(Option<i64>, RecordBatch)>, ArrowError> {
    let name = Column::CollectionId.name();
    let ids = batch.column_by_name(name).and_then(|column| column.as_primitive_opt::<Int64Type>());
    let Some(ids) = ids else {
        return Err(ArrowError::SchemaError(format!("the batch has no column {name}")));
    };
    let mut places: HashMap<Option<i64>, usize> = HashMap::new();
    let mut parts: Vec<(Option<i64>, Vec<u32>)> = Vec::new();
    let mut last = None;
    for (row, id) in (0_u32..).zip(ids) {
        let place = match last {
            Some((of, place)) if of == id => place,
            _ => *places.entry(id).or_insert_with(|| {
                parts.push((id, Vec::new()));
                parts.len() - 1
            }),
        };
        last = Some((id, place));
        parts[place].1.push(row);
    }
    if let [(id, _)] = parts.as_slice() {
        return Ok(vec![(*id, batch.clone())]);
    }
    parts
        .into_iter()
        .map(|(id, rows)| Ok((id, take_record_batch(batch, &UInt32Array::from(rows))?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Int64Array, StringArray};
    use proptest::prelude::*;

    use super::*;

    fn batch(ids: &[Option<i64>]) -> RecordBatch {
        let rows: Vec<String> = (0..ids.len()).map(|row| row.to_string()).collect();
        RecordBatch::try_from_iter_with_nullable([
            ("collection_id", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef, true),
            ("row", Arc::new(StringArray::from(rows)) as ArrayRef, false),
        ])
        .unwrap()
    }

    fn rows(batch: &RecordBatch) -> Vec<usize> {
        batch["row"].as_string::<i32>().iter().map(|row| row.unwrap().parse().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn every_row_is_in_the_part_of_its_collection_in_order(
            ids in prop::collection::vec(prop::option::weighted(0.8, 8_i64..12), 1..60),
        ) {
            let parts = by_collection(&batch(&ids)).unwrap();
            let mut seen = Vec::new();
            for (id, part) in &parts {
                let rows = rows(part);
                prop_assert!(!rows.is_empty() && rows.is_sorted());
                prop_assert!(rows.iter().all(|row| ids[*row] == *id));
                seen.push(rows[0]);
            }
            prop_assert!(seen.is_sorted());
            prop_assert_eq!(parts.iter().map(|(_, part)| part.num_rows()).sum::<usize>(), ids.len());
        }
    }

    #[test]
    fn a_batch_of_one_collection_is_not_copied() {
        let whole = batch(&[Some(8), Some(8)]);
        let parts = by_collection(&whole).unwrap();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].0, Some(8));
        assert!(Arc::ptr_eq(parts[0].1.column(0), whole.column(0)));
    }

    #[test]
    fn a_batch_without_collections_is_refused() {
        let rows = RecordBatch::try_from_iter([(
            "seqno",
            Arc::new(Int64Array::from(vec![1])) as ArrayRef,
        )]);
        let refused = by_collection(&rows.unwrap()).unwrap_err().to_string();
        assert_eq!(refused, "Schema error: the batch has no column collection_id");
    }
}
