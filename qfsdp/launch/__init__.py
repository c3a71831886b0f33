"""Starts the ranks of a recipe, on one machine or several, and ends them.

`start.launch` is the last line of every recipe. torchrun's agent starts and watches the ranks; a
watchdog ends a run that hangs; signals ask it to save and end; a rank whose peers are gone ends
without a traceback.
"""
