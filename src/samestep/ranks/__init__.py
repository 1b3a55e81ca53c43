"""The ranks of a run: how they meet, what they must agree on, and how they stop together."""
