"""Find the values of a configuration that break a run on its cluster.

Each error is one line that names the value, the rule and the remedy. Judged is what makes a pod
wait for ever, or ends a run that has started; what a cluster rejects at once it says itself. The
checks need no cluster, no network and no torch.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.nodes import walk
from samestep.hydra.rules import load_project_rules
from samestep.hydra.suggestions import show
from samestep.launch.render import Manifest
from samestep.ranks.secrets import is_secret_name, looks_secret
from samestep.run_spec import check_shares

EXAMPLE_REGISTRY = "registry.example.com/"
LONGEST = 63  # characters of a name in DNS, and of the value of a label
NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{LONGEST - 2}}}[a-z0-9])?")
NAME_RULE = f"at most {LONGEST} of a-z 0-9 -, the first a letter, the last not -"
PINNED = re.compile(r"[^@]+@sha256:[0-9a-f]{64}|(.*/)?[^/:@]+:(?!latest$)[^/:@]+")

SECRET_RULE = (  # a message never shows the value
    "is a secret that everyone could read; put it into the Secret that cluster.secret names: its "
    "keys become variables of the pods"
)
HARMLESS = re.compile(r"/|\$\{|$|null$|true$|false$")  # a path, an interpolation, no value
ASSIGNMENT = re.compile(r"(?:--[\w-]+=)?[-+~]*([\w.-]+)=(.*)", re.DOTALL)  # NAME=VALUE
NAMES_ONLY = ("cluster.secret", "cluster.pull_secret")  # they, and cluster.secrets, hold names


def faults(cfg: DictConfig, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the errors in ``cfg`` for its cluster, and the secrets in plain text.

    Args:
        cfg: composed for a cluster; its ``run_id`` is set.
        manifests: what ``render`` made of it.
    """
    cluster = cfg.cluster
    yield from check_name(cfg)
    yield from check_devices(cfg)
    yield from check_ranks(cfg)
    yield from check_images(cfg)
    if "grace_s" in cluster and cluster.grace_s <= cluster.shutdown_s:
        yield (
            f"cluster.grace_s={cluster.grace_s}: must be more than cluster.shutdown_s="
            f"{cluster.shutdown_s}, or pods are killed while they save; raise it"
        )
    if "volume" in cluster:
        yield from check_volume(cfg)
    if cluster.get("queue_priority") is not None and cluster.queue is None:
        yield (
            f"cluster.queue_priority={cluster.queue_priority}: is a class of Kueue and needs "
            "cluster.queue; without a queue, say cluster.priority_class"
        )
    if cluster.name == "slurm":
        yield from check_slurm(cfg)
    yield from check_fixed_values(cfg)
    secrets = [*find_secrets(cfg)]
    yield from secrets or (line for manifest in manifests for line in find_secrets(manifest))


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
            "docs/clusters/README.md says, and name it"
        )


def check_name(cfg: DictConfig) -> Iterator[str]:
    """The run's name becomes the name of objects, to which controllers append suffixes."""
    if not NAME.fullmatch(cfg.run_id):
        yield f"RUN_ID={cfg.run_id}: names things in the cluster, so it must be {NAME_RULE}"
        return
    suffix = cfg.cluster.get("longest_suffix", 0)
    if (excess := len(cfg.run_id) + suffix - LONGEST) > 0:
        yield (
            f"RUN_ID={cfg.run_id}: has {len(cfg.run_id)} characters, and the cluster appends up to "
            f"{suffix}, which makes more than {LONGEST}; choose a RUN_ID that is {excess} shorter"
        )


def check_devices(cfg: DictConfig) -> Iterator[str]:
    """Each process uses one GPU, and with trainer.accelerator=gpu none can do without."""
    gpus, devices = cfg.cluster.get("gpus"), cfg.trainer.devices
    if devices == "auto":
        yield "trainer.devices=auto: a cluster needs a number; set trainer.devices=N"
    elif isinstance(gpus, int) and gpus != devices:  # with cluster=runai it is a list of options
        yield (
            f"cluster.gpus={gpus}: each process has one, so it must be "
            f"trainer.devices={devices}; leave out cluster.gpus"
        )
    if "gpus" in cfg.cluster and cfg.trainer.accelerator == "gpu" and not gpus:
        yield (
            f"cluster.gpus={'null' if gpus is None else gpus}: trainer.accelerator=gpu needs some; "
            "leave out cluster.gpus, or say trainer.accelerator=cpu"
        )


