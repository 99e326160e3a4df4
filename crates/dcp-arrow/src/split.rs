//! Batches split by collection.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::builder::BooleanBufferBuilder;
use arrow_array::cast::AsArray;
use arrow_array::types::{
    BinaryType, ByteArrayType, Int64Type, TimestampMicrosecondType, Utf8Type,
};
use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, BooleanArray, GenericByteArray, Int64Array,
    PrimitiveArray, RecordBatch, StructArray, downcast_primitive,
};
use arrow_buffer::{ArrowNativeType, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use arrow_select::interleave::interleave;

use crate::Column;

/// The rows of a collection.
#[derive(Debug, Clone)]
pub struct Part {
    /// ID of the collection; `None` for rows that have none.
    pub collection_id: Option<i64>,
    /// The rows, in order.
    pub batches: Vec<RecordBatch>,
}

impl Part {
    /// Bytes of the rows.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.batches.iter().flat_map(RecordBatch::columns).map(sliced_bytes).sum()
    }

    /// The oldest time of a CAS, in microseconds since 1970; `None` without a column of them.
    #[must_use]
    pub fn oldest(&self) -> Option<i64> {
        let times = self.batches.iter().filter_map(|batch| {
            let times = batch.column_by_name(Column::Timestamp.name())?;
            times.as_primitive_opt::<TimestampMicrosecondType>()?.iter().flatten().min()
        });
        times.min()
    }
}

/// Memory of an array's rows in bytes, excluding unused parts of its buffers.
#[must_use]
pub fn sliced_bytes(array: &ArrayRef) -> usize {
    array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_buffer_memory_size())
}

/// Splits the rows of batches by the ID of their collection, in the order of their first rows.
///
/// A part is one batch, so that its columns are worked on as a whole however many collections there
/// are. Batches that are all of one collection stay as they are.
///
/// # Errors
/// [`ArrowError`] if a batch has no column `collection_id`, the columns of batches differ, or a part
/// cannot be made.
pub fn by_collection(batches: &[&RecordBatch]) -> Result<Vec<Part>, ArrowError> {
    let mut places: HashMap<Option<i64>, usize> = HashMap::new();
    let mut ids: Vec<Option<i64>> = Vec::new();
    let mut split = Split::default();
    for batch in batches {
        let mut last = None;
        for id in ids_of(batch)? {
            let place = match last {
                Some((of, place)) if of == id => place,
                _ => *places.entry(id).or_insert_with(|| {
                    ids.push(id);
                    split.sizes.push(0);
                    ids.len() - 1
                }),
            };
            last = Some((id, place));
            split.places.push(place);
            split.sizes[place] += 1;
        }
    }
    let [first, ..] = batches else {
        return Ok(Vec::new());
    };
    if let [id] = ids.as_slice() {
        let batches = batches.iter().map(|batch| (*batch).clone()).collect();
        return Ok(vec![Part { collection_id: *id, batches }]);
    }
    let schema = first.schema();
    if batches.iter().any(|batch| *batch.schema_ref() != schema) {
        return Err(ArrowError::SchemaError("the batches have different columns".to_owned()));
    }
    split.batches(&schema, batches, ids)
}

fn ids_of(batch: &RecordBatch) -> Result<&Int64Array, ArrowError> {
    let name = Column::CollectionId.name();
    let ids = batch.column_by_name(name).and_then(|column| column.as_primitive_opt::<Int64Type>());
    ids.ok_or_else(|| ArrowError::SchemaError(format!("the batch has no column {name}")))
}

/// Which part each row goes to.
///
/// The rows of a column are read in order and written to as many places as there are parts. The
/// other way round, part by part, each read would miss the processor's caches.
#[derive(Debug, Default)]
struct Split {
    /// By row of all batches.
    places: Vec<usize>,
    /// Rows by part.
    sizes: Vec<usize>,
}

impl Split {
    fn batches(
        &self,
        schema: &SchemaRef,
        batches: &[&RecordBatch],
        ids: Vec<Option<i64>>,
    ) -> Result<Vec<Part>, ArrowError> {
        let mut columns: Vec<Vec<ArrayRef>> = vec![Vec::new(); ids.len()];
        for index in 0..schema.fields().len() {
            let column: Vec<&dyn Array> =
                batches.iter().map(|batch| batch.column(index).as_ref()).collect();
            for (columns, part) in columns.iter_mut().zip(self.arrays(&column)?) {
                columns.push(part);
            }
        }
        let parts = ids.into_iter().zip(columns).map(|(collection_id, columns)| {
            let batch = RecordBatch::try_new(Arc::clone(schema), columns)?;
            Ok(Part { collection_id, batches: vec![batch] })
        });
        parts.collect()
    }

