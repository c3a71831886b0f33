"""A model behind an OpenAI-compatible endpoint judges answers: what `recipes/judge` is made of.

`verdicts` has the judge's prompts and reads its answers, `exchanges` asks endpoints and keeps what
they say, `questions` reads MT-bench's files. `run` compares a finetuned model with its base, judged
by rules and by a model, on this machine alone.
"""
