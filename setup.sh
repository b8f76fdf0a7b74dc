#!/bin/sh
# Sets up this clone, then runs a command as root: a program of .venv/bin, or any other.
#
#   ./setup.sh otel-kprofiler record -d 10s    what profiling needs
#   ./setup.sh bash                            a root shell with the programs of .venv on its PATH
#   ./setup.sh --tests make test               also what development and the tests need
#
# It can be repeated, in any order, as root or as a user with sudo, which packages and the command
# need. VENV=DIRECTORY replaces .venv, PYTHON=INTERPRETER chooses its interpreter. By default that is
# the first CPython 3.11 or later of: the system's, which the PATH of sudo does not change; the one of
# an existing .venv; those on the PATH.
# shellcheck disable=SC2086  # lists of packages are split
set -eu

RUN_PACKAGES='python3-venv libbpf1'
TEST_PACKAGES='clang-14 llvm-14 stress-ng chromium linux-perf iproute2 libcap2-bin python3-bpfcc
	qemu-system-x86 qemu-user-static busybox-static kmod gcc gcc-12 gcc-12-aarch64-linux-gnu
	libc6-dev-arm64-cross g++ python3-dev binutils dwz make xz-utils openssl musl-tools'
SYSTEM_PYTHON=/usr/bin/python3
VENV=${VENV:-.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { # cause, fix
	printf 'error: %s\nfix: %s\n' "$1" "$2" >&2
	exit 1
}

say() {
	printf 'setup: %s\n' "$1" >&2
}

# Runs a command that may take minutes; prints its description, then a dot each second.
run_step() { # description, command
	printf 'setup: %s ' "$1" >&2
	shift
	(while sleep 1 && kill -0 $$ 2>/dev/null; do printf . >&2; done) &
	dots=$! status=0
	"$@" || status=$?
	kill "$dots" && wait "$dots" 2>/dev/null || true
	echo >&2
	return "$status"
}

as_root() {
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	elif command -v sudo >/dev/null; then
		sudo "$@"
	else
		fail 'root is needed, and there is no sudo' 'run this as root, or install sudo'
	fi
}

install_packages() { # names
	if ! command -v apt-get >/dev/null; then
		say 'no apt-get: install Python 3.11 or later with venv, and libbpf 1, if they are missing'
		return
	fi
	missing=$(select_packages is_missing "$@")
	[ -n "$missing" ] || return 0
	as_root true # sudo asks for the password here, not amid dots
	run_step 'reading the lists of packages (apt-get update)' as_root apt-get update -qq ||
		say 'apt-get update failed: earlier lists of packages are used'
	available=$(select_packages is_available $missing)
	for name in $missing; do
		is_available "$name" || say "$name is not in the archives of this system: left out"
	done
	[ -n "$available" ] || return 0
	run_step "installing $available (apt-get)" as_root env DEBIAN_FRONTEND=noninteractive \
		DEBCONF_NOWARNINGS=yes apt-get install -y -qq --no-install-recommends $available >/dev/null
}

select_packages() { # condition, names
	condition=$1 chosen=
	shift
	for name; do
		if "$condition" "$name"; then chosen="$chosen${chosen:+ }$name"; fi
	done
	echo "$chosen"
}

is_missing() {
	! dpkg-query --show --showformat '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

is_available() { # apt-cache succeeds, without output, for a name that other packages provide
	apt-cache show "$1" 2>/dev/null | grep -q .
}

# Prints the path and version of an interpreter; a status other than 0 if it cannot be used, and why.
describe='
import os, sys
path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
found = "%s (%s)" % (path, ".".join(map(str, sys.version_info[:3])))
if sys.version_info < (3, 11):
    sys.exit(found + " is older than 3.11")
if sys.implementation.name != "cpython":
    sys.exit(found + " is not CPython")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("%s has no %s" % (found, error.name))
print(found)
'

choose_python() { # sets python and found
	refused=
	if [ -n "${PYTHON:-}" ]; then
		try "$PYTHON" 'as PYTHON says' && return
		fail "PYTHON cannot be used: $refused" 'choose CPython 3.11 or later, with venv and ensurepip'
	fi
	try "$SYSTEM_PYTHON" "the system's" && return
	[ -x "$VENV/bin/python" ] && try "$VENV/bin/python" "which $VENV is of" && return
	for name in python3 python3.14 python3.13 python3.12 python3.11; do
		try "$name" "by the PATH, since the system's cannot be used" && return
	done
	fail "no usable Python is installed: $refused" 'install CPython 3.11 or later with venv and ensurepip
     (of Debian 12, Ubuntu 24.04 or later: apt-get install python3-venv), or name it: PYTHON=/path/to/python3'
}

try() { # interpreter, reason
	command -v "$1" >/dev/null || { refused="$refused${refused:+; }there is no $1"; return 1; }
	if found=$("$1" -I -c "$describe" 2>&1); then
		python=${found% (*}
		first=$(command -v python3 || true)
		[ "$(readlink -f "$first")" != "$python" ] || first=
		say "Python is $found, $2${first:+, not $first}"
	else
		refused="$refused${refused:+; }$1: $(echo "$found" | head -n 1)"
		return 1
	fi
}

prepare_venv() {
	why=$(name_fault)
	if [ -n "$why" ]; then
		[ -e "$VENV/pyvenv.cfg" ] || fail "$VENV is not a virtual environment" \
			'move it away, or name another directory: VENV=DIRECTORY'
		say "replacing $VENV: $why"
		remove "$VENV"
	fi
	[ -e "$VENV" ] || run_step "creating $VENV" "$python" -m venv "$VENV"
}

install_clone() {
	installed=$VENV/installed # lines: directory, checksum of pyproject.toml, extras
	wanted="$PWD $(cksum <pyproject.toml)"
	set -- "$VENV"/lib/python3*/site-packages/otel_kprofiler-*.dist-info
	[ ! -e "$1" ] || ! grep -qxF "$wanted${extras:+ $extras}" "$installed" 2>/dev/null || return 0
	run_step "installing this clone and its libraries in $VENV (pip)" \
		"$VENV/bin/python" -m pip install -q -e ".$extras"
	printf '%s\n' "$wanted" ${extras:+"$wanted $extras"} >"$installed"
}

name_fault() { # prints why the environment cannot be kept
	if [ ! -e "$VENV" ] && [ ! -L "$VENV" ]; then
		:
	elif [ -n "$(find "$VENV" -type d ! -uid "$(id -u)" -print -quit)" ]; then
		echo 'another user has made it, or a part of it'
	elif ! its=$("$VENV/bin/python" -I -c "$describe" 2>&1); then
		echo "$its" | head -n 1
	elif [ "$its" != "$found" ]; then
		echo "it is of $its"
	elif ! "$VENV/bin/python" -I -c 'import pip' 2>/dev/null; then
		echo 'it has no pip'
	elif is_moved; then
		echo 'it was made for another directory'
	fi
}

# Scripts name the interpreter by its path, but for paths that are too long.
is_moved() {
	first=$(head -n 1 "$VENV/bin/pip" 2>/dev/null) || return
	path=${first#\#!}
	[ "$path" != /bin/sh ] && ! [ "${path%/*}/pip" -ef "$VENV/bin/pip" ]
}

remove() {
	rm -rf "$1" 2>/dev/null || as_root rm -rf "$1"
}

extras=
case ${1:-} in
--tests) extras='[test,dev,docs]' && shift ;;
-*) fail "no option $1" 'use: ./setup.sh [--tests] [COMMAND ...]' ;;
esac
cd -- "$(dirname -- "$0")"
install_packages $RUN_PACKAGES ${extras:+$TEST_PACKAGES}
choose_python
prepare_venv
install_clone
"$VENV/bin/python" -m compileall -q otel_kprofiler # or root would write these files
if [ -n "$extras" ] && command -v npm >/dev/null; then
	[ ! -e viewer/node_modules ] || [ -O viewer/node_modules ] || remove viewer/node_modules
	(cd viewer && npm ci --ignore-scripts --no-audit --no-fund)
fi
if [ $# -eq 0 ]; then
	say 'next: ./setup.sh bash (a root shell with otel-kprofiler on its PATH), then otel-kprofiler record'
	exit 0
fi
program=$1
shift
[ ! -x "$VENV/bin/$program" ] || program=$VENV/bin/$program
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
as_root env "PATH=$PATH:$VENV/bin" "$program" "$@"
