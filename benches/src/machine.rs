//! The machine and build on which results were measured.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

/// Printed with every set of results.
#[derive(Clone, Debug)]
pub struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
    congestion_control: String,
    load: String,
    rustc: &'static str,
    commit: String,
}

impl Machine {
    /// Inspects this machine; unknown values are `unknown`.
    #[must_use]
    pub fn look() -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: cpu(),
            kernel: read("/proc/sys/kernel/osrelease"),
            congestion_control: default_congestion_control(),
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
            rustc: env!("DCP_BENCHES_RUSTC"),
            commit: commit(),
        }
    }

    /// As one line of text.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "{} cores ({}), Linux {}, TCP {} by default, load {}, {}, commit {}",
            self.cores,
            self.cpu,
            self.kernel,
            self.congestion_control,
            self.load,
            self.rustc,
            self.commit
        )
    }

    /// As a JSON object.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "cores": self.cores,
            "cpu": self.cpu,
            "kernel": self.kernel,
            "congestion_control": self.congestion_control,
            "load": self.load,
            "rustc": self.rustc,
            "commit": self.commit,
        })
    }
}

/// The default congestion control of TCP sockets.
#[must_use]
pub fn default_congestion_control() -> String {
    read("/proc/sys/net/ipv4/tcp_congestion_control")
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

fn cpu() -> String {
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name"));
    model.map_or_else(
        || "unknown".to_owned(),
        |model| model.trim_start_matches([' ', '\t', ':']).to_owned(),
    )
}

/// The checked-out commit, marked if files differ from it.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let out = Command::new("git").args(arguments).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=10", "HEAD"]) else {
        return "unknown".to_owned();
    };
    match git(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if changes.is_empty() => commit,
        _ => format!("{commit} with changes"),
    }
}
