"""Each online CPU has exactly one event, including after CPU hotplug."""

import errno

import pytest

from otel_kprofiler.host import Access, EventPerCpu


class Host(EventPerCpu[str]):
    """Fakes events for the CPUs in a captured tree. Tests can make events die, or fail to open."""

    def __init__(self, root, cpus=()):
        super().__init__(Access(str(root)), cpus)
        self.dead, self.errors, self.was_closed = set(), {}, []

    def _open_event(self, cpu):
        if cpu in self.errors:
            raise OSError(self.errors[cpu], "refused")
        return f"event {cpu}"

    def _is_dead(self, cpu):
        return cpu in self.dead

    def _close_event(self, event):
        self.was_closed.append(event)


@pytest.fixture
def online(tmp_path):
    """Writes the file that lists the online CPUs, and returns its path."""
    path = tmp_path / "sys/devices/system/cpu/online"
    path.parent.mkdir(parents=True)
    path.write_text("0-2\n")
    return path


def make(online, cpus=()):
    return Host(online.parents[4], cpus)


def test_events_track_cpu_hotplug(online):
    host = make(online)
    assert host.update() == ([0, 1, 2], [], {})
    online.write_text("0,2-3\n")
    assert host.update() == ([3], [1], {})
    assert host.was_closed == ["event 1"]
    assert host.update() == ([], [], {})


def test_the_event_on_a_briefly_offline_cpu_is_replaced(online):
    host = make(online)
    host.update()
    host.dead = {2}
    assert host.update() == ([2], [], {})
    assert host.was_closed == ["event 2"]


def test_only_selected_cpus_have_events(online):
    assert make(online, {1, 7}).update() == ([1], [], {})


def test_a_failure_to_open_an_event_is_not_reported_again_until_it_opens(online):
    host = make(online)
    host.errors = {1: errno.EMFILE}
    changes = host.update()
    assert changes.opened == [0, 2]
    assert changes.refused[1].errno == errno.EMFILE
    assert host.update() == ([], [], {})
    host.errors = {}
    assert host.update() == ([1], [], {})
    host.errors, host.dead = {1: errno.EMFILE}, {1}
    assert list(host.update().refused) == [1]


def test_a_cpu_going_offline_while_its_event_is_opened_is_not_an_error(online):
    host = make(online)
    host.errors = {2: errno.ENODEV}
    assert host.update() == ([0, 1], [], {})


def test_all_events_remain_open_if_the_cpu_list_cannot_be_read(online):
    host = make(online)
    host.update()
    online.unlink()
    with pytest.raises(FileNotFoundError):
        host.update()
    assert host.was_closed == []