    /// The parts of a column, which `arrays` are.
    fn arrays(&self, arrays: &[&dyn Array]) -> Result<Vec<ArrayRef>, ArrowError> {
        macro_rules! primitive {
            ($kind:ty) => {
                self.primitives::<$kind>(arrays)
            };
        }
        let [first, ..] = arrays else {
            return Ok(Vec::new());
        };
        downcast_primitive! {
            first.data_type() => (primitive),
            DataType::Boolean => Ok(self.booleans(arrays)),
            DataType::Utf8 => self.bytes::<Utf8Type>(arrays),
            DataType::Binary => self.bytes::<BinaryType>(arrays),
            DataType::Struct(_) => self.structs(arrays),
            _ => self.others(arrays),
        }
    }

    fn primitives<T: ArrowPrimitiveType>(
        &self,
        arrays: &[&dyn Array],
    ) -> Result<Vec<ArrayRef>, ArrowError> {
        let mut parts: Vec<Vec<T::Native>> = self.room();
        let mut places = self.places.iter();
        for array in arrays {
            let values = array.as_primitive::<T>().values();
            for (value, place) in values.iter().zip(places.by_ref()) {
                parts[*place].push(*value);
            }
        }
        let nulls = self.nulls(arrays);
        let parts = parts.into_iter().zip(nulls).map(|(values, nulls)| {
            let array = PrimitiveArray::<T>::try_new(values.into(), nulls)?;
            Ok(Arc::new(array.with_data_type(arrays[0].data_type().clone())) as ArrayRef)
        });
        parts.collect()
    }

    fn booleans(&self, arrays: &[&dyn Array]) -> Vec<ArrayRef> {
        let mut parts: Vec<BooleanBufferBuilder> =
            self.sizes.iter().map(|rows| BooleanBufferBuilder::new(*rows)).collect();
        let mut places = self.places.iter();
        for array in arrays {
            for (value, place) in array.as_boolean().values().iter().zip(places.by_ref()) {
                parts[*place].append(value);
            }
        }
        let nulls = self.nulls(arrays);
        let parts = parts.into_iter().zip(nulls).map(|(mut values, nulls)| {
            Arc::new(BooleanArray::new(values.finish(), nulls)) as ArrayRef
        });
        parts.collect()
    }

    fn bytes<T: ByteArrayType>(&self, arrays: &[&dyn Array]) -> Result<Vec<ArrayRef>, ArrowError> {
        let mut offsets: Vec<Vec<T::Offset>> =
            self.sizes.iter().map(|rows| Vec::with_capacity(rows + 1)).collect();
        offsets.iter_mut().for_each(|offsets| offsets.push(T::Offset::usize_as(0)));
        let mut lens = vec![0_usize; self.sizes.len()];
        let mut places = self.places.iter();
        for array in arrays {
            let array = array.as_bytes::<T>();
            for (range, place) in array.value_offsets().windows(2).zip(places.by_ref()) {
                let len = &mut lens[*place];
                *len += range[1].as_usize() - range[0].as_usize();
                let end = T::Offset::from_usize(*len);
                offsets[*place].push(end.ok_or(ArrowError::OffsetOverflowError(*len))?);
            }
        }
        let mut values: Vec<Vec<u8>> = lens.into_iter().map(Vec::with_capacity).collect();
        let mut places = self.places.iter();
        for array in arrays {
            let array = array.as_bytes::<T>();
            let bytes = array.value_data();
            for (range, place) in array.value_offsets().windows(2).zip(places.by_ref()) {
                values[*place].extend_from_slice(&bytes[range[0].as_usize()..range[1].as_usize()]);
            }
        }
        let parts = offsets.into_iter().zip(values).zip(self.nulls(arrays));
        let parts = parts.map(|((offsets, values), nulls)| {
            let offsets = OffsetBuffer::new(ScalarBuffer::from(offsets));
            let array = GenericByteArray::<T>::try_new(offsets, values.into(), nulls)?;
            Ok(Arc::new(array) as ArrayRef)
        });
        parts.collect()
    }

