"""Run a published Qwen3-MoE or GPT-OSS: prefill, then decoding, with experts over the devices.

    python examples/decode_qwen3_moe.py
    python examples/decode_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --prompt=9707,11,847,829,374
    python examples/decode_qwen3_moe.py --checkpoint=gpt-oss-20b --text="The capital of France is"
    python examples/decode_qwen3_moe.py --checkpoint=Qwen3-30B-A3B-FP8 --quantized=keep
    python examples/decode_qwen3_moe.py --random_weights=30b --batch_size=16 --prompt_length=128

--checkpoint is a directory with config.json and safetensors files in bfloat16, float8 or MXFP4.
Without --checkpoint the model has random weights, in a published or a tiny shape. Prompts may
differ in length. They are token ids, or texts if the directory has tokenizer.json and the
`tokenizers` package is installed. `decoder.py` has the models and the decoding loop, which runs on
the devices as one program.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# XLA reads this flag once, when JAX starts; GPUs ignore it. Flags that the user sets win.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import decoder
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep import QuantizedArray, formats
from jax_ep.bench.floor import memory_bandwidth
from jax_ep.moe.few_tokens import MOST_TOKENS
from jax_ep.moe.params import LOGICAL_AXES

_QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES: dict[str, decoder.Published] = {
    "tiny": _QWEN3
    | _TINY
    | {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4},
    "tiny_gpt_oss": _GPT_OSS
    | _TINY
    | {"intermediate_size": 48, "num_local_experts": 16, "sliding_window": 8},
    # The configuration of Qwen3-30B-A3B.
    "30b": _QWEN3,
    "gpt_oss_20b": _GPT_OSS,
}

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Directory of a Qwen3-MoE or GPT-OSS as published."
)
_RANDOM_WEIGHTS = flags.DEFINE_enum(
    "random_weights",
    "tiny",
    list(SHAPES),
    "Without --checkpoint: the model that random weights have the shape of.",
)
_FORMATS = {"float8": formats.FLOAT8_MATRICES, "mxfp4": formats.MXFP4}
# Hopper GPUs multiply any number of tokens by experts in this format without dequantizing them.
_AS_STORED = formats.Transposed.of(formats.MXFP4)
_QUANTIZED = flags.DEFINE_enum(
    "quantized",
    None,
    ["keep", *_FORMATS],
    "How experts stay in memory. keep: as the files hold them. float8, mxfp4: quantized while they "
    "are loaded. Default: not quantized, which takes two to four times the memory. Hopper GPUs "
    "read mxfp4 as it is stored. A step dequantizes float8 before each matmul, unless "
    "--matmul_dtype is given, or one Hopper GPU decodes up to 16 sequences.",
)
_MATMUL_DTYPE = flags.DEFINE_enum(
    "matmul_dtype",
    None,
    ["float8_e4m3fn"],
    "Dtype that experts multiply; needs experts that --quantized holds as float8. Default: "
    "bfloat16 on GPUs, float32 on CPUs.",
)
_PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "Token ids of a prompt, with commas between; may be given several times."
)
_TEXT = flags.DEFINE_multi_string("text", None, "The text of a prompt; may be given several times.")
_PROMPT_LENGTH = flags.DEFINE_list(
    "prompt_length",
    ["32"],
    "Without --prompt and --text: the numbers of tokens of random prompts, which take turns.",
)
_PADDING = flags.DEFINE_enum(
    "padding", "left", ["left", "right"], "The side on which shorter prompts are padded."
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Sequences, over all devices; prompts are repeated in turns. Default: one for each prompt; 8 "
    "if prompts are random.",
    lower_bound=1,
)
_STEPS = flags.DEFINE_integer(
    "steps", 32, "The most tokens to decode for each sequence.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    0.0,
    "0: take the likeliest token. Above 0: draw a token by its probability.",
    0.0,
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed that tokens are drawn from.")
_STOP_TOKENS = flags.DEFINE_list(
    "stop_tokens", None, "Token ids that end a sequence. Default: those of the checkpoint."
)
_CHUNK = flags.DEFINE_integer(
    "chunk", 512, "Tokens of each prompt that prefill reads at a time.", lower_bound=1
)
_SCAN_LAYERS = flags.DEFINE_bool(
    "scan_layers",
    False,
    "Stack the layers' weights and scan them, a smaller program, instead of unrolling the layers. "
    "A kernel then reads a copy of its layer's weights where XLA cannot give it a slice.",
)
_LOOP = flags.DEFINE_enum(
    "loop",
    "device",
    ["device", "host"],
    "device: decoding is one program. host: Python launches each step.",
)


GREEDY = decoder.Sampling()


class Times(NamedTuple):
    """Seconds of prefill and of decoding, without compilation, and the number of decoding steps."""

    prefill: float
    decoding: float
    steps: int


def generate(
    config: decoder.Config,
    model: decoder.Model,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    sampling: decoder.Sampling = GREEDY,
    chunk: int = 512,
    padding: str = "left",
    loop: str = "device",
) -> tuple[list[list[int]], decoder.State, Times]:
    """Continues prompts of any lengths by up to `steps` tokens each, stop tokens included.

    Generation runs twice: the first run compiles, the second is timed.

    Returns:
        The new tokens of each sequence, the state after the last step, and the times of the second
        run.
    """
    tokens, mask = decoder.padded(prompts, padding)
    batch, length = tokens.shape
    mesh = config.mesh
    spec = PartitionSpec(mesh.axis_names if batch % mesh.size == 0 else None)
    tokens, mask = jax.device_put((tokens, mask), NamedSharding(mesh, spec))
    dtype = model.shared["model.embed_tokens.weight"].dtype
    room = decoder.rounded_up(length, chunk) + steps

    def run() -> tuple[decoder.State, Times]:
        cache = decoder.empty_cache(config, model, batch, room, dtype)
        start = _seconds(cache)
        logits, cache = decoder.prefill(config, model, tokens, mask, cache, chunk)
        state = decoder.begin(config, sampling, logits, cache, steps)
        middle = _seconds(state)
        if loop == "device":
            state = decoder.decode(config, sampling, model, state)
        else:
            for _ in range(steps - 1):
                state, *_ = decoder.step(config, sampling, model, state)
        end = _seconds(state)
        return state, Times(middle - start, end - middle, int(state.done) - 1)

    # The first run compiles the programs.
    run()
    state, times = run()
    found = np.asarray(state.tokens).tolist()
    return [[token for token in row if token != decoder.PADDING] for row in found], state, times


def _seconds(arrays: Any) -> float:
    """Waits until the arrays are computed; returns the time of a clock, in seconds."""
    jax.block_until_ready(arrays)
    return time.perf_counter()


def bytes_of_step(
    config: decoder.Config, model: decoder.Model, state: decoder.State
) -> tuple[float, float]:
    """Decodes one more step and counts the bytes that a device must read in it; donates `state`.

    A device reads its replicated weights, the weights of the experts that some token chose
    (averaged over the devices), and the keys and values of the tokens that are attended to. If the
    step dequantizes experts first, it also reads all experts of the device and writes the results.
    Hopper GPUs multiply by MXFP4 as it is stored; one of them, with up to 16 sequences, by float8.

    Returns:
        The bytes on one device, and the number of experts chosen in a layer, averaged over layers.
    """
    lengths = np.asarray(state.cache.lengths)
    cached = jax.tree.leaves(state.cache.keys)[0]
    split = cached.sharding.shard_shape(cached.shape)[-4] / cached.shape[-4]
    row = 2 * config.num_key_value_heads * config.head_dim * cached.dtype.itemsize
    attended = sum(np.minimum(lengths, window).sum() for window in config.windows) * row * split
    state = state._replace(finished=jnp.zeros_like(state.finished), done=jnp.int32(0))
    _, _, chosen = decoder.step(config, GREEDY, model, state)
    experts = float((np.asarray(chosen) > 0).sum(axis=1).mean())
    layers = model.moe if isinstance(model.moe, list) else [model.moe]
    of_experts, others = 0, bytes_of((model.shared, model.layers))
    on_gpus = jax.default_backend() == "gpu"
    few = on_gpus and config.mesh.size == 1 and len(lengths) <= MOST_TOKENS
    dequantizes = config.moe.matmul_dtype is None and not few
    for params in layers:
        for name, values in params._asdict().items():
            quantized = isinstance(values, QuantizedArray)
            as_stored = quantized and on_gpus and values.format == _AS_STORED
            if quantized and dequantizes and not as_stored:
                # A step reads all experts of a device and writes them dequantized. It then reads
                # the dequantized weights of the chosen experts.
                numbers = math.prod(values.shape) * values.dtype.itemsize
                others += (bytes_of(values) + numbers) / config.mesh.size
                of_experts += numbers
            elif LOGICAL_AXES[name][0] == "exp":
                of_experts += bytes_of(values)
            else:
                others += bytes_of(values)
    if "lm_head.weight" in model.shared:
        # If the output head has a matrix of its own, a step reads few rows of the embedding table.
        others -= bytes_of(model.shared["model.embed_tokens.weight"])
    held = config.moe.num_slots or config.moe.num_experts
    return others + of_experts * experts / held / config.mesh.size + attended, experts


def bytes_of(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


def token_ids(name: str, values: Sequence[str], vocabulary: int) -> list[int]:
    words = [word.strip() for word in values]
    if not words or not all(word.isdecimal() and int(word) < vocabulary for word in words):
        raise SystemExit(
            f"--{name} must be token ids from 0 to {vocabulary - 1}, but is {','.join(words)}"
        )
    return list(map(int, words))


def tokenizer_of(folder: Path | None) -> Any:
    """Loads the tokenizer of a checkpoint directory; exits if the directory has none."""
    if folder is None or not (folder / "tokenizer.json").exists():
        raise SystemExit("--text needs a --checkpoint with tokenizer.json; give --prompt instead")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SystemExit("--text needs the tokenizers package: pip install tokenizers") from None
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompts_of_flags(vocabulary: int, tokenizer: Any) -> list[list[int]]:
    prompts = [token_ids("prompt", ids.split(","), vocabulary) for ids in _PROMPT.value or ()]
    prompts += [tokenizer.encode(text).ids for text in _TEXT.value or ()]
    if not all(prompts):
        raise SystemExit("--text must not be empty")
    batch = _BATCH_SIZE.value or len(prompts) or 8
    if prompts:
        return [prompts[i % len(prompts)] for i in range(batch)]
    lengths = _PROMPT_LENGTH.value
    if not lengths or not all(length.isdecimal() and int(length) for length in lengths):
        raise SystemExit(f"--prompt_length must be positive integers, but is {','.join(lengths)}")
    rng = np.random.default_rng(1)
    sizes = [int(lengths[i % len(lengths)]) for i in range(batch)]
    return [rng.integers(vocabulary, size=size).tolist() for size in sizes]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    devices = jax.devices()
    # Measure before the model fills the memory.
    bandwidth = memory_bandwidth(devices[0])
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    dtype = jnp.bfloat16 if devices[0].platform == "gpu" else jnp.float32
    folder = Path(_CHECKPOINT.value) if _CHECKPOINT.value else None
    tokenizer = tokenizer_of(folder) if _TEXT.value else None
    quantized: Any = _QUANTIZED.value
    quantized = _FORMATS.get(quantized, quantized)
    if _MATMUL_DTYPE.value and quantized is None:
        raise SystemExit(
            "--matmul_dtype needs --quantized=float8, or --quantized=keep and a --checkpoint whose "
            "experts are float8"
        )
    options = dict(stack=_SCAN_LAYERS.value, quantized=quantized, matmul_dtype=_MATMUL_DTYPE.value)
    if quantized == "keep" and not folder:
        raise SystemExit("--quantized=keep needs a --checkpoint; give float8 or mxfp4 instead")
    try:
        if folder:
            config, model = decoder.load_model(folder, mesh, dtype, **options)
        else:
            shape = SHAPES[_RANDOM_WEIGHTS.value]
            config, model = decoder.random_model(shape, mesh, dtype, **options)
    except ValueError as error:
        if quantized is None:
            raise
        # For example, a matrix is not a whole number of the format's blocks.
        raise SystemExit(f"--quantized={_QUANTIZED.value}: {error}") from error
    held = decoder.format_of_experts(model)
    if _MATMUL_DTYPE.value not in (None, held):
        raise SystemExit(
            f"--matmul_dtype={_MATMUL_DTYPE.value} needs experts held as float8, but "
            f"--quantized={_QUANTIZED.value} holds them as {held}"
        )
    vocabulary = model.shared["model.embed_tokens.weight"].shape[0]
    if _STOP_TOKENS.value is not None:
        stop = [token_ids("stop_tokens", [word], vocabulary)[0] for word in _STOP_TOKENS.value]
        config = config._replace(stop_tokens=tuple(stop))
    prompts = prompts_of_flags(vocabulary, tokenizer)
    decoded, state, times = generate(
        config,
        model,
        prompts,
        _STEPS.value,
        sampling=decoder.Sampling(_TEMPERATURE.value, _SEED.value),
        chunk=_CHUNK.value,
        padding=_PADDING.value,
        loop=_LOOP.value,
    )
    print(
        f"{config.num_layers} layers, {config.moe.num_experts_per_token} of "
        f"{config.moe.num_experts} experts for each token, on {mesh.size} x "
        f"{devices[0].device_kind}"
    )
    print(f"first sequence: {decoded[0]}")
    if tokenizer is not None:
        for prompt, tokens in zip(prompts, decoded, strict=True):
            print(repr(tokenizer.decode(prompt)), "->", repr(tokenizer.decode(tokens)))
    read = sum(map(len, prompts))
    print(f"prefill {times.prefill * 1e3:.2f} ms: {read / times.prefill:,.0f} tokens/s")
    if times.steps:
        report_decoding(config, model, decoded, state, times, bandwidth)


def report_decoding(
    config: decoder.Config,
    model: decoder.Model,
    decoded: list[list[int]],
    state: decoder.State,
    times: Times,
    bandwidth: float,
) -> None:
    """Prints a step's time, next to the time to read its bytes at `bandwidth` [bytes/s]."""
    seconds = times.decoding / times.steps
    rate = (sum(map(len, decoded)) - len(decoded)) / times.decoding
    print(f"step {seconds * 1e3:.2f} ms, mean of {times.steps}: {rate:,.0f} tokens/s")
    num_bytes, experts = bytes_of_step(config, model, state)
    least = num_bytes / bandwidth
    print(
        f"a step reads {num_bytes / 1e9:.3g} GB on a device ({experts:.1f} experts in a layer); at "
        f"a copy's {bandwidth / 1e9:,.0f} GB/s that is {least * 1e3:.2f} ms, "
        f"{least / seconds:.0%} of the step's time"
    )


if __name__ == "__main__":
    app.run(main)
