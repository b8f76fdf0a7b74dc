"""Runs TLS connections within one process, forever.

Argument: a file that contains the certificate and the key.
"""

import contextlib
import hashlib
import ssl
import sys


def connect(certificate: str, cipher: str) -> None:
    contexts = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    contexts[0].load_cert_chain(certificate)
    contexts[1].check_hostname, contexts[1].verify_mode = False, ssl.CERT_NONE
    for context in contexts:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(cipher)
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = contexts[0].wrap_bio(one, other, server_side=True)
    client = contexts[1].wrap_bio(other, one)
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    for _ in range(20):
        client.write(bytes(16000))
        server.read(16000)


while True:
    for cipher in ("ECDHE-RSA-AES128-GCM-SHA256", "AES256-SHA256", "ECDHE-RSA-CHACHA20-POLY1305"):
        connect(sys.argv[1], cipher)
    for name in ("md5", "sha1", "sha512", "sha3_256", "blake2b"):
        hashlib.new(name, bytes(300_000))
    hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 3000)
    hashlib.scrypt(b"word", salt=b"salt", n=256, r=8, p=1)
