"""Models and adapters in the formats of other programs.

`gguf_file.py` writes GGUF for llama.cpp, with the metadata of `gguf_metadata.py` and
`gguf_tokenizer.py`; `w4a16.py` writes 4-bit integers for vLLM, and `vllm_adapter.py` checks that
vLLM loads an adapter. Weights come from `checkpoint/weights/merge.py`, some rows at a time.
"""
