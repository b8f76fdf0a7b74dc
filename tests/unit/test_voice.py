"""The style checker finds phrases that the house style avoids, in samples and in the checkout."""

import pytest

from tests.voice import Place, exceeds, find_places


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('def f():\n    """Whether it runs."""\n', ["opening"]),
        ('LIMIT = 3\n"""Of one file."""\n', ["opening"]),
        ('def f():\n    """Returns whether it runs; what it does."""\n', []),
        ("for one in rows:\n    pass\n", ["name"]),
        ("def f(known):\n    pass\n", ["name"]),
        ("print(row.one, file.tell())\n", []),
        ("# The kernel tells\n# of no unmapping, in\tvain\n", ["in vain", "tell"]),
        ("# files stay as they are, in the order of which.\n", ["as it is", "of which"]),
        ("# names as they are given\n", []),
        ("def test_rows_equal_those_of_llvm(): ...\n", ["equals that of"]),
        ("# Meanwhile, the boot time is 5.\n", ["boot time", "meanwhile"]),
        ("# The size; None without\n# a file that can be had.\n", ["None without", "be had"]),
        ("# It goes on, for ever, or stands still.\n", ["go on", "for ever", "stand still"]),
        ("# It is read anew, and goes on a list.\n", ["anew"]),
    ],
)
def test_phrases_to_avoid_are_found_and_classified(text, kinds):
    assert sorted(place.kind for place in find_places("a.py", text)) == sorted(kinds)


def test_phrases_in_pages_are_found_with_their_line_numbers():
    assert list(find_places("a.md", "One\n\nWhat the log tells")) == [
        Place("a.md", 3, "tell", "tells")
    ]


def test_only_comments_in_c_sources_are_searched():
    text = "int told;\n/* Whether it runs. */\nint f; /* what it tells */\n\n/*\n * Of x.\n */\n"
    results = sorted((place.line, place.kind) for place in find_places("a.c", text))
    assert results == [(2, "opening"), (3, "tell"), (6, "opening")]


def test_phrases_without_an_allowance_are_listed_and_allowed_phrases_are_counted():
    places = [Place("docs/a.md", 1, "tell", "told"), Place("tests/b.py", 2, "name", "one")]
    assert exceeds(places, {"tests": {"name": 1}}) == ["docs/a.md:1: tell: told"]
    assert exceeds(places * 2, {"docs": {"tell": 2}, "tests": {"name": 1}}) == [
        "tests: 2 of kind 'name', 1 allowed"
    ]
