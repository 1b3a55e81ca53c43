"""Data in an exact order on any number of ranks, and files that are complete or absent."""
