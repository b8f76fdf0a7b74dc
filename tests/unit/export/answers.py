"""Responses from receivers that reject profiles or requests."""

import gzip

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

from tests.waiting import call_in_thread, wait_until


def partial_success(rejected=0, message=""):
    response = profiles_service_pb2.ExportProfilesServiceResponse()
    response.partial_success.SetInParent()
    response.partial_success.rejected_profiles = rejected
    response.partial_success.error_message = message
    return response.SerializeToString()


def refuse(code, text="no", details=None):
    def answer(_, context):
        if details is not None:
            context.set_trailing_metadata([("grpc-status-details-bin", details)])
        context.abort(code, text)

    return answer


def accept_only(receiver, fits, status=413, text=b""):
    """Makes an HTTP receiver accept only bodies that satisfy ``fits``, and returns these bodies."""
    taken = []

    def answer(handler):
        _, headers, body = receiver.requests[-1]
        if headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        if fits(body):
            taken.append(body)
            handler.reply(200)
        else:
            handler.reply(status, text, Content_Type="text/plain")

    receiver.answer(answer)
    return taken


def start_export(exporter, batch, receiver):
    """Exports a batch in a thread. Returns a future once the request has arrived."""
    result = call_in_thread(exporter.export, batch)
    wait_until(lambda: receiver.requests)
    return result
