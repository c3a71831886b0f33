"""What every other package uses and what knows nothing of models, data or configs.

Errors of a user and how a process ends after one, the terminal and what a run says there, sizes and
durations as text, and files that are written whole. Imports no other package of qfsdp.
"""
