#!/usr/bin/env bash
# Process 1 of the guest. Its root is the host's, read only; what is written goes into memory and is gone afterwards.
# The folder guest_dir= of the kernel's command line is the host's own: the command is in it, the status goes there.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8

mount -t proc proc /proc
for word in $(</proc/cmdline); do
    case $word in guest_dir=*) folder=${word#guest_dir=} ;; esac
done

mount -t tmpfs tmpfs /run
mkdir -p /run/upper /run/work /run/new
mount -t overlay -o lowerdir=/,upperdir=/run/upper,workdir=/run/work overlay /run/new || busybox poweroff -f
mount -t proc proc /run/new/proc
mount -t sysfs sysfs /run/new/sys
mount -t devtmpfs devtmpfs /run/new/dev
mkdir -p /run/new/dev/shm /run/new/dev/pts
mount -t tmpfs tmpfs /run/new/dev/shm
mount -t devpts devpts /run/new/dev/pts
mount -t tmpfs tmpfs /run/new/run
mount -t tmpfs tmpfs /run/new/tmp
mkdir -p "/run/new/$folder"
mount -t hostfs none "/run/new/$folder" -o "$folder"

# Two hosts' worth of network: the ends of a cable, each with a device. Jumbo frames first: RoCE takes its MTU from them.
ip link set lo up
ip link add left mtu 9000 type veth peer name right mtu 9000
ip address add 10.8.0.1/24 dev left
ip address add 10.8.0.2/24 dev right
for end in left right; do
    ip link set "$end" up
    echo 1 >"/run/new/proc/sys/net/ipv4/conf/$end/accept_local"
    echo 0 >"/run/new/proc/sys/net/ipv4/conf/$end/rp_filter"
done
echo 0 >/run/new/proc/sys/net/ipv4/conf/all/rp_filter
echo 1 >/run/new/proc/sys/net/ipv4/conf/all/accept_local
rdma link add rxe0 type rxe netdev left
rdma link add rxe1 type rxe netdev right

ulimit -l unlimited
chroot /run/new /bin/bash "$folder/command" </dev/null
echo $? >"/run/new/$folder/status"
exec busybox poweroff -f
