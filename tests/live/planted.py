"""A program with thirty functions, exactly one of which spends time in the kernel."""

import os

HOT, FUNCTIONS = 17, 30
_STEP = """
def step_{number}(match=None):
    if {number} == {hot}:
        os.listdir({directory!r})
    return "{number}"

"""
_MAIN = """
def handle():
    for number in range({functions}):
        step = globals()[f"step_{{number}}"]
        step()
        re.sub("a", step, "a")  # called again, from C code


def main(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        handle()


if __name__ == "__main__":
    main(float(sys.argv[1]))
"""


def write_program(path):
    """Writes the program, and returns the number of the line that causes kernel time."""
    directory = os.path.dirname(os.__file__)  # has hundreds of entries
    steps = [
        _STEP.format(number=number, hot=HOT, directory=directory) for number in range(FUNCTIONS)
    ]
    text = "import os, re, sys, time\n" + "".join(steps) + _MAIN.format(functions=FUNCTIONS)
    path.write_text(text)
    return text[: text.index(f"if {HOT} == {HOT}")].count("\n") + 2
