"""Answers requests over HTTP, as OpenAI's API: `qfsdp serve`.

`api` reads requests and writes answers, `requests` checks their fields, `engine` runs the decoder
for all of them together; `AnswerText` turns tokens into text up to a stop string.
"""
