"""Causal language models of transformers, trained as our own decoder is.

`families` builds some architectures natively; every other one comes from transformers. `HubDecoder`
gives its module the interface of `Decoder`, so recipes, sharding, loading and checkpoints see one
thing. `config.py` says which implementation a model folder gets.
"""
