# Everything runs in .venv. It is installed once, with the versions of requirements.lock, and brought up to date when that file
# or pyproject.toml changes.

PYTHON ?= python3
ARGS ?=
PACKAGES = PYTHON=.venv/bin/python sh scripts/packages.sh

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

lock: .venv/place.stamp ## write requirements.lock after a change in pyproject.toml, or ARGS=--upgrade
	$(PACKAGES) lock $(ARGS)

# The stamp holds the path of this folder: a .venv that was copied or moved still points at its old
# place, so it is installed again.
ifneq ($(shell test -x .venv/bin/python && cat .venv/place.stamp 2>/dev/null),$(CURDIR))
.PHONY: .venv/place.stamp
endif

.venv/place.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || \
	{ echo 'Needs Python 3.11 to 3.14, and $(PYTHON) is not: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv
	@echo '$(CURDIR)' > $@

.venv/train.stamp .venv/dev.stamp: .venv/place.stamp pyproject.toml requirements.lock $(wildcard vendor/*.whl)

# The stamps go before an installation and come back after it: one that was interrupted starts over, in a new .venv.
define INSTALL
@echo 'Installing into .venv: at first 1 to 4 minutes, 6 GB ...'
@rm -f .venv/*.stamp
@$(PACKAGES) sync
endef

.venv/train.stamp:
	$(INSTALL)
	@$(PACKAGES) own
	@echo '$(CURDIR)' | tee .venv/place.stamp > $@

.venv/dev.stamp:
	$(INSTALL) --extra dev
	@$(PACKAGES) own
	@echo '$(CURDIR)' | tee .venv/place.stamp .venv/train.stamp > $@
