# The image of a run: Python, the locked packages, and this code. It holds no data and no secrets.
#
#   docker build -t project:1 .     # or podman build, buildah bud --layers; Docker before 23 needs DOCKER_BUILDKIT=1
#
# --build-arg REVISION=COMMIT                 runs record it in run.json, as there is no git in the image
# --build-arg EXTRAS="--extra s3"             extras of pyproject.toml; without it those for cluster=elastic and s3:// addresses
# --build-arg BASE_IMAGE=...                  any base with Python 3.11 to 3.14; what Debian 12 or Ubuntu 24.04 lack of it, apt brings
# --secret id=pip.conf,src=pip.conf           names a private package index; the image does not keep the file. With
#   --volume /etc/ssl/certs:/run/certs:ro     (podman, buildah) it may say cert = /run/certs/ca-certificates.crt
ARG BASE_IMAGE=docker.io/library/python:3.11.13-slim-bookworm
FROM ${BASE_IMAGE}

USER root
WORKDIR /workspace
RUN { python3 -m venv /opt/venv && test -s /etc/ssl/certs/ca-certificates.crt; } || \
    { apt-get update && \
      apt-get install --yes --no-install-recommends ca-certificates python3-venv && \
      apt-get clean && rm -rf /var/lib/apt/lists/* && \
      python3 -m venv --clear /opt/venv; } && \
    python3 -c 'import sys; v = sys.version_info; \
      sys.exit(not (3, 11) <= v < (3, 15) and f"BASE_IMAGE has Python {v[0]}.{v[1]}; it must be 3.11 to 3.14")'
ENV PATH=/opt/venv/bin:$PATH

# During the build only: pip and uv keep no cache, and a secret may name another package index.
ARG UV_COMPILE_BYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONFIG_FILE=/run/secrets/pip.conf

# 6 GB, which only a change of these files installs again. EXTRAS are those of pyproject.toml.
COPY requirements.lock pyproject.toml ./
COPY scripts/packages.sh scripts/
COPY library/pyproject.toml library/
ARG EXTRAS="--extra elastic --extra s3"
RUN --mount=type=secret,id=pip.conf \
    PYTHON=/opt/venv/bin/python sh scripts/packages.sh sync $EXTRAS

# Readable for every user, written by none; a new volume takes over the modes of runs and data.
COPY . ./
RUN --mount=type=secret,id=pip.conf \
    PYTHON=/opt/venv/bin/python sh scripts/packages.sh own && \
    chmod -R a+rX . && python -m compileall -q . && install -d -m 1777 runs data

# A user without a name or a home, and a root file system that is read-only.
ENV PYTHONPATH=/workspace/src:/workspace PYTHONUNBUFFERED=1 HOME=/tmp USER=project
USER 1000:1000

ARG REVISION= SOURCE=
ENV PROJECT_REVISION=${REVISION}
LABEL org.opencontainers.image.title="project" \
      org.opencontainers.image.licenses="MIT"
LABEL org.opencontainers.image.description="Image classification with Lightning and Hydra"
LABEL org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}"
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "samestep.launch.entrypoint"]
