"""Unwind tables for arm64 are built from Go's function tables."""

import shutil
import struct

import pytest

from otel_kprofiler.elf import ElfFile, ImageSource
from otel_kprofiler.unwinding.frame_writing import Segment
from otel_kprofiler.unwinding.go_frames import make_tables
from otel_kprofiler.unwinding.table import Tables
from tests.truth import native
from tests.unit.unwinding.go_files import (
    ARM64_EPILOGUE,
    ARM64_ORDINARY,
    ARM64_PROLOGUE,
    ARM64_SIZES,
    CALL,
    LOAD_FP,
    NOP,
    RETURN,
    SET_FP,
    STORE_FP,
    TEXT,
    Made,
    go_file,
    pack_words,
)
from tests.unit.unwinding.test_go_frames import ADDRESS, decode, read_rows

SP, FP, LINK = 31, 29, 30
AARCH64 = 183
TOP, WRITES_SP, ASSEMBLY = 1, 2, 4
LOST, KEPT = ("UNDEFINED", None), None
UNKNOWN = ("VAL_EXPRESSION", [])
PROLOGUE, EPILOGUE, SIZES = ARM64_PROLOGUE, ARM64_EPILOGUE, ARM64_SIZES
KEEP_LINK = 0xAA1E03E3  # mov x3, x30
MOVE_SP, MOVE_BACK = 0x9100007F, 0x9100009F  # mov sp, x3; mov sp, x4
LOAD_SP = (0xF9401F83, MOVE_SP)  # ldr x3, [x28, #56]: g.sched.sp; mov sp, x3
LOAD_SP_BACK = (0xF9401F84, MOVE_BACK)  # ldr x4, [x28, #56]; mov sp, x4


def saved(bytes_below_cfa):
    return "OFFSET", -bytes_below_cfa


def rows(made):
    """Returns a function's rows: offset, CFA, rule for x29, rule for the return address."""
    file, table, segments = go_file([*[ARM64_ORDINARY] * 10, made], quantum=4)
    maker = make_tables(file, table, TEXT, segments, ADDRESS, machine=AARCH64)
    entries = decode(maker.frames)
    start = max(entries)
    assert maker.pairs[-1][0] == start
    return read_rows(entries, start, FP, LINK)


def assembly(words, sizes=SIZES, name=b"main.asm", flags=ASSEMBLY):
    """Returns an assembly function's rows; NOPs before its last three words pad it to 16 words."""
    words = [*words[:-3], *[NOP] * (16 - len(words)), *words[-3:]]
    return rows(Made(name, pack_words(*words), sizes, flags=flags))


BODY = [
    (0, (SP, 0), KEPT, None),
    (4, (SP, 48), KEPT, saved(48)),
    (8, (SP, 48), saved(56), saved(48)),
]
RETURNED = (60, (SP, 0), KEPT, None)
WITHOUT = [(0, (SP, 16), KEPT, UNKNOWN)]


def test_rules_for_x30_and_x29_change_at_the_instructions_that_store_them():
    assert rows(ARM64_ORDINARY) == [*BODY, RETURNED]


def test_registers_preserved_in_c_are_undefined_in_callers_of_go_functions():
    file, table, segments = go_file([ARM64_ORDINARY] * 10, quantum=4)
    frames = make_tables(file, table, TEXT, segments, ADDRESS, machine=AARCH64).frames
    entry = next(iter(decode(frames).values()))
    (row, *_) = entry.cie.get_decoded().table
    assert [row[number].type for number in range(19, 29)] == ["UNDEFINED"] * 10
    assert (entry.cie["code_alignment_factor"], entry.cie["data_alignment_factor"]) == (4, -8)
    assert entry.cie["return_address_register"] == LINK


