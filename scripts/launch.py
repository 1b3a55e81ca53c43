"""Send a run to a cluster. It takes the same overrides as train.py, plus action=.

python scripts/launch.py cluster=k8s trainer.num_nodes=2                 # print the manifests
python scripts/launch.py cluster=k8s trainer.num_nodes=2 action=check    # look for mistakes
RUN_ID=mine python scripts/launch.py cluster=k8s cluster.image=$IMAGE action=submit
RUN_ID=mine python scripts/launch.py action=logs                         # also status, cancel

action  render  print what the cluster would get; the default
        check   look for mistakes in the configuration and the manifests; then ask the cluster,
                if there is one, whether it would accept them
        data    download the data set in the cluster, into the volume of the runs (cluster=k8s)
        submit  start the run, or continue it; a second submit changes nothing
        logs    print the logs of all pods until the run ends
        status  print the state of each pod, and how far the run has come
        cancel  let the run save, then remove it

IMAGE is what `python scripts/image.py NAME --push` prints. RUN_ID names the run; without it, it
gets a new name. logs, status and cancel need no more than it: submit remembers the overrides in
<run_root>/<run_id>/launch.yaml. The pods run train.py with the same overrides.
Exit codes: 0 done, 1 error, 2 wrong usage or configuration.
"""

import sys

import options  # noqa: F401 (puts src on the path)

from samestep.launch.main import main
from samestep.ranks import process

if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:], __doc__))
