"""Data in an exact order on any number of ranks.

Promise: step ``s`` of an epoch sees the same samples on any number of ranks, before and after any
interruption, for every data set that answers ``dataset[ids]``, and with ``split_batches`` for every
map-style DataLoader.

Read in this order: ``sampler`` (which samples each rank sees), ``order`` (of an epoch), ``seeds``
(of random numbers), ``threads`` (that read ahead), ``loader`` (batches), ``torch_loaders``
(DataLoaders of torch), ``loaders`` (all loaders of a stage), ``arrow`` and
``lance`` (rows that need not fit in memory).
"""
