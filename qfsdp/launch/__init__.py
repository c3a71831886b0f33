"""Starts the ranks of a recipe, on one machine or several, and ends them.

`start.launch` is the last line of every recipe. torchrun's agent starts the ranks and watches them.
A watchdog ends a run that hangs. Signals ask a run to save and end. A rank that has lost another
one ends without a traceback.
"""