    fn structs(&self, arrays: &[&dyn Array]) -> Result<Vec<ArrayRef>, ArrowError> {
        let [first, ..] = arrays else {
            return Ok(Vec::new());
        };
        let fields = first.as_struct().fields();
        let mut parts: Vec<Vec<ArrayRef>> = vec![Vec::new(); self.sizes.len()];
        for index in 0..fields.len() {
            let children: Vec<&dyn Array> =
                arrays.iter().map(|array| array.as_struct().column(index).as_ref()).collect();
            for (parts, part) in parts.iter_mut().zip(self.arrays(&children)?) {
                parts.push(part);
            }
        }
        let parts = parts.into_iter().zip(&self.sizes).zip(self.nulls(arrays));
        let parts = parts.map(|((children, rows), nulls)| {
            let array = StructArray::try_new_with_length(fields.clone(), children, nulls, *rows)?;
            Ok(Arc::new(array) as ArrayRef)
        });
        parts.collect()
    }

    /// Parts of types that few tables have.
    fn others(&self, arrays: &[&dyn Array]) -> Result<Vec<ArrayRef>, ArrowError> {
        let mut rows: Vec<Vec<(usize, usize)>> = self.room();
        let mut places = self.places.iter();
        for (number, array) in arrays.iter().enumerate() {
            for (row, place) in (0..array.len()).zip(places.by_ref()) {
                rows[*place].push((number, row));
            }
        }
        rows.iter().map(|rows| interleave(arrays, rows)).collect()
    }

    /// The nulls of each part of a column.
    fn nulls(&self, arrays: &[&dyn Array]) -> Vec<Option<NullBuffer>> {
        if arrays.iter().all(|array| array.null_count() == 0) {
            return vec![None; self.sizes.len()];
        }
        let mut parts: Vec<BooleanBufferBuilder> =
            self.sizes.iter().map(|rows| BooleanBufferBuilder::new(*rows)).collect();
        let mut places = self.places.iter();
        for array in arrays {
            let rows = places.by_ref().take(array.len());
            match array.nulls() {
                Some(nulls) => nulls.iter().zip(rows).for_each(|(valid, place)| {
                    parts[*place].append(valid);
                }),
                None => rows.for_each(|place| parts[*place].append(true)),
            }
        }
        let parts = parts.into_iter().map(|mut valid| {
            Some(NullBuffer::new(valid.finish())).filter(|nulls| nulls.null_count() > 0)
        });
        parts.collect()
    }

