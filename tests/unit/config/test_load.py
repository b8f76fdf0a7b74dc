"""A configuration is loaded with defaults, and every error is reported with its position."""

import os

import pytest

from otel_kprofiler.config import dump_config, find_exposure, load_config, parse_config
from otel_kprofiler.errors import ConfigError
from tests.unit.config.minimal import MINIMAL, with_receiver


def load(text, **environ):
    return parse_config(text, path="agent.yaml", environ=environ)


def problems(text, **environ):
    with pytest.raises(ConfigError) as caught:
        load(text, **environ)
    return [str(problem) for problem in caught.value.problems]


def receiver(block, **environ):
    """Returns the problems in a receiver block, without the common prefix."""
    result = problems(with_receiver(block), **environ)
    return [line.replace("agent.yaml:", "").replace("receivers.kprofiler.", "") for line in result]


def test_a_minimal_file_is_loaded_with_the_defaults():
    config = load(MINIMAL).config
    assert config.receiver.samples_per_second == 19
    assert config.receiver.reporter_interval.seconds == 5
    assert list(config.running_exporters) == ["debug"]


def test_every_problem_is_reported_with_its_position():
    assert receiver(
        "samples_per_second: fast\n"
        "reporter_interval: 5\n"
        "sampels_per_second: 3\n"
        "probabilistic_interval: 10m\n"
        "pin_cpu_ids: 3-1\n"
        "error_mode: explode\n"
        "max_frames: 200\n"
        "max_frames: 20"
    ) == [
        "3:25: samples_per_second: should be a valid integer, not 'fast'",
        "4:24: reporter_interval: a duration needs a unit: write 5s or 5ms",
        "5:5: sampels_per_second: unknown key; did you mean samples_per_second?",
        "6:29: probabilistic_interval: should be less than or equal to 5m, not '10m'",
        "7:18: pin_cpu_ids: '3-1' is not a range of CPUs (0 to 8191)",
        "8:17: error_mode: should be 'propagate' or 'ignore', not 'explode'",
        "10:5: max_frames: is a duplicate of line 9",
    ]


def test_values_of_the_wrong_type_are_not_coerced():
    assert (
        len(receiver('samples_per_second: "19"\nsend_idle_frames: 1\nmap_scale_factor: true')) == 3
    )


def test_values_of_variables_are_converted_and_errors_name_the_variable():
    config = load(MINIMAL.replace("debug:\n", "debug: {verbosity: '${V}'}\n"), V="detailed").config
    assert config.exporters["debug"].verbosity == "detailed"
    assert receiver("samples_per_second: ${RATE}") == [
        "3:25: samples_per_second: has no value: RATE is unset or empty"
    ]
    assert receiver("samples_per_second: ${RATE}", RATE="0") == [
        "3:25: samples_per_second: should be greater than or equal to 1, not 0"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "receivers: is required"),
        ("[]", "should be a mapping"),
        ("a: [", "not YAML"),
        ("%YAML 1.9\n---\na: 1\n", "not YAML: unknown version"),
        ("a: \x07", "not YAML"),
        ('a: "\\U00110000"', "not YAML: an escape sequence"),
        (MINIMAL.replace("debug:\n", 'file: {path: "x\\0"}\n'), "file.path: contains a NUL"),
        (MINIMAL.replace("debug:\n", 'file: {path: "\\ud800"}\n'), "a surrogate"),
        (MINIMAL.replace("debug:", "otlp:", 1), "not available: use otlp_grpc"),
        (MINIMAL.replace("debug:", "debgu:", 1), "did you mean debug?"),
        (MINIMAL.replace("debug:", "otlp_grpc:", 1), "exporters.otlp_grpc.endpoint: is required"),
        (MINIMAL.replace("[debug]", "[debug, file]"), "there is no exporter 'file'"),
        (MINIMAL.replace("[debug]", "[debug, debug]"), "lists an exporter twice"),
        (MINIMAL.replace("[debug]", "[]"), "exporters: "),
        (MINIMAL.replace("[kprofiler]", "[other]"), "should be [kprofiler]"),
        (MINIMAL.replace("kprofiler:", "profiling:", 1), "use kprofiler, which has the same keys"),
        (MINIMAL + "extensions: {}\n", "use service.health"),
        (MINIMAL + "<<: {a: 1}\n", "a key must be a string"),
        (MINIMAL + "x: &a [*a]\n", "inside its own anchor"),
        (MINIMAL + "x: !!binary aa\n", "is not supported"),
    ],
)
def test_invalid_keys_outside_the_receiver_section_are_reported(text, message):
    assert any(message in problem for problem in problems(text))


