"""Errors and logs name options in plain words: Python, Spark and the command line spell them apart.

A `ConfigError` is not looked at: it has the option beside its text, which each of them translates.
"""

import ast
import inspect
import re
from pathlib import Path

import dcp_rs
from dcp_rs import planner

ROOT = Path(__file__).parents[2]
ENGINE = ("dcp-wire", "dcp-proto", "dcp-consumer", "dcp-arrow")
# Texts of a page of the reference, which has options in Python's spelling.
OF_A_PAGE = {"capabilities.rs"}
OPTIONS = {
    name
    for each in (dcp_rs.connect, dcp_rs.Client.stream, planner.PlanOptions, dcp_rs.replicate)
    for name in inspect.signature(each).parameters
}
LONG = "|".join(name for name in OPTIONS if "_" in name)
NAMED = re.compile(rf"\b(?:{LONG})\b|(?<![?&\w])(?:{'|'.join(OPTIONS)})=\S")
LOGS = ("debug", "info", "warning", "error", "exception")


def engine_texts(source):
    """Returns the texts of several words in a file of Rust."""
    code = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    texts = (re.sub(r"\\\n\s*", "", each) for each in re.findall(r'"((?:[^"\\]|\\.|\\\n)*)"', code))
    return [each for each in texts if " " in each]


def package_texts(source):
    """Returns the texts of errors and logs in a file of Python."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in LOGS or (name.endswith("Error") and name not in ("ConfigError", "UsageError")):
            parts = (part for argument in call.args for part in ast.walk(argument))
            texts = (part.value for part in parts if isinstance(part, ast.Constant))
            found += [text for text in texts if isinstance(text, str)]
    return found


def test_errors_and_logs_name_options_in_plain_words():
    rust = [path for each in ENGINE for path in (ROOT / "crates" / each / "src").rglob("*.rs")]
    texts = {path: engine_texts(path.read_text()) for path in rust if path.name not in OF_A_PAGE}
    package = (ROOT / "python/dcp_rs").rglob("*.py")
    texts |= {path: package_texts(path.read_text()) for path in package}
    assert sum(map(len, texts.values())) > 500
    named = [(path.name, text) for path, found in texts.items() for text in found]
    assert [each for each in named if NAMED.search(each[1])] == []


def test_an_option_in_the_text_of_an_error_or_a_log_is_found():
    rust = 'tracing::warn!("no authorities: pass \\\n    tls_ca");'
    assert NAMED.search(*engine_texts(rust))
    for python in (
        'raise DataError(f"{seqno}: set on_error to reject")',
        '_log.info("vbuckets=0")',
    ):
        assert any(map(NAMED.search, package_texts(python)))
    assert package_texts('raise ConfigError("give on_error", option="on_error")') == []
