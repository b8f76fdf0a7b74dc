"""Source files for the page are selected correctly, read with a user's permissions, and decoded."""

import codecs
import contextlib
import json
import os
from urllib.parse import urlencode

import pytest

from otel_kprofiler.viewing import PageServer
from otel_kprofiler.viewing.source_files import MAX_SOURCE_BYTES, SourceError, read_source
from tests.public import open_directory
from tests.unit.viewing.test_server import NOBODY, ask, ask_as

pytestmark = pytest.mark.system
ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def open_folder():
    with open_directory() as folder:
        yield folder


def read(path):
    return read_source(str(path), os.geteuid())


def refusal(path):
    with pytest.raises(SourceError) as caught:
        read(path)
    return caught.value.message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("a = 'é'\n".encode(), "a = 'é'\n"),
        (codecs.BOM_UTF8 + b"a\n", "a\n"),
        ("# coding: koi8-r\n# Ж\n".encode("koi8-r"), "# coding: koi8-r\n# Ж\n"),
        ("# é\n".encode("latin-1"), "# é\n"),
        ("x\n".encode("utf-16"), "x\n"),
        (b"# coding: unheard-of\n\xe9\n", "# coding: unheard-of\né\n"),
        (b"# coding: hex\n", "# coding: hex\n"),
        (b"# coding: punycode\nbcher-kva", "# coding: punycode\nbcher-kva"),
        (b"a\r\nb\rc\x0cd\n\te", "a\nb\nc\\x0cd\n\te"),
        ("a\u2028b\u202ec\x1b[2J".encode(), "a\\u2028b\\u202ec\\x1b[2J"),
    ],
)
def test_text_is_decoded_and_split_into_lines_as_compilers_do(tmp_path, data, text):
    path = tmp_path / "a.py"
    path.write_bytes(data)
    assert read(path).text == text


def test_a_long_line_is_truncated(tmp_path):
    path = tmp_path / "a.c"
    path.write_text("x" * 5000 + "\ny\n")
    assert read(path).text == "x" * 2000 + "…\ny\n"


def test_the_modification_time_of_a_source_file_is_reported(tmp_path):
    path = tmp_path / "a.c"
    path.write_text("x\n")
    os.utime(path, ns=(0, 1_700_000_000_123_999_999))
    assert read(path).modified_ms == 1_700_000_000_123


def test_only_source_files_are_read(tmp_path):
    (tmp_path / "key.pem").write_text("secret")
    (tmp_path / "shadow").write_text("secret")
    (tmp_path / "a.py").mkdir()
    (tmp_path / "b.c").write_bytes(b"\0ELF")
    (tmp_path / "large.c").write_bytes(b"x" * (MAX_SOURCE_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.py")  # opening a FIFO would wait for a writer
    for name, reason in [
        ("key.pem", "its name does not look like a source file's"),
        ("shadow", "its name does not look like a source file's"),
        ("a.py", "is not a regular file"),
        ("b.c", "is not a text file"),
        ("large.c", "is larger than 2 MiB"),
        ("pipe.py", "is not a regular file"),
        ("missing.py", "cannot be read: No such file or directory"),
        ("nul\0.py", "cannot be read: "),
    ]:
        assert reason in refusal(tmp_path / name)
    assert "is a relative path" in refusal("a.py")
    assert "is not a regular file" in refusal("/dev/null")


def test_scripts_and_headers_without_a_suffix_can_be_read(tmp_path):
    script, header = tmp_path / "tool", tmp_path / "include/c++/14/vector"
    header.parent.mkdir(parents=True)
    script.write_text("#!/usr/bin/python3\n")
    header.write_text("#include <bits/stl_vector.h>\n")
    assert read(script).text.startswith("#!")
    assert read(header).text.startswith("#include")


@ONLY_ROOT
def test_another_user_can_read_only_permitted_files(open_folder):
    public, secret, group = (open_folder / f"{name}.py" for name in ("public", "secret", "group"))
    for path, mode in ((public, 0o644), (secret, 0o600), (group, 0o640)):
        path.write_text("x\n")
        path.chmod(mode)
    assert read_source(str(public), NOBODY).text == "x\n"
    for path in (secret, group):
        with pytest.raises(SourceError, match="Permission denied"):
            read_source(str(path), NOBODY)
        assert read(path).text == "x\n"  # this thread's privileges have not changed
    with pytest.raises(SourceError, match="there is no"):
        read_source(str(public), 4_000_000_000)


@contextlib.contextmanager
def serving(*names, host="127.0.0.1"):
    server = PageServer(f"{host}:0", "<p>", lambda _: [b"{}"], set(names).__contains__)
    with contextlib.closing(server):
        yield server


def request(path):
    return f"/source.json?{urlencode({'file': path})}"


def test_only_files_named_in_the_profile_are_served(tmp_path):
    named, other, link = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "link.py"
    named.write_text("a\n")
    other.write_text("b\n")
    link.symlink_to(other)
    with serving(str(named), str(link)) as server:
        status, _, body = ask(server, request(named))
        assert (status, json.loads(body)["text"]) == (200, "a\n")
        assert json.loads(ask(server, request(link))[2])["text"] == "b\n"
        for path in (other, f"{tmp_path}/./a.py", f"{named}/../b.py", f"//{named}", "", "x" * 3000):
            status, _, body = ask(server, request(path))
            assert (status, json.loads(body)) == (
                400, {"error": "no frame in this profile refers to this source file"},
            )  # fmt: skip
        assert ask(server, request(named), Host="evil.example")[0] == 403
        assert ask(server, request(named), Sec_Fetch_Site="cross-site")[0] == 403


def test_no_source_file_is_served_to_other_hosts(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("a\n")
    with serving(str(path), host="0.0.0.0") as server:
        status, _, body = ask(server, request(path))
    assert status == 400
    assert "omit --bind" in json.loads(body)["error"]


@ONLY_ROOT
def test_the_user_who_ran_sudo_cannot_view_files_readable_only_by_root(open_folder, monkeypatch):
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    public, secret = open_folder / "public.py", open_folder / "secret.py"
    for path, mode in ((public, 0o644), (secret, 0o600)):
        path.write_text("x\n")
        path.chmod(mode)
    with serving(str(public), str(secret)) as server:
        assert ask_as(NOBODY, server, "127.0.0.1", request(public)) == 200
        assert ask_as(NOBODY, server, "127.0.0.1", request(secret)) == 400
        assert ask_as(0, server, "127.0.0.1", request(secret)) == 200
