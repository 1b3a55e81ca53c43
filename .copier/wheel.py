"""Write the library of the template as a wheel. Copier calls this in the copy's folder.

python wheel.py LIBRARY vendor

The standard library alone does it, so that no build tool is downloaded. Equal sources give equal
bytes on any machine, so that `copier update` finds no change where there is none: the files are not
compressed, because versions of zlib differ. git compresses them.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit("Copier runs on a Python before 3.11: uvx --python 3.12 copier ...")


def metadata(project: dict) -> str:
    """METADATA of a wheel: its name, and what it needs."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {need}" for need in project["dependencies"]),
    ]
    for extra, needs in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {need}; extra == '{extra}'" for need in needs]
    return "\n".join(lines) + "\n"


def main(library: Path, folder: Path) -> None:
    """Write the wheel into the folder."""
    project = tomllib.loads((library / "pyproject.toml").read_text("utf-8"))["project"]
    stem = f"{project['name']}-{project['version']}"
    scripts = [f"{name} = {place}" for name, place in project["scripts"].items()]
    wheel = [
        "Wheel-Version: 1.0",
        "Generator: wheel.py",
        "Root-Is-Purelib: true",
        "Tag: py3-none-any",
    ]
    files = {
        path.relative_to(library / "src").as_posix(): path.read_bytes()
        for path in sorted((library / "src").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"{stem}.dist-info"
    files[f"{info}/METADATA"] = metadata(project).encode()
    files[f"{info}/WHEEL"] = ("\n".join(wheel) + "\n").encode()
    files[f"{info}/entry_points.txt"] = "\n".join(["[console_scripts]", *scripts, ""]).encode()
    files[f"{info}/licenses/LICENSE"] = (library / "LICENSE").read_bytes()
    record = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980, like all of them
            entry.external_attr = 0o644 << 16
            file.writestr(entry, content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