def test_functions_with_large_frames_store_x29_and_x30_before_changing_sp():
    # sub x20, sp, #256; stp; mov sp, x20
    words = [0xD10403F4, 0xA93FFA9D, 0x9100029F, SET_FP, CALL]
    made = Made(b"main.large", pack_words(*words, *[NOP] * 11), ((12, 0), (60, 256), (64, 0)))
    assert rows(made) == [
        (0, (SP, 0), KEPT, None),
        (12, (SP, 256), saved(264), saved(256)),
        (60, (SP, 0), KEPT, None),
    ]


def test_the_second_of_two_instructions_that_pop_a_frame_has_no_unwind_rule():
    words = [0xD1402BF4, 0xA93FFA9D, 0x9100029F, SET_FP]
    made = Made(b"main.huge", pack_words(*words, *[NOP] * 12), ((12, 0), (60, 40960), (64, 0)))
    assert [(at, ra) for at, _, _, ra in rows(made)] == [
        (0, None), (12, saved(40960)), (56, UNKNOWN), (60, None)
    ]  # fmt: skip


def test_a_leaf_function_without_a_frame_returns_to_the_address_in_x30():
    assert rows(Made(b"main.leaf", pack_words(*[NOP] * 15, RETURN), ((64, 0),))) == [
        (0, (SP, 0), KEPT, None)
    ]
    assert assembly([NOP, RETURN], ((64, 0),)) == [(0, (SP, 0), KEPT, None)]


def test_a_function_that_never_changes_x30_need_not_save_it():
    sizes = ((4, 0), (60, 32), (64, 0))
    drop, back = 0xD10083FF, 0x910083FF  # sub sp, sp, #32; add sp, sp, #32
    for flags in (0, ASSEMBLY):
        assert assembly([drop, NOP, NOP, back, RETURN], sizes, flags=flags) == [
            (0, (SP, 0), KEPT, None), (4, (SP, 32), KEPT, None), (60, (SP, 0), KEPT, None)
        ]  # fmt: skip
        assert assembly([drop, CALL, NOP, back, RETURN], sizes, flags=flags) == WITHOUT


def test_a_leaf_in_assembly_may_overwrite_its_return_address_slot():
    """``internal/chacha8rand.block`` overwrites this slot."""
    drop = (0x9100A3FD, 0x9100C3FF, RETURN)  # add x29, sp, #40; add sp, sp, #48
    assert assembly([*PROLOGUE, 0xB90003E2, *drop]) == [
        (0, (SP, 0), KEPT, None),
        (4, (SP, 48), KEPT, None),
        (8, (SP, 48), saved(56), None),
        (60, (SP, 0), KEPT, None),
    ]


def test_assembly_functions_that_make_calls_have_the_usual_unwind_rules():
    assert assembly([*PROLOGUE, CALL, *EPILOGUE]) == [*BODY, RETURNED]


def test_x30_is_preserved_across_the_call_that_grows_the_stack():
    words = [*PROLOGUE, *[CALL] * 4, *EPILOGUE, KEEP_LINK, CALL, *[NOP] * 4]
    sizes = ((4, 0), (36, 48), (64, 0))
    for flags in (0, ASSEMBLY):
        made = rows(Made(b"main.grows", pack_words(*words), sizes, flags=flags))
        assert made == [*BODY, (36, (SP, 0), KEPT, None)]


@pytest.mark.parametrize(
    "words",
    [
        [CALL, *PROLOGUE, *EPILOGUE],  # x30 changes before it is saved
        [*PROLOGUE, CALL, MOVE_SP, *EPILOGUE],  # sets the stack pointer, not the frame size
        [*PROLOGUE, CALL, 0xF84107FE, NOP, *EPILOGUE],  # ldr x30, [sp], #16
        [*PROLOGUE, CALL, 0xA9BF07E0, *EPILOGUE],  # stp x0, x1, [sp, #-16]!
    ],
)
def test_functions_whose_code_contradicts_their_frame_sizes_have_no_unwind_rule(words):
    assert assembly(words) == WITHOUT


def test_the_callers_x29_is_unknown_in_a_function_that_overwrites_it():
    assert assembly([0xAA1F03FD, NOP, RETURN], ((64, 0),)) == [(0, (SP, 0), LOST, None)]


