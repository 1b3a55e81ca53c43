"""Sending a run to a cluster, and being one node of it."""
