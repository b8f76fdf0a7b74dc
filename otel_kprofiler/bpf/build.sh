#!/bin/sh
# Compile the sampler; the result is the same byte for byte from any directory.
# usage: build.sh [OUTPUT]   (CLANG and LLVM_STRIP name the pinned tools, version 14)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
output=${1:-$here/sampler.bpf.o}
cd "$here"
"${CLANG:-clang-14}" -target bpfel -mcpu=v2 -O2 -g -nostdinc -std=gnu11 \
	-Wall -Wextra -Werror -Wno-unused-const-variable \
	-ffile-prefix-map="$here"=. -fdebug-compilation-dir=. \
	-c sampler.bpf.c -o "$output.tmp"
# Maps need BTF (.BTF), the rest of the debug information is for nobody.
"${LLVM_STRIP:-llvm-strip-14}" --strip-debug "$output.tmp"
mv "$output.tmp" "$output"
