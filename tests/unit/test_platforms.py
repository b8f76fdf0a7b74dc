"""The platforms page is generated from the recorded results."""

from tests.platforms.report import EMULATED, NO, PAGE, PROVED, Row, merge, read_rows, render

ROW = Row("arm64", "glibc 2.36", "Linux 6.1", "CPython 3.11", EMULATED, ("boots", "waits"))


def test_a_new_result_replaces_the_old_one_for_the_same_platform():
    newer, other = ROW._replace(results=("boots",)), ROW._replace(machine="x86-64", state=PROVED)
    assert merge([ROW, other], [newer]) == [newer, other]


def test_the_page_lists_each_platform_with_its_state_and_results():
    page = render([ROW, ROW._replace(state=NO, results=("no wheel",))])
    assert "| arm64 | glibc 2.36 | Linux 6.1 | CPython 3.11 | *emulated*: boots; waits |" in page
    assert "*no*: no wheel" in page


def test_the_platforms_page_is_generated_from_the_results():
    assert PAGE.read_text() == render(read_rows())
