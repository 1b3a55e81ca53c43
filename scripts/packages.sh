#!/bin/sh
# Installs what pyproject.toml asks for, with the versions and hashes of requirements.lock, or writes that file.
# PYTHON is the interpreter of the environment:
#
#   PYTHON=.venv/bin/python sh scripts/packages.sh sync [--extra dev ...]     # packages of others, and no further ones
#   PYTHON=.venv/bin/python sh scripts/packages.sh own                        # samestep and this project, which have no hash
#   PYTHON=.venv/bin/python sh scripts/packages.sh lock [--upgrade ...]
set -eu
command=$1
shift

# pip fetches uv, and setuptools for the one package that comes as source only. Hashes protect both.
sed -n '/^setuptools==/,/# via/p; /^uv==/,/# via/p' requirements.lock |
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --require-hashes -r /dev/stdin

# uv reads neither pip's files nor its variables. It gets those that name an index, unless a variable
# of its own says something else. The first line counts: variables, then files for `install`, then others.
eval "$("$PYTHON" -m pip config list | sed 's/^global/later/' | sort | sed -nE '
    s/\\n/ /g
    s/^(:env:|install|later)\.//
    s/^index-url=/UV_DEFAULT_INDEX=/
    s/^extra-index-url=/UV_INDEX=/
    s/^trusted-host=/UV_INSECURE_HOST=/
    s/^cert=/SSL_CERT_FILE=/
    s/^(default-)?timeout=/UV_HTTP_TIMEOUT=/
    s/^no-cache-dir=/UV_NO_CACHE=/
    /^find-links=/ { s/ +/,/g; s/^find-links=/UV_FIND_LINKS=/; }
    s/^((UV|SSL)_[A-Z_]+)=(.*)/export \1; : ${\1:=\3}/p')"
# pip takes a version from any index. Hashes say that it is the right one.
export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
# pip trusts the certificates of the system too: a company may have one of its own.
if "$PYTHON" -c 'import ssl; p = ssl.get_default_verify_paths(); exit(not (p.cafile or p.capath))'; then
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
fi

case $command in
sync)
    wanted=$(mktemp)
    trap 'rm -f "$wanted"' EXIT
    # First what this machine needs of the lock, then that, with a hash for each package.
    "$PYTHON" -m uv pip compile pyproject.toml --group build "$@" --python "$PYTHON" --constraint requirements.lock \
        --no-emit-package samestep --no-build-isolation --no-header --no-annotate --quiet > "$wanted" &&
    "$PYTHON" -m uv pip sync "$wanted" --python "$PYTHON" --constraint requirements.lock --require-hashes --no-build-isolation || {
        echo 'The installation has failed. After a change in pyproject.toml, `make lock` is next.' >&2
        exit 1
    } ;;
own)
    "$PYTHON" -m uv pip install --python "$PYTHON" --no-deps --no-build-isolation --requirements pyproject.toml --editable . ;;
lock)
    "$PYTHON" -m uv pip compile pyproject.toml --group build --all-extras --python "$PYTHON" --universal --python-version 3.11 \
        --fork-strategy fewest --generate-hashes --no-emit-index-url --no-emit-package samestep --annotation-style line \
        --custom-compile-command 'make lock' --quiet --output-file requirements.lock "$@" ;;
esac
