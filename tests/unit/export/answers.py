"""Answers of receivers that reject profiles or requests."""

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2


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
