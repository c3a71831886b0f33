"""Rows of data files: JSON, JSON lines, CSV, TSV, Parquet and text, as they are written.

`rows` is what datasets call. No reader guesses types, and a fault is named by its file and line.
"""
