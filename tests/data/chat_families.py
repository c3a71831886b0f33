"""Chat templates in the forms of well-known families, with marks around what is to be trained.

Each is written for these tests, after what the family's text looks like. `{% generation %}` marks
an answer with the token that ends it; `unmarked` takes the marks away.
"""

from __future__ import annotations

import re

G, E = "{% generation %}", "{% endgeneration %}"


def unmarked(template: str) -> str:
    """The template as most models have it."""
    return re.sub(r"{%-? (end)?generation -?%}", "", template)


def simple(
    user: str, answer: str, prompt: str, other: str | None = None, start: str = "", end: str = ""
) -> str:
    """A template that writes messages one after the other.

    Args:
        user, answer, other: what it writes of a user's, the assistant's and any other message.
        prompt: the header of an answer that is asked for.
        start, end: what stands before and after all messages; `end` without `prompt` only.
    """
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'user' %}}{user}"
        f"{{% elif m.role == 'assistant' %}}{answer}{{% else %}}{other or user}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% else %}}{end}{{% endif %}}"
    )


CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML_ANSWER = (
    f"{{{{ '<|im_start|>assistant\n' }}}}{G}{{{{ m.content + '<|im_end|>' }}}}{E}{{{{ '\n' }}}}"
)
CHATML_PROMPT = "{{ '<|im_start|>assistant\n' }}"
LLAMA3_TURN = (
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}"
)
HEADERS = "'<|start_header_id|>assistant<|end_header_id|>\n\n'"
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}"  # noqa: E501

QWEN3 = (
    "{% set ns = namespace(last=messages | length) %}"
    "{% for m in messages[::-1] %}{% set at = messages | length - 1 - loop.index0 %}"
    "{% if ns.last == messages | length and m.role == 'user' and "
    "not (m.content.startswith('<tool_response>')) %}{% set ns.last = at %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}" + CHATML_TURN + ""
    "{% elif m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}" + G + ""
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}" + CALLS + "{{ '<|im_end|>' }}" + E + "{{ '\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}" + CHATML_PROMPT + "{% endif %}"
)
_THINKS = "{% if loop.index0 > ns.last %}"
QWEN3_5 = QWEN3.replace(
    G + "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + ",
    _THINKS + "{{ '<think>\n' }}{% endif %}" + G + _THINKS + "{{ ",
).replace("prompt %}" + CHATML_PROMPT, "prompt %}{{ '<|im_start|>assistant\n<think>\n' }}")
R1 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' }}" + G + "{{ content + '<｜end▁of▁sentence｜>' }}" + E + ""
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are a model.<|end|>' }}"
    "{% if messages[0].role in ['developer', 'system'] %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant' }}" + G + ""
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{{ '<|start|>assistant' }}{% endif %}"
    "{{ ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson + '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{{ '<|start|>assistant' }}{% endif %}"
    "{{ '<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}" + E + ""
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions to=assistant<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MISTRAL = (
    SYSTEM_FIRST + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last or (messages | length == loop.index + 1) %}"
    "{{ '[INST] ' + (system + '\n\n' if system else '') + m.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% elif m.role not in ['assistant', 'tool'] %}{{ raise_exception('no such role') }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + {'content': m.content} | tojson }}"
    "{{ '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}" + G + "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}" + E + ""
    "{% else %}" + G + "{{ ' ' + m.content | trim + eos_token }}" + E + "{% endif %}{% endfor %}"
)
LLAMA2 = (
    SYSTEM_FIRST + "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content.strip() + ' [/INST]' }}"
    "{% else %}" + G + "{{ ' ' + m.content.strip() + ' ' + eos_token }}" + E + "{% endif %}"
    "{% endfor %}"
)
_AFTER_AN_ANSWER = "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"


def _begins(token: str) -> str:
    """A message that begins with a token, which ends the answer before it."""
    written = f"{{{{ '{token}' }}}}"
    text = _AFTER_AN_ANSWER + G + written + E + "{% else %}" + written + "{% endif %}"
    return text + "{{ '\n' + m.content }}"


GLM = simple(
    _begins("<|user|>"),
    "{{ '<|assistant|>' }}" + G + "{{ '\n' + m.content }}" + CALLS + E,
    "<|assistant|>",
    "{% if m.role == 'tool' %}" + _begins("<|observation|>")
    + "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}",
    "[gMASK]<sop>",
)  # fmt: skip

