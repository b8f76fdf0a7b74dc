"""Reads data from pages written by ``formats.html``."""

import base64
import json
import re
from array import array


def data(page):
    """Returns the JSON object embedded in a page, with all columns unpacked to lists."""
    text = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    return unpacked(json.loads(text))


def unpacked(found):
    for name in ("nodes", "samples"):
        found[name] = {column: unpack(packed) for column, packed in found[name].items()}
    return found


def unpack(packed):
    code, _, text = packed.partition(":")
    return array(code, base64.b64decode(text)).tolist()
