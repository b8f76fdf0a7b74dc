"""The page contains every sample exactly once, and the committed page matches its sources."""

import base64
import hashlib
import re
from importlib.resources import files
from pathlib import Path

from otel_kprofiler.formats import FORMATS, html, page
from tests.page import data

VIEWER = Path(__file__).parents[3] / "viewer"
ASSET = files("otel_kprofiler.formats").joinpath("assets/flamegraph.html").read_text()


def test_page_columns_are_consistent_and_contain_every_sample(windows):
    result = data(html(windows))
    samples, nodes, frames = result["samples"], result["nodes"], result["frames"]
    assert sum(samples["count"]) == 10
    assert all(parent < node for node, parent in enumerate(nodes["parent"]))
    names = []
    node = samples["node"][0]
    while node >= 0:
        names.append(result["strings"][frames["name"][nodes["frame"][node]]])
        node = nodes["parent"][node]
    assert names == ["inlined", "ext4_read", "vfs_read", "do_syscall_64", "[0x401000]", "dd"]
    threads = {(result["strings"][name], tid) for name, tid in
               zip(result["threads"]["name"], result["threads"]["tid"], strict=True)}  # fmt: skip
    assert threads == {("dd", 7), ("helper", 71), (r"a;b\n", 8)}


def test_identical_samples_share_one_entry(windows):
    assert len(data(html(windows))["samples"]["count"]) == 4


def test_a_title_cannot_break_out_of_its_html_element(windows):
    text = html(windows, title="</title><script>{{PROFILE}}")
    assert "</title><script>" not in text
    assert text.count("</script>") == 2


def test_the_html_title_is_the_name_of_the_recorded_target(windows):
    (row,) = [row for row in FORMATS if row.name == "html"]
    assert data(row.write_page(windows, "make", ()))["title"] == "make"
    assert data(row.write(windows))["title"] == "Profile"


def test_only_a_page_that_fetches_data_may_open_connections():
    assert "connect-src 'none'" in html([])
    assert "connect-src 'self'" in page({"source": "profile.json"}, connects=True)


def test_the_page_was_built_from_the_committed_sources():
    digest = hashlib.sha256((VIEWER / "package-lock.json").read_bytes())
    for path in sorted((VIEWER / "src").iterdir()):
        digest.update(path.read_bytes())
    assert f"viewer {digest.hexdigest()}" in ASSET, "run `make viewer`"


def test_the_page_contains_no_external_references():
    addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", ASSET))
    assert {address for address in addresses if "www.w3.org" not in address} == set()


def test_the_content_policy_allows_only_the_pages_scripts_and_styles():
    for name, element in (("style", "<style>"), ("script", "<script>")):
        text = ASSET.partition(element)[2].partition(f"</{name}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in ASSET
    assert "unsafe" not in ASSET.partition("<title>")[0]
