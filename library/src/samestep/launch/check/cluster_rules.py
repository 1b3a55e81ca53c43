"""Rules for the configuration of a run on a cluster.

Clusters have different keys, so ``check_cluster`` asks which keys this cluster has.
"""

import re
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.rules import load_project_rules
from samestep.hydra.schema import plain, show
from samestep.launch.check import images
from samestep.launch.check.names import LONGEST, NAME, NAME_RULE, NAMESPACE, NAMESPACE_RULE
from samestep.launch.check.quantities import parse_quantity, parse_size
from samestep.spec import fault_of_shares

EXAMPLE_REGISTRY = "registry.example.com/"


def check_cluster(cfg: DictConfig) -> Iterator[str]:
    """Yield every mistake in ``cfg`` that would keep its cluster from running it."""
    cluster = cfg.cluster
    yield from check_run_id(cfg)
    yield from check_devices(cfg)
    yield from check_ranks(cfg)
    yield from check_image(cfg)
    yield from check_memory(cfg)
    if "gpus" in cluster:
        yield from check_gpus(cfg)
    if "grace_s" in cluster:
        yield from check_grace(cfg)
    if "volume" in cluster:
        yield from check_volume(cfg)
    if "namespace" in cluster:
        yield from check_kubernetes(cfg)
    if "min_nodes" in cluster:
        yield from check_node_range(cfg)
    if cluster.name == "slurm":
        yield from check_slurm(cfg)
    if cluster.name == "flyte":
        yield from check_secret(cfg)
    yield from check_fixed_values(cfg)


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


def check_examples(cfg: DictConfig) -> Iterator[str]:
    """Yield the values with which no run can be submitted, because they are only examples."""
    if str(cfg.cluster.get("image")).startswith(EXAMPLE_REGISTRY):
        yield (
            f"cluster.image={cfg.cluster.image}: is only an example; build and push an image as "
            "docs/clusters/image.md says, and name it"
        )


def check_run_id(cfg: DictConfig) -> Iterator[str]:
    """The run's name becomes the name of objects, to which controllers append suffixes."""
    if not NAME.fullmatch(cfg.run_id):
        yield f"RUN_ID={cfg.run_id}: names things in the cluster, so it must be {NAME_RULE}"
    length, suffix = len(cfg.run_id), cfg.cluster.get("longest_suffix", 0)
    excess = length + suffix - LONGEST
    # A name that is too long by itself is reported above.
    if length <= LONGEST < length + suffix:
        yield (
            f"RUN_ID={cfg.run_id}: has {length} characters, and the cluster appends up to "
            f"{suffix}, which makes more than {LONGEST}; choose a RUN_ID that is {excess} shorter"
        )


def check_devices(cfg: DictConfig) -> Iterator[str]:
    """The manifest needs a number; only the machine itself can count its devices."""
    if cfg.trainer.devices == "auto":
        yield "trainer.devices=auto: a cluster must be told how many; say trainer.devices=N"


def check_gpus(cfg: DictConfig) -> Iterator[str]:
    """Each process uses one GPU, and with trainer.accelerator=gpu none can do without."""
    gpus, devices = cfg.cluster.gpus, cfg.trainer.devices
    # With cluster=runai this is a list of options; with trainer.devices=auto it is text.
    if isinstance(gpus, int) and devices != "auto" and gpus != devices:
        yield (
            f"cluster.gpus={gpus}: each process has one, so it must be "
            f"trainer.devices={devices}; leave out cluster.gpus"
        )
    if cfg.trainer.accelerator == "gpu" and not gpus:
        yield (
            f"cluster.gpus={show(gpus)}: trainer.accelerator=gpu needs some; leave out "
            "cluster.gpus, or say trainer.accelerator=cpu"
        )


def check_ranks(cfg: DictConfig) -> Iterator[str]:
    """The user's rules and cluster.shares fit each number of ranks that the run may get."""
    sizes = list_sizes(cfg)
    if sizes:
        numbers = [num_ranks for _, num_ranks in sizes]
        yield from load_project_rules(cfg.rules).check_ranks(cfg, numbers)
    shares = cfg.cluster.shares
    if not isinstance(shares, str):
        faults = (fault_of_shares(shares, *size) for size in sizes)
        yield from list(filter(None, faults))[:1]


def list_sizes(cfg: DictConfig) -> list[tuple[int, int]]:
    """Each number of nodes, and of ranks on them: one pair, or several if nodes come and go."""
    cluster, devices = cfg.cluster, cfg.trainer.devices
    if "devices_per_node" in cluster:
        return [(len(cluster.devices_per_node), sum(cluster.devices_per_node))]
    if devices == "auto":
        return []  # check_devices reports it
    if "max_nodes" in cluster:
        numbers = range(cluster.min_nodes, cluster.max_nodes + 1)
        return [(nodes, nodes * devices) for nodes in numbers]
    return [(cfg.trainer.num_nodes, cfg.trainer.num_nodes * devices)]


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
    """Memory and shared memory have sizes; shared memory counts as memory."""
    yield from check_size(cfg, "memory")
    if "shm" not in cfg.cluster:
        return
    yield from check_size(cfg, "shm")
    shm, memory = parse_size(cfg.cluster.shm), parse_size(cfg.cluster.memory)
    if shm is not None and memory is not None and shm > memory:
        yield (
            f"cluster.shm={cfg.cluster.shm}: counts as memory, so it must be at most "
            f"cluster.memory={cfg.cluster.memory}"
        )


