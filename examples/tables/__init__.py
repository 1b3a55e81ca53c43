"""Images of any number, read from Lance tables or Hugging Face datasets: README.md.

Read in this order: ``datamodule`` (from tables to batches), ``convert`` (the command that writes
tables) and ``writer`` (how it writes and verifies them).
"""