def test_the_error_for_the_obsolete_key_symbol_names_advises_removing_the_key():
    (problem,) = receiver("symbol_names: compressed")
    assert "symbol_names: not available: " in problem
    assert problem.endswith("; remove this setting")


def exporter(block):
    return load(MINIMAL.replace("  debug:\n", "  debug:\n" + block)).config.exporters


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4317", "[::1]:4317", "http://c:4317", "https://c:4317/", "unix:///run/c.sock",
     "dns:///collector:4317"],
)  # fmt: skip
def test_grpc_endpoints_are_parsed(endpoint):
    result = exporter(f"  otlp_grpc/x: {{endpoint: '{endpoint}'}}\n")["otlp_grpc/x"]
    assert result.endpoint == endpoint
    assert result.tls.insecure is False


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("otlp_grpc: {endpoint: localhost}", "should be host:port"),
        ("otlp_grpc: {endpoint: 'h:99999'}", "should be host:port"),
        ("otlp_grpc: {endpoint: 4317}", "should be a valid string, not 4317"),
        ("otlp_http: {endpoint: [a], proxy_url: {b: c}}", "proxy_url: should be a valid string"),
        (
            "otlp_grpc: {endpoint: 'h:1', headers: {'a b': x}}",
            "headers.(3 characters): should be a header name",
        ),
        ("otlp_grpc: {endpoint: 'h:1', headers: {a: \"s3cret\\n\"}}", "printable ASCII"),
        ("otlp_http: {endpoint: 'http://h:1', headers: {a: s3crét}}", "printable ASCII"),
        ("otlp_grpc: {endpoint: 'h:1', headers: {TE: trailers}}", "'TE' is reserved for gRPC"),
        ("otlp_grpc: {endpoint: 'h:1', tls: {cert_file: a}}", "must be set together"),
        ("otlp_grpc: {endpoint: 'h:1', sending_queue: {num_consumers: 2}}", "one worker"),
        ("otlp_http: {endpoint: 'h:1'}", "should be a URL"),
        ("otlp_http: {endpoint: 'http://h:1', tls: {insecure: true}}", "scheme of the endpoint"),
        ("file: {format: json}", "exporters.file.path: is required"),
        ("file: {path: x, compression: zstd}", "not available"),
    ],
)
def test_invalid_exporter_settings_are_reported(block, message):
    result = problems(MINIMAL.replace("  debug:\n", f"  debug:\n  {block}\n"))
    assert any(message in problem for problem in result), result
    assert not any("s3cret" in problem for problem in result)


@pytest.mark.parametrize("kind", ["otlp_grpc", "otlp_http"])
@pytest.mark.parametrize("version", ["1", "2", ""])
def test_the_configured_schema_version_is_passed_to_the_exporter(kind, version):
    (name, block) = (f"{kind}/x", "endpoint: 'http://127.0.0.1:4318'")
    result = exporter(f"  {name}: {{{block}, development_version: '{version}'}}\n")[name]
    assert result.settings().client.development_version == version


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[("text", "text"), ("3", 3), ("true", True), (f"{-(2**63)}", -(2**63))],
        *[("[a, b]", ["a", "b"]), ("[1, 2]", [1, 2]), ("[0.5]", [0.5]), ("[true]", [True])],
    ],
)
def test_configured_resource_attributes_are_parsed(value, expected):
    assert load(with_receiver(f"resource: {{k: {value}}}")).config.receiver.resource == {
        "k": expected
    }


@pytest.mark.parametrize(
    "value", ["{a: 1}", "[1, a]", "[[1]]", "~", f"{2**63}", f"[0, {-(2**63) - 1}]"]
)
def test_each_invalid_resource_attribute_causes_one_message(value):
    assert len(receiver(f"resource: {{k: {value}}}")) == 1


SECRETS = """\
receivers:
  kprofiler: {samples_per_second: "${RATE}"}
exporters:
  otlp_http:
    endpoint: http://user:pass@h:1
    headers: {authorization: "Bearer ${TOKEN}"}
service:
  pipelines:
    profiles: {receivers: [kprofiler], exporters: [otlp_http]}
"""


def test_a_dumped_configuration_redacts_secrets_shows_origins_and_can_be_loaded():
    loaded = load(
        SECRETS.replace('"${RATE}"', "${RATE}".join("  ")).replace(
            "{samples_per_second:  ${RATE} }", "\n    samples_per_second: ${RATE}"
        ),
        RATE="7",
        TOKEN="t0p",
    )
    text = dump_config(loaded, origins=True)
    assert "t0p" not in text
    assert "t0p" not in repr(loaded.config)
    assert "pass@" not in text
    assert "samples_per_second: 7  # env RATE, agent.yaml:3" in text
    assert "max_frames: 127  # default" in text
    assert "env TOKEN, agent.yaml:7" in text
    assert load(dump_config(loaded)).config.receiver == loaded.config.receiver


