"""Start the real servers of a Kubernetes cluster on this machine, until Ctrl-C or SIGTERM.

python -m labs.servers FOLDER [--while=PID]

When everything answers, FOLDER/kubeconfig leads kubectl and ``samestep launch`` there. The log of
each server is FOLDER/NAME.log. labs/servers/build.sh builds the servers, once.
"""

import signal
import sys
import time
from pathlib import Path

from labs.command import make_parser
from labs.servers.start import Servers, why_not


def main() -> None:
    parser = make_parser("servers", __doc__)
    parser.add_argument("folder", type=Path, help="for the kubeconfig, the logs and etcd's data")
    parser.add_argument(
        "--while", dest="parent", type=int, default=0, metavar="PID",
        help="end when this process has ended",
    )  # fmt: skip
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    servers = Servers(arguments.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        servers.start()
        while not arguments.parent or Path(f"/proc/{arguments.parent}").exists():
            servers.raise_if_one_has_ended()
            time.sleep(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        servers.stop()


if __name__ == "__main__":
    main()
