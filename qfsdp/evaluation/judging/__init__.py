"""Judges answers with a model behind an OpenAI-compatible endpoint: `recipes/judge`.

`verdicts` has the judge's prompts and reads its answers, `exchanges` asks endpoints and keeps what
they say, `questions` reads MT-bench's files.
"""
