"""Options of sampling commands: the sampler's settings for waits."""

import pytest
from click.testing import CliRunner

from otel_kprofiler.cli.record import command as record
from otel_kprofiler.cli.sampling_options import Sampling
from otel_kprofiler.host import Access
from otel_kprofiler.sampling import OffCpuConfig

OPTIONS = {
    "rate": 99, "pids": (), "comms": (), "cgroups": (), "containers": (), "pods": (), "units": (),
    "cpus": (), "stacks": "both", "user_symbols": "names", "python": True, "off_cpu": False,
    "off_cpu_rate": 20, "wakers": False, "loader": "auto", "idle": False,
}  # fmt: skip


def config(child_pid=None, **options):
    sampling, access = Sampling(**OPTIONS | options), Access()
    return sampling.config(access, sampling.find_targets(access), child_pid)


def test_waits_are_sampled_on_request():
    assert config().off_cpu is None
    result = config(off_cpu=True, off_cpu_rate=7, wakers=True)
    assert result.off_cpu == OffCpuConfig(samples_per_second=7, wakers=True, leaves_out="process")
    assert result.on_cpu
    assert not config(off_cpu=True, on_cpu=False).on_cpu


def test_waits_of_a_command_are_found_by_its_process():
    assert config(4242).child_pid == 4242
    result = config(4242, off_cpu=True)
    assert (result.child_pid, result.target_pids, result.target_descendants) == (
        None,
        (4242,),
        True,
    )


@pytest.mark.parametrize("option", ["--wakers", "--no-on-cpu"])
def test_wait_options_without_waits_are_rejected(option, tmp_path):
    done = CliRunner().invoke(record, [option, "-o", str(tmp_path / "x.otlp")])
    assert done.exit_code == 2
    assert f"{option} needs --off-cpu" in done.output
    assert not list(tmp_path.iterdir())