def test_unreadable_files_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        load_config(str(tmp_path / "none.yaml"), environ={})
    assert "docs/configuration.md" in caught.value.hint
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(str(path), environ=os.environ)


@pytest.mark.parametrize(
    "block",
    [
        "otlp_http: {endpoint: 'http://me:s3cret@h:port'}",
        "otlp_http: {endpoint: 'http://me:s3cret@[h:1'}",
        "otlp_http: {endpoint: 'http://me:4/s3cret/x?@h'}",
        "otlp_http: {endpoint: 'ftp://s3cret@h'}",
        "otlp_http: {endpoint: 'http://h/?token=s3cret'}",
        "otlp_http: {endpoint: 'http://h', proxy_url: 'me:s3cret@h:1'}",
        "otlp_http: {endpoint: 'http://h', proxy_url: 'http://me:s3cret@h\u2100'}",
        "otlp_http: {endpoint: ['http://me:s3cret@h:1']}",
        "otlp_grpc: {endpoint: 'me:s3cret@h:4317'}",
        "otlp_grpc: {endpoint: 'h:1', proxy_url: 'https://me:s3cret@h:1'}",
        "otlp_grpc: {endpoint: 'h:1', headers: s3cret}",
        "otlp_grpc: {endpoint: 'h:1', headers: [s3cret]}",
    ],
)
def test_error_messages_never_reveal_secrets_in_urls_and_headers(block):
    result = problems(MINIMAL.replace("  debug:\n", f"  debug:\n  {block}\n"))
    assert result
    assert not any("s3cret" in problem for problem in result), result


@pytest.mark.parametrize(
    "text",
    [
        "receivers:\n  kprofiler:\n    tr0ub4dor&3: 1\n",
        "receivers:\n  kprofiler: {tr0ub4dor&3}\n",
        "exporters: {tr0ub4dor&3: }\n",
        "exporters:\n  otlp_http:\n    headers:\n      Bearer tr0ub4dor&3:\n",
        "exporters:\n  otlp_http:\n    headers: {tr0ub4dor&3: {a: b}}\n",
        "exporters:\n  otlp_http:\n    tr0ub4dor&3: 1\n    tr0ub4dor&3: 2\n",
        "receivers:\n  kprofiler: {loader: '${tr0ub4dor&3}'}\n",
        "receivers:\n  kprofiler: {loader: '${env:tr0ub4dor&3:-x}'}\n",
        "receivers:\n  kprofiler: {loader: *tr0ub4dor&3}\n",
        "receivers:\n  kprofiler: {loader: !tr0ub4dor&3 x}\n",
    ],
)
def test_error_messages_never_reveal_a_misplaced_secret(text):
    """For a password in place of a key or tag, the message shows only its length and position."""
    result = problems(text)
    assert result
    assert not any("tr0ub4dor" in problem for problem in result), result
    assert any("characters" in problem for problem in result), result


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("endpoint: http://h:1, headers: {authorization: abc}", "headers.authorization"),
        ("endpoint: 'http://me:pw@h:1'", "endpoint"),
        ("endpoint: http://h:1, proxy_url: 'http://me:pw@h:1'", "proxy_url"),
        ("endpoint: http://h:1, headers: {authorization: '${env:TOKEN}'}", ""),
        ("endpoint: http://h:1, tls: {ca_file: a}", ""),
    ],
)
def test_world_readable_secrets_cause_a_warning(tmp_path, line, secret):
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & 0o001:
            directory.chmod(0o711)  # a directory created by the test
    path = tmp_path / "agent.yaml"
    path.write_text(MINIMAL.replace("  debug:\n", f"  debug:\n  otlp_http: {{{line}}}\n"))
    results = {}
    for mode in (0o644, 0o640, 0o600):
        path.chmod(mode)
        results[mode] = find_exposure(load_config(str(path), environ={"TOKEN": "abc"}))
    assert results[0o640] == results[0o600] == ""
    assert (f"(exporters.otlp_http.{secret})" in results[0o644]) == bool(secret)
    assert "pw" not in results[0o644].replace(str(path), "")
    path.chmod(0o644)
    tmp_path.chmod(0o700)
    assert find_exposure(load_config(str(path), environ={"TOKEN": "abc"})) == ""


@pytest.mark.parametrize(("written", "read"), [("off", 0), ("false", 0), ("0", 0), ("9", 9)])
def test_python_frames_accepts_a_number_or_off(written, read):
    assert load(with_receiver(f"python_frames: {written}")).config.receiver.python_frames == read
