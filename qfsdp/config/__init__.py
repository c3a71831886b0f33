"""From a YAML file and words on the command line to one checked, typed config.

A recipe's dataclass is the schema. Components are the classes and functions that a config names by
their import path. Keys of other projects are answered with ours, and every key has a reference.
"""
