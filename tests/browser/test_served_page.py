"""When hosted by a server, the page fetches its data, and keeps its view when new data arrives."""

import json
import time
from dataclasses import replace

import pytest

from otel_kprofiler.formats import columns, page
from otel_kprofiler.viewing.server import PageServer, QueryError
from tests.browser.flame_graph import (
    PROFILE,
    READ,
    SYSCALL,
    boxes,
    choose,
    frame,
    names,
    place,
    sample,
    text,
    window,
)


class Host:
    """A stand-in for ``view``: serves windows or errors, and records the queries it receives."""

    def __init__(self):
        self.windows = [PROFILE]
        self.queries = []
        self.problem = None
        self.more = {
            "live": True,
            "resources": [{"id": "1", "name": "dd", "samples": 75},
                          {"id": "2", "name": "sh", "samples": 25}],
        }  # fmt: skip

    def answer(self, query):
        self.queries.append(query)
        if self.problem:
            raise QueryError(self.problem)
        yield json.dumps({**columns(self.windows, title="live"), **self.more}).encode()


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def served(browser, host):
    server = PageServer("127.0.0.1:0", page({"source": "profile.json"}, connects=True), host.answer)
    browser.open(server.address)
    wait(browser, "window.viewer.panes.length > 0")
    yield browser
    browser.open("about:blank")
    server.close()


def wait(page, condition):
    for _ in range(100):
        if page.evaluate(condition):
            return
        time.sleep(0.05)
    raise AssertionError(condition)


def refresh(page):
    page.evaluate("document.getElementById('refresh').click()")
    wait(page, "!document.getElementById('status').textContent.startsWith('loading')")


def test_the_page_fetches_only_from_its_server(served):
    assert text(served, "title") == "live"
    assert "100 samples" in text(served, "details")
    paths = {url.partition("?")[0].rpartition("/")[2] for url in served.requests}
    assert paths <= {"", "profile.json", "favicon.ico"}


def test_the_page_requests_the_selected_range_and_resource(served, host):
    assert host.queries[-1].last_s is None
    choose(served, "last", "last 5 minutes")
    wait(served, "document.getElementById('status').textContent === ''")
    assert host.queries[-1].last_s == 300
    choose(served, "resource", "sh")
    wait(served, "document.getElementById('status').textContent === ''")
    assert (host.queries[-1].last_s, host.queries[-1].resource) == (300, "2")


def test_zoom_and_search_are_preserved_when_new_data_arrives(served, host):
    served.click_at(*place(served, "sh"))
    served.press("/", *"vmlinux")
    assert names(served)["sh"] == 100
    new = window(("aa", 1, [sample([READ, frame("other")], 50)]),
                 ("sh", 5, [sample([frame("fresh"), SYSCALL], 30, tid=5)]))  # fmt: skip
    host.windows = [new]
    refresh(served)
    assert names(served) == {"all": 100, "sh": 100, "do_syscall_64": 100, "fresh": 100}
    assert text(served, "matched").startswith("matched 100.00%, 30 samples")
    host.windows = [window(("aa", 1, [sample([READ], 50)]))]
    refresh(served)
    assert names(served) == {"all": 100, "aa": 100, "vfs_read": 100}
    host.windows = [new]
    refresh(served)
    assert [box["name"] for box in boxes(served) if box["row"] == 1] == ["sh"]


def test_a_brushed_interval_remains_selected_when_the_range_advances(served, host):
    served.evaluate("viewer.brush([1000, 2000])")
    shown = text(served, "brushed")
    assert shown.startswith("01:46:41.000")
    host.windows = [replace(PROFILE, start_unix_ns=PROFILE.start_unix_ns - 3 * 10**9)]
    refresh(served)
    assert text(served, "brushed") == shown


def test_a_server_error_is_shown_and_the_previous_data_remains_visible(served, host):
    host.problem = "<b>no such resource</b>"
    refresh(served)
    assert text(served, "status") == "<b>no such resource</b>"
    assert names(served)["sh"] == 25
    host.problem = None
    refresh(served)
    assert text(served, "status") == ""


def test_live_controls_are_hidden_if_the_page_shows_a_file(served, host):
    hidden = "document.getElementById('live').hidden"
    assert served.evaluate(hidden) is False
    host.more = {}
    refresh(served)
    assert served.evaluate(hidden) is True


def test_the_page_refreshes_until_paused(served, host):
    count = len(host.queries)
    wait_for = time.monotonic() + 15
    while len(host.queries) == count:
        assert time.monotonic() < wait_for
        served.evaluate("1")
        time.sleep(0.1)
    served.evaluate("document.getElementById('pause').click()")
    pressed = "document.getElementById('pause').getAttribute('aria-pressed')"
    assert served.evaluate(pressed) == "true"
