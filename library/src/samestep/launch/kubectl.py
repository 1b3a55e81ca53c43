"""Call kubectl, and find the objects of a run with it."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import render
from samestep.launch.explain import explain, explain_error, has_no_answer, has_no_login
from samestep.launch.render import Manifest

HANGS_S = 60  # seconds after its own limit in which kubectl must end; it retries several times
RUNS = ("Job", "JobSet", "PyTorchJob", "TrainJob", "ElasticJob")
"""Kinds of the owner object of a run: it ends when the run ends."""
IDENTITY = "samestep/"
"""How the labels begin that say whose an object is; k8s/labels.yaml has them."""
OUTCOMES = {"Complete": True, "Completed": True, "Succeeded": True, "Failed": False}
"""Conditions that end a run, and whether the run succeeded."""


class NoAnswerError(RunError):
    """No cluster was asked: there is no kubectl, it knows no cluster, or that does not answer."""


class LoginError(RunError):
    """The context of kubectl does not exist, or its login is not valid."""


class AlreadyExistsError(RunError):
    """An object was not created because there is one of its kind and name."""


class QuotaError(RunError):
    """A quota of the namespace is used up."""


def build_command(cfg: DictConfig, *arguments: str) -> list[str]:
    """Build a command of kubectl, in the configured namespace if there is one."""
    command = ["kubectl", *arguments]
    if cfg.cluster.namespace:
        command[1:1] = ["-n", cfg.cluster.namespace]
    return command


def call(
    cfg: DictConfig,
    *arguments: str,
    manifests: Sequence[Manifest] = (),
    timeout_s: float = 30,
    shows_warnings: bool = False,
) -> str:
    """Run kubectl, with the manifests as its input, and return what it prints.

    Raises:
        RunError: if kubectl fails: one sentence with the cause and the remedy.
    """
    command = build_command(cfg, *arguments, f"--request-timeout={timeout_s:g}s")
    try:
        result = subprocess.run(
            command,
            input=render.text(manifests),
            capture_output=True,
            text=True,
            check=False,
            # The limit of a request does not end a kubectl that asks for a password.
            timeout=timeout_s + HANGS_S,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"kubectl {arguments[0]}: no answer in {timeout_s + HANGS_S:.0f} seconds; check "
            "whether kubectl waits for a login, and try again"
        ) from None
    except FileNotFoundError:
        raise NoAnswerError(
            "kubectl: no such command on this machine; install it from "
            "https://kubernetes.io/docs/tasks/tools"
        ) from None
    if result.returncode:
        raise build_error(result.stderr)
    if shows_warnings:
        # Warnings of the server about fields that it ignores; it repeats them for each object.
        for line in dict.fromkeys(result.stderr.splitlines()):
            print(line, file=sys.stderr)
    return result.stdout


def build_error(stderr: str) -> RunError:
    """Build the error for a call of kubectl that has failed."""
    text = explain_error(stderr)
    for is_cause, kind in ERRORS.items():
        if is_cause(stderr):
            return kind(text)
    return RunError(text)


def exceeds_quota(stderr: str) -> bool:
    """Whether the namespace has no room for what was to be created."""
    return "exceeded quota" in stderr


def exists_already(stderr: str) -> bool:
    """Whether nothing else was wrong than that all of it is there already."""
    errors = [line for line in stderr.splitlines() if line.startswith("Error ")]
    return bool(errors) and all("(AlreadyExists)" in line for line in errors)


ERRORS: dict[Callable[[str], bool], type[RunError]] = {
    has_no_answer: NoAnswerError,
    has_no_login: LoginError,
    exceeds_quota: QuotaError,
    exists_already: AlreadyExistsError,
}
"""By what kubectl has printed; the first one that fits counts."""


def create(cfg: DictConfig, manifests: Sequence[Manifest]) -> str:
    """Create the objects of the manifests, and return what kubectl prints."""
    # Not `apply`, which would change an object that another user has created a moment before.
    # kubectl notes what it was given, so that the next submit can tell whether it is the same.
    options = ("--save-config", "--validate=strict", "--filename=-")
    return call(cfg, "create", *options, manifests=manifests)


def get(cfg: DictConfig, *arguments: str, manifests: Sequence[Manifest] = ()) -> Manifest:
    """Get an object or a list of objects; empty if there is none."""
    # Without --ignore-not-found a missing object could not be told from a cluster that is away.
    options = ("--output=json", "--ignore-not-found")
    answer = call(cfg, "get", *arguments, *options, manifests=manifests)
    found: Manifest = {}
    if answer.strip():
        found = json.loads(answer)
    return found


def find_identity(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Find the labels that every object of the run has, and no other object."""
    return read_identity(find_owner(manifests))


def read_identity(manifest: Manifest) -> dict[str, str]:
    """Read the labels of an object that only samestep writes."""
    labels = manifest.get("metadata", {}).get("labels", {})
    return {key: value for key, value in labels.items() if key.startswith(IDENTITY)}


def select(manifests: Sequence[Manifest]) -> str:
    """The option that selects the objects of the run."""
    pairs = [f"{key}={value}" for key, value in find_identity(manifests).items()]
    return f"--selector={','.join(pairs)}"


