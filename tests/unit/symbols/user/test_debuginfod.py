"""Debug files are downloaded over HTTP from well-behaved and hostile debuginfod servers."""

import contextlib
import gzip
import os
import subprocess
import threading
import time

import pytest

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.symbols.user.debug_files import WantedDebugFile
from otel_kprofiler.symbols.user.debuginfod import Debuginfod, DownloadLimits, find_servers
from tests.servers import HttpServer
from tests.waiting import wait_until

pytestmark = pytest.mark.system

LIMITS = DownloadLimits(file_bytes=1 << 20, connect_s=60.0, total_s=60.0, missing_s=600.0)
OTHER = "00112233445566778899aabbccddeeff00112233"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the build id of a program, and the content of its debug file."""
    folder = tmp_path_factory.mktemp("debuginfod")
    program, debug = folder / "program", folder / "program.debug"
    subprocess.run(
        ["gcc", "-g", "-x", "c", "-Wl,--build-id=sha1", "-o", program, "-"],
        input=b"int main(void) { return 0; }", check=True,
    )  # fmt: skip
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    with program.open("rb") as file:
        build_id = read_elf(FileSource(file.fileno(), program.stat().st_size)).build_id
    return build_id, debug.read_bytes()


class Server:
    """A local server that handles requests with a given function, and counts them."""

    def __init__(self, answer):
        self.asked, self._answer = [], answer
        http = HttpServer(self._take)
        self.address, self.close = http.url, http.close

    def _take(self, request):
        self.asked.append(request.path)
        request.close_connection = True
        with contextlib.suppress(OSError):
            self._answer(request)


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(contextlib.closing(Server(answer)))


def wanted(build_id):
    return WantedDebugFile("/usr/bin/program", "", build_id, None)


def read(fd):
    with open(fd, "rb") as file:
        return file.read()


def test_a_debug_file_is_downloaded_once(made, serve, cache):
    build_id, debug = made
    server = serve(lambda handler: handler.reply(200, debug))
    finder = Debuginfod([server.address + "/"], cache, LIMITS)
    for _ in range(2):
        (result,) = finder.find(wanted(build_id))
        assert result.elf.build_id == build_id
        assert read(result.fd) == debug
    assert read(Debuginfod([server.address], cache, LIMITS).fetch(build_id)) == debug
    assert server.asked == [f"/buildid/{build_id}/debuginfo"]
    assert os.listdir(cache.path) == [f"{build_id}.debuginfo"]


def test_a_debug_file_that_no_server_has_is_requested_again_only_after_ten_minutes(
    made, serve, cache
):
    server = serve(lambda handler: handler.reply(404, b""))
    finder = Debuginfod([server.address], cache, LIMITS)
    assert [finder.fetch(made[0]) for _ in range(3)] == [None] * 3
    assert len(server.asked) == 1
    missing = f"{cache.path}/{made[0]}.debuginfo.missing"
    os.utime(missing, (0, time.time() - 601))
    assert finder.fetch(made[0]) is None
    assert len(server.asked) == 2
    os.utime(missing, (0, time.time() + 1e6))  # the clock was set back
    assert finder.fetch(made[0]) is None
    assert len(server.asked) == 3


def trickle(handler, content, delay_s):
    for byte in content:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(delay_s)


def slow_body(handler, debug):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(debug)))
    handler.end_headers()
    trickle(handler, debug, 0.05)


def endless(handler, debug):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(debug)


def redirect(to):
    return lambda handler, debug: handler.reply(302, b"", Location=to)


HOSTILE = {
    "status 500": lambda handler, debug: handler.reply(500, b"oops"),
    "a page": lambda handler, debug: handler.reply(200, b"<html>Log in</html>"),
    "nothing": lambda handler, debug: handler.reply(200, b""),
    "cut off file": lambda handler, debug: handler.reply(200, debug[:700]),
    "cut off answer": lambda handler, debug: handler.reply(
        200, debug[:700], Content_Length=str(len(debug))
    ),
    "no HTTP": lambda handler, debug: handler.wfile.write(debug),
    "a long length": lambda handler, debug: handler.reply(200, debug, Content_Length="9" * 30),
    "endless": endless,
    "slow body": slow_body,
    "slow headers": lambda handler, debug: trickle(handler, b"HTTP/1.1 200 OK\r\nA: B" * 99, 0.05),
    "compressed": lambda handler, debug: handler.reply(200, debug, Content_Encoding="gzip"),
    "redirects to itself": redirect("/buildid/x"),
    "redirects to a file": redirect("file:///etc/passwd"),
    "redirects to nonsense": redirect("http://[::1"),
    "no answer": lambda handler, debug: handler.rfile.read(),
}
SLOW = {"slow body", "slow headers", "no answer"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_skipped_and_the_next_is_queried(name, made, serve, cache, monkeypatch):
    build_id, debug = made
    now = [0.0]
    hostile = serve(lambda handler: HOSTILE[name](handler, debug))
    honest = serve(lambda handler: handler.reply(200, debug))
    timer = threading.Timer

    def expire_once_asked(abort, before):
        wait_until(lambda: len(hostile.asked) > before)
        abort()

    def limit_next_download():
        slow = iter([len(hostile.asked)] if name in SLOW else [])

        def make(total_s, abort):
            before = next(slow, None)
            expire = timer(total_s, abort)
            return expire if before is None else timer(0, expire_once_asked, (abort, before))

        monkeypatch.setattr(threading, "Timer", make)

    limit_next_download()
    finder = Debuginfod([hostile.address], cache, LIMITS, lambda: now[0])
    started = time.monotonic()
    assert finder.fetch(build_id) is None
    assert time.monotonic() - started < 30
    assert os.listdir(cache.path) == []
    count = len(hostile.asked)
    assert finder.fetch(build_id) is None
    assert len(hostile.asked) == count
    now[0] = 6.0
    if name in {"status 500", "a page"}:  # these requests are soon retried
        assert finder.fetch(build_id) is None
        assert len(hostile.asked) == 2 * count
        now[0] = 12.0
        assert finder.fetch(build_id) is None
        assert len(hostile.asked) == 2 * count
    limit_next_download()
    both = Debuginfod([hostile.address, honest.address], cache, LIMITS)
    assert read(both.fetch(build_id)) == debug


def test_a_file_with_a_different_build_id_is_rejected(made, serve, cache):
    server = serve(lambda handler: handler.reply(200, made[1]))
    assert Debuginfod([server.address], cache, LIMITS).fetch(OTHER) is None
    assert os.listdir(cache.path) == []


def test_a_response_with_an_unrequested_content_encoding_is_decompressed(made, serve, cache):
    server = serve(
        lambda handler: handler.reply(200, gzip.compress(made[1]), Content_Encoding="gzip")
    )
    assert read(Debuginfod([server.address], cache, LIMITS).fetch(made[0])) == made[1]


def test_a_decompression_bomb_is_decompressed_only_up_to_the_limit(made, serve, cache):
    bomb = gzip.compress(bytes(100 << 20))
    server = serve(lambda handler: handler.reply(200, bomb, Content_Encoding="gzip"))
    assert Debuginfod([server.address], cache, LIMITS).fetch(made[0]) is None
    assert os.listdir(cache.path) == []


def test_http_redirects_are_followed(made, serve, cache):
    def answer(handler):
        if handler.path.startswith("/buildid"):
            handler.reply(302, b"", Location="/elsewhere")
        else:
            handler.reply(200, made[1])

    assert read(Debuginfod([serve(answer).address], cache, LIMITS).fetch(made[0])) == made[1]


@pytest.mark.parametrize("status", [200, 302, 404, 500])
def test_reading_an_endless_response_stops_at_the_limit(status, made, serve, cache):
    sent = []

    def answer(handler):
        handler.send_response(status)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()
        while len(sent) < 1000:
            handler.wfile.write(bytes(1 << 20))
            sent.append(1)

    assert Debuginfod([serve(answer).address], cache, LIMITS).fetch(made[0]) is None
    assert len(sent) < 50


def test_an_unreachable_server_does_not_prove_that_a_file_is_missing(made, cache):
    gone = Server(None)
    gone.close()
    assert Debuginfod([gone.address], cache, LIMITS).fetch(made[0]) is None
    assert os.listdir(cache.path) == []


def test_corrupt_cache_files_are_replaced(made, serve, cache):
    server = serve(lambda handler: handler.reply(200, made[1]))
    finder = Debuginfod([server.address], cache, LIMITS)
    file = cache.create(f"{made[0]}.debuginfo")
    os.write(file.fd, b"damaged")
    file.finish()
    assert list(finder.find(wanted(made[0]))) == []
    (result,) = finder.find(wanted(made[0]))
    assert read(result.fd) == made[1]


@pytest.mark.parametrize("build_id", [None, "", "..", "../../etc/passwd", "ABCD", "a" * 300])
def test_malformed_build_ids_are_never_requested(build_id, serve, cache):
    server = serve(lambda handler: handler.reply(200, b""))
    assert list(Debuginfod([server.address], cache, LIMITS).find(wanted(build_id))) == []
    assert server.asked == []


def test_a_full_disk_does_not_count_as_a_server_failure(made, serve, cache, monkeypatch):
    server = serve(lambda handler: handler.reply(200, made[1]))
    finder = Debuginfod([server.address], cache, LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(28, "full")))
        assert finder.fetch(made[0]) is None
    assert read(finder.fetch(made[0])) == made[1]


def test_servers_are_read_from_the_environment(cache, caplog):
    environ = {"DEBUGINFOD_URLS": "https://a.example  ima:enforcing http://b.example/x ftp://c"}
    servers = find_servers(environ)
    assert servers == ("https://a.example", "http://b.example/x", "ftp://c")
    Debuginfod((*servers, "http://user:secret@"), cache)
    assert "invalid debuginfod server URL: ftp://c" in caplog.text
    assert "secret" not in caplog.text
    assert find_servers({}) == ()
