"""Model folders: reading, quantizing, writing and converting their weights.

A folder is Hugging Face's: safetensors, config.json and a tokenizer, with plain or 4-bit weights.
The two layouts of 4-bit weights are qfsdp's own and that of bitsandbytes. Every function streams:
a rank holds one weight at a time.
"""
