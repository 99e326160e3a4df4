//! Decodes JSON documents into columns, compared with Arrow's own JSON reader.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use arrow_json::ReaderBuilder;
use arrow_schema::{DataType, Field, Schema};
use dcp_arrow::{DocumentSchema, TableOptions, ValueFormat};
use dcp_wire::{Datatype, snappy};

use crate::Error;
use crate::drive::BATCH_ROWS;
use crate::measure::{Case, Options, ThreadClock, compare};
use crate::mutations::into_batches;
use crate::report::Group;

/// Number of distinct documents, each sent many times.
const DISTINCT: usize = 1024;

/// The types of fields, in turn.
const KINDS: [Kind; 5] = [Kind::Integer, Kind::Text, Kind::Float, Kind::Boolean, Kind::Text];

#[derive(Clone, Copy, Debug)]
enum Kind {
    Integer,
    Float,
    Boolean,
    Text,
}

impl Kind {
    const fn column(self) -> (&'static str, DataType) {
        match self {
            Self::Integer => ("BIGINT", DataType::Int64),
            Self::Float => ("DOUBLE", DataType::Float64),
            Self::Boolean => ("BOOLEAN", DataType::Boolean),
            Self::Text => ("STRING", DataType::Utf8),
        }
    }

    fn value(self, number: usize) -> String {
        match self {
            Self::Integer => (number * 7919).to_string(),
            Self::Float => format!("{}.{:03}", number % 977, number % 1000),
            Self::Boolean => number.is_multiple_of(3).to_string(),
            Self::Text => format!("\"text {number} of a field\""),
        }
    }
}

/// Measures documents with `fields` fields. One thread does all the work.
///
/// # Errors
/// If a document does not fit its columns, or a measurement fails.
pub fn measure(options: &Options, fields: usize) -> Result<Group, Error> {
    let kinds: Vec<Kind> = KINDS.into_iter().cycle().take(fields).collect();
    let documents: Vec<Vec<u8>> =
        (0..DISTINCT).map(|number| document(&kinds, number).into_bytes()).collect();
    let compressed =
        documents.iter().map(|value| snappy::compress(value)).collect::<Result<Vec<_>, _>>()?;
    let lines = documents.join(&b'\n');
    let passes = options.pick(16 << 20, 256 << 20) / lines.len();
    let columns: Vec<String> =
        kinds.iter().enumerate().map(|(at, kind)| format!("f{at} {}", kind.column().0)).collect();
    let mut table = TableOptions::default();
    table.document_schema = Some(DocumentSchema::parse(&columns.join(", "))?);
    let mut variant = TableOptions::default();
    variant.value_format = ValueFormat::Variant;
    let inflates = Datatype::JSON.with(Datatype::SNAPPY);
    let cases = vec![
        Case::reference("arrow-json", || read(&lines, &kinds, passes)),
        Case::new("document_schema", || into_batches(&documents, Datatype::JSON, passes, &table)),
        Case::new("document_schema, Snappy", || {
            into_batches(&compressed, inflates, passes, &table)
        }),
        Case::new("VARIANT", || into_batches(&documents, Datatype::JSON, passes, &variant)),
    ];
    let name = format!("documents of {fields} fields");
    Ok(Group {
        series: compare(options, &name, cases)?,
        name,
        shape: format!(
            "{DISTINCT} documents of {} B on average, batches of {BATCH_ROWS} rows or 4 MiB",
            lines.len() / DISTINCT
        ),
        rows: (DISTINCT * passes) as u64,
        bytes: (lines.len() * passes) as u64,
    })
}

fn document(kinds: &[Kind], number: usize) -> String {
    let mut text = String::from("{");
    for (at, kind) in kinds.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        let _ = write!(text, "{comma}\"f{at}\":{}", kind.value(number + at));
    }
    text + "}"
}

/// Decodes the same documents, one a line, with the same columns.
fn read(lines: &[u8], kinds: &[Kind], passes: usize) -> Result<Duration, Error> {
    let fields = kinds.iter().enumerate();
    let fields: Vec<Field> =
        fields.map(|(at, kind)| Field::new(format!("f{at}"), kind.column().1, true)).collect();
    let schema = Arc::new(Schema::new(fields));
    let mut decoder = ReaderBuilder::new(schema).with_batch_size(BATCH_ROWS).build_decoder()?;
    let mut rows = 0;
    let clock = ThreadClock::start();
    for _ in 0..passes {
        let mut rest = lines;
        while !rest.is_empty() {
            let used = decoder.decode(rest)?;
            rest = rest.get(used..).unwrap_or_default();
            if !rest.is_empty() {
                rows += flush(&mut decoder)?;
            }
        }
    }
    rows += flush(&mut decoder)?;
    let elapsed = clock.elapsed();
    if rows != DISTINCT * passes {
        return Err(format!("{rows} rows came out instead of {}", DISTINCT * passes).into());
    }
    Ok(elapsed)
}

fn flush(decoder: &mut arrow_json::reader::Decoder) -> Result<usize, Error> {
    let batch = decoder.flush()?;
    Ok(std::hint::black_box(batch).map_or(0, |batch| batch.num_rows()))
}
