#!/usr/bin/env bash
# Checks that this machine has what the Makefile needs, and stops with one line if not.
# Usage: scripts/require.sh rust | java | maven | python | postgres | stunnel | tshark | promtool | deny | mutants | actionlint | versitygw |
#        azurite | fake-gcs-server
#        (python: prints the interpreter found)
#
# As root on Debian or Ubuntu it installs a JDK, PostgreSQL, stunnel and tshark if missing, and
# promtool into .state/tools. A missing tshark or promtool is not an error: the tests that need them
# are skipped with a message.
set -euo pipefail

stop() {
    echo "dcp_rs: $*" >&2
    exit 1
}

# version_at_least HAVE WANT: compares dotted numbers.
version_at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

require_rust() {
    local want have
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! command -v cargo >/dev/null || ! have=$(rustc --version 2>/dev/null | cut -d' ' -f2); then
        stop "Rust is missing: install cargo and rustc $want or newer (with rustup)"
    fi
    version_at_least "$have" "$want" ||
        stop "rustc $have is too old: install Rust $want or newer (rustup update)"
    command -v cc >/dev/null || stop "no C linker (cc): install gcc (apt-get install gcc libc6-dev)"
}

require_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    stop "no Python 3.11 or newer with venv: install python3.11 and python3.11-venv"
}

java_major() {
    local java=java
    [ -z "${JAVA_HOME:-}" ] || java="$JAVA_HOME/bin/java"
    { "$java" -version 2>&1 || true; } | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1
}

# Whether this is root on Debian or Ubuntu.
may_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
        grep -qsE '^(ID|ID_LIKE)=.*(debian|ubuntu)' /etc/os-release
}

# Non-interactive: packages use the default answers to their questions.
install_package() {
    DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends "$1" >/dev/null </dev/null
}

require_java() {
    local major package
    major=$(java_major)
    [ "${major:-0}" -lt 17 ] || return 0
    if [ -z "${JAVA_HOME:-}" ] && may_install; then
        echo "dcp_rs: no Java 17 or newer: installing a JDK with apt-get" >&2
        apt-get update -qq
        for package in openjdk-17-jre-headless openjdk-21-jre-headless; do
            install_package "$package" && break
        done
        major=$(java_major)
    fi
    [ "${major:-0}" -ge 17 ] ||
        stop "Spark needs Java 17 or newer: install openjdk-17-jre-headless, or set JAVA_HOME"
}

require_maven() {
    command -v mvn >/dev/null && return
    if may_install; then
        echo "dcp_rs: no Maven: installing it with apt-get" >&2
        apt-get update -qq
        install_package maven || true
    fi
    command -v mvn >/dev/null || stop "no Maven for what the tests run on Java: install maven"
}

