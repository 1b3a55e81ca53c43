"""The hooks of pytest, from here for all tests of the tree: tests/hooks.py."""

from tests.hooks import *  # noqa: F403
