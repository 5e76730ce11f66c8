"""Decode with a published Qwen3-MoE or GPT-OSS, its experts spread over the devices.

    python decode_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --text="The capital of France is"
    python decode_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --prompt=9707,11,847 --quantized=float8
    python decode_qwen3_moe.py --model=qwen3-30b-a3b --batch_size=16 --prompt_length=128

--checkpoint is a directory with config.json and safetensors files in bfloat16, float8 or MXFP4, for
example what train_qwen3_moe.py has written. Without --checkpoint, weights are random. Prompts may
differ in length: token ids, or texts, which are bytes if the directory has no tokenizer.json.
`jax_ep.models` has the model; the devices run the decoding loop as one program.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_ep import QuantizedArray, formats
from jax_ep.flags import Flags, at_least, integer, number
from jax_ep.models import generation, published
from jax_ep.models.config import PUBLISHED, DecoderConfig
from jax_ep.models.generation import GREEDY, Model, Sampling, State, Times
from jax_ep.models.launch import blamed_flag
from jax_ep.moe.few_tokens import MOST_TOKENS
from jax_ep.moe.params import LOGICAL_AXES

# Hopper GPUs multiply any number of tokens by experts in this format without dequantizing them.
AS_STORED = formats.Transposed.of(formats.MXFP4)


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse(argv: list[str]) -> argparse.Namespace:
    flags = Flags(None, __doc__.partition("\n")[0])
    flag = flags.add
    flag("checkpoint", None, "Directory of a published model.", Path)
    flag("model", "tiny", "Without --checkpoint: a shape for random weights.", choices=PUBLISHED)
    held = "How experts stay in memory; keep: as the files hold them. Default: not quantized."
    flag("quantized", None, held, choices=["keep", "float8", "mxfp4"])
    needs = "Dtype that experts multiply; needs experts that --quantized holds as float8."
    flag("matmul_dtype", None, needs, choices=["float8_e4m3fn"])
    flag("prompt", None, "Token ids by commas; may be given several times.", ids, action="append")
    flag("text", None, "Text of a prompt; may be given several times.", action="append")
    flag("prompt_length", "32", "Without prompts: lengths of random ones, by commas.", ids)
    flag("padding", "left", "Side on which shorter prompts are padded.", choices=["left", "right"])
    flag("batch_size", None, "Sequences. Default: one for each prompt, or 8 random ones.", integer)
    flag("steps", 32, "Most tokens to decode for each sequence.", integer)
    flag("temperature", 0.0, "0 takes the likeliest token, above 0 draws one.", number)
    flag("seed", 0, "Seed that tokens are drawn from.", at_least(0))
    flag("stop_tokens", None, "Ids that end a sequence. Default: those of the checkpoint.", ids)
    flag("chunk", 512, "Tokens of each prompt that prefill reads at a time.", integer)
    flag("loop", "device", "host: Python launches each step.", choices=["device", "host"])
    return flags.parse_args(argv)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def tokenizer_of(folder: Path | None) -> Any:
    if folder and (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    print("--text: without a --checkpoint that has tokenizer.json, tokens are bytes")
    return Bytes()


def load(args: argparse.Namespace, mesh: Any) -> tuple[DecoderConfig, Model]:
    dtype = jnp.bfloat16 if mesh.devices.flat[0].platform == "gpu" else jnp.float32
    if args.quantized == "keep" and not args.checkpoint:
        raise SystemExit("--quantized=keep needs a --checkpoint; give float8 or mxfp4 instead")
    if args.matmul_dtype and not args.quantized:
        raise SystemExit("--matmul_dtype needs --quantized=float8, or keep and float8 files")
    quantized, fields = args.quantized, {"matmul_dtype": args.matmul_dtype}
    try:
        if args.checkpoint:
            return published.load_decoder(
                args.checkpoint, mesh, dtype, quantized=quantized, **fields
            )
        config = DecoderConfig.of(PUBLISHED[args.model]).replace(**fields)
        return published.random_decoder(config, mesh, dtype, quantized=quantized)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        flag = blamed_flag(text, args, ["quantized", "matmul_dtype"], ["checkpoint"])
        # Of a matrix that is no whole number of the format's blocks, only its name is told.
        flag = flag or ("quantized" if args.quantized else "checkpoint")
        raise SystemExit(f"--{flag}={getattr(args, flag)}: {text}") from error


def prompts_of(args: argparse.Namespace, vocab: int, tokenizer: Any) -> list[list[int]]:
    prompts = list(args.prompt or ())
    for tokens in (*prompts, args.stop_tokens or []):
        if not all(0 <= token < vocab for token in tokens):
            flag = "prompt" if tokens in prompts else "stop_tokens"
            raise SystemExit(f"--{flag} must be token ids below {vocab}, but is {tokens}")
    for text in args.text or ():
        found = tokenizer.encode(text)
        prompts.append(list(getattr(found, "ids", found)))
        if not prompts[-1]:
            raise SystemExit("--text must not be empty")
    batch = args.batch_size or len(prompts) or 8
    if prompts:
        return [prompts[i % len(prompts)] for i in range(batch)]
    if min(args.prompt_length) < 1:
        raise SystemExit(f"--prompt_length must be at least 1, but is {min(args.prompt_length)}")
    rng = np.random.default_rng(1)
    sizes = [args.prompt_length[i % len(args.prompt_length)] for i in range(batch)]
    return [rng.integers(vocab, size=size).tolist() for size in sizes]


def bytes_of(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


def bytes_of_step(
    config: DecoderConfig, model: Model, state: State, num_ranks: int
) -> tuple[float, float]:
    """Decodes one more step and counts the bytes that a device must read in it; donates `state`.

    A device reads its replicated weights, the weights of the experts that some token chose
    (averaged over the devices), and the keys and values of the tokens that are attended to. If the
    step dequantizes experts first, it also reads all experts of the device and writes the results.
    Hopper GPUs multiply by MXFP4 as it is stored; one of them, with up to 16 sequences, by float8.

    Returns:
        The bytes on one device, and the number of experts chosen in a layer, averaged over layers.
    """
    lengths, cached = np.asarray(state.cache.lengths), state.cache.keys[0]
    share = cached.sharding.shard_shape(cached.shape)[0] / cached.shape[0]
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * cached.dtype.itemsize
    windows = map(config.window, range(config.num_layers))
    attended = sum(np.minimum(lengths, window).sum() for window in windows) * token_bytes * share
    # No sequence is finished, and the new token takes the place of the first one.
    state = state._replace(finished=jnp.zeros_like(state.finished), done=jnp.int32(0))
    _, _, chosen = generation.step(config, GREEDY, model, state)
    experts = float((np.asarray(chosen) > 0).sum(axis=1).mean())
    of_experts, others = 0.0, float(bytes_of((model.shared, model.layers)))
    on_gpus = jax.default_backend() == "gpu"
    few = on_gpus and num_ranks == 1 and len(lengths) <= MOST_TOKENS
    dequantizes = config.moe.matmul_dtype is None and not few
    for params in model.moe:
        for name, values in params._asdict().items():
            quantized = isinstance(values, QuantizedArray)
            as_stored = quantized and on_gpus and values.format == AS_STORED
            if quantized and dequantizes and not as_stored:
                # A step reads all experts of a device and writes them dequantized. It then reads
                # the dequantized weights of the chosen experts.
                numbers = math.prod(values.shape) * values.dtype.itemsize
                others += (bytes_of(values) + numbers) / num_ranks
                of_experts += numbers
            elif LOGICAL_AXES[name][0] == "exp":
                of_experts += bytes_of(values)
            else:
                others += bytes_of(values)
    if not config.tied:
        # A step reads few rows of the embedding table.
        others -= bytes_of(model.shared["model.embed_tokens.weight"])
    return others + of_experts * experts / config.moe.num_held / num_ranks + attended, experts


def report(decoded: list[list[int]], prompts: list[list[int]], times: Times) -> None:
    read = sum(map(len, prompts))
    print(f"prefill {times.prefill * 1e3:.2f} ms: {read / times.prefill:,.0f} tokens/s")
    if times.steps:
        # The first token of each sequence follows from prefill.
        rate = (sum(map(len, decoded)) - len(decoded)) / times.decoding
        step = times.decoding / times.steps
        print(f"step {step * 1e3:.2f} ms, mean of {times.steps}: {rate:,.0f} tokens/s")


def main(argv: list[str]) -> None:
    args = parse(argv)
    is_set = jax.config.values["jax_num_cpu_devices"] >= 0
    if not is_set and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("expert",), (AxisType.Auto,))
    jax.set_mesh(mesh)
    config, model = load(args, mesh)
    wi = model.moe[0].wi_0
    held = wi.format.name if isinstance(wi, QuantizedArray) else str(wi.dtype)
    if args.matmul_dtype not in (None, held):
        raise SystemExit(f"--matmul_dtype={args.matmul_dtype} needs experts held so, not as {held}")
    tokenizer = tokenizer_of(args.checkpoint) if args.text else None
    prompts = prompts_of(args, config.vocab, tokenizer)
    if args.stop_tokens is not None:
        config = config.replace(stop_tokens=tuple(args.stop_tokens))
    decoded, state, times = generation.generate(
        config,
        model,
        prompts,
        args.steps,
        mesh=mesh,
        sampling=Sampling(args.temperature, args.seed),
        chunk=args.chunk,
        padding=args.padding,
        loop=args.loop,
    )
    print(
        f"{config.num_layers} layers, {config.num_experts_per_token} of {config.num_experts} "
        f"experts for each token, in {held}, on {mesh.size} x {devices[0].device_kind}"
    )
    print(f"first sequence: {decoded[0]}")
    if tokenizer is not None:
        for prompt, tokens in zip(prompts, decoded, strict=True):
            print(repr(tokenizer.decode(prompt)), "->", repr(tokenizer.decode(tokens)))
    report(decoded, prompts, times)
    if times.steps:
        num_bytes, experts = bytes_of_step(config, model, state, mesh.size)
        rate = num_bytes / (times.decoding / times.steps)
        print(
            f"a step reads {num_bytes / 1e9:.3g} GB on a device ({experts:.1f} experts in a "
            f"layer): {rate / 1e9:,.0f} GB/s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