FAMILIES = {
    "chatml": simple(CHATML_TURN, CHATML_ANSWER, CHATML_PROMPT),
    "smollm2": simple(
        CHATML_TURN, CHATML_ANSWER, CHATML_PROMPT,
    ).replace(
        "{% if m.role == 'user' %}",
        "{% if loop.first and m.role != 'system' %}"
        "{{ '<|im_start|>system\nYou are SmolLM, b a c hello.<|im_end|>\n' }}{% endif %}"
        "{% if m.role == 'user' %}", 1,
    ),
    "llama2": LLAMA2,
    "llama3": simple(
        LLAMA3_TURN, f"{{{{ {HEADERS} }}}}{G}{{{{ m.content | trim + '<|eot_id|>' }}}}{E}",
        f"{{{{ {HEADERS} }}}}", start="{{ bos_token }}",
    ),
    "mistral": MISTRAL,
    "gemma": simple(
        "{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>model\n' }}" + G + "{{ m.content | trim + '<end_of_turn>' }}" + E
        + "{{ '\n' }}",
        "{{ '<start_of_turn>model\n' }}", "{{ raise_exception('System role not supported') }}",
        "{{ bos_token }}",
    ),
    "gemma3": SYSTEM_FIRST + simple(
        "{{ '<start_of_turn>user\n' + (system + '\n\n' if loop.first and system else '') }}"
        "{{ m.content | trim + '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>model\n' }}" + G + "{{ m.content | trim + '<end_of_turn>' }}" + E
        + "{{ '\n' }}",
        "{{ '<start_of_turn>model\n' }}", "{{ raise_exception('no such role') }}",
        "{{ bos_token }}",
    ),
    "phi3": simple(
        "{{ '<|user|>\n' + m.content + '<|end|>\n' }}",
        "{{ '<|assistant|>\n' }}" + G + "{{ m.content + '<|end|>' }}" + E + "{{ '\n' }}",
        "{{ '<|assistant|>\n' }}", "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}",
        end="{{ eos_token }}",
    ),
    "phi4": simple(
        "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}",
        "{{ '<|im_start|>assistant<|im_sep|>' }}" + G + "{{ m.content + '<|im_end|>' }}" + E,
        "<|im_start|>assistant<|im_sep|>",
    ),
    "glm": GLM,
    "zephyr": (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|user|>\n' + m.content + eos_token + '\n' }}{% elif m.role == 'system' %}"
        "{{ '<|system|>\n' + m.content + eos_token + '\n' }}{% elif m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' }}" + G + "{{ m.content + eos_token }}" + E + "{{ '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "qwen3": QWEN3,
    "qwen3.5": QWEN3_5,
    "r1": R1,
    "gpt-oss": GPT_OSS,
    "granite": simple(
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}",
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}" + G + "{{ m.content or '' }}" + CALLS
        + "{{ '<|end_of_text|>' }}" + E + "{{ '\n' }}",
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
        start="{% if messages[0].role != 'system' %}"
        "{{ '<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n' }}{% endif %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}",
    ),
    "olmo2": simple(
        "{{ '<|user|>\n' + m.content + '\n' }}",
        "{{ '<|assistant|>\n' }}" + G + "{{ m.content + eos_token }}" + E
        + "{% if not loop.last %}{{ '\n' }}{% endif %}",
        "{{ '<|assistant|>\n' }}", "{{ '<|system|>\n' + m.content + '\n' }}", "{{ bos_token }}",
    ),
    "vicuna": SYSTEM_FIRST + simple(
        "{{ 'USER: ' + m.content + ' ' }}",
        "{{ 'ASSISTANT:' }}" + G + "{{ ' ' + m.content + eos_token }}" + E,
        "ASSISTANT:", "{{ raise_exception('no such role') }}", "{{ system + ' ' if system }}",
    ),
    "closed-by-the-next": simple(
        "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        + G + "{{ '<|im_end|>' }}" + E + "{{ '\n' }}{% elif not loop.first %}"
        "{{ '<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content }}",
        "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        + G + "{{ '<|im_end|>' }}" + E + "{{ '\n' }}{% elif not loop.first %}"
        "{{ '<|im_end|>\n' }}{% endif %}{{ '<|im_start|>assistant\n' }}" + G
        + "{{ m.content }}" + E,
        "{{ '<|im_end|>\n<|im_start|>assistant\n' }}",
        end=G + "{{ '<|im_end|>' }}" + E,
    ),
    "by-number": (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + G + "{{ m.content + '<|im_end|>' }}" + E + "{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + CHATML_PROMPT + "{% endif %}"
    ),
    "no-end": simple(
        "{{ '### User: ' + m.content + '\n' }}", "{{ '### Assistant:' }}" + G
        + "{{ ' ' + m.content + '\n' }}" + E, "### Assistant:",
    ),
    "eos-once": simple(
        "{{ '### User: ' + m.content + '\n' }}", "{{ '### Assistant:' }}" + G
        + "{{ ' ' + m.content + ('' if loop.last else '\n') }}" + E, "### Assistant:",
        end=G + "{{ eos_token }}" + E,
    ),
}  # fmt: skip
MACRO = (
    "{% macro write(m) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endmacro %}{% for m in messages %}{{ write(m) }}{% endfor %}"
    "{% if add_generation_prompt %}" + CHATML_PROMPT + "{% endif %}"
)
SPECIALS = [
    "<s>", "</s>", *sorted(
        {token for text in FAMILIES.values() for token in re.findall(r"<[|｜][^<>]+[|｜]>", text)}
        - {"<|' + m.role + '|>"}
        | {"<start_of_turn>", "<end_of_turn>", "<|system|>", "<|observation|>", "[INST]",
           "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[gMASK]", "<sop>"}
    ),
]  # fmt: skip
EOS = {"r1": "<｜end▁of▁sentence｜>", "gpt-oss": "<|return|>", "granite": "<|end_of_text|>"}
