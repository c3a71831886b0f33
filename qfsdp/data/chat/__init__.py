"""Conversations: messages, chat templates, and which characters of a rendered one are trained.

Templates are rendered in a process of their own, within limits of time and length.
`conversations` has the builders of datasets.
"""
