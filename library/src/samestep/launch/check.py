"""Find the values of a configuration that break a run on its cluster.

Each error is one line that names the value, the rule and the remedy. These checks find what makes
a pod wait forever, or ends a run that has started; what a cluster rejects at once it reports
itself. They need no cluster, no network and no torch.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.nodes import walk
from samestep.hydra.suggestions import show
from samestep.launch.render import Manifest
from samestep.ranks.secrets import is_secret_name, looks_secret
from samestep.run_spec import check_shares

EXAMPLE_REGISTRY = "registry.example.com/"
LONGEST = 63  # characters of a name in DNS, and of the value of a label
NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{LONGEST - 2}}}[a-z0-9])?")
NAME_RULE = f"at most {LONGEST} of a-z 0-9 -, the first a letter, the last not -"
PINNED = re.compile(
    r"[^@]+@sha256:[0-9a-f]{64}"  # by its digest
    r"|(.*/)?[^/:@]+:(?!latest$)[^/:@]+"  # by its tag
    r"|/.*"  # a file, with Slurm
)
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # of Slurm: DAYS-HOURS:MINUTES:SECONDS

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
    yield from check_name(cfg)
    yield from check_devices(cfg)
    yield from check_ranks(cfg)
    yield from check_images(cfg)
    yield from check_grace(cfg)
    yield from check_volume(cfg)
    yield from check_queue(cfg)
    yield from check_slurm(cfg)
    yield from check_fixed_values(cfg)
    yield from check_secrets(cfg, manifests)


def notes(cfg: DictConfig) -> Iterator[str]:
    """Yield what the user must prepare before the run starts, and what only the user can know."""
    place = "cluster.data"
    if "volume" in cfg.cluster:
        place = "cluster.volume"
    folder = find_needed_folder(cfg)
    source = OmegaConf.select(cfg, place)
    if folder and source is not None:
        yield (
            f"data={cfg.choices.data}: the pods do not download it; {place}={source} must have "
            f"{folder} before the run starts: `python scripts/prepare_data.py "
            f"data={cfg.choices.data} data.root=DIR` downloads it into a folder, and `samestep "
            f"launch --data cluster=k8s data={cfg.choices.data}` into a volume of Kubernetes"
        )


def check_examples(cfg: DictConfig) -> Iterator[str]:
    """Yield the values that are only examples, so that no run can be submitted with them."""
    if str(cfg.cluster.get("image")).startswith(EXAMPLE_REGISTRY):
        yield (
            f"cluster.image={cfg.cluster.image}: is only an example; build and push an image, "
            "`docker build -t IMAGE . && docker push IMAGE`, and name it by cluster.image=IMAGE"
        )


def check_name(cfg: DictConfig) -> Iterator[str]:
    """The run's name becomes the name of objects, to which controllers append suffixes."""
    suffix = cfg.cluster.get("longest_suffix", 0)
    if not NAME.fullmatch(cfg.run_id):
        yield (
            f"RUN_ID={cfg.run_id}: names things in the cluster, so it must be {NAME_RULE}; for "
            f"instance RUN_ID={make_valid_name(cfg.run_id, suffix)}"
        )
        return
    # A controller that makes a longer name creates no pods, and only an event says why.
    excess = len(cfg.run_id) + suffix - LONGEST
    if excess > 0:
        yield (
            f"RUN_ID={cfg.run_id}: has {len(cfg.run_id)} characters, and the cluster appends up to "
            f"{suffix}, which makes more than {LONGEST}; choose a RUN_ID that is {excess} shorter"
        )


def make_valid_name(name: str, longest_suffix: int = 0) -> str:
    """The name with nothing that a cluster rejects: ``my-net-3f2a1b`` for ``My_Net-3f2a1b``."""
    words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    if not words[:1].isalpha():
        words = f"run-{words}"
    # The end stays: the random characters of a new name tell two runs apart.
    excess = max(0, len(words) + longest_suffix - LONGEST)
    head, tail = words[:-6], words[-6:]
    return f"{head[: len(head) - excess]}{tail}".strip("-")


def check_devices(cfg: DictConfig) -> Iterator[str]:
    """Each process uses one GPU, and with trainer.accelerator=gpu each process needs one."""
    devices = cfg.trainer.devices
    # A cluster without this key gives the GPUs by other means.
    gpus = cfg.cluster.get("gpus", devices)
    # With cluster=runai cluster.gpus is a list of options, which cannot be compared.
    is_number = isinstance(gpus, int)
    if devices == "auto":
        yield "trainer.devices=auto: a cluster needs a number; set trainer.devices=N"
    elif is_number and gpus != devices:
        yield (
            f"cluster.gpus={gpus}: each process has one, so it must be "
            f"trainer.devices={devices}; leave out cluster.gpus"
        )
    if cfg.trainer.accelerator == "gpu" and not gpus:
        given = "null" if gpus is None else gpus
        yield (
            f"cluster.gpus={given}: trainer.accelerator=gpu needs some; "
            "leave out cluster.gpus, or say trainer.accelerator=cpu"
        )


