"""The volume of the runs in a Kubernetes cluster: its claim, and a Job that puts data into it."""

from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.launch import kubectl, patch, render
from samestep.launch.render import Manifest

CLAIM = "PersistentVolumeClaim"
PROGRAM = ["python", "scripts/prepare_data.py"]


def render_job(cfg: DictConfig, overrides: Sequence[str]) -> list[Manifest]:
    """Fill ``k8s/data.yaml``: the pod of a run, which executes ``PROGRAM`` on no GPU."""
    if cfg.cluster.name != "k8s":
        raise ConfigError(
            f"cluster={cfg.cluster.name} --data: only cluster=k8s fills a volume, also for "
            "the other clusters on Kubernetes; elsewhere type `python scripts/prepare_data.py "
            "data.root=DIR` where DIR of the volume is mounted"
        )
    if cfg.cluster.volume is None:
        raise ConfigError("cluster.volume=null: --data fills a volume; name its claim")
    cfg = cfg.copy()
    cfg.trainer.accelerator = "cpu"
    cfg.cluster.manifest = "data"
    # A single pod: it has no other nodes to find, and no torchrun.
    cfg.cluster.subdomain = None
    cfg.cluster.rendezvous = []
    cfg.cluster.torchrun = []
    # It is for the Job that trains.
    cfg.cluster.job_patch = None
    manifests = patch.apply(cfg, render.render(cfg, overrides))
    (container,) = manifests[-1]["spec"]["template"]["spec"]["containers"]
    container["command"] = PROGRAM
    return manifests


def leave_existing_claim(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Leave out the claim if the cluster has it: the values of a claim cannot be changed."""
    claim, *rest = manifests  # render puts it first, if there is one
    if claim["kind"] != CLAIM:
        return list(manifests)
    if not kubectl.get(cfg, kubectl.build_resource_name(claim)):
        return list(manifests)
    print(f"{cfg.run_id}: the claim {cfg.cluster.volume} exists, and stays as it is")
    return rest
