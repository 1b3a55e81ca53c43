"""The library beside other versions of torch, Lightning and Python; see ``__main__``."""
