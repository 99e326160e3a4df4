//! Every recording of a real server, replayed to the embedded cluster.
//!
//! The folder is `tests/traces`, or the one `DCP_TRACES` names. What a recording says was done to
//! the bucket is done again, in simulated time; its clients send what they sent, and each packet of
//! the cluster must be the recorded server's. `normalised.json` lists what is left out of the
//! comparison and why, and counts what the fields of snapshot markers are judged by: `moments` and
//! `stage` work out when things were done, and `damage` shows that no marker tells them.
//! `differences.json` lists which of the project's recordings differ, in what, and why; of other
//! recordings only what `list` can tell by the packets may differ.

mod client;
mod compare;
mod damage;
mod facts;
mod history;
mod ignored;
mod list;
mod manifests;
mod markers;
mod moments;
mod parts;
mod run;
mod seen;
mod shown;
mod stage;
mod twins;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, thread};

use dcp_test::traces::{self, Scenario};

use ignored::{Ignored, Normalised};
use list::{Exempt, List};
use markers::{Counts, Field, Source};
use run::Replayed;

/// Replays at a time.
const AT_A_TIME: usize = 2;

/// What differs in one recording; one that contradicts itself, or whose server comes to a
/// standstill, does not keep the others from being replayed.
fn replay(scenario: &Scenario) -> Replayed {
    let replayed = panic::catch_unwind(AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(run::replay(scenario))
    }));
    replayed.unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        let what = format!("cannot be replayed: {}", words.unwrap_or("no word of why"));
        Replayed { differs: vec![what], ..Replayed::default() }
    })
}

/// What became of each recording.
#[derive(Debug, Default)]
struct Found {
    /// What differs.
    differs: BTreeMap<String, Vec<String>>,
    /// Why it is not replayed.
    exempt: BTreeMap<String, Exempt>,
    /// What was left out of the comparison.
    ignored: BTreeSet<Ignored>,
    /// What the fields of all markers follow from.
    marker_fields: Counts,
    /// The recordings with fields that follow from themselves.
    not_judged: BTreeMap<Field, BTreeSet<String>>,
    /// Recordings that do not say what was written.
    without_operations: BTreeSet<String>,
}

impl Found {
    fn add(&mut self, name: &str, replayed: Replayed) {
        self.differs.insert(name.to_owned(), replayed.differs);
        self.ignored.extend(replayed.ignored);
        for (field, by_source) in replayed.marker_fields {
            for (source, count) in by_source {
                let counts = self.marker_fields.entry(field).or_default();
                *counts.entry(source).or_default() += count;
                if source == Source::Itself {
                    self.not_judged.entry(field).or_default().insert(name.to_owned());
                }
            }
        }
    }
}

/// The recordings that are replayed, and what became of the others.
fn read_all(recordings: &[PathBuf]) -> (Vec<Scenario>, Found) {
    let (mut scenarios, mut found) = (Vec::new(), Found::default());
    for path in recordings {
        match Scenario::read(path) {
            Ok(scenario) => scenarios.push(scenario),
            Err(error) => {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                found.differs.insert(name, vec![format!("cannot be read: {error}")]);
            }
        }
    }
    history::share_operations(&mut scenarios);
    scenarios.retain(|scenario| match Exempt::of(scenario) {
        None => true,
        Some(why) => found.exempt.insert(scenario.name.clone(), why).is_some(),
    });
    let operations =
        |scenario: &Scenario| scenario.expected["kv_ops"].as_array().map_or(0, Vec::len);
    let without = scenarios.iter().filter(|scenario| operations(scenario) == 0);
    found.without_operations = without.map(|scenario| scenario.name.clone()).collect();
    (scenarios, found)
}

/// Replays recordings, and adds to what was found.
fn replay_all(scenarios: &[Scenario], found: Found) -> Found {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(found));
    let work = || {
        while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
            let replayed = replay(scenario);
            found.lock().unwrap().add(&scenario.name, replayed);
        }
    };
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(work);
        }
    });
    found.into_inner().unwrap()
}

