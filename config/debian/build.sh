#!/bin/sh
# Build a Debian package of this checkout, for the release and architecture of this host.
# usage: build.sh [DIRECTORY]   (where to write the package; default: dist in the checkout)
#
# REVISION           Debian revision of the package, after the hyphen of its version; default: 1
# CONSTRAINTS        file for `pip install --constraint`: versions of the bundled packages
# SOURCE_DATE_EPOCH  time of all files; default: the time of the last commit
# COMPRESSION        for dpkg-deb: xz, zstd, gzip or none; default: xz
# DEBFULLNAME, DEBEMAIL  the maintainer
#
# The same sources, constraints and time make the same package, byte for byte. The constraints of a
# package are in /usr/share/doc/otel-kprofiler/constraints.txt.
set -eu
umask 022
export LC_ALL=C.UTF-8
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
source=$(CDPATH= cd -- "$here/../.." && pwd)
output=${1:-$source/dist}
for tool in /usr/bin/python3 dpkg-deb gcc gzip strip; do
	command -v "$tool" > /dev/null || {
		echo "$tool is missing: apt-get install binutils dpkg gcc gzip python3-dev python3-venv" >&2
		exit 1
	}
done
headers=$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
test -e "$headers/Python.h" || {
	echo "$headers/Python.h is missing: apt-get install python3-dev" >&2
	exit 1
}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/otel_kprofiler/version.py")
architecture=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2> /dev/null ||
	stat -c %Y "$source/otel_kprofiler/version.py")}
export SOURCE_DATE_EPOCH
maintainer="${DEBFULLNAME:-The otel-kprofiler authors} <${DEBEMAIL:-root@localhost}>"
full=$version-${REVISION:-1}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
home=/usr/lib/otel-kprofiler
doc=$root/usr/share/doc/otel-kprofiler
install -d "$output" "$root$home" "$root/DEBIAN" "$doc/examples"

# The virtual environment, first with this machine's paths. Its compiled modules work with one minor
# version of Python only, on which the package therefore depends.
/usr/bin/python3 -m venv "$work/tool"
python=$("$work/tool/bin/python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
/usr/bin/python3 -m venv --without-pip "$root$home"
HATCH_BUILD_HOOK_ENABLE_CUSTOM=true \
	"$work/tool/bin/python" -m pip -q --disable-pip-version-check --python "$root$home/bin/python" \
	install --no-compile ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} "${source}[dwarf,zstd]"

# Then with the installed paths, and without the commands of the bundled packages.
packages=$root$home/lib/$python/site-packages
"$work/tool/bin/python" -m pip --disable-pip-version-check --python "$root$home/bin/python" freeze |
	grep -v '^otel-kprofiler' > "$doc/constraints.txt"
rm -r "$root$home/bin" "$root$home/include" "$root$home/lib64" "$root$home/share"
rm "$packages"/otel_kprofiler-*.dist-info/direct_url.json
sed -i -e '/^\.\.\//d' -e '/direct_url\.json/d' "$packages"/*.dist-info/RECORD
install -d "$root$home/bin" "$root/usr/bin"
ln -s "/usr/bin/$python" "$root$home/bin/python3"
ln -s python3 "$root$home/bin/python"
ln -s ../lib/otel-kprofiler/bin/otel-kprofiler "$root/usr/bin/otel-kprofiler"
cat > "$root$home/pyvenv.cfg" << END
home = /usr/bin
include-system-site-packages = false
version = ${python#python}
END
cat > "$root$home/bin/otel-kprofiler" << END
#!$home/bin/python3 -I
import sys

from otel_kprofiler.cli import main

sys.exit(main())
END
chmod 755 "$root$home/bin/otel-kprofiler"
find "$packages" -name '*.so' ! -path '*/otel_kprofiler/*' \
	-exec strip --strip-unneeded --remove-section=.comment {} +

# Files outside the virtual environment.
install -Dm644 "$here/agent.yaml" "$root/etc/otel-kprofiler/agent.yaml"
unit=$root/usr/lib/systemd/system/otel-kprofiler.service
install -d "${unit%/*}"
sed -e '/^#$/d' -e '/^#   /d' \
	-e 's|/opt/otel-kprofiler/bin/otel-kprofiler|/usr/bin/otel-kprofiler|' \
	-e 's|^DynamicUser=yes$|User=otel-kprofiler\nGroup=otel-kprofiler|' \
	"$source/config/systemd/otel-kprofiler.service" > "$unit"
for page in "$source"/docs/man/*.1; do
	install -Dm644 "$page" "$root/usr/share/man/man1/${page##*/}"
	gzip -9n "$root/usr/share/man/man1/${page##*/}"
done
completion() { # SHELL FILE
	install -d "$(dirname "$root/usr/share/$2")"
	_OTEL_KPROFILER_COMPLETE=${1}_source PYTHONDONTWRITEBYTECODE=1 "$work/tool/bin/python" -c '
import sys
sys.path.insert(0, sys.argv.pop())
sys.argv[0] = "otel-kprofiler"
from otel_kprofiler.cli import main
main()' "$packages" > "$root/usr/share/$2"
}
completion bash bash-completion/completions/otel-kprofiler
completion zsh zsh/vendor-completions/_otel-kprofiler
completion fish fish/vendor_completions.d/otel-kprofiler.fish
install -m644 "$source/README.md" "$source/SECURITY.md" "$doc"
cp -R "$source/config/agent.yaml" "$source/config/collector" "$doc/examples"
gzip -9nc "$source/CHANGELOG.md" > "$doc/changelog.gz"
gzip -9n > "$doc/changelog.Debian.gz" << END
otel-kprofiler ($full) unstable; urgency=medium

  * Built from the sources of $version; see changelog.gz.

 -- $maintainer  $(date -uRd "@$SOURCE_DATE_EPOCH")
END
"$work/tool/bin/python" "$here/copyright.py" "$packages" > "$doc/copyright"

# Control files.
for script in postinst prerm postrm; do
	install -m755 "$here/$script" "$root/DEBIAN/$script"
done
echo /etc/otel-kprofiler/agent.yaml > "$root/DEBIAN/conffiles"
find "$root" -depth -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
# Byte code is validated by the source's time and size, which is Python's default.
env -u SOURCE_DATE_EPOCH "$work/tool/bin/python" -m compileall -qf --invalidation-mode timestamp \
	-s "$root" -p / "$root$home/lib"
cat > "$root/DEBIAN/control" << END
Package: otel-kprofiler
Version: $full
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -sk --apparent-size --exclude=DEBIAN "$root" | cut -f1)
Depends: $python, libbpf1, libc6, libgcc-s1, libstdc++6, adduser, procps
Section: utils
Priority: optional
Homepage: https://opentelemetry.io/docs/concepts/signals/profiles/
Description: kernel-first continuous profiler for OpenTelemetry
 Samples every CPU with an eBPF program, resolves kernel and user code to
 functions and lines, and exports OTLP profiles: as a command, or as an agent
 that runs without root, with six capabilities.
END
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -print | sort | cut -c3- |
	xargs -d '\n' md5sum > DEBIAN/md5sums)
find "$root" -depth -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
package=$output/otel-kprofiler_${full}_$architecture.deb
dpkg-deb --root-owner-group -Z"${COMPRESSION:-xz}" --build "$root" "$package" > /dev/null
echo "$package"
