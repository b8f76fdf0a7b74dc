"""``otel-kprofiler``: dispatches commands, and reports each error's cause, fix and exit status."""

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import click

from otel_kprofiler.cli.terminal import FILE_FIX, say
from otel_kprofiler.errors import ConfigError, KProfilerError, SamplerError, ShortageError

# The help texts for commands are here, so that --help imports no command.
COMMANDS: Final = {
    "record": "Profile this host, or one command, and write a file.",
    "report": "Show the contents of profiles: functions, system calls and processes.",
    "view": "Show saved, received or live profiles in the browser.",
    "diff": "Compare two profiles, and mark differences that may be due to chance.",
    "send": "Send saved profiles to an OTLP receiver.",
    "top": "Show what is running now: functions, processes and system calls.",
    "dump": "Show what each thread of a process is doing right now, even if it is asleep.",
    "run": "Run the agent alongside an OpenTelemetry Collector.",
    "doctor": "Check whether this host can be profiled, and show how to fix what is missing.",
    "symbolize": "Resolve addresses, and find the addresses of symbols.",
    "validate": "Check an agent configuration without starting the agent.",
    "print-config": "Print the effective configuration, without secrets.",
    "check": "Check OTLP profiles against the data model's rules.",
}

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
_WRITE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
_NO_THREAD: Final = "can't start new thread"  # CPython raises a RuntimeError without errno


class LazyCommands(click.Group):
    """A command group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns command names in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's module, and return the command; None if the command does not exist."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"otel_kprofiler.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look up a command. The error for an unknown name suggests a similar command."""
        similar = difflib.get_close_matches(args[0], COMMANDS, 1)
        if similar and args[0] not in COMMANDS:
            raise click.UsageError(f"no such command: {args[0]!r}; did you mean {similar[0]}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help for all commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(importlib.import_module("otel_kprofiler.cli.versions").describe_versions())
        ctx.exit()


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the versions of otel-kprofiler, the eBPF loader, the Python interpreter and the "
    "kernel.",
)  # fmt: skip
@click.option("--debug", is_flag=True, help="Show tracebacks and debug messages.")
@click.pass_context
def cli(ctx: click.Context, *, debug: bool) -> None:
    """Kernel-first continuous profiler for OpenTelemetry.

    \b
    Profile this host for ten seconds:   otel-kprofiler record -d 10s -o profile.html
    Run alongside a Collector:           otel-kprofiler run -c agent.yaml
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    ctx.obj = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exit status: 0 ok, 1 failure, 2 usage or configuration, 3 unsuitable host."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words[:1]
    _open_standard_streams()
    if arguments is None:  # an inherited SIG_IGN would discard the exit status of children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            cli.main(words, prog_name="otel-kprofiler", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except KProfilerError as error:
        if debug:
            raise
        show_error(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:  # the reader has exited, as with `| head`
        _discard_output()
        sys.exit(1)
    except (OSError, RuntimeError, MemoryError) as error:
        explained = None if debug else _explain(error)
        if explained is None:
            raise
        _discard_output()
        show_error(explained)
        sys.exit(explained.exit_status)


def _open_standard_streams() -> None:
    """Reserve the descriptors of closed standard streams, so that new files do not use them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def _discard_output() -> None:
    """Discard buffered output, so that flushing it at exit does not fail again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception) -> KProfilerError | None:
    """Convert a system error to an error with a fix. Return None if the error may be a bug."""
    if isinstance(error, MemoryError):
        return ShortageError("out of memory", hint="raise the memory limit, or process less data")
    if isinstance(error, BlockingIOError) or _NO_THREAD in str(error):  # fork, pthread_create
        return ShortageError(
            "the system does not allow more processes or threads",
            hint="raise the limit: ulimit -u, the unit's TasksMax, or the container's pids.max",
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        from otel_kprofiler.host import find_open_files_error  # noqa: PLC0415 - only on failure

        return find_open_files_error("running this command", error)
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None:
        return KProfilerError(
            f"cannot write to standard output: {error.strerror}",
            hint="redirect it to a file on a disk with free space",
        )
    if isinstance(error, OSError) and error.filename is not None:
        return KProfilerError(f"{error.filename!s}: {error.strerror}", hint=FILE_FIX)
    return None


def show_error(error: KProfilerError) -> None:
    """Print an error's cause, and how to fix it, to standard error."""
    lines = error.message.splitlines()
    if isinstance(error, ConfigError):
        for line in lines:
            say(f"error: {line}", err=True)
    else:
        say("error: " + "\n  ".join(lines), err=True)
    if isinstance(error, SamplerError) and error.log:
        click.echo(f"verifier log:\n{error.log}", err=True)
    if error.hint:
        say("fix: " + "\n  ".join(error.hint.splitlines()), err=True)
