"""From words on the command line to a checked config and running processes.

The bottom package: it imports nothing else of qfsdp. Configs and components (config, convert,
component, messages), recipes and how they start (recipes, launch, ranks, signals, tool_config),
the `qfsdp` command and what it adds to `tune` (command, torchtune), and what all packages share
(errors, sizes).
"""
