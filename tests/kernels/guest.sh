# First process of a guest, whose root is the host's root with an overlay in memory.
# Runs pytest with this script's arguments, prints its exit status, and powers off.
# shellcheck shell=sh
# not /tmp, which may contain the checkout, and old files of the host's tests
export HOME=/run/tmp TMPDIR=/run/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
mkdir -m 1777 /run/tmp
export PATH="$(dirname "$MATRIX_PYTHON"):/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

# other users must be able to enter the directories above the interpreter and the checkout
for dir in "$MATRIX_CHECKOUT" "$(dirname "$MATRIX_PYTHON")" \
    "$(dirname "$(readlink -f "$MATRIX_PYTHON")")" "$MATRIX_SPIN"; do
    while [ "$dir" != / ]; do
        chmod o+rx "$dir"
        dir=$(dirname "$dir")
    done
done
mkdir -p /lib/modules
mount --bind "$MATRIX_MODULES" /lib/modules
if [ -n "$MATRIX_OVERLAY" ]; then
    mount --bind "$MATRIX_OVERLAY" "$MATRIX_CHECKOUT/otel_kprofiler"
fi
ip link set lo up 2>/dev/null || busybox ifconfig lo 127.0.0.1 up

cd "$MATRIX_CHECKOUT" || exit 1
"$MATRIX_PYTHON" -m pytest "$@"
status=$?
dmesg >"$MATRIX_RUN/dmesg.log"
echo "kernel-matrix: pytest exit $status"
sync
busybox poweroff -f
sleep 1000
