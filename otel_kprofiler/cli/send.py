"""``otel-kprofiler send``: send saved profiles to an OTLP receiver."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import click

from otel_kprofiler.cli.output import DEFAULT_NAME
from otel_kprofiler.cli.profiles import read_otlp_file
from otel_kprofiler.cli.receivers import open_receiver
from otel_kprofiler.cli.sending import describe_failure, find_change
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.unsent import UnsentFile
from otel_kprofiler.errors import ExportError, PayloadError
from otel_kprofiler.export import ExportResult, OtlpSender, Part, is_wholly_lost
from otel_kprofiler.model import Batch, LossCause
from otel_kprofiler.otlp import encode_message, parse_payloads
from otel_kprofiler.redact import redact_address

_STDIN: Final = "-"


@click.command(name="send")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.argument("address", metavar="URL")
def command(paths: tuple[str, ...], address: str) -> None:
    """Send the OTLP profiles in FILEs to a receiver.

    \b
      otel-kprofiler send profile.otlp grpc://127.0.0.1:4317
      otel-kprofiler send *.otlp.jsonl.gz https://collector.example:4318

    FILEs are created by `record`, `report`, or a Collector's file exporter. If FILE is -, standard
    input is read. URL is grpc://HOST:PORT, grpcs://HOST:PORT, or starts with http:// or https://.
    Headers, certificates, compression and other settings are read from the
    OTEL_EXPORTER_OTLP_[PROFILES_]* environment variables, as for `record --export`.

    If the receiver did not accept everything, the command prints which files to send again and
    exits with status 1. If a file was only partially accepted, the unsent samples are saved in
    NAME.unsent.otlp.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    for path in paths:
        if path != _STDIN:
            read_otlp_file(path, lambda _: None)  # reject unreadable files before sending any
    with closing(_Delivery(open_receiver(address), address, paths)) as delivery:
        for path in paths:
            delivery.send(path)
        delivery.check()


class _Delivery:
    def __init__(self, exporter: OtlpSender, address: str, paths: Sequence[str]) -> None:
        self._exporter = exporter
        self._paths = paths
        self._causes: set[LossCause] = set()
        self._address = redact_address(address)
        self._stopped: LossCause | None = None
        self._status = 1
        self._said = ""
        self._sent = 0
        self._lost = 0
        self._is_readable = True
        self._again: list[str] = []

    def send(self, path: str) -> None:
        """Send a file, and save the parts that must be resent."""
        data = read_otlp_file(path, self._report_damage)
        sent_before, lost_before = self._sent, self._lost
        taken = 0
        with closing(UnsentFile(_name(path), self._exporter.form)) as unsent:
            for batch in self._encode(path, data):
                for part, result in self._export(batch):
                    self._sent += result.exported
                    self._lost += part.sample_count - result.exported
                    self._causes.update(result.lost)
                    if is_wholly_lost(result):
                        unsent.add(part, next(iter(result.lost)))
                    else:
                        taken += 1
            is_whole = taken == 0 and path != _STDIN
            if is_whole:
                unsent.discard()
        if unsent.problem:
            say(f"{path}: the rejected samples could not be kept ({unsent.problem})", err=True)
        if self._lost > lost_before:
            self._again += [path] if is_whole else [unsent.path] if unsent.path else []
        sent = describe_count(self._sent - sent_before, "sample")
        say(f"{path}: sent {sent} in {describe_count(taken, 'request')} to {self._address}")

    def check(self) -> None:
        """Raise ``ExportError`` if any sample was not accepted."""
        if self._lost:
            total = describe_count(self._sent + self._lost, "sample")
            error = ExportError(
                f"{self._lost:,} of {total} did not reach {self._address}: {self._said}",
                hint=self._find_fix(),
            )
            error.exit_status = self._status
            raise error
        if not self._is_readable:
            raise ExportError(
                "the corrupt data was not sent", hint="list it with `otel-kprofiler check FILE`"
            )

    def close(self) -> None:
        self._exporter.shutdown(0)

    def _find_fix(self) -> str:
        if not self._again:
            return (
                "the lost samples cannot be sent again, because the receiver accepted the rest of "
                "the data"
            )
        change = find_change(self._causes)
        if self._again == list(self._paths):  # all files remain: the same command resends them
            again = "send the same files again"
            return f"{change}, then {again}" if change else again
        command = shlex.join(["otel-kprofiler", "send", *self._again, self._address])
        return f"{change}, then {command}" if change else f"to send the rest: {command}"

    def _encode(self, path: str, data: bytes) -> Iterator[Batch]:
        def report(error: PayloadError) -> None:
            self._report_damage(f"{path}: skipped corrupt data: {error.message}")

        for payload in parse_payloads(data, report):
            try:
                batches, too_large = encode_message(
                    payload.message, self._exporter.form, self._exporter.max_bytes
                )
            except PayloadError as error:
                report(error)
                continue
            if too_large:
                self._lost += sum(too_large.values())
                self._causes.add(LossCause.TOO_LARGE)
                self._said = f"a single sample is larger than {self._exporter.max_bytes:,} bytes"
            yield from batches

    def _export(self, batch: Batch) -> Sequence[Part]:
        """Send a batch, unless the receiver was unreachable or the user has pressed Ctrl-C."""
        if self._stopped:
            return [Part(batch, ExportResult.failure(batch, self._stopped, self._said))]
        try:
            parts = self._exporter.export_parts(batch)
        except KeyboardInterrupt:
            self._stopped, self._said, self._status = LossCause.SHUTDOWN, "interrupted", 130
            return [Part(batch, ExportResult.failure(batch, self._stopped, self._said))]
        for _, result in parts:
            if LossCause.RETRIES_EXHAUSTED in result.lost:
                self._stopped = LossCause.RETRIES_EXHAUSTED
            if result.lost:
                self._said = describe_failure(result)
        return parts

    def _report_damage(self, problem: str) -> None:
        self._is_readable = False
        say(problem, err=True)


def _name(path: str) -> str:
    return DEFAULT_NAME if path == _STDIN else path
