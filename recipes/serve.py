"""Serve a base model, and adapters over it, with OpenAI's HTTP API.

    qfsdp serve model.path=meta-llama/Meta-Llama-3-8B-Instruct adapters.mine=runs/x/adapter
    tune run recipes/serve --config configs/serve.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B-Instruct adapters.mine=runs/x/adapter

`/v1/models`, `/v1/chat/completions` and `/v1/completions`, with streaming. The base is in memory
once, quantized as in training; the adapters are not merged. A request chooses the base or an
adapter by `model`. Requests are answered together and may join at any token.

The server listens on 127.0.0.1 unless `host` says otherwise. It runs in one process, on one
accelerator or the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qfsdp.checkpoint.adapter_base import OfAdapter, model_tokenizer, tell_another_base
from qfsdp.checkpoint.saved_template import build_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField
from qfsdp.common.sizes import format_size
from qfsdp.common.terminal import say
from qfsdp.config.component import Component
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import init_world
from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.evaluation.inference_model import check_for_inference, load_adapters_of_one_base
from qfsdp.evaluation.prompts import stop_ids
from qfsdp.evaluation.serving.engine import Engine, Model
from qfsdp.evaluation.serving.served import LimitsConfig, Served, is_loopback
from qfsdp.evaluation.serving.server import check_packages, open_socket, run_server
from qfsdp.launch.ranks import check_one_process
from qfsdp.launch.start import launch
from qfsdp.modules.compute_dtype import compute_dtype
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.hub_models.refused import check_hub_answers
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.tensor_subclasses.kernels.compiled import check_compile, use_cache_dir


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    tokenizer: Component = field(default_factory=model_tokenizer)  # of the model
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    # where requests say nothing; without a seed, each answer to the same request is another
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(seed=None))
    adapters: dict[str, str] = field(default_factory=dict)  # name -> a folder in PEFT's format
    model_name: str | None = None  # of the base, for requests; null: the folder's name
    host: str = "127.0.0.1"  # 0.0.0.0: all addresses of this machine
    port: int = 8000  # 0: any free one
    api_key: str | None = None  # that clients must send; null: none
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    compile: bool = False  # compile every decoder layer for new tokens
    compile_cache_dir: str | None = None  # for compiled code; null: PyTorch's choice

    def check(self) -> None:
        if not 0 <= self.port < 65536:
            raise InvalidField("port", self.port, "a number from 0 to 65535")
        if self.api_key == "":
            raise InvalidField("api_key", self.api_key, "a key, or null for none")
        if self.base_name in self.adapters:
            raise InvalidField("model_name", self.base_name, "another name than the adapters'")

    @property
    def base_name(self) -> str:
        return self.model_name or Path(self.model.path).name


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is loaded."""
    check_packages()
    check_one_process()
    tell_another_base(cfg)
    cfg.tokenizer.check("tokenizer")
    check_compile(cfg.compile, cfg.compile_cache_dir)
    for adapter in (None, *cfg.adapters.values()):
        model = check_for_inference(cfg.model, cfg.quantization, adapter, ShardingConfig("ddp"))
        check_hub_answers(cfg, model.config, "ddp")
        stop_ids(build_tokenizer(cfg.tokenizer, adapter), cfg.model.folder)
    open_socket(cfg.host, cfg.port).close()


def tell_cache(cfg: Config, model: AnyConfig) -> None:
    """Says how much memory keys and values may take beside the weights; of a model of transformers
    it is not known before."""
    most = min(cfg.limits.prompt_tokens + cfg.limits.new_tokens, model.max_position_embeddings)
    if isinstance(model, HubConfig):
        return
    of_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    size = cfg.limits.running * most * of_token * compute_dtype(cfg.model.dtype).itemsize
    requests = f"{cfg.limits.running} requests of {most} tokens"
    say(f"cache: at most {format_size(size)} for {requests} (limits)")


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    listening = open_socket(cfg.host, cfg.port)
    world = init_world()
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile)
    decoders = load_adapters_of_one_base(
        cfg.model, cfg.quantization, cfg.base_name, cfg.adapters, world
    )
    run.model = base = decoders[cfg.base_name]
    models = {}
    for name, decoder in decoders.items():
        tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapters.get(name))
        models[name] = Model(decoder, tokenizer, stop_ids(tokenizer, cfg.model.folder))
        if cfg.compile:
            decoder.compile_layers()
    limits = cfg.limits
    engine = Engine(models, world.device, limits.running)
    served = Served(engine, models, cfg.sampling, limits, cfg.api_key, cfg.host)
    tell_cache(cfg, base.config)
    host, port = listening.getsockname()[:2]
    if not is_loopback(host) and cfg.api_key is None:
        say(f"host: {host} without api_key: whoever reaches this machine may ask")
    say(f"serving {', '.join(models)} at http://{host}:{port}/v1 (Ctrl-C ends)")
    run_server(served, listening)


if __name__ == "__main__":
    launch(__file__, Config, check, main, one_process=True)
