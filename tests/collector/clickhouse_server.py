"""chDB, ClickHouse's engine, behind the subset of ClickHouse's HTTP API that clients use.

``python -m tests.collector.clickhouse_server DIRECTORY`` prints its port, and serves until it is
killed. There are two clients: clickhouse-connect, and clickhouse-go, which the Collector's exporter
uses. clickhouse-go requires blocks in a newer version of the protocol.
"""

import base64
import json
import os
import re
import struct
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.wire import pack_varint

USER, PASSWORD = "reader", "s3cret-word"
"""The credentials that are checked if a client sends a user other than ``default``."""
_INSERT = re.compile(r"insert\s+into\s+(\S+)\s*\((.*?)\)", re.IGNORECASE | re.DOTALL)
_FORMAT = re.compile(r"\s+format\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_HELLO = re.compile(r"select\s+displayName", re.IGNORECASE)
_CODE = re.compile(r"Code: (\d+)")
_REVISION = 54483
_QUERY = {"select", "show", "describe", "desc", "with", "exists"}


def _text(text):
    data = text.encode()
    return pack_varint(len(data)) + data


def _block(columns, rows):
    """Encodes a block of strings and 32-bit numbers in the format of server revision 54454."""
    info = b"\x01\x00\x02" + struct.pack("<i", -1) + b"\x00"
    data = info + pack_varint(len(columns)) + pack_varint(len(rows))
    for at, (name, kind) in enumerate(columns):
        data += _text(name) + _text(kind) + b"\x00"
        for row in rows:
            data += struct.pack("<I", int(row[at])) if kind == "UInt32" else _text(str(row[at]))
    return data


class Engine:
    """One chDB session, which accepts one query at a time."""

    def __init__(self, directory):
        # lazy import: other modules need only the constants of this module
        from chdb import session

        self._session = session.Session(directory)
        self._lock = threading.Lock()

    def run(self, sql, body, *, is_go):
        """Runs a query, with ``body`` as the data to insert, and returns the response."""
        with self._lock:
            word = sql.split(None, 1)[0].lower()
            if word == "insert" and is_go:
                return self._insert(sql, body)
            if is_go and word in _QUERY:
                return self._answer_go(sql)
            match = _FORMAT.search(sql)
            form = match[1] if match else "TSV"
            result = self._session.query(sql[: match.start()] if match else sql, form)
            return result.bytes() if result.size() else b""

    def _insert(self, sql, body):
        table, columns = _INSERT.match(sql).groups()
        with tempfile.NamedTemporaryFile(suffix=".native") as file:
            file.write(body)
            file.flush()
            source = f"SELECT {columns} FROM file('{file.name}', 'Native')"
            self._session.query(f"INSERT INTO {table} ({columns}) {source}")
        return b""

    def _answer_go(self, sql):
        if _HELLO.match(sql):
            version = self._session.query("SELECT version()", "TSVRaw").data().strip()
            columns = [("displayName()", "String"), ("version()", "String")]
            columns += [("revision()", "UInt32"), ("timezone()", "String")]
            return _block(columns, [["chdb", version, _REVISION, "UTC"]])
        answer = json.loads(self._session.query(sql, "JSONCompact").data())
        return _block([(one["name"], "String") for one in answer["meta"]], answer["data"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        query = parse_qs(urlsplit(self.path).query)
        body = self._body()
        sql = query.get("query", [""])[0]
        if not sql:
            sql, body = body.decode(), b""
        status, code = 200, ""
        try:
            self._authenticate()
            is_go = "clickhouse-go" in self.headers.get("User-Agent", "")
            answer = self.engine.run(sql.strip(), body, is_go=is_go)
        except RuntimeError as error:
            answer, status = str(error).encode(), 500
            code = match[1] if (match := _CODE.search(str(error))) else "1"
        self.send_response(status)
        if code:
            self.send_header("X-ClickHouse-Exception-Code", code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _authenticate(self):
        given = self.headers.get("Authorization", "").partition(" ")[2]
        user, _, password = base64.b64decode(given).decode().partition(":")
        if user not in {"", "default"} and (user, password) != (USER, PASSWORD):
            raise RuntimeError(f"Code: 516. DB::Exception: {user}: Authentication failed")

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        result = b""
        while size := int(self.rfile.readline(), 16):
            result += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return result


if __name__ == "__main__":
    Handler.engine = Engine(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    os.close(sys.stdout.fileno())
    server.serve_forever()