def test_a_stack_ends_at_a_function_marked_as_outermost_unless_it_is_sigtramp():
    words = [*PROLOGUE, CALL, *EPILOGUE]
    assert assembly(words, flags=ASSEMBLY | TOP) == [(0, (SP, 0), KEPT, LOST)]
    assert assembly(words, name=b"runtime.sigtramp", flags=ASSEMBLY | TOP) == [*BODY, RETURNED]


def switching(name, words, sizes=SIZES):
    return assembly(words, sizes, name, ASSEMBLY | WRITES_SP)


def test_systemstack_is_unwound_through_the_previous_stacks_frame_pointer():
    words = [*PROLOGUE, *LOAD_SP, CALL, *LOAD_SP_BACK, *EPILOGUE]
    assert switching(b"runtime.systemstack", words) == [
        *BODY,
        (20, (0x8D, 56), saved(56), saved(48)),  # breg29 56
        (32, (SP, 48), saved(56), saved(48)),
        RETURNED,
    ]


def test_no_unwind_rule_applies_after_systemstack_drops_its_frame():
    words = [*PROLOGUE, *LOAD_SP, CALL, *LOAD_SP_BACK, *EPILOGUE, 0xF84307FE, SET_FP, NOP]
    *_, returned, again, dropped = switching(
        b"runtime.systemstack", [*words, *[NOP] * 2], ((4, 0), (40, 48), (44, 0), (64, 48))
    )
    assert returned == (40, (SP, 0), KEPT, None)
    assert again == (44, (SP, 48), saved(56), saved(48))
    assert (dropped[0], dropped[3]) == (48, UNKNOWN)


@pytest.mark.parametrize(
    "words",
    [
        [*PROLOGUE, *LOAD_SP, CALL, *EPILOGUE],  # the function does not restore sp
        [*PROLOGUE, *LOAD_SP, 0xAA1F03FD, CALL, *LOAD_SP_BACK, *EPILOGUE],  # mov x29, xzr
        [NOP, STORE_FP, SET_FP, *LOAD_SP, CALL, *LOAD_SP_BACK, *EPILOGUE],  # x30 is not saved
    ],
)
def test_an_unrecognized_systemstack_has_no_unwind_rule(words):
    assert switching(b"runtime.systemstack", words) == WITHOUT


def test_functions_called_by_mcall_do_not_return_to_it():
    made = switching(b"runtime.mcall", [NOP, CALL, NOP, *LOAD_SP, CALL, NOP, NOP], ((64, 0),))
    assert [(at, ra) for at, _, _, ra in made] == [(0, None), (4, UNKNOWN), (20, LOST)]


@pytest.mark.parametrize("name", [b"runtime.morestack", b"gogo", b"gosave_systemstack_switch"])
def test_functions_that_switch_stacks_have_rules_until_they_change_registers(name):
    for words in ([NOP, NOP, CALL, *LOAD_SP], [*LOAD_SP, NOP, NOP]):
        made = switching(name, [*words, NOP, NOP, NOP], ((64, 0),))
        assert [(at, ra) for at, _, _, ra in made] == [(0, None), (8, UNKNOWN)]


def test_functions_with_an_unrecognized_stack_switch_have_no_unwind_rule():
    assert switching(b"runtime.other", [*PROLOGUE, *LOAD_SP, CALL, *EPILOGUE]) == WITHOUT


SMALL_PROLOGUE = (0xF81F0FFE, STORE_FP, SET_FP)  # str x30, [sp, #-16]!
SMALL_EPILOGUE = (LOAD_FP, 0xF84107FE, RETURN)
TAKE_GOROUTINE = (0x910003E2, 0xAA1C03E4)  # mov x2, sp; mov x4, x28
KEEP_GOROUTINE = (0x910003ED, 0xD10041AD, 0x910001BF, 0xF90003E4, 0xF9400484, 0xCB020084)
KEEP_DEPTH = 0xF90007E4  # str x4, [sp, #8]
BACK = (0xF9400785, 0xF94007E6, 0xCB0600A5, 0xAA0903E0, 0x910000BF)
LEFT = (0xAA0203ED, 0xD10041AD, 0x910001BF, CALL, 0xF94007E2, 0x9100005F)


