"""Rules for the configuration of a run on a cluster.

RULES lists them. Clusters have different keys: a rule is skipped if the cluster lacks a key that
the rule needs.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from samestep.config.schema import show
from samestep.launch.check import images
from samestep.launch.check.names import LONGEST, NAME, NAME_RULE, NAMESPACE, NAMESPACE_RULE
from samestep.launch.check.quantities import parse_quantity, parse_size

EXAMPLE_REGISTRY = "registry.example.com/"


class Rule(NamedTuple):
    """A check, and the keys of ``cfg.cluster`` without which it is skipped."""

    check: Callable[[DictConfig], Iterator[str]]
    keys: tuple[str, ...] = ()


def check_cluster(cfg: DictConfig) -> Iterator[str]:
    """Yield every mistake in ``cfg`` that would keep its cluster from running it."""
    for rule in RULES:
        if all(key in cfg.cluster for key in rule.keys):
            yield from rule.check(cfg)


def placeholder(cfg: DictConfig) -> Iterator[str]:
    """Yield the mistake of submitting a run with the image that is only an example."""
    if "image" in cfg.cluster and cfg.cluster.image.startswith(EXAMPLE_REGISTRY):
        yield (
            f"cluster.image={cfg.cluster.image}: is only an example; build and push an image as "
            "docs/clusters/image.md says, and name it"
        )


def check_run_id(cfg: DictConfig) -> Iterator[str]:
    """The run's name becomes the name of objects, and part of the names of pods."""
    if not NAME.fullmatch(cfg.run_id):
        yield f"RUN_ID={cfg.run_id}: names things in the cluster, so it must be {NAME_RULE}"


def check_length_of_run_id(cfg: DictConfig) -> Iterator[str]:
    """The run's name must be short enough for all that a controller appends to it."""
    length, suffix = len(cfg.run_id), cfg.cluster.longest_suffix
    excess = length + suffix - LONGEST
    # A name that is too long by itself is reported by check_run_id.
    if length <= LONGEST < length + suffix:
        yield (
            f"RUN_ID={cfg.run_id}: has {length} characters, and the cluster appends up to "
            f"{suffix}, which makes more than {LONGEST}; choose a RUN_ID that is {excess} shorter"
        )


def check_namespace(cfg: DictConfig) -> Iterator[str]:
    """A namespace has a name that Kubernetes accepts."""
    namespace = cfg.cluster.namespace
    if namespace and not NAMESPACE.fullmatch(namespace):
        yield f"cluster.namespace={namespace}: must be {NAMESPACE_RULE}"


def check_devices(cfg: DictConfig) -> Iterator[str]:
    """The manifest needs a number; only the machine itself can count its devices."""
    if cfg.trainer.devices == "auto":
        yield "trainer.devices=auto: a cluster must be told how many; say trainer.devices=N"


def check_number_of_gpus(cfg: DictConfig) -> Iterator[str]:
    """Each process uses one GPU."""
    gpus, devices = cfg.cluster.gpus, cfg.trainer.devices
    # With cluster=runai this is a list of options; with trainer.devices=auto it is text.
    if isinstance(gpus, int) and devices != "auto" and gpus != devices:
        yield (
            f"cluster.gpus={gpus}: each process has one, so it must be "
            f"trainer.devices={devices}; leave out cluster.gpus"
        )


def check_that_there_are_gpus(cfg: DictConfig) -> Iterator[str]:
    """With trainer.accelerator=gpu a pod without GPUs could only fail."""
    if cfg.trainer.accelerator == "gpu" and not cfg.cluster.gpus:
        yield (
            f"cluster.gpus={show(cfg.cluster.gpus)}: trainer.accelerator=gpu needs some; leave out "
            "cluster.gpus, or say trainer.accelerator=cpu"
        )


def check_grace(cfg: DictConfig) -> Iterator[str]:
    """Pods are killed after grace_s; by then the processes must have saved."""
    cluster = cfg.cluster
    if cluster.grace_s <= cluster.shutdown_s:
        yield (
            f"cluster.grace_s={cluster.grace_s}: must be more than cluster.shutdown_s="
            f"{cluster.shutdown_s}, or pods are killed while they save; raise it"
        )


