#!/bin/sh
# Makes docker.io/library/python:3.12-slim-bookworm where no registry of images is reached: Debian's own packages and a
# Python 3.12 of this machine. Needs root, debootstrap and podman. $1 is an interpreter whose prefix is copied. The
# machine's certificates and pip.conf are copied too, so that pip works in a build as it does outside. Never publish it.
set -eu
prefix=$("$1" -c 'import sys; print(sys.base_prefix)')
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
debootstrap --variant=minbase \
    --include=ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g \
    bookworm "$place" >&2
cp -a "$prefix"/bin/python3.12 "$place/usr/local/bin/"
cp -a "$prefix"/lib/python3.12 "$place/usr/local/lib/"
cp -a "$prefix"/lib/libpython3* "$place/usr/local/lib/" 2>/dev/null || true
rm -rf "$place/usr/local/lib/python3.12/test" "$place/usr/local/lib/python3.12/site-packages"
ln -s python3.12 "$place/usr/local/bin/python3"
ln -s python3.12 "$place/usr/local/bin/python"
chroot "$place" ldconfig
cp -L /etc/ssl/certs/ca-certificates.crt "$place/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$place/etc/"
rm -rf "$place"/var/cache/apt/* "$place"/var/lib/apt/lists/*
tar -C "$place" --exclude=./dev --exclude=./proc --exclude=./sys -c . |
    podman import - docker.io/library/python:3.12-slim-bookworm