def call_of_c(keep_depth=KEEP_DEPTH, taken=TAKE_GOROUTINE):
    """Builds a shortened ``runtime.asmcgocall`` from Go 1.26."""
    words = [*SMALL_PROLOGUE, *taken, *LOAD_SP, *KEEP_GOROUTINE, keep_depth, CALL, *BACK]
    words += [*SMALL_EPILOGUE, TAKE_GOROUTINE[0], *LEFT, *SMALL_EPILOGUE, *[NOP] * 2]
    sizes = ((4, 0), (88, 16), (92, 0), (128, 16), (140, 0))
    return Made(b"runtime.asmcgocall", pack_words(*words), sizes, WRITES_SP | ASSEMBLY)


GOROUTINE = (0x8F, 0, 6, 0x23, 8, 6, 0x8F, 8, 6, 0x1C, 0x23, 16)
KEPT_AT = 56


def test_c_code_is_unwound_to_the_goroutine_that_called_it():
    assert [(at, cfa, ra) for at, cfa, _, ra in rows(call_of_c())] == [
        (0, (SP, 0), None),
        (4, (SP, 16), saved(16)),
        (8, (SP, 16), saved(16)),
        (28, (SP, 16), UNKNOWN),
        (KEPT_AT, GOROUTINE, saved(16)),
        (80, (SP, 16), saved(16)),
        (88, (SP, 0), None),
        (92, (SP, 16), saved(16)),
        (108, (SP, 32), saved(16)),
        (120, (SP, 16), saved(16)),
        (128, (SP, 0), None),
    ]


def test_the_caller_of_c_code_is_unknown_if_asmcgocall_is_not_recognized():
    for made in (call_of_c(0xF9000BE4), call_of_c(taken=(NOP, NOP))):
        assert rows(made) == WITHOUT


GOEXIT = Made(b"runtime.goexit", pack_words(0xAA0003E0, CALL, NOP, NOP), ((16, 0),), TOP | ASSEMBLY)


@pytest.mark.system
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_c_code_is_unwound_to_the_start_of_the_goroutine(tmp_path):
    """``runtime.asmcgocall`` stores the goroutine and the depth of its stack."""
    file, table, segments = go_file([*[ARM64_ORDINARY] * 10, GOEXIT, call_of_c()], quantum=4)
    maker = make_tables(file, table, TEXT, segments, ADDRESS, machine=AARCH64)
    (goexit, _), (asmcgocall, _) = maker.pairs[-2:]
    unwinder = native.NativeUnwinder(native.build(tmp_path), "aarch64")
    pairs = [(start - ADDRESS, entry - ADDRESS) for start, entry in maker.pairs]
    tables = Tables(
        ADDRESS, None, len(pairs), Segment(0, 0, ADDRESS),
        b"".join(struct.pack("<ii", *pair) for pair in pairs), bytes(maker.frames),
    )  # fmt: skip
    elf = ElfFile(tuple(segments), (segments[0],), None, None, 0, (0, 0, 0), AARCH64)
    unwinder.add_made(ImageSource(file), tables, elf, 1)
    unwinder.add_mapping(TEXT, TEXT + segments[0].size, 0, 1)
    unwinder.add_memory(TEXT, file[: segments[0].size])
    system_stack, goroutine, end, depth = 0x10000, 0x20000, 0x31000, 0x100
    frame = end - depth
    unwinder.add_memory(system_stack, struct.pack("<2Q", goroutine, depth))
    unwinder.add_memory(goroutine, struct.pack("<2Q", end - 0x1000, end))
    stack = bytearray(0x200)
    # saved x29, and the return address in main.work
    struct.pack_into("<2Q", stack, 0x100 - 8, 0x7777, TEXT + 16)
    struct.pack_into("<Q", stack, 0x100 + 16, goexit + 4)
    registers = [0] * 34
    registers[SP], registers[SP + 1] = system_stack, asmcgocall + KEPT_AT + 4
    result = unwinder.unwind(struct.pack("<34Q", *registers), frame - 0x100, bytes(stack))
    assert result.addresses == (registers[SP + 1], TEXT + 16)
    assert result.end.name == "COMPLETE"


