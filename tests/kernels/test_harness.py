"""The harness itself, tested on the host without booting a guest."""

import shutil
import subprocess

import mutations
import pytest
from harness.cpio import Archive
from harness.errors import MatrixError
from harness.initramfs import load_order, module_name, parse_dependencies
from harness.kernels import DirectoryKernel, get_kernel
from harness.qemu import Outcome, parse_status
from harness.results import FAILED, PASSED, Column, Result, parse_junit, render_table
from run import find_promises


def test_a_cpio_archive_has_the_documented_layout():
    archive = Archive()
    archive.directory("dev")
    archive.character_device("dev/console", 5, 1)
    archive.file("init", b"#!/bin/sh\n", 0o755)
    data = archive.finish()
    entries, at = [], 0
    while at < len(data):
        assert at % 4 == 0
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        start = (at + 110 + fields[11] + 3) // 4 * 4
        entries.append((name, fields[1], fields[9:11], data[start : start + fields[6]]))
        at = (start + fields[6] + 3) // 4 * 4
    assert entries == [
        ("dev", 0o040755, [0, 0], b""),
        ("dev/console", 0o020600, [5, 1], b""),
        ("init", 0o100755, [0, 0], b"#!/bin/sh\n"),
        ("TRAILER!!!", 0, [0, 0], b""),
    ]


def test_busybox_can_extract_a_cpio_archive(tmp_path):
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed")
    archive = Archive()
    archive.directory("a")
    archive.file("a/b", b"odd length", 0o640)
    subprocess.run(
        [busybox, "cpio", "-i"], input=archive.finish(), cwd=tmp_path, check=True, stderr=-3
    )
    assert (tmp_path / "a/b").read_bytes() == b"odd length"


def test_modules_are_loaded_after_their_dependencies():
    dep = parse_dependencies(
        "kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz\n"
        "kernel/net/9p/9pnet.ko.xz:\nkernel/fs/netfs/netfs.ko.xz:\n"
        "kernel/net/9p/9pnet-virtio.ko.xz: kernel/net/9p/9pnet.ko.xz\n"
    )
    assert [module_name(path) for path in load_order(dep, ["virtio", "9pnet_virtio", "9p"])] == [
        "9pnet",
        "9pnet_virtio",
        "netfs",
        "9p",
    ]


@pytest.mark.parametrize(
    ("console", "status"),
    [
        ("x\nkernel-matrix: pytest exit 0\n[ 1.0] reboot: Power down", 0),
        ("kernel-matrix: pytest exit 1\r\n", 1),
        ("[ 3.1] Kernel panic - not syncing: Attempted to kill init!", None),
        ("E  assert 'kernel-matrix: pytest exit 0' in log", None),
        ("", None),
    ],
)
def test_the_exit_status_is_read_only_from_the_guests_marker_line(console, status):
    assert parse_status(console) == status


_A = 'classname="tests.kernels.test_a"'
JUNIT = f"""<testsuites><testsuite>
<testcase {_A} name="test_x" time="1.5"><properties>
<property name="feature" value="Works"/></properties></testcase>
<testcase {_A} name="test_y" time="0"><failure message="boom">x</failure></testcase>
<testcase {_A} name="test_z" time="0"><error message="broken"/></testcase>
<testcase {_A} name="test_s" time="0"><skipped message="one CPU"/></testcase>
</testsuite></testsuites>"""


def test_junit_reports_are_parsed_into_features_and_outcomes():
    assert parse_junit(JUNIT) == [
        Result("test_a::test_x", "Works", "passed", "", 1.5),
        Result("test_a::test_y", "test_a::test_y", "failed", "boom", 0),
        Result("test_a::test_z", "test_a::test_z", "failed", "broken", 0),
        Result("test_a::test_s", "test_a::test_s", "skipped", "one CPU", 0),
    ]


