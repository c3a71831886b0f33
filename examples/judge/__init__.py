"""A finetuned model against its base, judged by rules and by a model, on this machine alone."""
