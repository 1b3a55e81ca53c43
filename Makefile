# Everything runs in .venv, which is installed once from the hash-locked files, and again when they
# change. A stamp is written last and removed first, so an install that broke off starts over.

PYTHON ?= python3
ARGS ?=
PIP = .venv/bin/python -m pip install -qq

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train test faults lint format lock

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

train: .venv/train.stamp ## train on handwritten digits, or ARGS="data=mnist trainer.max_epochs=5"
	.venv/bin/python train.py $(ARGS)

test: .venv/dev.stamp ## run all tests, or ARGS="tests/test_make.py -x"
	.venv/bin/python -m pytest -n 2 $(ARGS)

faults: .venv/dev.stamp ## harm runs in every way, and write the table of docs/reliability.md
	.venv/bin/python -m tests.faults.lab $(ARGS)

lint: .venv/dev.stamp ## check style, format and types
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m mypy

format: .venv/dev.stamp ## rewrite the code in the project's style
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

lock: .venv/dev.stamp ## write the lock files after a change in pyproject.toml, or ARGS=--upgrade
	$(PIP) uv
	$(LOCK) --output-file requirements.lock
	$(LOCK) --output-file requirements-dev.lock --all-extras --constraint requirements.lock

LOCK = .venv/bin/python -m uv pip compile pyproject.toml --group build --quiet $(ARGS) --universal \
	--python-version 3.11 --fork-strategy fewest --generate-hashes --no-emit-index-url \
	--annotation-style line --custom-compile-command 'make lock'

# The stamp holds the path it was made for: a copied or moved .venv still points at its old place.
ifneq ($(shell test -x .venv/bin/python && cat .venv/train.stamp 2>/dev/null),$(CURDIR))
.PHONY: .venv/train.stamp
endif

# One package (of Hydra's) comes as source only: what builds it is locked, and installed first.
.venv/train.stamp: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	{ echo 'Needs Python 3.11 to 3.13, and $(PYTHON) is not: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'Installing into .venv, once: 2 to 5 minutes, 6 GB ...'
	@rm -f .venv/*.stamp
	@$(PYTHON) -m venv --clear .venv
	@sed -n '/^setuptools==/,/# via/p' $< | $(PIP) --require-hashes -r /dev/stdin
	@$(PIP) --no-build-isolation --require-hashes -r $<
	@$(PIP) --no-build-isolation --no-deps -e .
	@echo '$(CURDIR)' > $@

.venv/dev.stamp: requirements-dev.lock .venv/train.stamp
	@echo 'Installing the tools of developers into .venv, once ...'
	@rm -f .venv/*.stamp
	@$(PIP) --no-build-isolation --require-hashes -r $<
	@echo '$(CURDIR)' > .venv/train.stamp
	@touch $@
