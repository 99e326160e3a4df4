#!/usr/bin/env bash
# Writes requirements/*.txt from pyproject.toml: all packages pinned, with hashes and without index
# URLs, for all supported Python versions and platforms.
# Usage: scripts/lock.sh UV   (UV: the uv program)
set -euo pipefail
uv=$1
lock() {
    local name=$1
    shift
    "$uv" pip compile pyproject.toml "$@" --quiet --universal --python-version 3.11 \
        --fork-strategy fewest --generate-hashes --no-emit-index-url --no-annotate --no-header \
        --output-file "requirements/$name.txt"
}
lock build --group build
lock release --group release
lock demo --extra demo
lock test --extra dlt --extra polars --extra cli --extra demo --extra duckdb --extra postgres --extra delta --extra iceberg --extra kafka --extra object-store --group test --group docs
# Versions of PySpark other than that, and all else as in the file above.
pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
for version in 4.0 4.1 4.2; do
    { sed -n 's/ \\$//; /^[a-z]/{/^pyspark==/!p}' requirements/test.txt; echo "pyspark==$version.*"; } >"$pinned"
    lock "spark-$version" --extra spark --extra delta --group spark --constraints "$pinned"
done
# The lowest versions of what users install, and the newest of what that needs.
# Ray has an environment of its own, in tests/engines.
lock lowest --resolution lowest-direct --extra dlt --extra polars --extra demo --extra duckdb --extra ducklake --extra postgres --extra delta --extra iceberg --extra kafka --extra object-store --extra opentelemetry --extra prometheus --group lowest --group readers
