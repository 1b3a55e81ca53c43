"""What proves that a checkpoint is whole: its sidecar, the file ``<name>.ckpt.sha256`` beside it.

Its first line is for ``sha256sum -c last.ckpt.sha256``. Each other line describes one version of
the file as JSON, the newest first:

- the version that is there, or that is just about to replace it: a sidecar is written before its
  checkpoint takes its name, so the older version must stay valid until then;
- the versions before it. ``last-previous.ckpt`` is one of them, and has no sidecar of its own.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from samestep.run.files import read_text, set_aside, sha256_of, write_text

# Of each file: one about to come, the current one, the previous one, and some to spare for
# processes that were killed one after the other, each just before its file took its name.
NUM_VERSIONS = 6
PREVIOUS = "-previous"


class Version(NamedTuple):
    """One version of a checkpoint file."""

    sha256: str
    file: str  # name under which it was saved: its role in the run
    run_id: str | None = None
    global_step: int = 0
    score: float | None = None  # the monitored value; of a best checkpoint only


def path_of(checkpoint: Path) -> Path:
    """Where the sidecar of a checkpoint is."""
    return checkpoint.with_name(f"{role_of(checkpoint)}.sha256")


def role_of(checkpoint: Path) -> str:
    """The name under which a file was saved: ``last-previous.ckpt`` was ``last.ckpt``."""
    return checkpoint.name.replace(f"{PREVIOUS}.ckpt", ".ckpt")


def previous(checkpoint: Path) -> Path:
    """Where the predecessor of a checkpoint is kept."""
    return checkpoint.with_stem(f"{checkpoint.stem}{PREVIOUS}")


def read(checkpoint: Path) -> list[Version]:
    """The known versions of a checkpoint, newest first; none without a sidecar that can be read."""
    try:
        text = read_text(path_of(checkpoint))
    except (OSError, UnicodeDecodeError):
        return []
    return parse(text)


def version_of(checkpoint: Path) -> Version:
    """What the file of a checkpoint that was just saved is, by its sidecar."""
    # A strategy that writes its checkpoints itself leaves no sidecar.
    versions = read(checkpoint) or [Version(sha256_of(checkpoint), checkpoint.name)]
    return versions[0]


def write(checkpoint: Path, version: Version) -> None:
    """Add a version to the sidecar, before the checkpoint takes its name."""
    path = path_of(checkpoint)
    if path.is_dir():
        set_aside(path, "it is a folder")
    write_text(path, format_versions([version, *read(checkpoint)]))


def parse(text: str) -> list[Version]:
    """The versions in the text of a sidecar; lines that are damaged are left out."""
    versions = []
    for line in text.splitlines():
        if line.startswith("# "):
            try:
                versions.append(_version(json.loads(line[2:])))
            except (ValueError, TypeError, KeyError):
                continue
    return versions


def format_versions(versions: list[Version]) -> str:
    """The text of a sidecar: the newest versions, each of them once."""
    kept = list({version.sha256: version for version in reversed(versions)}.values())[::-1]
    lines = [f"{kept[0].sha256}  {kept[0].file}"]
    for version in kept[:NUM_VERSIONS]:
        known = {name: value for name, value in version._asdict().items() if value is not None}
        lines.append(f"# {json.dumps(known)}")
    return "\n".join(lines) + "\n"


def _version(entry: dict[str, Any]) -> Version:
    """The version that JSON describes; a ValueError, TypeError or KeyError if it describes none."""
    version = Version(**{name: entry[name] for name in Version._fields if name in entry})
    if not isinstance(version.sha256, str) or not isinstance(version.global_step, int):
        raise TypeError("a digest is a string, and a step is a whole number")
    return version
