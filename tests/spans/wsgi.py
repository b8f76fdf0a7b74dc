"""WSGI services: Flask, and Django with middleware."""

import socketserver
import threading
import time
import wsgiref.simple_server

from opentelemetry import trace

from tests.spans.interpreter import TRACER
from tests.spans.requests import request_until


class Traced:
    """WSGI middleware that handles each request in a new span, and passes the span to the app."""

    def __init__(self, app, truth):
        self.app = app
        self.truth = truth

    def __call__(self, environ, start_response):
        self.truth.observe(trace.INVALID_SPAN)
        with TRACER.start_as_current_span("server") as span:
            environ["tests.span"] = span
            self.truth.observe(span)
            body = b"".join(self.app(environ, start_response))
            self.truth.observe(span)
        return [body]


class ThreadingServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = False


class QuietHandler(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *_):
        pass


def serve_wsgi(app, truth, seconds, paths):
    server = wsgiref.simple_server.make_server(
        "127.0.0.1", 0, Traced(app, truth), ThreadingServer, QuietHandler
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        request_until(time.monotonic() + seconds, server.server_port, paths)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def flask_service(truth, seconds):
    """A Flask service with views, request hooks and a streamed response body."""
    import flask

    app = flask.Flask("service")

    def span():
        return flask.request.environ["tests.span"]

    @app.before_request
    def before():
        truth.observe(span())

    @app.after_request
    def after(response):
        truth.observe(span())
        return response

    @app.get("/plain")
    def plain():
        truth.observe(span())
        return "ok"

    @app.get("/nested")
    def nested():
        with TRACER.start_as_current_span("inner") as inner:
            truth.observe(inner)
        truth.observe(span())
        return "ok"

    @app.get("/streamed")
    def streamed():
        current = span()

        def body():
            truth.observe(current)
            yield "a"
            truth.observe(current)
            yield "b"

        return flask.Response(body())

    serve_wsgi(app, truth, seconds, ["/plain", "/nested", "/streamed"])


def django_wsgi(truth, seconds):
    """Django on WSGI, with middleware and views. One of the views leaves a span current."""
    from tests.spans import django_project

    app = django_project.set_up(truth, asynchronous=False)
    serve_wsgi(app, truth, seconds, ["/plain", "/left", "/coroutine"])


SCENARIOS = {"flask": flask_service, "django wsgi": django_wsgi}
