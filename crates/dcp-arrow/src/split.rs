//! Batches split by collection.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Int64Array, RecordBatch};
use arrow_schema::ArrowError;
use arrow_select::interleave::interleave_record_batch;

use crate::Column;

/// The rows of a collection.
#[derive(Debug, Clone)]
pub struct Part {
    /// ID of the collection; `None` for rows that have none.
    pub collection_id: Option<i64>,
    /// The rows, in order.
    pub batches: Vec<RecordBatch>,
}

/// Splits the rows of batches by the ID of their collection, in the order of their first rows.
///
/// A part is one batch, so that its columns are worked on as a whole however many collections there
/// are. Batches that are all of one collection stay as they are.
///
/// # Errors
/// [`ArrowError`] if a batch has no column `collection_id`, or a part cannot be made.
pub fn by_collection(batches: &[&RecordBatch]) -> Result<Vec<Part>, ArrowError> {
    let mut places: HashMap<Option<i64>, usize> = HashMap::new();
    let mut ids: Vec<Option<i64>> = Vec::new();
    // Where the rows of each are: a batch, and a row of it.
    let mut rows: Vec<Vec<(usize, usize)>> = Vec::new();
    for (number, batch) in batches.iter().enumerate() {
        let mut last = None;
        for (row, id) in ids_of(batch)?.iter().enumerate() {
            let place = match last {
                Some((of, place)) if of == id => place,
                _ => *places.entry(id).or_insert_with(|| {
                    ids.push(id);
                    rows.push(Vec::new());
                    rows.len() - 1
                }),
            };
            last = Some((id, place));
            rows[place].push((number, row));
        }
    }
    if let [id] = ids.as_slice() {
        let batches = batches.iter().map(|batch| (*batch).clone()).collect();
        return Ok(vec![Part { collection_id: *id, batches }]);
    }
    ids.into_iter()
        .zip(rows)
        .map(|(collection_id, rows)| {
            let batches = vec![interleave_record_batch(batches, &rows)?];
            Ok(Part { collection_id, batches })
        })
        .collect()
}

fn ids_of(batch: &RecordBatch) -> Result<&Int64Array, ArrowError> {
    let name = Column::CollectionId.name();
    let ids = batch.column_by_name(name).and_then(|column| column.as_primitive_opt::<Int64Type>());
    ids.ok_or_else(|| ArrowError::SchemaError(format!("the batch has no column {name}")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, StringArray};
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

    fn rows(batches: &[RecordBatch]) -> Vec<usize> {
        let texts = batches.iter().flat_map(|batch| batch["row"].as_string::<i32>().iter());
        texts.map(|row| row.unwrap().parse().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn every_row_is_in_the_part_of_its_collection_in_order(
            ids in prop::collection::vec(prop::option::weighted(0.8, 8_i64..12), 1..60),
            cuts in prop::collection::vec(0_usize..60, 0..4),
        ) {
            let whole = batch(&ids);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(ids.len())).collect();
            cuts.extend([0, ids.len()]);
            cuts.sort_unstable();
            let batches: Vec<RecordBatch> =
                cuts.windows(2).map(|cut| whole.slice(cut[0], cut[1] - cut[0])).collect();
            let batches: Vec<&RecordBatch> = batches.iter().collect();
            let parts = by_collection(&batches).unwrap();
            let mut seen = Vec::new();
            for part in &parts {
                let rows = rows(&part.batches);
                prop_assert!(!rows.is_empty() && rows.is_sorted());
                prop_assert!(rows.iter().all(|row| ids[*row] == part.collection_id));
                prop_assert!(part.batches.len() == 1 || parts.len() == 1);
                seen.push(rows[0]);
            }
            prop_assert!(seen.is_sorted());
            let parts = parts.iter().flat_map(|part| &part.batches);
            prop_assert_eq!(parts.map(RecordBatch::num_rows).sum::<usize>(), ids.len());
        }
    }

    #[test]
    fn batches_of_one_collection_are_not_copied() {
        let (one, other) = (batch(&[Some(8), Some(8)]), batch(&[Some(8)]));
        let parts = by_collection(&[&one, &other]).unwrap();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].collection_id, Some(8));
        assert!(Arc::ptr_eq(parts[0].batches[0].column(0), one.column(0)));
        assert!(Arc::ptr_eq(parts[0].batches[1].column(0), other.column(0)));
    }

    #[test]
    fn a_batch_without_collections_is_refused() {
        let rows = RecordBatch::try_from_iter([(
            "seqno",
            Arc::new(Int64Array::from(vec![1])) as ArrayRef,
        )]);
        let refused = by_collection(&[&rows.unwrap()]).unwrap_err().to_string();
        assert_eq!(refused, "Schema error: the batch has no column collection_id");
    }
}
