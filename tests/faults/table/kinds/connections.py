"""Broken connections to receivers, and invalid host names and certificates."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from tests.faults.table.receivers import GrpcReceiver, HttpReceiver, Proxy
from tests.faults.table.scenario import Scenario
from tests.servers import free_port


def reset(connection, connect):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(connection, connect):
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def garbage(connection, connect):
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(range(256)) * 20)
    silent(connection, connect)


def endless(connection, connect):
    with contextlib.suppress(OSError):
        for _ in range(1000):
            connection.sendall(bytes(65536))
            time.sleep(0.005)


MANNERS = {
    "is closed immediately": lambda connection, connect: connection.close(),
    "is reset immediately": reset,
    "never receives a response": silent,
    "is never read": lambda connection, connect: time.sleep(6),
    "receives a response in another protocol": garbage,
    "returns an endless stream of zeros": endless,
    "is closed after 1,000 bytes from the agent": lambda connection, connect: connect(there=1000),
    "is closed after 20 bytes from the receiver": lambda connection, connect: connect(back=20),
    "is limited to 300 bytes per 10 ms":
        lambda connection, connect: connect(pause_s=0.01, piece=300),
    "is limited to one byte per 10 ms": lambda connection, connect: connect(pause_s=0.01, piece=1),
}  # fmt: skip


def proxied(kind, receiver, name, manner, **more):
    return Scenario(kind, f"connection {name}", receiver=lambda: Proxy(receiver(), manner), **more)


class Elsewhere:
    """A receiver whose configured address is wrong until a configuration reload corrects it."""

    def __init__(self, receiver, address):
        self.behind, self.address, self.exporter = receiver, address, receiver.exporter
        self.heal, self.close = receiver.heal, receiver.close

    @property
    def payloads(self):
        return self.behind.payloads

    def configure(self):
        host, port = self.address
        return self.behind.configure((host, port or free_port()))


def correct(run):
    """Reloads with the correct address after a while, so that queued batches can be sent."""
    time.sleep(run.seconds)
    run.config["exporters"][run.exporter].update(run.receiver.behind.configure())
    run.reload()
    time.sleep(2)


PLACES = {
    "refuses connections": ("127.0.0.1", 0),
    "has an unresolvable host name": ("nobody.invalid", 4318),
}


@functools.cache
def certificates() -> Path:
    """Returns a directory of certificates and keys, named after the certificates' defects."""
    place = Path(tempfile.mkdtemp(prefix="kprofiler-faults-", dir="/tmp"))

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=place)

    def issue(name, subject, days):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj",
                "/CN=x", "-out", f"{name}.csr")  # fmt: skip
        (place / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.crt", "-extfile", f"{name}.ext",
                "-days", days)  # fmt: skip

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj",
                f"/CN={name}", "-out", f"{name}.crt", "-days", 30)  # fmt: skip
    issue("good", "IP:127.0.0.1", 30)
    issue("host", "DNS:elsewhere.invalid", 30)
    issue("old", "IP:127.0.0.1", -1)
    issue("client", "DNS:client.invalid", 30)
    (place / "index.txt").touch()
    (place / "ca.cnf").write_text(
        "[ca]\ndefault_ca = all\n[all]\ndatabase = index.txt\ndefault_md = sha256\n"
        "default_crl_days = 30\n"
    )
    signing = ("ca", "-config", "ca.cnf", "-cert", "ca.crt", "-keyfile", "ca.key")
    openssl(*signing, "-revoke", "client.crt")
    openssl(*signing, "-gencrl", "-out", "ca.crl")
    return place


class TlsReceiver(HttpReceiver):
    """Serves HTTPS with a given certificate until the fault ends, then with a valid certificate."""

    def __init__(self, certificate, ca="ca", *, client=False, version=None):
        super().__init__()
        self.certificate, self.ca, self.client, self.version = certificate, ca, client, version
        self._listen()

    def _listen(self):
        place = certificates()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            place / f"{self.certificate}.crt", place / f"{self.certificate}.key"
        )
        if self.client:
            context.load_verify_locations(place / "ca.crt")
            context.verify_mode = ssl.CERT_REQUIRED
        if self.version:
            context.minimum_version = context.maximum_version = self.version
        server = self.server
        plain = server.get_request

        def get_request():
            connection, address = plain()
            connection.settimeout(5)
            return self.context.wrap_socket(connection, server_side=True), address

        self.context = context
        if not hasattr(self, "wrapped"):
            self.wrapped = True
            server.get_request = get_request

    def configure(self, address=None):
        host, port = address or self.address
        return {
            "endpoint": f"https://{host}:{port}",
            "tls": {"ca_file": str(certificates() / f"{self.ca}.crt")},
        }

    def heal(self):
        self.certificate, self.client, self.version = "good", False, None
        self._listen()
        super().heal()


class RevokingReceiver(TlsReceiver):
    """A receiver that treats its client's certificate as revoked until ``heal`` is called."""

    def __init__(self):
        super().__init__("good", client=True)

    def _listen(self):
        super()._listen()
        if self.client:
            self.context.load_verify_locations(certificates() / "ca.crl")
            self.context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF

    def configure(self, address=None):
        exporter = super().configure(address)
        for key, name in (("cert_file", "client.crt"), ("key_file", "client.key")):
            exporter["tls"][key] = str(certificates() / name)
        return exporter


def expect_revocation(run):
    time.sleep(run.seconds)
    if "the client certificate is revoked" not in run.log:
        raise RuntimeError("the log does not name the revoked certificate")


TLS = {
    "certificate has expired": lambda: TlsReceiver("old"),
    "certificate is for another host": lambda: TlsReceiver("host"),
    "certificate is self-signed": lambda: TlsReceiver("other"),
    "client certificate is required": lambda: TlsReceiver("good", client=True),
    "receiver supports only TLS 1.1": lambda: TlsReceiver("good", version=ssl.TLSVersion.TLSv1_1),
}


def replace_ca(run):
    """Truncates and rewrites the agent's CA file."""
    path = Path(run.config["exporters"][run.exporter]["tls"]["ca_file"])
    copy = run.directory / "ca.crt"
    content = path.read_bytes()
    copy.write_bytes(content)
    run.config["exporters"][run.exporter]["tls"]["ca_file"] = str(copy)
    run.reload()
    time.sleep(1.5)
    copy.write_bytes(content[:100])
    run.process.send_signal(1)
    time.sleep(1.5)
    copy.write_bytes(content)
    run.reload()
    time.sleep(1)


SCENARIOS = [
    *[proxied("connection over HTTP", HttpReceiver, *manner) for manner in MANNERS.items()],
    *[proxied("connection over gRPC", GrpcReceiver, *manner) for manner in MANNERS.items()],
    *[
        Scenario(f"connection over {protocol}", f"receiver {name}", correct,
                 lambda receiver=receiver, place=place: Elsewhere(receiver(), place))
        for protocol, receiver in (("HTTP", HttpReceiver), ("gRPC", GrpcReceiver))
        for name, place in PLACES.items()
    ],
    *[Scenario("TLS", name, receiver=receiver) for name, receiver in TLS.items()],
    Scenario("TLS", "client certificate is revoked", expect_revocation, RevokingReceiver),
    Scenario("TLS", "CA file is truncated while the agent reloads", replace_ca,
             lambda: TlsReceiver("good")),
]  # fmt: skip