def check_ranks(cfg: DictConfig) -> Iterator[str]:
    """The project's rules and cluster.shares fit each number of ranks that the run may get."""
    cluster, devices, sizes = cfg.cluster, cfg.trainer.devices, []
    if "devices_per_node" in cluster:
        sizes = [(len(cluster.devices_per_node), sum(cluster.devices_per_node))]
    elif devices != "auto":
        low, high = cluster.get("min_nodes"), cluster.get("max_nodes")
        if low is None:
            low = high = cfg.trainer.num_nodes
        if low > high:
            yield f"cluster.min_nodes={low}: must be at most cluster.max_nodes={high}"
        sizes = [(nodes, nodes * devices) for nodes in range(low, high + 1)]
    if sizes:
        numbers = [num_ranks for _, num_ranks in sizes]
        yield from load_project_rules(cfg.rules).check_ranks(cfg, numbers)
    if not isinstance(cluster.shares, str):
        found = (check_shares(cluster.shares, *size) for size in sizes)
        yield from list(filter(None, found))[:1]


def check_images(cfg: DictConfig) -> Iterator[str]:
    """All pods, also those of a later restart, must run the same code."""
    for key in ("image", "etcd_image"):
        image = cfg.cluster.get(key)
        is_file = image is None or image.startswith("/")  # only with Slurm
        if not is_file and not PINNED.fullmatch(image):
            yield (
                f"cluster.{key}={image}: can change at any time; use a tag other than latest, "
                "or a digest"
            )


def find_needed_files(cfg: DictConfig) -> list[str]:
    """The files below ``data/`` without which every container would fail."""
    if "volume" not in cfg.cluster and "data" not in cfg.cluster:
        return []  # a workflow of Flyte fetches them
    files = load_project_rules(cfg.rules).needed_files(cfg)
    # A file at another place may be part of the image.
    return [file for file in files if not file.startswith("/")]


def list_briefly(files: list[str]) -> str:
    """The first file, and how many more there are."""
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def check_volume(cfg: DictConfig) -> Iterator[str]:
    """A run that needs a volume names its claim."""
    if cfg.cluster.volume is not None:
        return
    if files := find_needed_files(cfg):
        yield (
            f"cluster.volume=null: data={cfg.choices.data} needs {list_briefly(files)}, which the "
            "pods do not download; name a claim that has them, or say cluster.download=true"
        )
    if "commands" in cfg.cluster:  # a command that makes the pods itself, such as Run:ai's
        yield "cluster.volume=null: must be the name of a claim; the pods keep nothing themselves"


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


def check_slurm(cfg: DictConfig) -> Iterator[str]:
    """A container needs an image, and folders for runs and data; a job needs time to train."""
    cluster = cfg.cluster
    for key in ("image", "runs", "data"):
        value = cluster[key]
        if cluster.container == "none" and value is not None:
            yield (
                f"cluster.{key}={value}: is only for a container; add cluster.container=pyxis or "
                "apptainer"
            )
        if cluster.container != "none" and value is None:
            yield f"cluster.{key}=null: cluster.container={cluster.container} needs one"
    seconds = parse_time(str(cluster.time))
    if seconds is not None and seconds <= 2 * cluster.grace_s:
        yield (
            f"cluster.time={cluster.time}: must be more than twice cluster.grace_s="
            f"{cluster.grace_s} seconds, because the job saves, stops and is queued again so long "
            "before its end"
        )


def parse_time(time: str) -> int | None:
    """The seconds of a time limit of Slurm, such as 30, 12:00:00 or 1-12; None for other texts.

    One or two numbers are minutes and seconds, but after days they are hours and minutes.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


def find_secrets(tree: DictConfig | Manifest) -> Iterator[str]:
    """Yield the places where a secret stands in plain text, before interpolation.

    In a configuration a value is also a secret if its key says so, such as ``api_key``.
    """
    is_config = isinstance(tree, DictConfig)
    reported: tuple[str, ...] = ()
    for path, node in walk(OmegaConf.to_container(tree) if is_config else tree):
        if path.startswith(reported) or (is_config and path.startswith(NAMES_ONLY)):
            continue
        name = path.rpartition(".")[2] if is_config else ""
        if is_secret(name, node) or holds_secret(node):
            # The value of a variable is not reported again below the variable.
            reported = (f"{path}.", f"{path}[")
            title = "" if is_config else f"{tree.get('kind', 'manifest')}: "
            yield f"{title}{path}: {SECRET_RULE}"


def holds_secret(node: Any) -> bool:
    """Whether ``node`` is a variable of a container, or NAME=VALUE, with a secret as its value."""
    if isinstance(node, dict) and {"name", "value"} <= node.keys():
        return is_secret(str(node["name"]), node["value"])
    match = ASSIGNMENT.fullmatch(node) if isinstance(node, str) else None
    # cluster.secret=... is only a name; the configuration's own walk judges the other keys.
    if match is None or match[1].startswith("cluster."):
        return False
    return is_secret(match[1].rpartition(".")[2], match[2])


def is_secret(name: str, value: object) -> bool:
    """Whether ``value`` must stay secret, by its own look or because ``name`` says so."""
    if not isinstance(value, str):
        return False
    is_named_so = is_secret_name(name) and not HARMLESS.match(value)
    return is_named_so or looks_secret(value)
