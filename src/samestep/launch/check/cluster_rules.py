"""Rules for the configuration of a run on a cluster.

RULES lists them. Clusters have different keys: a rule is skipped if the cluster lacks a key that
the rule needs.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from samestep.config.rules import fault_of_shares, load_project_rules
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


def notes(cfg: DictConfig) -> Iterator[str]:
    """Yield what must be there before the run starts, and what only its user can know."""
    files = find_needed_files(cfg)
    place = "cluster.volume" if "volume" in cfg.cluster else "cluster.data"
    if files and OmegaConf.select(cfg, place) is not None:
        yield (
            f"data={cfg.choices.data}: the pods do not download it; {place}="
            f"{OmegaConf.select(cfg, place)} must have {list_briefly(files)} before the run "
            "starts; docs/data.md says how to fill it"
        )


def placeholder(cfg: DictConfig) -> Iterator[str]:
    """Yield the mistake of submitting a run with the image that is only an example."""
    if str(cfg.cluster.get("image")).startswith(EXAMPLE_REGISTRY):
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


def check_ranks(cfg: DictConfig) -> Iterator[str]:
    """The user's own rules accept each number of ranks that the run may get."""
    if sizes := list_sizes(cfg):
        numbers = [size.num_ranks for size in sizes]
        yield from load_project_rules(cfg.rules).check_ranks(cfg, numbers)


def check_shares(cfg: DictConfig) -> Iterator[str]:
    """A list of shares fits every number of nodes and ranks that the run may get."""
    shares = cfg.cluster.shares
    if isinstance(shares, str):
        return
    faults = (fault_of_shares(shares, *size) for size in list_sizes(cfg))
    yield from list(filter(None, faults))[:1]


class Size(NamedTuple):
    """How large a run may be."""

    num_nodes: int
    num_ranks: int


def list_sizes(cfg: DictConfig) -> list[Size]:
    """Each size that the run may have: one, or several if nodes come and go."""
    cluster, devices = cfg.cluster, cfg.trainer.devices
    if "devices_per_node" in cluster:
        return [Size(len(cluster.devices_per_node), sum(cluster.devices_per_node))]
    if devices == "auto":
        return []  # check_devices reports it
    if "max_nodes" in cluster:
        numbers = range(cluster.min_nodes, cluster.max_nodes + 1)
        return [Size(nodes, nodes * devices) for nodes in numbers]
    return [Size(cfg.trainer.num_nodes, cfg.trainer.num_nodes * devices)]


def check_files(cfg: DictConfig) -> Iterator[str]:
    """Without a volume, the pods begin with an empty directory for the data."""
    files = find_needed_files(cfg)
    if files and cfg.cluster.volume is None:
        yield (
            f"cluster.volume=null: data={cfg.choices.data} needs {list_briefly(files)}, which the "
            "pods do not download; name a claim that has them, or say cluster.download=true"
        )


def find_needed_files(cfg: DictConfig) -> list[str]:
    """The files below ``data/`` without which every container would refuse to train."""
    if "volume" not in cfg.cluster and "data" not in cfg.cluster:
        return []  # a workflow of Flyte fetches them
    files = load_project_rules(cfg.rules).needed_files(cfg)
    # A file at another place may be part of the image.
    return [file for file in files if not file.startswith("/")]


def list_briefly(files: list[str]) -> str:
    """The first file, and how many more there are."""
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def check_queue_priority(cfg: DictConfig) -> Iterator[str]:
    """A priority of Kueue has a meaning only in a queue of Kueue."""
    if cfg.cluster.queue_priority is not None and cfg.cluster.queue is None:
        yield (
            f"cluster.queue_priority={cfg.cluster.queue_priority}: is a class of Kueue and needs "
            "cluster.queue; without a queue, say cluster.priority_class"
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
    image = cfg.cluster.image
    is_file = image is None or image.startswith("/")  # only with Slurm
    if not is_file and not images.is_pinned(image):
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


def check_container(cfg: DictConfig) -> Iterator[str]:
    """A container of Slurm needs an image, and folders that keep the run and the data."""
    container = cfg.cluster.container
    for key in ("image", "runs", "data"):
        value = cfg.cluster[key]
        if container == "none" and value is not None:
            yield (
                f"cluster.{key}={value}: is only for a container; add cluster.container=pyxis or "
                "apptainer"
            )
        if container != "none" and value is None:
            yield f"cluster.{key}=null: cluster.container={container} needs one"


def check_memory_of_slurm(cfg: DictConfig) -> Iterator[str]:
    """Slurm does not know the units of Kubernetes."""
    if not re.fullmatch(r"\d+[KMGT]?", str(cfg.cluster.memory)):
        yield f"cluster.memory={cfg.cluster.memory}: Slurm takes whole numbers such as 512M or 16G"


def check_time_of_slurm(cfg: DictConfig) -> Iterator[str]:
    """The signal before the time limit must leave time to train, or the job is queued for ever."""
    text, grace_s = str(cfg.cluster.time), cfg.cluster.grace_s
    # Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
    match = re.fullmatch(r"(?:(\d+)-(?=\d+(?::\d+){0,2}$))?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if cfg.cluster.time is None:
        return
    if match is None:
        yield f"cluster.time={text}: must be minutes, hours:minutes:seconds or days-hours"
        return
    days, first, second, third = (int(group or 0) for group in match.groups())
    starts_with_hours = match[1] is not None or match[4] is not None
    seconds = 60 * first + second
    if starts_with_hours:
        seconds = 86400 * days + 3600 * first + 60 * second + third
    if seconds <= 2 * grace_s:
        yield (
            f"cluster.time={text}: must be more than twice cluster.grace_s={grace_s} seconds, "
            "because the job saves, stops and is queued again so long before its end"
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
    Rule(check_ranks),
    Rule(check_shares, ("shares",)),
    Rule(check_files, ("volume",)),
    Rule(check_queue_priority, ("queue", "queue_priority")),
    Rule(check_grace, ("grace_s", "shutdown_s")),
    Rule(check_image, ("image",)),
    Rule(check_memory, ("memory",)),
    Rule(check_shm, ("shm",)),
    Rule(check_shm_fits, ("shm", "memory")),
    Rule(check_cpu_limit, ("cpus", "cpu_limit")),
    Rule(check_volume, ("volume", "commands")),
    Rule(check_volume_size, ("volume_size",)),
    Rule(check_fixed_values, ("fixed",)),
    Rule(check_container, ("container", "trials")),
    Rule(check_memory_of_slurm, ("memory", "trials")),
    Rule(check_time_of_slurm, ("time", "trials")),
    Rule(check_node_range, ("min_nodes", "max_nodes")),
)
