//! Cuts a world that fails down to a short history that fails as well.

use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::run::{Outcome, run};

/// Real time spent on one world.
const TIME: Duration = Duration::from_secs(60);

/// What differs between readers that fail in the same way.
const SPELLINGS: [&str; 11] = [
    "Endless",
    "Rivals",
    "Members",
    "Latest",
    "Finite",
    "All",
    "Scope",
    "Collections",
    "Patterns",
    "Mutation",
    "Deletion",
];

/// A plan that still fails, with as little in it as was found, and how it goes.
pub(crate) fn shrink(plan: &Plan) -> (Plan, Outcome) {
    let begin = Instant::now();
    let (mut best, mut outcome) = (plan.clone(), run(plan));
    let mut size = best.steps.len().div_ceil(2).max(1);
    while size > 0 && begin.elapsed() < TIME {
        let mut at = 0;
        let mut is_smaller = false;
        while at < best.steps.len() && begin.elapsed() < TIME {
            let mut less = best.clone();
            less.steps.drain(at..(at + size).min(less.steps.len()));
            is_smaller |= take(&mut best, &mut outcome, less, &mut at, size);
        }
        if size > 1 || !is_smaller {
            size /= 2;
        }
    }
    for reader in (0..best.readers.len()).rev() {
        let mut less = best.clone();
        less.readers.remove(reader);
        take(&mut best, &mut outcome, less, &mut 0, 0);
    }
    for change in [|plan: &mut Plan| plan.vbuckets = 1, |plan: &mut Plan| plan.nodes = 1] {
        let mut less = best.clone();
        change(&mut less);
        take(&mut best, &mut outcome, less, &mut 0, 0);
    }
    (best, outcome)
}

/// What a failure says, without its numbers: a smaller plan that fails in another way is another
/// finding.
fn gist(outcome: &Outcome) -> Option<String> {
    let failure = outcome.result.as_ref().err()?;
    let words = failure.split(|letter: char| !letter.is_ascii_alphabetic());
    let words = words.filter(|word| word.len() > 2 && !SPELLINGS.contains(word));
    Some(words.take(12).collect::<Vec<_>>().join(" "))
}

/// Keeps a smaller plan if it fails in the same way; otherwise goes on behind what was left out.
fn take(best: &mut Plan, outcome: &mut Outcome, less: Plan, at: &mut usize, size: usize) -> bool {
    let went = run(&less);
    if gist(&went) == gist(outcome) {
        (*best, *outcome) = (less, went);
        return true;
    }
    *at += size;
    false
}
