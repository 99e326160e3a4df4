//! The parts of the comparison with other clients that are written in Rust: what all of them read,
//! and our own client. `run.py` puts them together.

mod count;
mod drained;
mod source;

use std::io::Write;
use std::time::Duration;

use dcp_benches::Error;
use dcp_benches::machine::Machine;

const USAGE: &str = "usage: peers source DOCUMENTS VALUE_LEN VBUCKETS | \
                     recorded DOCUMENTS VALUE_LEN VBUCKETS | \
                     node DOCUMENTS VALUE_LEN VBUCKETS | \
                     objects DOCUMENTS VALUE_LEN VBUCKETS | \
                     ready PASSES VALUE_LEN VBUCKETS | paced PASSES MICROSECONDS VBUCKETS | \
                     count | batches | drain NAP_MICROSECONDS | machine";

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().ok_or(USAGE)?;
    let mut number = || -> Result<u64, Error> { Ok(arguments.next().ok_or(USAGE)?.parse()?) };
    if what == "drain" {
        return drained::drained(Duration::from_micros(number()?));
    }
    let mut serve = |source: fn(u64, usize, u16) -> Result<(), Error>| {
        source(number()?, usize::try_from(number()?)?, u16::try_from(number()?)?)
    };
    match what.as_str() {
        "source" => serve(source::embedded),
        "recorded" => serve(source::recorded),
        "node" => serve(source::node),
        "objects" => serve(source::objects),
        "ready" => serve(source::ready),
        "paced" => serve(source::paced),
        "count" => count::count(false),
        "batches" => count::count(true),
        "machine" => Ok(writeln!(std::io::stdout(), "{}", Machine::look().line())?),
        _ => Err(USAGE.into()),
    }
}
