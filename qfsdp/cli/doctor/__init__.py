"""`qfsdp doctor`: what works on this machine, in one table.

`checks` has the checks, which run in child processes. `run` starts these, with a time limit, and
makes a row of whatever they do: a crash or a hang is a red row, and the rest goes on. Neither
imports torch before a check needs it, as a broken torch is one of the things to find.
"""
