#!/usr/bin/env bash
# Runs the Python tests on an extension built with AddressSanitizer, which checks all its memory
# accesses, including those of the libraries compiled into it.
# Usage: scripts/sanitize.sh [PYTEST ARGUMENT ...]
#
# Uses gcc's runtime, preloaded into Python together with the C++ library: the runtime aborts at an
# exception of a library that Python loads later, such as DuckDB, if it found none at the start. Leaks
# are not detected, since Python does not free all memory on exit. Skipped unless named: tests that
# measure memory, tests with PostgreSQL, which does not start under the runtime, and one test whose
# forked child hangs in it.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/.state/asan
host=$(rustc -vV | sed -n 's/^host: //p')
runtime=$(gcc -print-file-name=libasan.so)
[ -e "$runtime" ] || { echo "dcp_rs: gcc has no libasan.so: install it with gcc" >&2; exit 1; }
runtime=$(readlink -f "$runtime"):$(gcc -print-file-name=libstdc++.so.6)

# An unstable option, enabled by RUSTC_BOOTSTRAP. With --target, build scripts and macros are built
# without it.
RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=$folder/target \
    cargo build --locked --quiet --package dcp-python --target "$host" \
    --config 'profile.dev.opt-level=1' --config 'profile.dev.debug=1'

rm -rf "$folder/python"
mkdir -p "$folder/python"
cp -r python/dcp_rs "$folder/python/"
cp "$folder/target/$host/debug/lib_dcp_rs.so" "$folder/python/dcp_rs/_dcp_rs.abi3.so"

export PYTHONPATH=$folder/python LD_PRELOAD=$runtime
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:log_path=$folder/report
rm -f "$folder"/report.*
if [ $# -eq 0 ]; then
    set -- tests/python -q --ignore tests/python/test_scale.py --ignore tests/python/test_soak.py \
        -k "not postgres and not in_autocommit_mode and not variants_in_duckdb_alone \
            and not forked_child_logs_too"
fi
failed=0
.state/venv/bin/python -m pytest -p no:cacheprovider --timeout 600 \
    -W "ignore:dcp_rs was built without optimizations" "$@" || failed=$?
# Includes reports of child processes that no test checked.
if compgen -G "$folder/report.*" >/dev/null; then
    cat "$folder"/report.* >&2
    exit 1
fi
exit "$failed"