def has_identity(found: Manifest, manifests: Sequence[Manifest]) -> bool:
    """Whether an object in the cluster is the run's, and not only of the same name."""
    labels: dict[str, str] = found["metadata"].get("labels", {})
    return find_identity(manifests).items() <= labels.items()


def get_run(cfg: DictConfig, manifests: Sequence[Manifest]) -> Manifest:
    """Get the owner object of the run; empty if the run is not in the cluster."""
    run = get(cfg, build_resource_name(find_owner(manifests)))
    if run and has_identity(run, manifests):
        return run
    return {}


def get_pods(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Get the pods of the run, sorted by name."""
    pods: list[Manifest] = get(cfg, "pods", select(manifests)).get("items", [])
    return sorted(pods, key=lambda pod: pod["metadata"]["name"])


def find_existing(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the objects in the cluster with the kinds and names of the manifests, whoever's."""
    if not manifests:
        return []
    found = get(cfg, "--filename=-", manifests=manifests)
    if not found:
        return []
    # Of several objects kubectl makes a list, of a single one not.
    if found["kind"] == "List":
        return list(found["items"])
    return [found]


def find_phases(pods: Sequence[Manifest]) -> set[str]:
    """The phases in which the pods are, such as Pending; a new pod may have none yet."""
    return {pod.get("status", {}).get("phase", "") for pod in pods}


def is_training_pod(cfg: DictConfig, pod: Manifest) -> bool:
    """Whether the pod is a node of the run, and not a pod that the nodes need, such as etcd."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    return cfg.cluster.container in names


def find_owner(manifests: Sequence[Manifest]) -> Manifest:
    """Find the manifest of the owner object, which ends when the run ends."""
    for manifest in manifests:
        if manifest["kind"] in RUNS:
            return manifest
    raise AssertionError("a file of k8s/ for runs has an object of RUNS")


def build_kind(manifest: Manifest) -> str:
    """Build the name of a manifest's kind for kubectl: ``job.v1.batch``."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind = str(manifest["kind"]).lower()
    # Another operator may have a kind of this name, so the name says the group too. The core
    # group has no name, and kubectl takes no version without a group.
    if group:
        kind = f"{kind}.{version}.{group}"
    return kind


def build_kinds(manifests: Sequence[Manifest]) -> str:
    """Build the names of the kinds of manifests, each once."""
    return ",".join(dict.fromkeys(map(build_kind, manifests)))


def build_resource_name(manifest: Manifest) -> str:
    """Build the resource name of a manifest's object for kubectl: ``job.v1.batch/mine``."""
    return f"{build_kind(manifest)}/{manifest['metadata']['name']}"


def find_condition(run: Manifest) -> Manifest:
    """Find the condition that ended the run, otherwise its newest one; empty if it has none."""
    newest: Manifest = {}
    for condition in run.get("status", {}).get("conditions", ()):
        # The first condition that ends the run counts. Later ones tell of its cleaning up.
        if newest.get("type") in OUTCOMES:
            break
        if condition["status"] == "True":
            newest = condition
    return newest


def find_outcome(run: Manifest) -> bool | None:
    """Whether the run succeeded; None if it has not ended, or does not exist."""
    return OUTCOMES.get(find_condition(run).get("type", ""))


def get_warnings(cfg: DictConfig, run: Manifest) -> list[Manifest]:
    """Get the warnings since the run was submitted, the oldest first; none if we may not."""
    try:
        found = get(cfg, "events", "--field-selector=type=Warning")
    except RunError:
        return []
    created = run["metadata"]["creationTimestamp"]
    # Events stay for an hour, so some may be about an earlier run of this name.
    warnings = [event for event in found.get("items", ()) if get_event_time(event) >= created]
    return sorted(warnings, key=get_event_time)


def get_event_time(event: Manifest) -> str:
    """Get the time of an event in whole seconds, as timestamps of objects are written."""
    # Which of these fields has the time depends on the library that the controller uses.
    series = event.get("series") or {}
    times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"))
    for time in times:
        if time:
            # Some have microseconds. Without them texts can be compared.
            return f"{time[:19]}Z"
    return ""


def build_missing_error(cfg: DictConfig) -> RunError:
    """Build the error for a run that is not in the cluster."""
    reject_missing_namespace(cfg)
    where = ""
    if cfg.cluster.namespace:
        where = f" in namespace {cfg.cluster.namespace}"
    return RunError(
        f"{cfg.run_id}: there is no such run{where}; it was not submitted, was cancelled, or ended "
        "longer ago than its cluster.ttl_s"
    )


def reject_missing_namespace(cfg: DictConfig) -> None:
    """Raise a RunError if the namespace does not exist: nothing is found in it then."""
    name = cfg.cluster.namespace
    if name and is_missing(cfg, "namespaces", name):
        raise RunError(explain(f'namespaces "{name}" not found'))


def is_missing(cfg: DictConfig, *name: str) -> bool:
    """Whether an object does not exist; False if the user may not read objects of its kind."""
    return bool(why_missing(cfg, *name))


def why_missing(cfg: DictConfig, kind: str, name: str) -> str:
    """Say why there is no such object; an empty text if there is one, or the user may not look."""
    try:
        if get(cfg, kind, name):
            return ""
    except RunError as error:
        # Without its controller the cluster does not know the kind.
        if "does not know" in str(error):
            return str(error).partition(":")[0]
        return ""
    return "there is no such object"