def test_the_table_shows_the_worst_outcome_of_a_feature_and_explains_skips():
    def result(outcome, message=""):
        return Result("t", "Works", outcome, message, 0)

    page = render_table(
        [
            Column("A", [result("passed"), result("failed"), result("passed")]),
            Column("B", [result("skipped", "one CPU")]),
            Column("C", [result("passed")]),
            Column("D", []),
        ]
    )
    assert "| Feature | A | B | C | D |" in page
    assert "| Works | **no** | not tried [1] | yes |  |" in page
    assert "[1] one CPU" in page


def test_a_kernel_can_be_given_as_a_directory_with_an_image_and_modules(tmp_path):
    (tmp_path / "lib/modules/6.99.0-mine").mkdir(parents=True)
    (tmp_path / "bzImage").touch()
    row = get_kernel(str(tmp_path))
    assert isinstance(row, DirectoryKernel)
    assert row.get().release == "6.99.0-mine"
    (tmp_path / "bzImage").unlink()
    with pytest.raises(MatrixError):
        row.get()


def test_the_error_for_an_unknown_kernel_lists_the_known_kernels():
    with pytest.raises(MatrixError) as caught:
        get_kernel("5.4")
    assert "6.12" in caught.value.hint


BROKEN = mutations.Mutation("one-off", "no step back", "a/b.py", "x - 1", "x", "test_x")


def test_a_mutant_is_written_as_a_copy_and_the_original_is_unchanged(tmp_path):
    package = tmp_path / "package"
    (package / "a/__pycache__").mkdir(parents=True)
    (package / "a/b.py").write_text("y = x - 1\n")
    mutations.write_mutant(BROKEN, package, tmp_path / "mutant")
    assert (tmp_path / "mutant/a/b.py").read_text() == "y = x\n"
    assert not (tmp_path / "mutant/a/__pycache__").exists()
    assert (package / "a/b.py").read_text() == "y = x - 1\n"


@pytest.mark.parametrize("text", ["", "x - 1; x - 1"])
def test_a_mutation_that_does_not_match_exactly_once_is_an_error(text):
    with pytest.raises(MatrixError):
        mutations.mutate(text, BROKEN)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS.values(), ids=lambda m: m.name)
def test_every_listed_mutation_applies_to_the_current_package(mutation):
    mutations.mutate((mutations.PACKAGE / mutation.file).read_text(), mutation)


def test_a_mutation_counts_as_detected_only_if_the_named_test_fails():
    other = Result("test_a::test_y", "", "failed", "", 0)
    passed = Result("test_a::test_x", "", "passed", "", 0)
    assert not mutations.is_caught([other, passed], "test_x")
    assert not mutations.is_caught([], "test_x")
    assert mutations.is_caught([passed._replace(outcome="failed")], "test_x")


@pytest.mark.parametrize(
    ("console", "status", "failed"),
    [
        ("[  227.5] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\n", None, True),
        ("[   12.1] int3: 0000 [#1] PREEMPT SMP NOPTI\n", None, True),
        ("[   12.1] int3: 0000 [#1] PREEMPT SMP NOPTI\n", 1, False),
        ("[    0.1] Kernel panic - not syncing: IO-APIC + timer doesn't work!\n", None, True),
        ("[    4.1] Oops: general protection fault: 0000 [#1] SMP\n", None, False),
        ("[    4.1] Kernel panic - not syncing: Attempted to kill init!\n", None, False),
    ],
)
def test_impossible_crashes_are_blamed_on_the_emulator(tmp_path, console, status, failed):
    (tmp_path / "console.log").write_text(console)
    assert Outcome(status, tmp_path, 1.0, "").emulator_failed == failed


def test_a_feature_counts_as_working_only_if_its_tests_pass_on_every_boot():
    passed = Result("test_waits::test_a", "", PASSED, "", 1.0)
    failed = passed._replace(outcome=FAILED)
    boot = Result("test_boot::test_b", "", PASSED, "", 1.0)
    assert find_promises([passed, boot]) == ["waits", "system boot"]
    assert find_promises([passed, boot, failed]) == ["system boot"]
    assert find_promises([passed._replace(outcome="skipped")]) == []
