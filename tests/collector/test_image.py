"""buildah can build the image in config/kubernetes, which runs with the DaemonSet's privileges.

The tests need neither a registry (mmdebstrap builds the Containerfile's base image) nor a container
runtime (setpriv and mounts provide the same isolation, except for seccomp).
"""

import json
import os
import shutil
import subprocess

import pytest
from ruamel.yaml import YAML

from tests.collector.roots import Root, find_certificates, make_archive
from tests.collector.units import ROOT
from tests.needs import PACKAGES

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500), PACKAGES]

TOOLS = ("buildah", "mmdebstrap", "unshare", "nsenter", "chroot", "setpriv", "ip")
DIRECTORY = ROOT / "config/kubernetes"
BASE = "localhost/base:test"
IMAGE = "localhost/otel-kprofiler:test"


class Storage:
    """A buildah storage that is separate from the host's images."""

    def __init__(self, path):
        self._place = ["--root", path / "images", "--runroot", path / "run"]

    def run(self, *words):
        done = subprocess.run(
            ["buildah", *self._place, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{words}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout.strip()


def trust(directory):
    """Returns container options that make pip trust the host's CAs, such as a mirror's CA."""
    certificates = find_certificates()
    if not certificates:
        return []
    config = directory / "pip.conf"
    config.write_text("[global]\ncert = /run/certificates.crt\n")
    return [
        *("--volume", f"{config}:/etc/pip.conf:ro"),
        *("--volume", f"{certificates}:/run/certificates.crt:ro"),
    ]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Builds and mounts the image, and yields the path of its files, and its configuration."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)}")
    directory = tmp_path_factory.mktemp("image")
    storage = Storage(directory)
    archive = make_archive("minbase")
    base = storage.run("from", "scratch")
    storage.run("add", "--quiet", base, archive, "/")
    storage.run("commit", "--quiet", "--rm", base, BASE)
    storage.run(
        *("build", "--isolation", "chroot", "--network", "host", "--build-arg", f"BASE={BASE}"),
        *(*trust(directory), "-f", DIRECTORY / "Containerfile", "-t", IMAGE, ROOT),
    )
    container = storage.run("from", IMAGE)
    about = json.loads(storage.run("inspect", "--type", "image", IMAGE))
    yield storage.run("mount", container), about["OCIv1"]["config"]
    storage.run("umount", container)
    storage.run("rm", "--all")
    shutil.rmtree(directory)


@pytest.fixture
def root(image):
    root = Root(image[0], read_only=True)
    yield root
    root.close()


def test_the_image_runs_as_nobody_and_contains_no_tools(image, root):
    path, config = image
    assert config["User"] == "65534:65534"
    (program,) = config["Entrypoint"]
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
    versions = root.run(*nobody, program, "--version")
    assert versions.startswith("otel-kprofiler")
    assert "compiled modules" in versions
    imports = "import clickhouse_connect, grpc, symbolic, zstandard"
    root.run(*nobody, f"{os.path.dirname(program)}/python", "-c", imports)
    for tool in ("bin/pip", "bin/gcc", "bin/strip", "tool"):
        assert not os.path.exists(f"{path}/usr/{tool}")
        assert not os.path.exists(f"{path}/opt/otel-kprofiler/{tool}")
    assert not os.path.exists(f"{path}/src")


def test_the_image_can_sample_with_the_privileges_of_the_daemonset(image, root, sampling_host):
    _, config = image
    documents = YAML(typ="safe").load_all(DIRECTORY / "daemonset.yaml")
    (daemons,) = [document for document in documents if document["kind"] == "DaemonSet"]
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    security = container["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"]
    sets = ",".join(["-all", *(f"+{name.lower()}" for name in security["capabilities"]["add"])])
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    output = root.run(
        *("setpriv", f"--reuid={security['runAsUser']}", "--clear-groups", "--no-new-privs"),
        *(f"--bounding-set={sets}", f"--inh-caps={sets}"),
        *(*config["Entrypoint"], "record", "--duration", "3s", "--idle", "--format", "table"),
        *("--output", "-"),
    )
    assert "vmlinux" in output
    assert "lost 0" in output
