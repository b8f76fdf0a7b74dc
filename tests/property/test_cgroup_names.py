"""Arbitrary bytes are parsed without errors, and container ids are found only for containers."""

import re

from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.host import (
    parse_cgroup,
    parse_cgroup_path,
    parse_mount_points,
    parse_own_container,
)
from otel_kprofiler.processes.owners import parse_user_name

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
PARTS = st.one_of(
    st.sampled_from(["..", "docker", "system.slice", "kubepods", "libpod_parent", "ecs", "a:b:c"]),
    HEX,
    st.builds("{}-{}.scope".format, st.sampled_from(["docker", "crio", "conmon", "x"]), HEX),
    st.builds("{}.service".format, st.text("ab@-_", min_size=1)),
    st.text(st.characters(exclude_characters="/\n")),
)
PATHS = st.lists(PARTS, max_size=6).map(lambda parts: "/" + "/".join(parts))


@given(st.binary())
def test_arbitrary_proc_cgroup_content_is_parsed_without_an_error(text):
    assert parse_cgroup(text) == parse_cgroup(text)


@given(st.lists(st.tuples(st.sampled_from(["", "cpu", "name=systemd"]), PATHS)))
def test_every_parsed_name_is_a_substring_of_the_input(lines):
    text = "".join(f"{at}:{name}:{path}\n" for at, (name, path) in enumerate(lines))
    cgroup = parse_cgroup(text.encode("utf-8", "surrogatepass"))
    for name in (cgroup.container, cgroup.unit, cgroup.user_unit):
        assert name in text
    assert re.fullmatch("([0-9a-f]{64})?", cgroup.container)


@given(PATHS, HEX)
def test_a_container_is_recognized_below_any_cgroup_path(path, container):
    assert parse_cgroup_path(f"{path}/docker-{container}.scope").container == container
    assert parse_cgroup_path(f"{path}/crio-{container}/container").container == container


@given(st.lists(st.sampled_from(["system.slice", "a.service", "init.scope", "user.slice"])), HEX)
def test_sibling_cgroups_of_a_container_do_not_belong_to_it(parts, container):
    above = "/" + "/".join(parts)
    for name in ("crio-conmon-{}.scope", "libpod-conmon-{}.scope", "{}.service", "{}0", "x{}"):
        assert not parse_cgroup_path(f"{above}/{name.format(container)}").container


@given(st.binary(), st.integers(0, 2**32 - 1))
def test_arbitrary_mountinfo_and_passwd_content_is_parsed_without_an_error(text, uid):
    line = b"1 2 3:4 / /x rw - cgroup2 none rw\n"
    assert ("/x", "/") in parse_mount_points(text + b"\n" + line, "cgroup2")
    assert re.fullmatch("([0-9a-f]{64})?", parse_own_container(text).id)
    assert parse_user_name(text.replace(b":", b"") + b"\nme:x:%d:" % uid, uid) == "me"
