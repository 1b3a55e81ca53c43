"""Runs on the cluster that kubectl reaches, submitted as a user does. Six minutes on two cores.

IMAGE=project:e2e python -m labs.e2e              # all tests
IMAGE=project:e2e python -m labs.e2e -k urgent    # other arguments are those of pytest

It needs Kubernetes 1.29 or later, a node with 1 free CPU and 3 GiB of free memory, and the image
there (kind load docker-image project:e2e). It makes and removes a restricted namespace and a volume
in a folder of a node, which takes the right to make namespaces and PersistentVolumes. Without it,
name an existing namespace, and a claim there that two pods may share and user 1000 may write to.
Targets whose controller the cluster lacks are skipped: JobSet, Kubeflow Trainer, the training
operator, Kueue.

IMAGE              name and tag, or digest, of the image
IMAGE_PULL_POLICY  Never; IfNotPresent if the image comes from a registry
NAMESPACE, VOLUME  an existing namespace and an existing claim; otherwise the test makes them
E2E_SECONDS        seconds that each wait may take, 900
E2E_EPOCHS         epochs of a long run, 1500: minutes in which the tests interfere

Without Docker, a Linux machine is such a cluster, as root: start ``labs.servers``,
``kubectl cordon`` its nodes, and start beside it
- containerd with runc, and CNI's plugins ``bridge`` and ``host-local`` on 10.244.0.0/24;
- a kubelet, built like ``control_plane/`` from k8s.io/kubernetes/cmd/kubelet/app, with
  --kubeconfig, --node-ip=10.244.0.1 and --hostname-override=10.244.0.1, whose configuration
  allows anonymous requests, and has failCgroupV1: false on a machine with version 1 of cgroups;
- a DNS server at clusterDNS for POD.SERVICE.NAMESPACE.svc.cluster.local, from the EndpointSlices.

A killed test may leave namespaces and volumes called project-e2e-... behind. No torch is needed.
"""

import os
import subprocess
import sys
from pathlib import Path

from labs.command import make_parser

HERE = Path(__file__).parent


def main() -> None:
    parser = make_parser("e2e", __doc__)
    _, arguments = parser.parse_known_args()
    # Without the conftest.py of tests/, which needs torch.
    command = ["-p", "no:xdist", f"--confcutdir={HERE}", str(HERE), *arguments]
    environment = {**os.environ, "E2E": "1"}
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", *command], env=environment))


if __name__ == "__main__":
    main()
