//! Records the compiler's version, which is printed with every result.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc)
        .arg("--version")
        .output()
        .map_or_else(|_| String::new(), |out| String::from_utf8_lossy(&out.stdout).into_owned());
    println!("cargo::rustc-env=DCP_BENCHES_RUSTC={}", version.trim());
}
