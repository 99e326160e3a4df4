//! The plain drain as a program: the producer does all its work, the client next to none.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Duration;

use dcp_benches::Error;
use dcp_benches::drain::{Target, drain};
use dcp_wire::{Seqno, Vbid};
use serde_json::{Value, json};

/// Reads the job from the first line of standard input, begins at the second, and prints the totals
/// as a JSON line; waits for the end of its input, like `count`. It sleeps for `nap` before each
/// read.
pub(crate) fn drained(nap: Duration) -> Result<(), Error> {
    let mut lines = std::io::stdin().lock().lines();
    let job: Value = serde_json::from_str(&lines.next().ok_or("there is no job")??)?;
    let text = |name: &str| job[name].as_str().ok_or(format!("the job has no {name}"));
    let ends: BTreeMap<String, u64> = serde_json::from_value(job["high_seqnos"].clone())?;
    let target = Target {
        address: text("connection_string")?.trim_start_matches("couchbase://").parse()?,
        bucket: text("bucket")?.to_owned(),
        username: text("username")?.to_owned(),
        password: text("password")?.to_owned(),
        ends: ends
            .into_iter()
            .map(|(vbid, seqno)| Ok((Vbid(vbid.parse()?), Seqno(seqno))))
            .collect::<Result<_, Error>>()?,
        buffer_size: 8 << 20,
        passes: 1,
        nap,
    };
    lines.next().ok_or("nobody said when to begin")??;
    let drained = drain(&target)?;
    let seconds = drained.elapsed.as_secs_f64();
    let told = json!({"line": "counted", "changes": drained.changes, "seconds": seconds});
    writeln!(std::io::stdout(), "{told}")?;
    lines.try_for_each(|line| line.map(drop))?;
    Ok(())
}
