#!/bin/sh
# Builds the image without a container daemon, and trains in it: as a user without a name, with no
# capabilities and no network, on a root file system that is read-only. As root, with Debian's
# buildah, podman and debootstrap:
#
#   sh tests/image_build.sh [ARGUMENTS OF buildah bud ...]
#
# BASE_IMAGE is the base; without it, a plain Debian 12 with its Python 3.11 is made here. IMAGE is
# the name of the result. A private package index: see the Dockerfile.
set -eu
cd "$(dirname "$0")/.."
IMAGE=${IMAGE:-localhost/project:test}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -z "${BASE_IMAGE:-}" ]; then
    BASE_IMAGE=localhost/debian-python:12
    if ! buildah inspect --type image "$BASE_IMAGE" > "$work/log" 2>&1; then
        debootstrap --variant=minbase --include=python3 bookworm "$work/debian" > "$work/log" ||
            { tail "$work/log"; exit 1; }
        container=$(buildah from scratch)
        buildah add --quiet "$container" "$work/debian" > "$work/log"
        buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
        buildah commit --quiet --rm "$container" "$BASE_IMAGE"
    fi
fi

buildah bud --layers --isolation chroot --network host --build-arg BASE_IMAGE="$BASE_IMAGE" \
    --build-arg REVISION="$(git describe --always --dirty --abbrev=40 --exclude='*')" \
    --tag "$IMAGE" "$@" .

# crun refuses machines that still have the first version of control groups: it sees one without.
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
    isolated() { "$@"; }
else
    isolated() {
        unshare --mount sh -euc 'umount -lR /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec "$@"' sh "$@"
    }
fi
mkdir -m 1777 "$work/runs"
contained() {
    isolated podman --runtime crun run --rm --cgroups disabled --ulimit nofile="$(ulimit -n):$(ulimit -Hn)" \
        --ulimit nproc=4096:4096 --network none --cap-drop all --security-opt no-new-privileges \
        --read-only --read-only-tmpfs=false --tmpfs /tmp --shm-size 256m \
        --user 12345:54321 --passwd=false --volume "$work/runs:/workspace/runs" "$@"
}
trains() {
    contained --env RUN_ID="$1" "$IMAGE" --nproc-per-node="$2" trainer.max_epochs=1 trainer.accelerator=cpu
    echo "$1: $(stat -c '%u:%g' "$work/runs/$1/metrics.json") wrote $(tr -d '\n' < "$work/runs/$1/metrics.json")"
}
trains one 1
trains two 2
python3 -c '
import json, sys
git = json.load(open(sys.argv[1]))["starts"][0]["git"]
print("revision:", git["commit"])' "$work/runs/one/run.json"

# With flyte among the EXTRAS: the workflow too, as a task of Flyte starts it, without our entry point.
case "$*" in *"extra flyte"*)
    contained --entrypoint pyflyte --env FLYTE_OVERRIDES='["cluster=flyte", "trainer.accelerator=cpu"]' "$IMAGE" \
        run scripts/flyte_workflow.py training --hyperparameters '{"epochs": 1}' ;;
esac