#[test]
#[expect(clippy::print_stdout, reason = "a test over a folder tells how much it has seen")]
fn recording_is_answered_as_the_server_answered() {
    let (scenarios, found) = read_all(&traces::paths().unwrap());
    let found = replay_all(&scenarios, found);
    let wrong = match traces::is_own_folder() {
        true => [List::read().check(&found), Normalised::read().check(&found)].concat(),
        false => list::unexplained(&found),
    };
    println!("{} replayed, {} exempt", found.differs.len(), found.exempt.len());
    for (field, by_source) in &found.marker_fields {
        println!("{field:?} of markers follows from {by_source:?}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Replays the recordings of a folder in a process of its own.
fn replay_folder(folder: &Path) -> Output {
    let name = "replay::recording_is_answered_as_the_server_answered";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(traces::FOLDER_VARIABLE, folder);
    command.output().unwrap()
}

#[test]
fn recordings_that_cannot_be_replayed_do_not_keep_others_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let recording = fs::read_to_string(tests_folder("8.0.2-memory-fresh")).unwrap();
    let unknown = recording.replacen(r#""op": "set""#, r#""op": "no such operation""#, 1);
    let absurd = recording.replace(r#""vb": 0"#, r#""vb": 70000"#);
    assert!(unknown != recording && absurd != recording);
    let files = [
        ("garbage", "no recording"),
        ("empty", ""),
        ("absurd", absurd.as_str()),
        ("8.0.2-of-an-unknown-operation", unknown.as_str()),
        ("8.0.2-of-another-name", recording.as_str()),
    ];
    for (name, text) in files {
        fs::write(folder.path().join(format!("{name}.jsonl")), text).unwrap();
    }
    let output = replay_folder(folder.path());
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    for name in ["garbage", "empty", "absurd"] {
        assert!(said.contains(&format!("{name} differs: cannot be re")), "{name}: {said}");
    }
    assert!(!said.contains("8.0.2-of-an"), "{said}");
}

#[test]
fn recording_kinds_are_told_by_their_packets_and_not_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let names = [
        "6.0.5-replication",
        "6.0.5-resume-mid-snapshot-disk",
        "6.0.5-stream-end-state-replica",
        "8.0.2-cluster-failover",
        "8.0.2-close-stream",
        "8.0.2-end-seqno",
        "8.0.2-sdk-python-plain",
        "8.0.2-sync-disk-none",
        "8.0.2-sync-live",
    ];
    for (number, name) in names.into_iter().enumerate() {
        let recording = fs::read_to_string(tests_folder(name)).unwrap();
        let path = folder.path().join(format!("recording {number}.jsonl"));
        fs::write(path, in_another_vbucket(&recording)).unwrap();
    }
    let output = replay_folder(folder.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("6 replayed, 3 exempt"), "{said}");
}

/// A recording of one vBucket with another number for it, beyond those of a small bucket.
fn in_another_vbucket(recording: &str) -> String {
    const NAMES_A_VBUCKET: core::ops::RangeInclusive<u8> = 0x52..=0x59;
    let (meta, packets) = recording.split_once('\n').unwrap();
    let mut meta: serde_json::Value = serde_json::from_str(meta).unwrap();
    let vbids = meta["meta"]["vbuckets"].as_array_mut().unwrap();
    let [vbid] = &mut vbids[..] else { return recording.to_owned() };
    *vbid = (vbid.as_u64().unwrap() + 0x100).into();
    for operation in meta["meta"]["expected"]["kv_ops"].as_array_mut().into_iter().flatten() {
        operation["vb"] = (operation["vb"].as_u64().unwrap() + 0x100).into();
    }
    let mut lines = vec![meta.to_string()];
    for line in packets.lines() {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        if let Some(packet) = line["hex"].as_str() {
            let opcode = u8::from_str_radix(&packet[2..4], 16).unwrap();
            if packet.starts_with("80") && NAMES_A_VBUCKET.contains(&opcode) {
                line["hex"] = format!("{}01{}", &packet[..12], &packet[14..]).into();
            }
        }
        lines.push(line.to_string());
    }
    lines.join("\n")
}

#[test]
fn recording_with_a_changed_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let name = "8.0.2-deletes-disk-xattr";
    let recording = fs::read_to_string(tests_folder(name)).unwrap();
    let path = |name: &str| folder.path().join(format!("{name}.jsonl"));
    fs::write(path(name), &recording).unwrap();
    let output = replay_folder(folder.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));

    // One byte each of an answer's status, a failover log, a marker, a CAS, a value.
    let damage: [(&str, &str, usize); 5] = [
        ("status", "81", 7),
        ("log", "8153", 30),
        ("marker", "8056", 43),
        ("version", "8057", 20),
        ("value", "8057", usize::MAX),
    ];
    for (name, begins, at) in damage {
        fs::write(path(name), damaged(&recording, begins, at)).unwrap();
    }
    let output = replay_folder(folder.path());
    assert!(!output.status.success(), "the damage goes unnoticed");
    let said = String::from_utf8_lossy(&output.stderr);
    for (name, ..) in damage {
        assert!(said.contains(&format!("{name} differs")), "{name} goes unnoticed: {said}");
    }
    assert!(!said.contains(&format!("{name} differs")), "{said}");
}

/// A recording of the project, whatever folder the others come from.
fn tests_folder(name: &str) -> PathBuf {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
    traces.join(format!("{name}.jsonl"))
}

/// A recording with byte `at`, or the last one, changed in the last packet of the server that
/// begins with some hex digits.
fn damaged(recording: &str, begins: &str, at: usize) -> String {
    let mut lines: Vec<String> = recording.lines().map(str::to_owned).collect();
    let start = format!(r#"{{"dir": "s2c", "hex": "{begins}"#);
    let line = lines.iter_mut().rfind(|line| line.starts_with(&start)).unwrap();
    let hex = line.find(begins).unwrap();
    let end = line.rfind('"').unwrap();
    let digit = if at == usize::MAX { end - 1 } else { hex + 2 * at + 1 };
    let other = if line.as_bytes()[digit] == b'0' { "1" } else { "0" };
    line.replace_range(digit..=digit, other);
    lines.join("\n")
}
