//! Measurement: alternating rounds, medians, ratios.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::Error;

/// Command-line options of a benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// Short runs, for continuous integration.
    pub short: bool,
    /// JSON lines instead of tables.
    pub json: bool,
    /// Number of rounds that count; each runs every case once.
    pub rounds: usize,
    /// Only run cases that contain this in `group: case`, as for a profiler.
    pub only: Option<String>,
}

impl Options {
    /// Reads the command line: `--short`, `--json`, `--rounds N`, `--only TEXT`.
    ///
    /// # Errors
    /// For any other argument, and for fewer than five rounds.
    pub fn from_command_line() -> Result<Self, Error> {
        let mut options = Self { short: false, json: false, rounds: 0, only: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--short" => options.short = true,
                "--json" => options.json = true,
                // Cargo passes this for bench runs.
                "--bench" => {}
                "--rounds" => {
                    options.rounds = arguments.next().ok_or("--rounds needs a number")?.parse()?;
                    if options.rounds < 5 {
                        return Err("a median needs at least five rounds".into());
                    }
                }
                "--only" => options.only = Some(arguments.next().ok_or("--only needs a text")?),
                other => {
                    return Err(format!(
                        "unknown argument {other:?}: use --short, --json, --rounds N or --only TEXT"
                    )
                    .into());
                }
            }
        }
        if options.rounds == 0 {
            options.rounds = if options.short { 5 } else { 11 };
        }
        Ok(options)
    }

    /// `short` in a short run, otherwise `full`.
    #[must_use]
    pub fn pick<T>(&self, short: T, full: T) -> T {
        if self.short { short } else { full }
    }
}

/// Measures elapsed time.
#[derive(Clone, Copy, Debug)]
pub struct WallClock(Instant);

impl WallClock {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Measures the processor time of the calling thread, which does not depend on other load of the
/// machine.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock(Duration);

impl ThreadClock {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        Self(Self::now())
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now().saturating_sub(self.0)
    }

    fn now() -> Duration {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).unwrap_or_default()
    }
}

/// A case to measure.
pub struct Case<'a> {
    name: String,
    reference: bool,
    run: Box<dyn FnMut() -> Result<Duration, Error> + 'a>,
}

impl std::fmt::Debug for Case<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<'a> Case<'a> {
    /// A case to compare; `run` does the work once and returns its duration.
    pub fn new(name: impl Into<String>, run: impl FnMut() -> Result<Duration, Error> + 'a) -> Self {
        Self { name: name.into(), reference: false, run: Box::new(run) }
    }

    /// The case that others are compared with.
    pub fn reference(
        name: impl Into<String>,
        run: impl FnMut() -> Result<Duration, Error> + 'a,
    ) -> Self {
        Self { reference: true, ..Self::new(name, run) }
    }
}

/// Samples of a case, one per round.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name of the case.
    pub name: String,
    /// Whether other cases are compared with it.
    pub reference: bool,
    samples: Vec<Duration>,
}

impl Series {
    /// Median sample.
    #[must_use]
    pub fn median(&self) -> Duration {
        let mut samples = self.samples.clone();
        samples.sort_unstable();
        samples[samples.len() / 2]
    }

    /// Shortest sample.
    #[must_use]
    pub fn min(&self) -> Duration {
        self.samples.iter().min().copied().unwrap_or_default()
    }

    /// Longest sample.
    #[must_use]
    pub fn max(&self) -> Duration {
        self.samples.iter().max().copied().unwrap_or_default()
    }

    /// Number of samples.
    #[must_use]
    pub const fn rounds(&self) -> usize {
        self.samples.len()
    }

    /// Speed of this case relative to `reference`: the median of the ratios by round, since both
    /// samples of a round saw the same load.
    #[must_use]
    pub fn speed_ratio(&self, reference: &Self) -> f64 {
        let mut ratios = self.speed_ratios(reference);
        ratios.sort_unstable_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }

    /// The same of each round.
    #[must_use]
    pub fn speed_ratios(&self, reference: &Self) -> Vec<f64> {
        self.samples
            .iter()
            .zip(&reference.samples)
            .map(|(own, other)| other.as_secs_f64() / own.as_secs_f64())
            .collect()
    }
}

/// Runs every case of `group` once without counting it, then alternates them for `options.rounds`
/// rounds.
///
/// # Errors
/// The first error of a case; all measurements are discarded then.
pub fn compare(
    options: &Options,
    group: &str,
    mut cases: Vec<Case<'_>>,
) -> Result<Vec<Series>, Error> {
    if let Some(only) = &options.only {
        cases.retain(|case| format!("{group}: {}", case.name).contains(only.as_str()));
    }
    let mut all: Vec<Series> = cases
        .iter()
        .map(|case| Series {
            name: case.name.clone(),
            reference: case.reference,
            samples: Vec::with_capacity(options.rounds),
        })
        .collect();
    for round in 0..=options.rounds {
        for (case, series) in cases.iter_mut().zip(&mut all) {
            let sample =
                (case.run)().map_err(|error| format!("{group}: {}: {error}", case.name))?;
            if sample.is_zero() {
                return Err(format!("{group}: {}: too short to measure", case.name).into());
            }
            // The first round warms up.
            if round > 0 {
                series.samples.push(sample);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(samples: &[u64]) -> Series {
        Series {
            name: String::new(),
            reference: false,
            samples: samples.iter().copied().map(Duration::from_millis).collect(),
        }
    }

    #[test]
    fn a_ratio_compares_the_samples_of_the_same_round() {
        // The machine was four times slower during the last two rounds.
        let reference = series(&[10, 10, 10, 40, 40]);
        let own = series(&[20, 20, 20, 80, 80]);
        assert!((own.speed_ratio(&reference) - 0.5).abs() < 1e-9);
        assert_eq!(own.median(), Duration::from_millis(20));
        assert_eq!((own.min(), own.max()), (Duration::from_millis(20), Duration::from_millis(80)));
    }

    #[test]
    fn a_failure_leaves_no_figures() {
        let ok = Case::reference("ok", || Ok(Duration::from_millis(1)));
        let mut left = 3;
        let fails = Case::new("fails", || {
            left -= 1;
            if left == 0 { Err("broken".into()) } else { Ok(Duration::from_millis(1)) }
        });
        let options = Options { short: true, json: false, rounds: 5, only: None };
        let error = compare(&options, "work", vec![ok, fails]).unwrap_err();
        assert_eq!(error.to_string(), "work: fails: broken");
    }

    #[test]
    fn the_thread_clock_stands_still_while_the_thread_sleeps() {
        let (cpu, wall) = (ThreadClock::start(), WallClock::start());
        std::thread::sleep(Duration::from_millis(50));
        assert!(wall.elapsed() >= Duration::from_millis(50));
        assert!(cpu.elapsed() < Duration::from_millis(40));
    }
}
