"""Install packages into the environment of this Python: by uv, or else by pip.

python scripts/install.py --require-hashes -r requirements.lock

The arguments are those of ``pip install`` that uv has too. uv takes a fraction of pip's time, but
reads neither its variables nor its files. So it is told which index they name, unless a variable
of uv says something else.
"""

import ast
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

OF_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "no-cache-dir": ("UV_NO_CACHE", " "),
}
"""The variable of uv for each setting of pip, and what separates several values in it."""


def settings_of_uv(configuration: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that uv needs besides ``variables``, from what ``pip config list`` prints."""
    found = {}
    # Sorted as pip does: files for all commands, those for `install`, then variables.
    for section in ("global", "install", ":env:"):
        for line in configuration.splitlines():
            name, _, value = line.partition("=")
            place, _, setting = name.rpartition(".")
            if place == section and setting in OF_UV:
                variable, separator = OF_UV[setting]
                found[variable] = separator.join(ast.literal_eval(value).split())
    paths = ssl.get_default_verify_paths()
    if paths.cafile or paths.capath:
        # pip trusts the certificates of the system too: a company may have one of its own.
        found["UV_SYSTEM_CERTS"] = "1"
    if "UV_INDEX" in found:
        # pip takes a version from any index. Hashes say that it is the right one.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in variables}


def main(arguments: list[str]) -> int:
    """Install, and return the exit code."""
    is_shown = sys.stdout.isatty()
    pip = [sys.executable, "-m", "pip"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True)
    variables = {**os.environ, **settings_of_uv(listed.stdout, os.environ)}
    quiet = [] if is_shown else ["--quiet"]
    if find_spec("uv"):
        if subprocess.run([*uv, *quiet, *arguments], env=variables).returncode == 0:
            return 0
        print("uv has failed; pip tries again, which takes minutes ...", flush=True)
    quiet = [] if is_shown else ["-qq"]
    return subprocess.run([*pip, "install", *quiet, *arguments]).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
