"""A module in a package is imported without the package's other modules."""

import sys

import pytest

from otel_kprofiler.host.lean_import import import_module_alone
from tests.commands import run_python
from tests.waiting import call_in_thread

pytestmark = pytest.mark.system

FILES = {
    "__init__.py": "from {name}.heavy import Heavy\nfrom {name} import wanted\nLOADED = True\n",
    "heavy.py": "from {name} import wanted, other\nclass Heavy: pass\n",
    "wanted.py": "from {name} import other\nVALUE = other.VALUE\n",
    "other.py": "VALUE = 7\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Creates a package whose ``__init__`` imports all its modules, and returns its name."""
    name = f"package_of_{request.node.name}"
    (tmp_path / name).mkdir()
    for path, text in FILES.items():
        (tmp_path / name / path).write_text(text.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_importing_a_module_alone_does_not_import_other_modules_in_its_package(package):
    assert import_module_alone(f"{package}.wanted").VALUE == 7
    assert f"{package}.heavy" not in sys.modules
    assert "LOADED" not in vars(sys.modules[package])


def test_a_package_works_normally_after_a_lean_import(package):
    wanted = import_module_alone(f"{package}.wanted")
    results = {}
    exec(f"import {package} as whole\nfrom {package} import Heavy, wanted, LOADED", results)
    assert (results["LOADED"], results["wanted"]) == (True, wanted)
    assert results["whole"].Heavy is results["Heavy"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        results["whole"].nothing  # noqa: B018


def test_a_lean_import_sets_the_submodule_attribute_and_imports_no_unrelated_modules(package):
    import_module_alone(f"{package}.other")
    assert sys.modules[package].wanted.VALUE == 7
    assert f"{package}.heavy" not in sys.modules


def test_an_already_imported_package_is_left_unchanged(package):
    __import__(package)
    whole = sys.modules[package]
    assert import_module_alone(f"{package}.wanted") is whole.wanted
    assert sys.modules[package] is whole


def test_a_package_that_fails_to_import_fails_at_each_use(package, tmp_path):
    (tmp_path / package / "heavy.py").write_text("raise ImportError('no libheavy')")
    assert import_module_alone(f"{package}.wanted").VALUE == 7
    for _ in range(2):
        with pytest.raises(ImportError, match="no libheavy"):
            sys.modules[package].Heavy  # noqa: B018


def test_concurrent_imports_return_the_same_module(package, tmp_path):
    (tmp_path / package / "heavy.py").write_text("import time\ntime.sleep(0.1)\nHeavy = object()\n")
    import_module_alone(f"{package}.wanted")
    results = [call_in_thread(lambda: sys.modules[package].Heavy) for _ in range(4)]
    assert len({result.result() for result in results}) == 1


@pytest.mark.parametrize("name", ["no_such_package.module", "json.no_such_module"])
def test_a_missing_library_is_an_import_error(name):
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        import_module_alone(name)


PYROUTE2 = """
import sys
from otel_kprofiler.host.lean_import import import_module_alone
import_module_alone("pyroute2.netlink.uevent")
assert "pyroute2.iproute" not in sys.modules
import pyroute2
from pyroute2 import IPRoute, netns
from pyroute2.ndb.main import NDB
assert pyroute2.NDB is NDB and netns is pyroute2.netns
with IPRoute() as routes:
    print(len(routes.get_links()))
"""


def test_pyroute2_works_normally_after_one_of_its_modules_was_imported_alone():
    assert int(run_python(PYROUTE2)) >= 1
