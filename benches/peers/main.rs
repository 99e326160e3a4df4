//! The Rust parts of the comparison with other clients: the sources that all of them read, and our
//! own client. `run.py` combines them.

mod count;
mod drained;
mod source;

use std::io::Write;
use std::time::Duration;

use dcp_benches::Error;
use dcp_benches::machine::Machine;
use dcp_benches::writes::Priority;

use self::source::Holds;

const USAGE: &str = "usage: peers source|recorded|node|node-low|node-high|objects DOCUMENTS VALUE_LEN VBUCKETS [NODES] | \
                     ready|steady PASSES VALUE_LEN VBUCKETS | \
                     paced PASSES MICROSECONDS VBUCKETS | \
                     count | batches | drain NAP_MICROSECONDS | machine";

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().ok_or(USAGE)?;
    if what == "drain" {
        let nap = arguments.next().ok_or(USAGE)?.parse()?;
        return drained::drained(Duration::from_micros(nap));
    }
    let numbers: Vec<u64> = match what.as_str() {
        "count" | "batches" | "machine" => Vec::new(),
        _ => arguments.map(|text| text.parse()).collect::<Result<_, _>>()?,
    };
    let number = |at: usize| numbers.get(at).copied().ok_or(USAGE);
    let holds = |source: &dyn Fn(Holds) -> Result<(), Error>| {
        source(Holds {
            documents: number(0)?,
            value_len: usize::try_from(number(1)?)?,
            vbuckets: u16::try_from(number(2)?)?,
            nodes: usize::try_from(number(3).unwrap_or(1))?,
        })
    };
    let sends = |source: fn(u64, usize, u16) -> Result<(), Error>| {
        source(number(0)?, usize::try_from(number(1)?)?, u16::try_from(number(2)?)?)
    };
    match what.as_str() {
        "source" => holds(&source::embedded),
        "recorded" => holds(&source::recorded),
        "node" => holds(&|held| source::node(held, Priority::Medium)),
        "node-low" => holds(&|held| source::node(held, Priority::Low)),
        "node-high" => holds(&|held| source::node(held, Priority::High)),
        "objects" => holds(&source::objects),
        "ready" => sends(source::ready),
        "steady" => sends(source::steady),
        "paced" => sends(source::paced),
        "count" => count::count(false),
        "batches" => count::count(true),
        "machine" => Ok(writeln!(std::io::stdout(), "{}", Machine::look().line())?),
        _ => Err(USAGE.into()),
    }
}