KEEP, MOVE, RESTORE = 0x910003F4, 0x9100003F, 0x9100029F  # mov x20, sp; mov sp, x1; mov sp, x20


def test_vdso_calls_are_unwound_through_the_frame_pointer():
    assert switching(b"runtime.nanotime1", [*PROLOGUE, KEEP, MOVE, CALL, RESTORE, *EPILOGUE]) == [
        *BODY,
        (16, (0x8D, 56), saved(56), saved(48)),
        (28, (SP, 48), saved(56), saved(48)),
        RETURNED,
    ]
    changed = [*PROLOGUE, KEEP, MOVE, CALL, 0xAA1F03FD, RESTORE, *EPILOGUE]
    assert switching(b"runtime.nanotime1", changed) == WITHOUT


def test_unwinding_a_callback_from_c_continues_at_the_goroutines_call_to_c():
    words = [*PROLOGUE, MOVE, CALL, *EPILOGUE]
    assert switching(b"runtime.cgocallback", words) == [*BODY, RETURNED]


def test_the_sigpanic_frame_includes_the_words_that_the_signal_handler_pushed():
    assert rows(ARM64_ORDINARY._replace(name=b"runtime.sigpanic")) == [
        (0, (SP, 16), KEPT, None),
        (4, (SP, 64), KEPT, saved(64)),
        (8, (SP, 64), saved(72), saved(64)),
        (60, (SP, 16), KEPT, None),
    ]


SET_FRAME = [STORE_FP, SET_FP, CALL]
PREEMPTION = [0xF81103FE, 0xD103C3FF, *SET_FRAME]  # stur x30, [sp, #-240]; sub sp, sp, #240
LARGE_PREEMPTION = [0xD107C3FB, 0xF900037E, 0xD107C3FF, *SET_FRAME]  # x27 = sp - 496
LEAVE = [LOAD_FP, 0x910403FF, 0xD61F0360]  # add sp, sp, #256; br x27


@pytest.mark.parametrize(
    ("words", "made_at", "frame"), [(PREEMPTION, 8, 240), (LARGE_PREEMPTION, 12, 496)]
)
def test_the_special_prologue_of_asyncpreempt_is_recognized(words, made_at, frame):
    sizes = ((made_at, 0), (60, frame), (64, -16))
    cfa = frame + 16
    assert assembly([*words, *LEAVE], sizes, b"runtime.asyncPreempt") == [
        (0, (SP, 16), KEPT, None),
        (made_at, (SP, cfa), KEPT, saved(cfa)),
        (made_at + 4, (SP, cfa), saved(cfa + 8), saved(cfa)),
        (60, (SP, 16), saved(cfa + 8), UNKNOWN),
    ]
    assert assembly([words[0], NOP, *words[1:], *LEAVE], sizes, b"runtime.asyncPreempt") == WITHOUT


def test_go_function_tables_for_other_machines_are_rejected():
    file, table, segments = go_file([ARM64_ORDINARY] * 10, quantum=4)
    for machine in (62, 243):
        with pytest.raises(ValueError, match="gopclntab"):
            make_tables(file, table, TEXT, segments, ADDRESS, machine=machine)
    file, table, segments = go_file([ARM64_ORDINARY._replace(code=bytes(64))] * 10, quantum=4)
    with pytest.raises(ValueError, match=r"does not match \.gopclntab"):
        make_tables(file, table, TEXT, segments, ADDRESS, machine=AARCH64)
