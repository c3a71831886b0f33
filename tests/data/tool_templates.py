"""Chat templates with tools, in the style of well-known models, and conversations for them."""

from __future__ import annotations

from typing import Any

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Qwen 2.5 and Hermes: results of several calls share one user turn."""

LLAMA31 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- set seen = namespace(tools=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' and tools is not none and not seen.tools %}
        {%- set seen.tools = true %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
        {{- message['content'] | trim + "<|eot_id|>" }}
    {%- elif not (message.role == 'ipython' or message.role == 'tool' or
                  'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Llama 3.1: tools stand in the first user message, results have the role ipython."""

TEXT_ARGUMENTS = (
    "{% for t in tools or [] %}{{ t.function.name + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""DeepSeek: arguments are put together with text, so they must be JSON text."""

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Marks what is trained, for transformers."""


def tool(name: str, **parameters: str) -> dict[str, Any]:
    """The JSON schema of a function whose parameters are texts."""
    properties = {key: {"type": "string", "description": d} for key, d in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    function = {"name": name, "description": f"The {name}.", "parameters": schema}
    return {"type": "function", "function": function}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form, with arguments as an object."""
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [tool("weather", city="Name of a city"), tool("time", zone="A time zone")]
CALLS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather in Łódź?"},
    {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Łódź")]},
    {"role": "tool", "tool_call_id": "1", "name": "weather", "content": '{"celsius": 18}'},
    {"role": "assistant", "content": "It is 18."},
    {"role": "user", "content": "And the time?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("time", zone="CET")]},
    {"role": "tool", "tool_call_id": "1", "name": "time", "content": "12:30"},
    {"role": "assistant", "content": "It is 12:30."},
]
PARALLEL = [
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("weather", city="Rome"), call("time", zone="CET")],
    },
    {"role": "tool", "name": "weather", "content": "20"},
    {"role": "tool", "name": "time", "content": "12:30"},
    {"role": "assistant", "content": "20, 12:30."},
]