def check_ranks(cfg: DictConfig) -> Iterator[str]:
    """The global batch and cluster.shares fit each number of ranks that the run may get."""
    cluster = cfg.cluster
    low, high = find_numbers_of_nodes(cfg)
    if low > high:
        yield f"cluster.min_nodes={low}: must be at most cluster.max_nodes={high}"
    sizes = find_sizes(cfg)
    yield from check_global_batch(cfg, max((ranks for _, ranks in sizes), default=0))
    if isinstance(cluster.shares, str):
        return
    for nodes, ranks in sizes:
        fault = check_shares(cluster.shares, nodes, ranks)
        if fault:
            # The same list of shares fails in the same way for every other size.
            yield fault
            return


def check_global_batch(cfg: DictConfig, num_ranks: int) -> Iterator[str]:
    """Each of so many ranks gets a sample of every batch, if data count samples over all ranks."""
    size = OmegaConf.select(cfg, "data.global_batch_size")
    needed = num_ranks * cfg.trainer.accumulate_grad_batches
    if size is not None and size < needed:
        yield (
            f"data.global_batch_size={size}: must be at least {needed}, one sample for each of "
            f"{num_ranks} ranks in every batch"
        )


def find_numbers_of_nodes(cfg: DictConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes that the run may get."""
    cluster = cfg.cluster
    if cluster.get("min_nodes") is None:
        return cfg.trainer.num_nodes, cfg.trainer.num_nodes
    return cluster.min_nodes, cluster.max_nodes


def find_sizes(cfg: DictConfig) -> list[tuple[int, int]]:
    """Return the numbers of nodes and of ranks with which the run may train."""
    if "devices_per_node" in cfg.cluster:
        devices_per_node = cfg.cluster.devices_per_node
        return [(len(devices_per_node), sum(devices_per_node))]
    if cfg.trainer.devices == "auto":
        return []  # check_devices rejects it
    low, high = find_numbers_of_nodes(cfg)
    return [(nodes, nodes * cfg.trainer.devices) for nodes in range(low, high + 1)]


def check_images(cfg: DictConfig) -> Iterator[str]:
    """All pods, also those of a later restart, must run the same code."""
    for key in ("image", "etcd_image"):
        image = cfg.cluster.get(key)
        if image is not None and not PINNED.fullmatch(image):
            yield (
                f"cluster.{key}={image}: can change at any time; use a tag other than latest, "
                "or a digest"
            )


def check_grace(cfg: DictConfig) -> Iterator[str]:
    """The cluster waits longer for a pod than the ranks need to save."""
    cluster = cfg.cluster
    if "grace_s" in cluster and cluster.grace_s <= cluster.shutdown_s:
        yield (
            f"cluster.grace_s={cluster.grace_s}: must be more than cluster.shutdown_s="
            f"{cluster.shutdown_s}, or pods are killed while they save; raise it"
        )


def check_queue(cfg: DictConfig) -> Iterator[str]:
    """A priority class of Kueue means nothing without a queue of Kueue."""
    cluster = cfg.cluster
    if cluster.get("queue_priority") is not None and cluster.queue is None:
        yield (
            f"cluster.queue_priority={cluster.queue_priority}: is a class of Kueue and needs "
            "cluster.queue; without a queue, say cluster.priority_class"
        )


def find_needed_folder(cfg: DictConfig) -> str:
    """The folder of data without which every container would fail; empty if there is none."""
    # A workflow of Flyte fetches them.
    if {"volume", "data"}.isdisjoint(cfg.cluster) or cfg.data.get("download", True):
        return ""
    root = str(cfg.data.get("root") or "/")
    # A folder elsewhere may be part of the image, which cannot be inspected from here.
    return "" if root.startswith("/") else root


def check_volume(cfg: DictConfig) -> Iterator[str]:
    """A run that needs a volume names its claim."""
    if "volume" not in cfg.cluster or cfg.cluster.volume is not None:
        return
    folder = find_needed_folder(cfg)
    if folder:
        yield (
            f"cluster.volume=null: data={cfg.choices.data} needs {folder}, which the "
            "pods do not download; name a claim that has them, or say cluster.download=true"
        )
    # A command that makes the pods itself, such as Run:ai's, has no other place for checkpoints.
    if "commands" in cfg.cluster:
        yield "cluster.volume=null: must be the name of a claim; the pods keep nothing themselves"


def check_fixed_values(cfg: DictConfig) -> Iterator[str]:
    """Some keys have one value with this cluster, because another key says the same.

    ``cluster.fixed`` lists them: ``full.key: {value: ..., because: ...}``.
    """
    for key, entry in cfg.cluster.get("fixed", {}).items():
        given = OmegaConf.select(cfg, key)
        # check_devices reports this value already.
        is_reported = (key, given) == ("trainer.devices", "auto")
        if given != entry.value and not is_reported:
            yield (
                f"{key}={show(given)}: stays {show(entry.value)} with "
                f"cluster={cfg.cluster.name}; {entry.because}"
            )


def check_slurm(cfg: DictConfig) -> Iterator[str]:
    """A container needs an image, and folders for runs and data; a job needs time to train."""
    cluster = cfg.cluster
    if cluster.name != "slurm":
        return
    has_container = cluster.container != "none"
    for key in ("image", "runs", "data"):
        is_given = cluster[key] is not None
        if is_given == has_container:
            continue
        if has_container:
            yield f"cluster.{key}=null: cluster.container={cluster.container} needs one"
        else:
            yield (
                f"cluster.{key}={cluster[key]}: is only for a container; add "
                "cluster.container=pyxis or apptainer"
            )
    for option in cluster.options:
        if str(option).startswith("--comment"):
            yield (
                f"cluster.options: {option}: must not replace the comment of the job, which says "
                "whose it is; add your text to the comment in k8s/slurm.yaml"
            )
    # Slurm signals the job grace_s before its end. A job that is shorter than that, or hardly
    # longer, would be signalled at its start, save and be queued again, forever.
    if parse_time(str(cluster.time)) <= 2 * cluster.grace_s:
        yield (
            f"cluster.time={cluster.time}: must be more than twice cluster.grace_s="
            f"{cluster.grace_s} seconds, because the job saves, stops and is queued again that "
            "long before its end"
        )


def parse_time(time: str) -> float:
    """The seconds of a time limit of Slurm, such as 30, 12:00:00 or 1-12."""
    match = TIME.fullmatch(time)
    # Slurm knows words too, such as UNLIMITED, and rejects others itself.
    if match is None:
        return math.inf
    days, first, second, third = map(int, match.groups("0"))
    # One or two numbers are minutes and seconds. After days they are hours and minutes.
    if (match[1], match[4]) == (None, None):
        return 60 * first + second
    return 86400 * days + 3600 * first + 60 * second + third


def check_secrets(cfg: DictConfig, manifests: Sequence[Manifest]) -> Iterator[str]:
    """No secret stands in plain text, neither in the configuration nor in files of k8s/."""
    in_config = list(find_secrets(cfg))
    yield from in_config
    # A secret of the configuration is in the manifests as well: one message about it is enough.
    if in_config:
        return
    for manifest in manifests:
        yield from find_secrets_in_manifest(manifest)


def find_secrets(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys of ``cfg`` with a secret in plain text, before interpolation.

    A value is also a secret if its key says so, such as ``api_key``.
    """
    for path in find_paths_of_secrets(OmegaConf.to_container(cfg), NAMES_ONLY, has_own_keys=True):
        yield f"{path}: {SECRET_RULE}"


def find_secrets_in_manifest(manifest: Manifest) -> Iterator[str]:
    """Yield the places of a manifest with a secret in plain text."""
    # Its keys are those of Kubernetes, and do not tell: tolerations have a key.
    for path in find_paths_of_secrets(manifest, (), has_own_keys=False):
        yield f"{manifest.get('kind', 'manifest')}: {path}: {SECRET_RULE}"


def find_paths_of_secrets(
    tree: Any, skipped: tuple[str, ...], *, has_own_keys: bool
) -> Iterator[str]:
    """Yield the path of each secret in ``tree``.

    Args:
        tree: of plain containers.
        skipped: how the paths begin that are not inspected.
        has_own_keys: whether the keys of ``tree`` are ours or the user's, and so name the values.
    """
    for path, node in walk(tree):
        if path.startswith(skipped):
            continue
        name = ""
        if has_own_keys:
            name = path.rpartition(".")[2]
        if is_secret(name, node) or holds_secret(node):
            # A variable of a container is not reported again for its value, which is below it.
            skipped = (*skipped, f"{path}.", f"{path}[")
            yield path


def holds_secret(node: Any) -> bool:
    """Whether ``node`` is a variable of a container, or NAME=VALUE, with a secret as its value."""
    if isinstance(node, dict) and {"name", "value"} <= node.keys():
        return is_secret(str(node["name"]), node["value"])
    if not isinstance(node, str):
        return False
    match = ASSIGNMENT.fullmatch(node)
    # cluster.secret=... is only a name; find_secrets judges the other keys of the configuration.
    if match is None or match[1].startswith("cluster."):
        return False
    return is_secret(match[1].rpartition(".")[2], match[2])


def is_secret(name: str, value: object) -> bool:
    """Whether ``value`` must stay secret, by its own form or because ``name`` says so."""
    if not isinstance(value, str):
        return False
    if looks_secret(value):
        return True
    return is_secret_name(name) and not HARMLESS.match(value)
