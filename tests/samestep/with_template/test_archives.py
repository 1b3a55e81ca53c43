"""Archives that were made to write where they should not."""

import io
import tarfile
from pathlib import Path

import pytest

from project.data.download import DataError
from project.data.sources import CIFAR10
from tests import mirror


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("attack", ["parent", "absolute", "symlink", "hardlink"])
def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path, attack: str):
    served, root, outside = (tmp_path / name for name in ("served", "data", "outside"))
    for folder in (served, outside):
        folder.mkdir()
    (outside / "victim").write_bytes(b"mine")
    cifar10 = mirror.cifar10(served)
    (name,) = cifar10.archives
    up = "../" * 4 + "outside"  # of data/cifar10/.download-*/extracted
    attacks = {
        "parent": [member(f"{up}/evil")],
        "absolute": [member(f"{outside}/evil")],
        "symlink": [member("link", tarfile.SYMTYPE, str(outside)), member("link/evil")],
        "hardlink": [member("link", tarfile.LNKTYPE, f"{up}/victim"), member("link")],
    }
    with tarfile.open(served / name) as whole, tarfile.open(served / "evil", "w:gz") as evil:
        for info in attacks[attack]:
            info.size = 4 if info.type == tarfile.REGTYPE else 0
            evil.addfile(info, io.BytesIO(b"evil"))
        for info in whole:
            evil.addfile(info, whole.extractfile(info))
    (served / "evil").replace(served / name)
    archives = {name: mirror.md5((served / name).read_bytes())}  # as if the list were forged too

    source = CIFAR10(url="", archives=archives, files=cifar10.files)
    with mirror.serve(served) as server:
        if attack == "absolute":  # becomes a path below the folder
            source.prepare(root, download=True, mirror=server.url)
        else:
            with pytest.raises(DataError, match=f"{name} cannot be extracted: [^\n]+$"):
                source.prepare(root, download=True, mirror=server.url)
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert (outside / "victim").read_bytes() == b"mine"
    found = {path.name for path in tmp_path.rglob("evil*")} | {p.name for p in root.rglob("link")}
    assert found == set()
