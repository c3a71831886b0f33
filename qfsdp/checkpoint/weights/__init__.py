"""Base weights on disk: safetensors folders, plain or quantized.

Reading: `read.py` reads rows, `folder.py` says where each weight is, `load.py` fills a model; the
layouts of quantized weights are `qfsdp_layout.py` and `bnb_layout.py`. Writing: `write.py` writes
files, `convert.py` converts a whole folder, and `quantize.py`, `merge.py`, `expand.py` and
`save.py` are the conversions.
"""
