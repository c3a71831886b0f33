"""Evaluation of a model that is not training.

Loads a base with or without an adapter and measures it: held-out loss, perplexity, exact match by
generated answers, and tasks of lm-eval, with confidence intervals. Generation and prompts are here
too. Training uses `heldout_loss` for its validation. Recipes call these modules; nothing here knows
a recipe.
"""
