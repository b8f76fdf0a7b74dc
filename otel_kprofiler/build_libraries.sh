#!/bin/sh
# Compile the C libraries for each processor; the results are the same byte for byte from any directory.
# usage: build_libraries.sh [DIRECTORY]   (needs gcc 12 for x86-64 and aarch64, and the headers of Python 3.11)
#
# With DIRECTORY, the libraries are written to DIRECTORY/thread_record and DIRECTORY/speedups.
# shellcheck disable=SC2086  # lists of sources are split
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
output=$(CDPATH= cd -- "${1:-$here}" && pwd)
include=${PYTHON_INCLUDE:-/usr/include/python3.11}
headers=$(mktemp -d)
trap 'rm -r "$headers"' EXIT
# Debian's pyconfig.h includes that of the processor; what the stable ABI uses of it is the same.
mkdir "$headers/aarch64-linux-gnu"
ln -s "/usr/include/x86_64-linux-gnu/${include##*/}" "$headers/aarch64-linux-gnu/"

compile() { # PROCESSOR COMPILER OPTION...
	library=$output/$package/${name}_$1.abi3.so
	compiler=$2
	shift 2
	"$compiler" "$@" -std=gnu11 -O2 -g0 -fPIC -fvisibility=hidden -fno-stack-protector \
		-Wall -Wextra -Werror -ffile-prefix-map="$here"=. -I "$include" -I "$headers" \
		-shared -nostdlib -Wl,--build-id=none,-z,relro,-z,now,-z,noexecstack,--strip-all \
		$sources -o "$library.tmp"
	chmod 644 "$library.tmp"
	mv "$library.tmp" "$library"
}

build() { # PACKAGE LIBRARY SOURCE...
	package=$1 name=$2
	shift 2
	sources=$*
	mkdir -p "$output/$package"
	cd "$here/$package"
	compile x86_64 "${CC_X86_64:-x86_64-linux-gnu-gcc-12}" -mtls-dialect=gnu2 -fcf-protection=none
	compile aarch64 "${CC_AARCH64:-aarch64-linux-gnu-gcc-12}" -mtls-dialect=desc -mno-outline-atomics
}

build thread_record _record record.c imports.c
build speedups _speedups module.c frame_cache.c stacks.c groups.c frame_tokens.c locations.c samples.c records.c go_frames.c btf.c lines.c interleave.c
