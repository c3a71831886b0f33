"""Small outputs of earlier commits, which today's code must read; `make.py` makes one."""
