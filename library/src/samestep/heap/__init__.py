"""The objects of a program: what they hold, and how a later process gives it back to them."""
