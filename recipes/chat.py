"""Talk to a model on the terminal: a base, with or without an adapter, as trained.

    qfsdp chat model.path=meta-llama/Meta-Llama-3-8B-Instruct adapter=runs/x/adapter
    tune run recipes/chat --config configs/chat.yaml adapter=runs/x/adapter

The model sees the whole conversation. Its answer is printed while it is generated.

    /reset          forget the conversation
    /system TEXT    set the system message, and forget the conversation; without TEXT: none
    /help           these lines
    /exit           end; so does Ctrl-D

Ctrl-C stops an answer; what has been printed stays part of the conversation.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from qfsdp.checkpoint.adapter_base import OfAdapter, model_tokenizer, tell_another_base
from qfsdp.checkpoint.saved_template import build_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.common.printable import printable
from qfsdp.config.component import Component
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import check_for_inference, load_for_inference
from qfsdp.evaluation.prompts import prompt_tokens, stop_ids
from qfsdp.evaluation.text_stream import TextStream
from qfsdp.launch.ranks import check_one_process
from qfsdp.launch.start import launch
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.hub_models.refused import check_hub_answers
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.tensor_subclasses.kernels.compiled import check_compile, use_cache_dir

HELP = (__doc__ or "").partition("generated.\n\n")[2].rstrip()


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    tokenizer: Component = field(default_factory=model_tokenizer)  # of the model
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    adapter: str | None = None  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    system_prompt: str | None = None  # `/system` changes it
    compile: bool = False  # compile every decoder layer for new tokens
    compile_cache_dir: str | None = None  # for compiled code; null: PyTorch's choice


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is loaded."""
    check_one_process()
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed; expected a terminal, or lines of text")
    tell_another_base(cfg)
    cfg.tokenizer.check("tokenizer")
    check_compile(cfg.compile, cfg.compile_cache_dir)
    sharding = ShardingConfig("ddp")
    model = check_for_inference(cfg.model, cfg.quantization, cfg.adapter, sharding)
    check_hub_answers(cfg, model.config, "ddp")
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    stop_ids(tokenizer, cfg.model.folder)
    prompt_tokens(tokenizer, "Hello", True, cfg.system_prompt)  # the template takes a system prompt


class Conversation:
    """A model, and what it and the user have said.

    Fields:
        messages: `{"role": ..., "content": ...}` each.
        system: the system message, or None.
    """

    def __init__(self, cfg: Config, model: AnyDecoder, tokenizer: Any, world: World) -> None:
        self._model, self._tokenizer, self._world = model, tokenizer, world
        self._stops, self._sampling = stop_ids(tokenizer, cfg.model.folder), cfg.sampling
        self.system = cfg.system_prompt
        self.messages: list[dict[str, Any]] = []

    def reset(self) -> None:
        self.messages = []

    def answer(self, text: str) -> None:
        """Prints the answer to `text`; both become part of the conversation. Raises UserError, and
        leaves the conversation as it was, if there is no room for an answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = prompt_tokens(self._tokenizer, messages, True, self.system)
        positions = self._model.config.most_positions(len(prompt))
        if len(prompt) >= positions:
            raise UserError(
                f"the conversation has {len(prompt)} tokens; expected less than the model's "
                f"{positions} positions: /reset begins anew"
            )
        room = min(self._sampling.max_new_tokens, positions - len(prompt))
        said = self._print_answer(prompt, replace(self._sampling, max_new_tokens=room))
        self.messages = [*messages, {"role": "assistant", "content": said}]

    def _print_answer(self, prompt: list[int], sampling: SamplingConfig) -> str:
        text, pieces = TextStream(self._tokenizer), []

        def show(new: list[int | None]) -> None:
            waiting.close()
            if new[0] is not None:
                pieces.append(text.push(new[0]))
                print(printable(pieces[-1]), end="", flush=True)

        with ExitStack() as waiting:
            waiting.enter_context(long_wait(f"reading {len(prompt)} tokens"))
            try:
                generate(self._model, [prompt], sampling, self._stops, self._world, show)
                pieces.append(text.end())
                print(printable(pieces[-1]), flush=True)
            except KeyboardInterrupt:
                if not pieces:
                    raise UserError("[stopped before the answer began]") from None
                print(" [stopped]", flush=True)
        return "".join(pieces)


def command(conversation: Conversation, line: str) -> bool:
    """Obeys a line that begins with "/"; returns whether the conversation goes on."""
    name, _, rest = line.partition(" ")
    if name == "/exit":
        return False
    if name in ("/reset", "/system"):
        conversation.reset()
        if name == "/system":
            conversation.system = rest.strip() or None
        print("The conversation begins anew.", flush=True)
    elif name == "/help":
        print(HELP, flush=True)
    else:
        print(f"{name}: no such command; /help lists them", flush=True)
    return True


def talk(conversation: Conversation) -> None:
    """Reads lines and answers them until the user ends it."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  input() then has line editing and a history
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends", flush=True)
            continue
        try:
            if line.startswith("/"):
                if not command(conversation, line):
                    return
            elif line:
                conversation.answer(line)
        except UserError as error:
            print(printable(str(error)), flush=True)


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world()
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile)
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    sharding = ShardingConfig("ddp")
    run.model = model = load_for_inference(
        cfg.model, cfg.quantization, cfg.adapter, sharding, world
    )
    if cfg.compile:
        model.compile_layers()
    print(f"{cfg.adapter or cfg.model.path}; /help lists commands, Ctrl-D ends", file=sys.stderr)
    talk(Conversation(cfg, model, tokenizer, world))


if __name__ == "__main__":
    launch(__file__, Config, check, main, one_process=True)
