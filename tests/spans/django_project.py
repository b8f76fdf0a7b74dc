"""A Django project with synchronous and asynchronous middleware and views."""

import asyncio

from django.conf import settings
from opentelemetry import context as otel_context
from opentelemetry import trace

from tests.spans.interpreter import TRACER


def set_up(truth, *, asynchronous):
    """Returns the application, for WSGI or ASGI. Can be called only once per process."""
    import django
    from django.core.asgi import get_asgi_application
    from django.core.wsgi import get_wsgi_application

    settings.configure(
        TRUTH=truth,
        DEBUG=True,
        SECRET_KEY="x",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        MIDDLEWARE=[f"{__name__}.synchronous", f"{__name__}.Spanning"],
        LOGGING_CONFIG=None,
    )
    django.setup()
    return get_asgi_application() if asynchronous else get_wsgi_application()


def span_of(request):
    return request.META.get("tests.span") or request.scope["tests.span"]


def synchronous(get_response):
    """Middleware that supports only synchronous views, so that Django runs it in a thread."""

    def middleware(request):
        settings.TRUTH.observe(span_of(request))
        response = get_response(request)
        settings.TRUTH.observe()  # a view may leave another span current
        return response

    return middleware


class Spanning:
    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        with TRACER.start_as_current_span("middleware") as span:
            request.span = span
            settings.TRUTH.observe(span)
            return self.get_response(request)


def plain(request):
    from django.http import HttpResponse

    settings.TRUTH.observe(request.span)
    with TRACER.start_as_current_span("view") as span:
        settings.TRUTH.observe(span)
    return HttpResponse("ok")


def left(request):
    """A view that leaves a span current, as instrumentation with separate hooks may do."""
    from django.http import HttpResponse

    span = TRACER.start_span("left")
    otel_context.attach(trace.set_span_in_context(span))
    settings.TRUTH.observe(span)
    return HttpResponse("ok")


async def coroutine(request):
    from asgiref.sync import sync_to_async
    from django.http import HttpResponse

    with TRACER.start_as_current_span("coroutine") as span:
        settings.TRUTH.observe(span)
        await asyncio.sleep(0)
        settings.TRUTH.observe(span)
        await sync_to_async(settings.TRUTH.observe)(span)
        await sync_to_async(settings.TRUTH.observe, thread_sensitive=False)(span)
        settings.TRUTH.observe(span)
    return HttpResponse("ok")


def __getattr__(name):
    if name != "urlpatterns":
        raise AttributeError(name)
    from django.urls import path  # can be imported only after Django is set up

    return [path(view.__name__, view) for view in (plain, left, coroutine)]
