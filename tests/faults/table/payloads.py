"""Decodes samples and loss counts from received requests without the package's decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

KINDS = {"samples": "on_cpu", "off_cpu": "off_cpu"}
STREAM, EARLIER = "otel_kprofiler.stream.", "otel_kprofiler.earlier."
EARLIER_LOST = EARLIER + "lost."
IN_NO_WINDOW = ("ring_full", "self_profiled")
CONTROL_FUNCTION = "answer_requests"


def split(data: bytes) -> Iterator[bytes]:
    """Yields the messages in a file that the ``file`` exporter wrote in ``proto`` format."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        assert at + 4 + size <= len(data), f"half a message at {at} of {len(data)}"
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


class Received:
    """The distinct samples and the last counts in received requests, by kind and stream.

    ``last_ns`` is each stream's last sample time; ``twice`` counts samples in repeated requests.
    """

    def __init__(self, payloads: Iterable[bytes], control_pid: int = -1):
        self.samples, self.accounts = Counter(), {}
        self.last_ns, self.twice = Counter(), 0
        self._control, sizes = [], {}
        for payload in payloads:
            request = service.ExportProfilesServiceRequest.FromString(payload)
            strings, table = request.dictionary.string_table, request.dictionary.attribute_table
            streams, held = {}, []
            for resource in request.resource_profiles:
                pids = [
                    at.value.int_value
                    for at in resource.resource.attributes
                    if at.key == "process.pid"
                ]
                for scope in resource.scope_profiles:
                    for profile in scope.profiles:
                        kind = KINDS[strings[profile.sample_type.type_strindex]]
                        account = {
                            strings[table[at].key_strindex]: table[at].value
                            for at in profile.attribute_indices
                        }
                        if STREAM + "id" in account:
                            stream = account[STREAM + "id"].string_value
                            streams[kind] = stream
                            self._add_account(
                                kind, stream, {key: at.int_value for key, at in account.items()}
                            )
                        held.append((kind, profile, pids))
            for kind, profile, pids in held:
                stream = streams[kind]
                times = [t for sample in profile.samples for t in sample.timestamps_unix_nano]
                size = len(times)
                self.last_ns[stream] = max(self.last_ns[stream], *times, 0)
                if profile.profile_id in sizes:
                    assert sizes[profile.profile_id] == size, "one id, and two sizes"
                    self.twice += size
                    continue
                sizes[profile.profile_id] = size
                self.samples[kind, stream] += size
                if kind == "on_cpu" and pids == [control_pid]:
                    self._add_control(request.dictionary, profile)

    def _add_account(self, kind, stream, account) -> None:
        """Keeps the later of two sets of counts, since repeated requests carry old counts."""
        if _order(account) >= _order(self.accounts.get((kind, stream), account)):
            self.accounts[kind, stream] = account

    def _add_control(self, dictionary, profile) -> None:
        strings, functions = dictionary.string_table, dictionary.function_table
        for sample in profile.samples:
            names = {
                strings[functions[line.function_index].name_strindex]
                for at in dictionary.stack_table[sample.stack_index].location_indices
                for line in dictionary.location_table[at].lines
            }
            named = CONTROL_FUNCTION in names
            self._control += [(stamp, named) for stamp in sample.timestamps_unix_nano]

    @property
    def control(self) -> int:
        return len(self._control)

    @property
    def missed_share(self) -> float:
        accounts = [account for (kind, _), account in self.accounts.items() if kind == "on_cpu"]
        missed = sum(account.get(STREAM + "missed", 0) for account in accounts)
        return missed / (missed + sum(account[STREAM + "taken"] for account in accounts))

    @property
    def named(self) -> float:
        """The fraction of named functions in the second half of the control program's samples."""
        later = sorted(self._control)[len(self._control) // 2 :]
        return sum(named for _, named in later) / max(len(later), 1)

    def sum(self, kind: str) -> int:
        return sum(count for (of, _), count in self.samples.items() if of == kind)

    def streams(self, kind: str) -> list[str]:
        return [stream for of, stream in self.accounts if of == kind]

    def missing(self, kind: str) -> int:
        """Returns the number of samples that neither arrived in windows nor were counted as lost.

        With a spool, the counts of the last stream include the earlier streams.
        """
        *_, last = accounts = [self.accounts[kind, stream] for stream in self.streams(kind)]
        earlier = last.get(EARLIER + "samples")
        if earlier is not None:
            accounts = [last]
            earlier -= sum(value for key, value in last.items() if key.startswith(EARLIER_LOST))
        wanted = sum(account[STREAM + "samples"] for account in accounts) + (earlier or 0)
        return wanted - self.sum(kind) - sum(sum(lost_of(account).values()) for account in accounts)


def _order(account: dict[str, int]) -> tuple[int, ...]:
    lost = sum(value for key, value in account.items() if ".lost." in key)
    return account[STREAM + "taken"], account[STREAM + "samples"], lost


def lost_of(account: dict[str, int]) -> Counter[str]:
    """Returns the number of samples lost after their windows closed, by cause."""
    prefix = STREAM + "lost."
    return Counter(
        {
            cause: value
            for key, value in account.items()
            if key.startswith(prefix) and (cause := key.removeprefix(prefix)) not in IN_NO_WINDOW
        }
    )
