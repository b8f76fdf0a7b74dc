"""Built-in modules can be encoded, shown in reports, and selected."""

from dataclasses import replace

import pytest

from otel_kprofiler.formats import function_rows, select_modules, table
from otel_kprofiler.model import Form, LockTotal, Stack, WindowSample
from tests.unit.formats.conftest import DD, EXT4_READ, GAP, kernel
from tests.windows import make_window, send

EXT4_HERE = kernel("ext4_write", 0x400)._replace(builtin=("ext4",))
SHARED = kernel("cpdma_start", 0x500)._replace(builtin=("ti_cpsw", "ti_davinci_emac"))
SHARED_GAP = GAP._replace(builtin=("snd_seq",))
STACKS = [Stack.from_frames((frame,)) for frame in (EXT4_HERE, SHARED, SHARED_GAP, EXT4_READ)]


@pytest.fixture
def built_in():
    samples = [
        WindowSample(stack, 7, "dd", 0, None, [5_000 + at]) for at, stack in enumerate(STACKS)
    ]
    return make_window(5_000, 15_000, (DD, samples), period_ns=1000)


@pytest.mark.parametrize("form", Form)
def test_builtin_modules_survive_an_otlp_round_trip(built_in, form):
    results = [sample.stack.frames[0] for _, sample in send(built_in, form).samples]
    assert [frame.builtin for frame in results] == [
        ("ext4",), ("ti_cpsw", "ti_davinci_emac"), ("snd_seq",), ()
    ]  # fmt: skip
    assert {frame.module.name for frame in results[:3]} == {"vmlinux"}


def test_reports_show_builtin_modules_in_brackets(built_in):
    rows = {row.function: row.module for row in function_rows(built_in.profiles)}
    assert rows["ext4_write"] == "vmlinux [ext4]"
    assert rows["cpdma_start"] == "vmlinux [ti_cpsw] [ti_davinci_emac]"
    assert "vmlinux [ext4]" in table([built_in])


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["ext4"], [EXT4_HERE, EXT4_READ]),
        (["ti_davinci_emac"], [SHARED]),
        (["snd-seq", "ti-cpsw"], [SHARED, SHARED_GAP]),
        (["vmlinux"], [EXT4_HERE, SHARED, SHARED_GAP]),
        (["ext"], []),
    ],
)
def test_a_kernel_module_can_be_selected_whether_built_in_or_loaded(built_in, names, found):
    (profile,) = built_in.profiles
    profile = replace(profile, locks={"mutex": LockTotal(90, 700)})
    (window,) = select_modules([replace(built_in, profiles=[profile])], names)
    assert [sample.stack.frames[0] for _, sample in window.samples] == found
    (profile,) = window.profiles
    assert (profile.taken, profile.lost, profile.locks) == (len(found), {}, {})