def check_size(cfg: DictConfig, key: str) -> Iterator[str]:
    """The value of a key of ``cfg.cluster`` is a number of bytes."""
    value = cfg.cluster[key]
    if parse_size(value) is None:
        yield f"cluster.{key}={show(value)}: must be a size, such as 512Mi or 16Gi"


def check_volume(cfg: DictConfig) -> Iterator[str]:
    """A run that needs a volume names its claim."""
    if cfg.cluster.volume is not None:
        return
    files = find_needed_files(cfg)
    if files:
        yield (
            f"cluster.volume=null: data={cfg.choices.data} needs {list_briefly(files)}, which the "
            "pods do not download; name a claim that has them, or say cluster.download=true"
        )
    if "commands" in cfg.cluster:  # a command that makes the pods itself, such as Run:ai's
        yield "cluster.volume=null: must be the name of a claim; the pods keep nothing themselves"


def check_kubernetes(cfg: DictConfig) -> Iterator[str]:
    """What the manifests of Kubernetes are filled with."""
    cluster = cfg.cluster
    if cluster.namespace and not NAMESPACE.fullmatch(cluster.namespace):
        yield f"cluster.namespace={cluster.namespace}: must be {NAMESPACE_RULE}"
    if cluster.queue_priority is not None and cluster.queue is None:
        yield (
            f"cluster.queue_priority={cluster.queue_priority}: is a class of Kueue and needs "
            "cluster.queue; without a queue, say cluster.priority_class"
        )
    cpus, limit = parse_quantity(cluster.cpus), parse_quantity(cluster.cpu_limit)
    if cpus is not None and limit is not None and cpus > limit:
        yield (
            f"cluster.cpus={cluster.cpus}: must be at most "
            f"cluster.cpu_limit={cluster.cpu_limit}; raise the limit"
        )
    if cluster.volume_size is not None:
        yield from check_size(cfg, "volume_size")
        if cluster.volume is None:
            yield (
                f"cluster.volume_size={show(cluster.volume_size)}: is the size of the claim that "
                "cluster.volume names, which is null; name one"
            )


def check_fixed_values(cfg: DictConfig) -> Iterator[str]:
    """Some keys have one value with this cluster, because another key says the same.

    ``cluster.fixed`` lists them: ``full.key: {value: ..., because: ...}``.
    """
    for key, entry in cfg.cluster.get("fixed", {}).items():
        given = OmegaConf.select(cfg, key)
        is_reported = key == "trainer.devices" and given == "auto"  # by check_devices
        if given != entry.value and not is_reported:
            yield (
                f"{key}={show(given)}: stays {show(entry.value)} with "
                f"cluster={cfg.cluster.name}; {entry.because}"
            )


def check_secret(cfg: DictConfig) -> Iterator[str]:
    """A secret of Flyte needs the variable in which the run looks for it."""
    secret = plain(cfg.cluster)["secret"]
    needed = ["group", "key", "env_var"]
    if secret is not None and (not isinstance(secret, dict) or set(secret) != set(needed)):
        yield f"cluster.secret={show(secret)}: must have the keys {', '.join(needed)}"


def check_slurm(cfg: DictConfig) -> Iterator[str]:
    """Slurm has its own units; a container needs an image, and folders for runs and data."""
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
    if not re.fullmatch(r"\d+[KMGT]?", str(cfg.cluster.memory)):
        yield f"cluster.memory={cfg.cluster.memory}: Slurm takes whole numbers such as 512M or 16G"
    if cfg.cluster.time is not None:
        yield from check_time(str(cfg.cluster.time), cfg.cluster.grace_s)


def check_time(time: str, grace_s: int) -> Iterator[str]:
    """The signal before the time limit must leave time to train, or the job is queued for ever."""
    # Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
    match = re.fullmatch(r"(?:(\d+)-(?=\d+(?::\d+){0,2}$))?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        yield f"cluster.time={time}: must be minutes, hours:minutes:seconds or days-hours"
        return
    days, first, second, third = (int(group or 0) for group in match.groups())
    starts_with_hours = match[1] is not None or match[4] is not None
    seconds = 60 * first + second
    if starts_with_hours:
        seconds = 86400 * days + 3600 * first + 60 * second + third
    if seconds <= 2 * grace_s:
        yield (
            f"cluster.time={time}: must be more than twice cluster.grace_s={grace_s} seconds, "
            "because the job saves, stops and is queued again so long before its end"
        )


def check_node_range(cfg: DictConfig) -> Iterator[str]:
    """The smallest number of nodes is not above the greatest."""
    low, high = cfg.cluster.min_nodes, cfg.cluster.max_nodes
    if low > high:
        yield f"cluster.min_nodes={low}: must be at most cluster.max_nodes={high}"
