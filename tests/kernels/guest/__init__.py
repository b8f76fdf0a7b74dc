"""What the tests inside a guest share; importable on the host, usable only in the guest."""
