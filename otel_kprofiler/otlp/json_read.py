"""Parses OTLP JSON into protobuf messages, and reports deviations from OTLP's JSON mapping.

Accepts the variants that producers write: integers as strings or numbers, ids in hexadecimal or
base64, and unknown keys. Protobuf's ``json_format`` module neither accepts hexadecimal ids nor
reports deviations.
"""

import base64
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from otel_kprofiler.errors import PayloadError

_LONG: Final = frozenset({
    FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_SINT64,
})  # fmt: skip
_ID_BYTES: Final = {"trace_id": 16, "span_id": 8, "profile_id": 16}

Note = Callable[[str, str, str], None]
"""Function that receives a rule's id, the location of a deviation and a message."""


def fill_message(message: Any, tree: object, note: Note, where: str = "") -> None:
    """Fill an empty protobuf message from parsed JSON.

    ``note`` is called for deviations from the ``json-names``, ``json-long-strings``,
    ``json-int-numbers`` and ``json-hex-ids`` rules. ``where`` is the message's path, for ``note``
    and errors. Raises ``PayloadError`` if a value cannot be converted to the field's type.
    """
    if not isinstance(tree, dict):
        raise PayloadError(f"{where or 'the request'} is not a JSON object")
    fields = {field.json_name: field for field in message.DESCRIPTOR.fields}
    for key, value in tree.items():
        place = f"{where}.{key}" if where else key
        field = fields.get(key)
        if field is None:
            field = message.DESCRIPTOR.fields_by_name.get(key)
            note("json-names", place, "unknown key" if field is None else "not lowerCamelCase")
        if field is not None and value is not None:
            _set(message, field, value, note, place)


def _set(message: Any, field: Any, value: Any, note: Note, where: str) -> None:
    target = getattr(message, field.name)
    is_message = field.message_type is not None
    try:
        if field.is_repeated:
            for index, item in enumerate(value):
                place = f"{where}[{index}]"
                if is_message:
                    fill_message(target.add(), item, note, place)
                else:
                    target.append(_scalar(field, item, note, place))
        elif is_message:
            target.SetInParent()
            fill_message(target, value, note, where)
        else:
            setattr(message, field.name, _scalar(field, value, note, where))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PayloadError(f"{where}: {error}") from error


def _scalar(field: Any, value: Any, note: Note, where: str) -> Any:
    if field.type in _LONG:
        if not isinstance(value, str):
            note("json-long-strings", where, "a 64-bit integer must be a string")
        return int(value)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32):
        if isinstance(value, str):
            note("json-int-numbers", where, "a 32-bit integer must be a number")
        return int(value)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return float(value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(field.name, value, note, where)
    return value


def _bytes(name: str, text: str, note: Note, where: str) -> bytes:
    length = _ID_BYTES.get(name)
    if length is not None:
        try:
            return bytes.fromhex(text)
        except ValueError:
            note("json-hex-ids", where, f"must be {2 * length} hexadecimal digits")
    return base64.b64decode(text, validate=True)
