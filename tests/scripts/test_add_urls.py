"""A release has the address of its repository, and a README whose links work on an index."""

import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from add_urls import ROOT, with_links, with_urls

URL = "https://example.org/someone/dcp_rs"


def test_the_metadata_has_urls_and_is_otherwise_as_before():
    before = (ROOT / "pyproject.toml").read_text()
    text = with_urls(before, URL)
    with_table = tomllib.loads(text)
    urls = with_table["project"].pop("urls")
    assert with_table == tomllib.loads(before)
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
    assert all(each.startswith(URL) for each in urls.values())
    assert with_urls(text, URL) == text
    assert "No URLs" not in text


def test_links_of_the_readme_lead_to_files_of_the_tag():
    before = (ROOT / "README.md").read_text()
    text = with_links(before, URL, "1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 20
    assert all(each.startswith(("https://", "#")) for each in links)
    ours = [each.removeprefix(f"{URL}/blob/v1.2.3/") for each in links if each.startswith(URL)]
    assert "docs/guides/spark.md" in ours
    assert all((ROOT / each.split("#")[0]).exists() for each in ours)
    assert with_links(text, URL, "1.2.3") == text
