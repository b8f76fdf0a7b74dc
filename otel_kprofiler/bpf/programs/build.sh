#!/bin/sh
# Compile the BPF programs; the results are the same byte for byte from any directory.
# usage: build.sh [DIRECTORY]   (CLANG and LLVM_STRIP name the pinned tools, version 14)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
output=$(CDPATH= cd -- "${1:-$here}" && pwd)
cd "$here"
for name in sampler dump iterators; do
	object=$output/$name.bpf.o
	"${CLANG:-clang-14}" -target bpfel -mcpu=v2 -O2 -g -nostdinc -std=gnu11 \
		-Wall -Wextra -Werror -Wno-unused-const-variable \
		-ffile-prefix-map="$here"=. -fdebug-compilation-dir=. \
		-c "$name.bpf.c" -o "$object.tmp"
	# Maps need BTF (.BTF), the rest of the debug information is for nobody.
	"${LLVM_STRIP:-llvm-strip-14}" --strip-debug "$object.tmp"
	mv "$object.tmp" "$object"
done
