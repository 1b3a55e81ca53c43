#!/usr/bin/env bash
# Builds the servers of a Kubernetes cluster, the controllers of JobSet, Kueue, Kubeflow Trainer and the training
# operator, and an S3 server into a folder, with Go and its module proxy. Go compares every module with the public
# checksum database.
#
#     labs/servers/build.sh                # into ~/.cache/samestep-servers, or $SAMESTEP_SERVERS
#
# Once: 20 minutes on two cores, and 5 GB for Go's caches, which may be deleted afterwards.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${SAMESTEP_SERVERS:-$HOME/.cache/samestep-servers}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$target/bin" "$target/manifests"
export CGO_ENABLED=0 GOFLAGS="-mod=mod -buildvcs=false"
export GONOSUMDB=sigs.k8s.io/scheduler-library # which Kueue needs and the checksum database lacks

# The control plane: its go.mod replaces the modules that Kubernetes keeps in its own repository.
version=$(sed -n 's#^\tk8s.io/kubernetes ##p' "$here/control_plane/go.mod")
stamp="$version $(cat "$here/build.sh" "$here"/control_plane/* | sha256sum)"
[ "$(cat "$target/stamp" 2>/dev/null)" = "$stamp" ] && exit
cp "$here"/control_plane/* "$work"
info=k8s.io/component-base/version
(
  cd "$work"
  go build -o "$target/bin/kube-apiserver" \
    -ldflags "-s -w -X $info.gitVersion=$version -X $info.gitMajor=1 -X $info.gitMinor=36" .
)
for name in kube-controller-manager kube-scheduler kubectl; do
  ln -sf kube-apiserver "$target/bin/$name"
done

# With its versions of the modules that it shares with a controller, most packages of that are compiled already: of Trainer
# 98 are left, 3.5 minutes instead of 11.
list='{{.Path}} {{with .Replace}}{{.Version}}{{else}}{{.Version}}{{end}}'
(cd "$work" && go list -m -f "$list" all | grep ' v' | sort > shared)
pin() {
  go list -m -f "$list" all | sort | join "$work/shared" - | while read -r path theirs ours; do
    [ "$theirs" = "$ours" ] || go mod edit -replace="$path=$path@$theirs"
  done
}

go build -ldflags "-s -w" -o "$target/bin/slow" "$here/slow.go"

# A controller or server: its name, its package, its module, its version, and the folders of the module that have its manifests.
while read -r name package module tag folders; do
  mkdir "$work/$name"
  cd "$work/$name"
  printf 'module built\n\ngo 1.26.0\n\ntool %s\n\nrequire %s %s\n' "$package" "$module" "$tag" > go.mod
  cp go.mod go.mod.own
  pin
  if ! go build -ldflags "-s -w" -o "$target/bin/$name" "$package"; then
    echo "$name: needs its own versions of some modules, and is built with them"
    cp go.mod.own go.mod
    go build -ldflags "-s -w" -o "$target/bin/$name" "$package"
  fi
  source=$(go list -m -f '{{.Dir}}' "$module")
  mkdir -p "$target/manifests/$name"
  for folder in $folders; do
    cp -rf --no-preserve=mode "$source/$folder" "$target/manifests/$name"
  done
done << 'CONTROLLERS'
jobset sigs.k8s.io/jobset sigs.k8s.io/jobset v0.12.0 config/components/crd/bases config/components/webhook
trainer github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager github.com/kubeflow/trainer/v2 v2.3.0 manifests/base/crds manifests/base/webhook manifests/base/runtimes
training-operator github.com/kubeflow/training-operator/cmd/training-operator.v1 github.com/kubeflow/training-operator v1.9.3 manifests/base/crds manifests/base/webhook
versitygw github.com/versity/versitygw/cmd/versitygw github.com/versity/versitygw v1.8.0
kueue sigs.k8s.io/kueue/cmd/kueue sigs.k8s.io/kueue v0.19.2 config/components/crd/bases config/components/webhook
CONTROLLERS
echo "$stamp" > "$target/stamp"
