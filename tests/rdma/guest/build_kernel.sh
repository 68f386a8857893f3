#!/usr/bin/env bash
# build_kernel.sh TARGET: a User Mode Linux kernel with soft-RoCE, from Debian's kernel sources. Root, 7 to 12 minutes of CPU.
set -euo pipefail
target=$(realpath -m "$1")
config=$(realpath "$(dirname "$0")/kernel.config")
source=${KERNEL_SOURCE:-linux-source-6.12}

apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    gcc make libc6-dev flex bison bc xz-utils >/dev/null

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -q "$source"
dpkg-deb -x "$source"_*.deb package
mkdir linux
# Most of the sources are drivers for graphics and radio, which are never compiled here; their Kconfig files are read.
tar -xJf "package/usr/src/$source.tar.xz" -C linux --strip-components=1 \
    --exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/net/wireless/*.[ch]' \
    --exclude='*/Documentation/*.rst' --exclude='*/tools/testing/*'
cd linux
make -s ARCH=um allnoconfig KCONFIG_ALLCONFIG="$config" >/dev/null
for wanted in INFINIBAND_USER_ACCESS RDMA_RXE VETH OVERLAY_FS; do
    grep -q "^CONFIG_$wanted=y" .config || { echo "this kernel source has no $wanted for UML" >&2; exit 1; }
done
make -s ARCH=um -j"$(nproc)" linux
mkdir -p "$(dirname "$target")"
strip -o "$target.new" linux
mv "$target.new" "$target"
