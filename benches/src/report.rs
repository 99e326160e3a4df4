//! Output: a table or JSON lines, printed only once everything has succeeded.

use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::json;

use crate::Error;
use crate::machine::Machine;
use crate::measure::{Options, Series};

/// The results of one benchmark target.
#[derive(Debug)]
pub struct Report {
    bench: &'static str,
    options: Options,
    machine: Machine,
    groups: Vec<Group>,
}

/// Cases measured in turn over the same work.
#[derive(Debug)]
pub struct Group {
    /// Short name, including the parameter that varies between groups.
    pub name: String,
    /// Shape of the work: vBuckets, sizes, batches, congestion control.
    pub shape: String,
    /// Changes processed by each sample.
    pub rows: u64,
    /// Bytes on the wire of each sample.
    pub bytes: u64,
    /// Measured cases.
    pub series: Vec<Series>,
}

impl Report {
    /// An empty report of `bench`.
    #[must_use]
    pub fn new(bench: &'static str, options: Options) -> Self {
        Self { bench, options, machine: Machine::look(), groups: Vec::new() }
    }

    /// Adds a group of measured cases.
    pub fn add(&mut self, group: Group) {
        if !group.series.is_empty() {
            self.groups.push(group);
        }
    }

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        if self.options.json { self.print_json(out) } else { self.print_table(out) }
    }

    fn print_json(&self, out: &mut impl Write) -> io::Result<()> {
        for group in &self.groups {
            for series in &group.series {
                let by_name = |of: fn(&Series, &Series) -> serde_json::Value| {
                    let references = group.references(series);
                    let found = references.map(|other| (other.name.clone(), of(series, other)));
                    found.collect::<serde_json::Map<_, _>>()
                };
                let ratios = by_name(|own, other| json!(own.speed_ratio(other)));
                let by_round = by_name(|own, other| json!(own.speed_ratios(other)));
                let seconds = series.median().as_secs_f64();
                let line = json!({
                    "bench": self.bench,
                    "group": group.name,
                    "case": series.name,
                    "shape": group.shape,
                    "rounds": series.rounds(),
                    "rows": group.rows,
                    "bytes": group.bytes,
                    "seconds": {
                        "median": seconds,
                        "min": series.min().as_secs_f64(),
                        "max": series.max().as_secs_f64(),
                    },
                    "rows_per_second": group.rows as f64 / seconds,
                    "bytes_per_second": group.bytes as f64 / seconds,
                    "speed_ratio_to": ratios,
                    "speed_ratios_by_round": by_round,
                    "short": self.options.short,
                    "machine": self.machine.json(),
                });
                writeln!(out, "{line}")?;
            }
        }
        Ok(())
    }

    fn print_table(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\n{}: {}", self.bench, self.machine.line())?;
        for group in &self.groups {
            let rounds = group.series.first().map_or(0, Series::rounds);
            writeln!(
                out,
                "\n{} ({}; {} rows, median of {rounds})",
                group.name, group.shape, group.rows
            )?;
            writeln!(
                out,
                "  {:<34} {:>10} {:>8} {:>7} {:>17}  speed as % of",
                "", "M rows/s", "ns/row", "GB/s", "min-max ns/row"
            )?;
            for series in &group.series {
                writeln!(out, "  {}", group.row(series))?;
            }
        }
        writeln!(out)
    }
}

impl Group {
    /// The references of a case: those listed before it.
    fn references<'a>(&'a self, series: &'a Series) -> impl Iterator<Item = &'a Series> {
        let before = self.series.iter().take_while(|other| other.name != series.name);
        before.filter(|other| other.reference)
    }

    fn row(&self, series: &Series) -> String {
        let per_row = |time: std::time::Duration| time.as_secs_f64() * 1e9 / self.rows as f64;
        let seconds = series.median().as_secs_f64();
        let ratios: Vec<String> = self
            .references(series)
            .map(|other| format!("{} {:.0} %", other.name, series.speed_ratio(other) * 100.0))
            .collect();
        format!(
            "{:<34} {:>10.2} {:>8.1} {:>7.2} {:>17}  {}",
            series.name,
            self.rows as f64 / seconds / 1e6,
            per_row(series.median()),
            self.bytes as f64 / seconds / 1e9,
            format!("{:.1}-{:.1}", per_row(series.min()), per_row(series.max())),
            ratios.join(", ")
        )
    }
}

/// The `main` of a benchmark: runs `fill` and prints its results, or only the error.
pub fn run(
    bench: &'static str,
    fill: impl FnOnce(&Options, &mut Report) -> Result<(), Error>,
) -> ExitCode {
    let outcome = Options::from_command_line().and_then(|options| {
        let mut report = Report::new(bench, options.clone());
        fill(&options, &mut report)?;
        report.print(&mut io::stdout().lock())?;
        Ok(())
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{bench}: {error}; no figures are shown");
            ExitCode::FAILURE
        }
    }
}
