# Everything runs in .venv. It is installed once from the lock files, and again when they change.
# A stamp file is removed before an installation and written after it, so that an installation that
# was interrupted starts again from the beginning.

PYTHON ?= python3
ARGS ?=
# Shows its progress on a terminal, and only errors elsewhere.
PIP = .venv/bin/python -m pip install $(if $(MAKE_TERMOUT),,-qq)
# The same by uv, or by pip where there is no uv.
INSTALL = .venv/bin/python scripts/install.py

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train test test-programs test-all lint format lock

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

train: .venv/train.stamp ## train; ARGS="trainer.max_epochs=5" changes the run
	.venv/bin/python train.py $(ARGS)

PYTEST = .venv/bin/python -m pytest --dist worksteal

test: .venv/dev.stamp ## test within one process, in 4 minutes; ARGS=tests/test_layout.py: some
	$(PYTEST) -n 3 -m "not program and not nightly" $(ARGS)

# Five processes for two cores, because many tests wait.
test-programs: .venv/dev.stamp ## test programs: launchers, signals, several ranks
	$(PYTEST) -n 5 -m "program and not nightly" $(ARGS) || [ $$? = 5 ] # a copy may have no such test

test-all: .venv/dev.stamp ## all tests, also of pages, copies, the image and labs
	$(PYTEST) -n 5 $(ARGS)

lint: .venv/dev.stamp ## check style, format and types; change nothing
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m mypy

format: .venv/dev.stamp ## rewrite the code in the project's style
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

lock: .venv/dev.stamp ## write the lock files after a change in pyproject.toml, or ARGS=--upgrade
	$(LOCK) --output-file requirements.lock
	$(LOCK) --output-file requirements-dev.lock --all-extras --constraint requirements.lock

LOCK = .venv/bin/python -m uv pip compile pyproject.toml --group build --quiet $(ARGS) --universal \
	--python-version 3.11 --fork-strategy fewest --generate-hashes --no-emit-index-url --no-emit-package samestep \
	--annotation-style line --custom-compile-command 'make lock'

# The stamp holds the path of this folder: a .venv that was copied or moved still points at its old
# place, so it is installed again.
ifneq ($(shell test -x .venv/bin/python && cat .venv/train.stamp 2>/dev/null),$(CURDIR))
.PHONY: .venv/train.stamp
endif

# pip installs what installs the rest. One package, which Hydra needs, comes as source only. Its build
# tool, setuptools, is locked too and must be there before. A lock names all packages: --no-deps.
.venv/train.stamp: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || \
	{ echo 'Needs Python 3.11 to 3.14, and $(PYTHON) is not: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'Installing into .venv, once: 1 to 4 minutes, 6 GB ...'
	@rm -f .venv/*.stamp
	@$(PYTHON) -m venv --clear .venv
	@sed -n '/^setuptools==/,/# via/p' $< | $(PIP) --require-hashes -r /dev/stdin
	@sed -n '/^uv==/,/# via/p' $< | $(PIP) --only-binary uv --require-hashes -r /dev/stdin 2>/dev/null || \
	echo 'There is no uv for this machine; pip installs the rest, which takes minutes ...'
	@$(INSTALL) --no-build-isolation --no-deps --require-hashes -r $<
	@$(INSTALL) --no-build-isolation --no-deps -r samestep.txt -e .
	@echo '$(CURDIR)' > $@

.venv/dev.stamp: requirements-dev.lock .venv/train.stamp
	@echo 'Installing the development tools into .venv, once ...'
	@rm -f .venv/*.stamp
	@$(INSTALL) --no-build-isolation --no-deps --require-hashes -r $<
	@echo '$(CURDIR)' > .venv/train.stamp
	@touch $@