has_postgres() {
    command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

require_postgres() {
    has_postgres && return
    if may_install; then
        echo "dcp_rs: no PostgreSQL: installing it with apt-get" >&2
        apt-get update -qq
        # Do not create a server that listens on the default port.
        mkdir -p /etc/postgresql-common
        [ -e /etc/postgresql-common/createcluster.conf ] ||
            echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
        install_package postgresql || true
    fi
    has_postgres || stop "no PostgreSQL: install the package postgresql"
}

require_stunnel() {
    command -v openssl >/dev/null && command -v stunnel >/dev/null && return
    if may_install; then
        echo "dcp_rs: no openssl or stunnel: installing them with apt-get" >&2
        apt-get update -qq
        install_package openssl && install_package stunnel4 || true
    fi
    command -v openssl >/dev/null && command -v stunnel >/dev/null ||
        stop "no openssl or stunnel: install the packages openssl and stunnel4"
}

require_tshark() {
    command -v tshark >/dev/null && return
    if may_install; then
        echo "dcp_rs: no tshark: installing it with apt-get" >&2
        apt-get update -qq || true
        install_package tshark || true
    fi
    command -v tshark >/dev/null ||
        echo "dcp_rs: no tshark: no capture will be read (apt-get install tshark)" >&2
}

# Extract only this program: installing the package would start a server.
require_promtool() {
    local folder
    [ ! -x .state/tools/bin/promtool ] && ! command -v promtool >/dev/null || return 0
    if may_install; then
        echo "dcp_rs: no promtool: taking it out of the package prometheus" >&2
        folder=$(mktemp -d)
        apt-get update -qq || true
        if (cd "$folder" && apt-get download -qq prometheus >/dev/null 2>&1 && dpkg -x prometheus_*.deb .); then
            mkdir -p .state/tools/bin
            mv "$folder/usr/bin/promtool" .state/tools/bin/
        fi
        rm -rf "$folder"
    fi
    [ -x .state/tools/bin/promtool ] ||
        echo "dcp_rs: no promtool: the alarms will not be tried (apt-get install prometheus)" >&2
}

# Built from source, since only registries are available: minutes, once per working copy. It runs for
# seconds, so the build is made quick, not the program.
require_deny() {
    local want=0.20.2
    [ "$(.state/tools/bin/cargo-deny --version 2>/dev/null)" != "cargo-deny $want" ] || return 0
    echo "dcp_rs: building cargo-deny $want into .state/tools: this takes minutes" >&2
    CARGO_TARGET_DIR=.state/tools/build CARGO_PROFILE_RELEASE_LTO=off \
        CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        cargo install cargo-deny --version "$want" --locked --quiet --root .state/tools ||
        stop "cargo-deny $want cannot be built"
    rm -rf .state/tools/build
}

# Also built from source, in three minutes.
require_mutants() {
    local want=27.1.0
    [ "$(.state/tools/bin/cargo-mutants --version 2>/dev/null)" != "cargo-mutants $want" ] || return 0
    echo "dcp_rs: building cargo-mutants $want into .state/tools: this takes minutes" >&2
    CARGO_TARGET_DIR=.state/tools/build cargo install cargo-mutants --version "$want" --locked --quiet \
        --root .state/tools || stop "cargo-mutants $want cannot be built"
    rm -rf .state/tools/build
}

# Also built from source, in half a minute.
require_actionlint() {
    local want=v1.7.12
    [ "$(.state/tools/bin/actionlint -version 2>/dev/null | head -n 1)" != "$want" ] || return 0
    command -v go >/dev/null || stop "no Go: install golang, or leave the workflows unchecked"
    GOBIN="$PWD/.state/tools/bin" GOFLAGS=-modcacherw \
        go install "github.com/rhysd/actionlint/cmd/actionlint@$want" ||
        stop "actionlint $want cannot be built"
}

# require_server MODULE VERSION: also built from source, in minutes.
require_server() {
    local name="${1##*/}"
    [ ! -x ".state/tools/bin/$name" ] ||
        ! go version -m ".state/tools/bin/$name" | grep -qF "$2" || return 0
    command -v go >/dev/null || stop "no Go to build $name: install golang"
    GOBIN="$PWD/.state/tools/bin" GOFLAGS=-modcacherw go install "$1@$2" ||
        stop "$name $2 cannot be built"
}

# By npm, without the scripts of its packages.
require_azurite() {
    local want=3.37.0 folder=.state/tools/azurite
    ! grep -qsF "\"version\": \"$want\"" $folder/node_modules/azurite/package.json || return 0
    command -v npm >/dev/null || stop "no npm for an Azure server: install npm"
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix $folder "azurite@$want" ||
        stop "azurite $want cannot be installed"
}

case "${1:-}" in
rust) require_rust ;;
java) require_java ;;
maven) require_maven ;;
python) require_python ;;
postgres) require_postgres ;;
stunnel) require_stunnel ;;
tshark) require_tshark ;;
promtool) require_promtool ;;
deny) require_deny ;;
mutants) require_mutants ;;
actionlint) require_actionlint ;;
versitygw) require_server github.com/versity/versitygw/cmd/versitygw v1.8.0 ;;
azurite) require_azurite ;;
fake-gcs-server) require_server github.com/fsouza/fake-gcs-server v1.56.1 ;;
*) stop "usage: scripts/require.sh rust | java | maven | python | postgres | stunnel | tshark | promtool | deny | mutants | actionlint | versitygw | azurite | fake-gcs-server" ;;
esac