def check_image(cfg: DictConfig) -> Iterator[str]:
    """All pods, also those of a later restart, must run the same code."""
    if not images.is_pinned(cfg.cluster.image):
        yield f"cluster.image={cfg.cluster.image}: {images.RULE}"


def check_memory(cfg: DictConfig) -> Iterator[str]:
    """Memory has a size."""
    yield from check_size(cfg, "memory")


def check_shm(cfg: DictConfig) -> Iterator[str]:
    """Shared memory has a size."""
    yield from check_size(cfg, "shm")


def check_size(cfg: DictConfig, key: str) -> Iterator[str]:
    """The value of a key of ``cfg.cluster`` is a number of bytes."""
    value = cfg.cluster[key]
    if parse_size(value) is None:
        yield f"cluster.{key}={show(value)}: must be a size, such as 512Mi or 16Gi"


def check_shm_fits(cfg: DictConfig) -> Iterator[str]:
    """Shared memory counts as memory of the pod."""
    shm, memory = parse_size(cfg.cluster.shm), parse_size(cfg.cluster.memory)
    if shm is not None and memory is not None and shm > memory:
        yield (
            f"cluster.shm={cfg.cluster.shm}: counts as memory, so it must be at most "
            f"cluster.memory={cfg.cluster.memory}"
        )


def check_cpu_limit(cfg: DictConfig) -> Iterator[str]:
    """The API server refuses a request above the limit."""
    cpus, limit = parse_quantity(cfg.cluster.cpus), parse_quantity(cfg.cluster.cpu_limit)
    if cpus is not None and limit is not None and cpus > limit:
        yield (
            f"cluster.cpus={cfg.cluster.cpus}: must be at most "
            f"cluster.cpu_limit={cfg.cluster.cpu_limit}; raise the limit"
        )


def check_volume(cfg: DictConfig) -> Iterator[str]:
    """A system that makes the pods itself, such as Run:ai, needs a claim to keep the run in."""
    if cfg.cluster.volume is None:
        yield "cluster.volume=null: must be the name of a claim; the pods keep nothing themselves"


def check_volume_size(cfg: DictConfig) -> Iterator[str]:
    """A claim that the launcher makes has a size and a name."""
    size = cfg.cluster.volume_size
    if size is None:
        return
    yield from check_size(cfg, "volume_size")
    if cfg.cluster.volume is None:
        yield (
            f"cluster.volume_size={show(size)}: is the size of the claim that cluster.volume "
            "names, which is null; name one"
        )


def check_fixed_values(cfg: DictConfig) -> Iterator[str]:
    """Some keys have one value with this cluster, because another key says the same.

    ``cluster.fixed`` lists them: ``full.key: {value: ..., because: ...}``.
    """
    for key, entry in cfg.cluster.fixed.items():
        given = OmegaConf.select(cfg, key)
        is_reported = key == "trainer.devices" and given == "auto"  # by check_devices
        if given != entry.value and not is_reported:
            yield (
                f"{key}={show(given)}: stays {show(entry.value)} with "
                f"cluster={cfg.cluster.name}; {entry.because}"
            )


def check_node_range(cfg: DictConfig) -> Iterator[str]:
    """The smallest number of nodes is not above the greatest."""
    low, high = cfg.cluster.min_nodes, cfg.cluster.max_nodes
    if low > high:
        yield f"cluster.min_nodes={low}: must be at most cluster.max_nodes={high}"


RULES = (
    Rule(check_run_id),
    Rule(check_length_of_run_id, ("longest_suffix",)),
    Rule(check_namespace, ("namespace",)),
    Rule(check_devices),
    Rule(check_number_of_gpus, ("gpus",)),
    Rule(check_that_there_are_gpus, ("gpus",)),
    Rule(check_grace, ("grace_s", "shutdown_s")),
    Rule(check_image, ("image",)),
    Rule(check_memory, ("memory",)),
    Rule(check_shm, ("shm",)),
    Rule(check_shm_fits, ("shm", "memory")),
    Rule(check_cpu_limit, ("cpus", "cpu_limit")),
    Rule(check_volume, ("volume", "commands")),
    Rule(check_volume_size, ("volume_size",)),
    Rule(check_fixed_values, ("fixed",)),
    Rule(check_node_range, ("min_nodes", "max_nodes")),
)
