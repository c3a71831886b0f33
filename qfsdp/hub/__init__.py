"""The Hugging Face hub: what a config names there is downloaded, and results are uploaded.

`huggingface_hub` does the transfers; here are what it fetches for a run, and its errors in one
line each.
"""
