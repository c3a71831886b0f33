"""What is read from and written to disk: model folders, adapters and the checkpoints of a run.

`resume.py` saves and finds checkpoints, `state.py` holds what is in them, and `compatibility.py`
the settings that a resumed run must share. `adapter_files.py` reads and writes adapters in PEFT's
format, `adapter_start.py` and `loftq.py` set their start. Base weights are in `weights/`.
"""
