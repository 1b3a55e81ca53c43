"""A transformer that learns to predict the next character of a text: README.md.

Read in this order: ``text`` (from a file to ids), ``datamodule`` (from ids to batches), ``net``
(the transformer in plain torch), ``module`` (the recipe: loss, metrics, optimizer), ``predictions``
(the text that every run leaves), ``tokens`` and ``convert`` (files of tokens, larger than memory).
"""
