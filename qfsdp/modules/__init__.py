"""The model: a decoder, its quantized and adapted linears, its loss, and what backward keeps.

Modules work on local tensors of one rank and know nothing of files, ranks or training loops:
`qfsdp.distributed` shards them, `qfsdp.checkpoint` loads and saves them. Config sections of a model
(`adapter`, `quantization`, `trainable`, `activation`) are next to the code that they configure.
"""
