#!/bin/sh
# Compile the module; the result is the same byte for byte from any directory.
# usage: build.sh [DIRECTORY]   (CC is the pinned compiler, gcc 12; needs the headers of Python 3.11)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
output=$(CDPATH= cd -- "${1:-$here}" && pwd)
cd "$here"
library=$output/_record.abi3.so
"${CC:-gcc-12}" -std=gnu11 -O2 -g0 -fPIC -fvisibility=hidden -mtls-dialect=gnu2 -fno-stack-protector \
	-fcf-protection=none -Wall -Wextra -Werror -ffile-prefix-map="$here"=. \
	-I "${PYTHON_INCLUDE:-/usr/include/python3.11}" \
	-shared -nostdlib -Wl,--build-id=none,-z,relro,-z,now,-z,noexecstack,--strip-all \
	record.c imports.c -o "$library.tmp"
chmod 644 "$library.tmp"
mv "$library.tmp" "$library"
