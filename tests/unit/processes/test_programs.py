"""The program that an interpreter runs is derived from its command line."""

import pytest

from otel_kprofiler.formats import process_name
from otel_kprofiler.model import Resource
from otel_kprofiler.otlp import PROGRAM
from otel_kprofiler.processes.programs import find_program

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("executable", "command", "name"),
    [
        ("python3.11", "/usr/bin/python3 /usr/bin/gunicorn -w 2 app:app", "gunicorn"),
        ("python3.11", "python -m http.server 8000", "-m http.server"),
        ("python3.11", "python -um http.server 8000", "-m http.server"),
        ("python3.11", "python -mhttp.server", "-m http.server"),
        ("python3.13t", "python manage.py runserver hunter2", "manage.py"),
        ("python3", "python3 -W ignore -X dev -Wonce -Es /a/b/run.py", "run.py"),
        ("python3", "python3 -c hunter2 x.py", ""),
        ("python3", "python3 -Sc hunter2 x.py", ""),
        ("python3", "python3 /opt/tool/__main__.py", "tool"),
        ("python3", "python3 /opt/tool.pyz", "tool.pyz"),
        ("python3", "python3 - hunter2", ""),
        ("python3", "python3", ""),
        ("pypy3.10", "pypy3 a.py", "a.py"),
        ("python3.11", "gunicorn:_worker_[hunter2]", "gunicorn"),
        ("bash", "bash /srv/entry.sh hunter2", "entry.sh"),
        ("bash", "/bin/bash -eu -o pipefail entry.sh", "entry.sh"),
        ("bash", "bash -euo pipefail entry.sh", "entry.sh"),
        ("bash", "bash +x --rcfile hunter2 entry.sh", "entry.sh"),
        ("dash", "sh -c hunter2", ""),
        ("dash", "sh -ec hunter2 x", ""),
        ("bash", "-bash", ""),
        ("bash", "bash /dev/fd/63", ""),
        (
            "node",
            "node --max-old-space-size=400 -r hunter2 /srv/server.js --key hunter2",
            "server.js",
        ),
        ("node", "node -e hunter2", ""),
        (
            "java",
            "java -Xmx1g -Dkey=hunter2 -cp hunter2 org.apache.kafka.Kafka x",
            "org.apache.kafka.Kafka",
        ),
        ("java", "java @arguments -jar /opt/app.jar hunter2", "app.jar"),
        ("java", "java --add-opens java.base/java.lang=ALL-UNNAMED -m a.b/a.b.Main", "a.b.Main"),
        ("memfd:sealed-runc", "/usr/bin/runc init", "runc"),
        ("memfd:sealed-runc", "", ""),
        ("mysqld", "mysqld hunter2", ""),
        ("python-config", "python-config hunter2", ""),
    ],
)
def test_a_program_is_named_after_its_script_but_not_its_arguments(executable, command, name):
    arguments = [
        word.replace("_", " ").encode() if ":_" in word else word.encode()
        for word in command.split()
    ]
    program = find_program(executable, arguments)
    assert program == name
    assert SECRET not in program


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"process.executable.name": "python3.11", PROGRAM: "gunicorn"}, "gunicorn (python3.11)"),
        ({"process.executable.name": "python3.11"}, "python3.11"),
        ({"process.executable.name": "memfd:sealed-runc", PROGRAM: "runc"}, "runc"),
        ({"process.executable.name": "memfd:sealed-runc"}, "thread"),
        ({PROGRAM: "gunicorn"}, "gunicorn"),
        ({}, "thread"),
    ],
)
def test_a_process_is_named_after_its_program_or_if_unknown_its_executable(attributes, name):
    assert process_name(Resource(attributes), "thread") == name