    /// Room for the rows of each part.
    fn room<T>(&self) -> Vec<Vec<T>> {
        self.sizes.iter().map(|rows| Vec::with_capacity(*rows)).collect()
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::builder::{Int32Builder, ListBuilder};
    use arrow_array::{
        BinaryArray, Decimal128Array, StringArray, TimestampMicrosecondArray, UInt64Array,
    };
    use arrow_select::concat::concat_batches;
    use arrow_select::take::take_record_batch;
    use proptest::prelude::*;

    use super::*;

    /// A batch with columns of all kinds of layouts, where every `null_every`-th value is null.
    fn batch(ids: &[Option<i64>], null_every: usize) -> RecordBatch {
        let rows = 0..ids.len();
        let some = |row: usize| (!row.is_multiple_of(null_every)).then_some(row);
        let numbers =
            Int64Array::from_iter(rows.clone().map(|row| some(row).map(|row| row as i64)));
        let texts: StringArray =
            rows.clone().map(|row| some(row).map(|row| "ü".repeat(row % 7))).collect();
        let bytes: BinaryArray =
            rows.clone().map(|row| some(row / 2).map(|_| vec![9; row % 5])).collect();
        let flags: BooleanArray =
            rows.clone().map(|row| some(row).map(|row| row % 3 == 0)).collect();
        let amounts =
            Decimal128Array::from_iter(rows.clone().map(|row| some(row).map(|row| row as i128)))
                .with_precision_and_scale(9, 2)
                .unwrap();
        let times = TimestampMicrosecondArray::from_iter_values(rows.clone().map(|row| row as i64))
            .with_timezone("UTC");
        let mut lists = ListBuilder::new(Int32Builder::new());
        rows.clone().for_each(|row| match some(row) {
            Some(row) => lists.append_value((0..row as i32 % 4).map(Some)),
            None => lists.append_null(),
        });
        let valid: NullBuffer = rows.map(|row| some(row + 1).is_some()).collect();
        let members = RecordBatch::try_from_iter_with_nullable([
            ("texts", Arc::new(texts.clone()) as ArrayRef, true),
            ("numbers", Arc::new(numbers.clone()) as ArrayRef, true),
        ]);
        let structs: StructArray = members.unwrap().into();
        let (fields, members, _) = structs.into_parts();
        let structs = StructArray::new(fields, members, Some(valid));
        RecordBatch::try_from_iter_with_nullable([
            ("collection_id", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef, true),
            ("numbers", Arc::new(numbers) as ArrayRef, true),
            ("texts", Arc::new(texts) as ArrayRef, true),
            ("bytes", Arc::new(bytes) as ArrayRef, true),
            ("flags", Arc::new(flags) as ArrayRef, true),
            ("amounts", Arc::new(amounts) as ArrayRef, true),
            ("timestamp", Arc::new(times) as ArrayRef, false),
            ("lists", Arc::new(lists.finish()) as ArrayRef, true),
            ("structs", Arc::new(structs) as ArrayRef, true),
        ])
        .unwrap()
    }

    proptest! {
        #[test]
        fn every_row_is_in_the_part_of_its_collection_in_order(
            ids in prop::collection::vec(prop::option::weighted(0.8, 8_i64..12), 1..60),
            cuts in prop::collection::vec(0_usize..60, 0..4),
            null_every in 1_usize..70,
        ) {
            let whole = batch(&ids, null_every);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(ids.len())).collect();
            cuts.extend([0, ids.len()]);
            cuts.sort_unstable();
            let batches: Vec<RecordBatch> =
                cuts.windows(2).map(|cut| whole.slice(cut[0], cut[1] - cut[0])).collect();
            let batches: Vec<&RecordBatch> = batches.iter().collect();
            let parts = by_collection(&batches).unwrap();
            let mut firsts = Vec::new();
            for part in &parts {
                let rows = (0..).zip(&ids).filter(|(_, id)| **id == part.collection_id);
                let rows: UInt64Array = rows.map(|(row, _)| Some(row)).collect();
                firsts.push(rows.value(0));
                prop_assert!(part.batches.len() == 1 || parts.len() == 1);
                let found = concat_batches(&whole.schema(), &part.batches).unwrap();
                let expected = take_record_batch(&whole, &rows).unwrap();
                prop_assert_eq!(found, expected);
                prop_assert_eq!(part.oldest(), Some(rows.value(0) as i64));
            }
            prop_assert!(firsts.is_sorted());
            let all = Part { collection_id: None, batches: vec![whole] };
            // Each part has an offset and some bits more.
            let most = all.nbytes() + parts.len() * 200;
            prop_assert!((all.nbytes()..most).contains(&parts.iter().map(Part::nbytes).sum()));
            let kinds: std::collections::HashSet<_> = ids.iter().collect();
            prop_assert_eq!(parts.len(), kinds.len());
        }
    }

    #[test]
    fn batches_of_one_collection_are_not_copied() {
        let (one, other) = (batch(&[Some(8), Some(8)], 2), batch(&[Some(8)], 2));
        let parts = by_collection(&[&one, &other]).unwrap();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].collection_id, Some(8));
        assert!(Arc::ptr_eq(parts[0].batches[0].column(0), one.column(0)));
        assert!(Arc::ptr_eq(parts[0].batches[1].column(0), other.column(0)));
    }

    #[test]
    fn batches_without_collections_or_of_different_columns_are_refused() {
        let rows = RecordBatch::try_from_iter([(
            "seqno",
            Arc::new(Int64Array::from(vec![1])) as ArrayRef,
        )]);
        let refused = by_collection(&[&rows.unwrap()]).unwrap_err().to_string();
        assert_eq!(refused, "Schema error: the batch has no column collection_id");
        let one = batch(&[Some(8), Some(9)], 2);
        let other = one.project(&[0, 1]).unwrap();
        let refused = by_collection(&[&one, &other]).unwrap_err().to_string();
        assert_eq!(refused, "Schema error: the batches have different columns");
    }
}
