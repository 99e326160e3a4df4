#!/usr/bin/env bash
# rustc of scripts/fuzz.py (RUSTC_WRAPPER), without coverage in Arrow's crates. They parse nothing, and
# counting their branches takes half the time of the target that builds tables. Their overflow checks and
# assertions stay.
set -euo pipefail

command=()
for argument in "$@"; do
    if [[ " $* " != *" --crate-name arrow_"* || $argument != -Cpasses=sancov-module ]]; then
        command+=("$argument")
    fi
done
exec "${command[@]}"
