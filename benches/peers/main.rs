//! The parts of the comparison with other clients that are written in Rust: what all of them read,
//! and our own client. `run.py` puts them together.

mod count;
mod drained;
mod source;

use std::io::Write;

use dcp_benches::Error;
use dcp_benches::machine::Machine;

const USAGE: &str = "usage: peers source DOCUMENTS VALUE_LEN VBUCKETS | \
                     ready PASSES VALUE_LEN VBUCKETS | paced PASSES MICROSECONDS VBUCKETS | \
                     count | batches | drain | machine";

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().ok_or(USAGE)?;
    let mut number = || -> Result<u64, Error> { Ok(arguments.next().ok_or(USAGE)?.parse()?) };
    match what.as_str() {
        "source" => {
            source::embedded(number()?, usize::try_from(number()?)?, u16::try_from(number()?)?)
        }
        "ready" => source::ready(number()?, usize::try_from(number()?)?, u16::try_from(number()?)?),
        "paced" => source::paced(number()?, number()?, u16::try_from(number()?)?),
        "count" => count::count(false),
        "batches" => count::count(true),
        "drain" => drained::drained(),
        "machine" => Ok(writeln!(std::io::stdout(), "{}", Machine::look().line())?),
        _ => Err(USAGE.into()),
    }
}
