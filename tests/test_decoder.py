"""Tests of examples/decoder.py: its compiled loop decodes as single steps do, for any prompts.

tests/checkpoints/test_transformers.py compares the models with those of `transformers`.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.examples import example
from support.meshes import expert_mesh
from support.published import publish
from support.selection import quick

import jax_ep
from jax_ep import formats
from jax_ep.checkpoints import save_moe

decoder, program = example("decoder"), example("decode_qwen3_moe")
KINDS = "tiny", "tiny_gpt_oss"
PROMPTS = [[5, 77, 130, 9, 201, 33, 18, 64, 2, 111, 90], [250], [8, 8, 31, 7, 120], [99, 4]]
# Decode more tokens than the attention window of tiny_gpt_oss has.
STEPS = 12


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("float32"):
        yield


@functools.cache
def random_model(kind: str, ranks: int = 2, stack: bool = False):
    mesh = expert_mesh(min(ranks, len(jax.devices())))
    return decoder.random_model(program.SHAPES[kind], mesh, jnp.float32, stack=stack)


def tokens_of(model, prompts=PROMPTS, steps=STEPS, **options) -> list[list[int]]:
    return program.generate(*model, prompts, steps, **options)[0]


def one_token_at_a_time(kind: str, prompt: list[int]) -> list[int]:
    """Decodes one prompt alone, by a Python loop that reads one token at a time."""
    config, model = random_model(kind)
    cache = decoder.empty_cache(config, model, 1, 32, jnp.float32)
    tokens, found = list(prompt), []
    while len(found) < STEPS:
        logits, cache = read_one(config, model, jnp.array([[tokens.pop(0)]]), cache)
        if not tokens:
            found.append(int(jnp.argmax(logits)))
            tokens.append(found[-1])
    return found


@functools.partial(jax.jit, static_argnums=0)
def read_one(config, model, token, cache):
    x, cache, _ = decoder.hidden_states(config, model, token, token >= 0, cache)
    return decoder.logits_of(config, model, x[:, 0]), cache


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Decodes each prompt alone, as the expected result of decoding all of them in a batch.

    Returns:
        Kind of model -> the decoded tokens of each prompt.
    """
    with jax.default_matmul_precision("float32"):
        found = {kind: [one_token_at_a_time(kind, prompt) for prompt in PROMPTS] for kind in KINDS}
    for kind, rows in found.items():
        assert len({token for row in rows for token in row}) > 12, kind
    return found


WAYS = {
    "one loop": dict(),
    "steps from Python": dict(loop="host"),
    "padded on the right": dict(padding="right"),
    "in chunks": dict(chunk=3),
    "in chunks, padded on the right": dict(chunk=4, padding="right"),
}


@pytest.mark.parametrize("way", quick(WAYS, "in chunks", unpack=False))
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_a_batch_of_unequal_lengths_decodes_as_it_does_alone(alone, kind, way):
    assert tokens_of(random_model(kind), **way) == alone[kind]


@pytest.mark.parametrize("kind", quick(KINDS, "tiny_gpt_oss"))
def test_scanned_layers_decode_as_unrolled_ones_do(alone, kind):
    assert tokens_of(random_model(kind, stack=True), chunk=5) == alone[kind]


@pytest.mark.parametrize("ranks", quick([1, 3, 8], 3))
def test_any_number_of_devices_decodes_the_same(alone, ranks):
    """The number of devices must not change the tokens, even if it does not divide the experts.

    Three devices hold 18 slots for 16 experts, of which two have a second copy.
    """
    if ranks > len(jax.devices()):
        pytest.skip(f"needs {ranks} devices")
    model = random_model("tiny_gpt_oss", ranks)
    assert model[0].moe.num_slots == (18 if ranks == 3 else None)
    assert tokens_of(model) == alone["tiny_gpt_oss"]


def test_a_sequence_ends_with_its_stop_token_and_the_loop_with_the_last_sequence(alone):
    config, model = random_model("tiny")
    whole = alone["tiny"]
    stop = tuple({row[3] for row in whole})
    config = config._replace(stop_tokens=stop)
    want = [row[: 1 + min(i for i, token in enumerate(row) if token in stop)] for row in whole]
    assert len({len(row) for row in want} | {STEPS}) > 1
    found, state, _ = program.generate(config, model, PROMPTS, STEPS)
    assert found == want
    assert state.finished.all() and int(state.done) == max(map(len, want)) < STEPS
    # A finished sequence adds no tokens to its cache.
    assert np.asarray(state.cache.lengths).tolist() == [
        len(prompt) + len(row) - 1 for prompt, row in zip(PROMPTS, want, strict=True)
    ]


@pytest.mark.parametrize("temperature", quick([0.7, 1e-4], 0.7))
def test_tokens_are_drawn_alike_in_the_loop_and_by_python(alone, temperature):
    model, sampling = random_model("tiny"), decoder.Sampling(temperature, seed=3)
    drawn = tokens_of(model, sampling=sampling)
    assert drawn == tokens_of(model, sampling=sampling, loop="host")
    assert (drawn == alone["tiny"]) == (temperature < 0.1)
    other = decoder.Sampling(temperature, seed=4)
    assert (drawn == tokens_of(model, sampling=other)) == (temperature < 0.1)


def test_tokens_are_drawn_by_their_probability():
    config, model = random_model("tiny", ranks=1)
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))
    logits = jnp.broadcast_to(logits, (4000, 4))
    cache = decoder.empty_cache(config, model, 4000, 1, jnp.float32)
    state = decoder.begin(config, decoder.Sampling(1.0, 0), logits, cache, 1)
    share = np.bincount(np.asarray(state.last), minlength=4) / 4000
    np.testing.assert_allclose(share, [0.5, 0.25, 0.125, 0.125], atol=4 * (0.25 / 4000) ** 0.5)


def tensors_of(model) -> dict[str, np.ndarray]:
    """Returns the tensors of a model by their published names; its layers are not stacked."""
    tensors = dict(model.shared)
    for i, weights in enumerate(model.layers):
        split = np.cumsum([4 * 16, 2 * 16])
        for name, array in weights.items():
            parts = {name: array}
            if decoder.QKV in name:
                names = [name.replace("qkv", letter) for letter in "qkv"]
                parts = dict(zip(names, np.split(np.asarray(array), split), strict=True))
            tensors |= {f"model.layers.{i}.{part}": parts[part] for part in parts}
    return {name: np.asarray(array) for name, array in tensors.items()}


@pytest.mark.parametrize("stack", quick([False, True], False))
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_is_loaded_as_it_was_published(tmp_path, kind, stack):
    """Every weight of a published directory must be loaded bit for bit, stacked or not."""
    shape = program.SHAPES[kind] | {"eos_token_id": [3, 4]}
    config, model = decoder.random_model(shape, expert_mesh(2), jnp.float32)
    publish(tmp_path, shape, tensors_of(model), {})
    for i, params in enumerate(model.moe):
        save_moe(params, tmp_path, i)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    loaded, got = decoder.load_model(tmp_path, expert_mesh(2), jnp.float32, stack=stack)
    assert loaded == config._replace(stop_tokens=(7,))
    assert config.stop_tokens == (3, 4)
    want = model
    if stack:
        stacked = (
            jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
            for layers in (model.layers, model.moe)
        )
        want = decoder.Model(model.shared, *stacked)
    jax.tree.map(np.testing.assert_array_equal, got, want)


QUANTIZED = {
    "float8": ("tiny", formats.FLOAT8_MATRICES, {"quant_method": "fp8"}),
    "mxfp4": ("tiny_gpt_oss", formats.MXFP4, {"quant_method": "mxfp4"}),
}


def quantizable(kind: str) -> dict:
    """Returns a tiny shape whose experts' matrices have whole blocks of 128 x 128."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_experts_per_tok": 2}
    name = "moe_intermediate_size" if kind == "tiny" else "intermediate_size"
    number = "num_experts" if kind == "tiny" else "num_local_experts"
    return program.SHAPES[kind] | sizes | {name: 128, number: 4}


def with_numbers(model):
    """Returns a copy of the model in which the experts' quantized matrices are dequantized."""

    def numbers(params):
        fields = params._asdict()
        quantized = {n: x for n, x in fields.items() if isinstance(x, jax_ep.QuantizedArray)}
        assert set(quantized) == {"wi_0", "wi_1", "wo"}
        return params._replace(**{n: jax.jit(x.dequantize)() for n, x in quantized.items()})

    if isinstance(model.moe, list):
        return model._replace(moe=list(map(numbers, model.moe)))
    return model._replace(moe=numbers(model.moe))


@pytest.mark.parametrize("stack", quick([False, True], False))
@pytest.mark.parametrize("format", QUANTIZED)
def test_experts_that_stay_quantized_decode_as_their_numbers_do(format, stack):
    kind, form, _ = QUANTIZED[format]
    config, model = decoder.random_model(
        quantizable(kind), expert_mesh(2), jnp.float32, stack=stack, quantized=form
    )
    tokens = tokens_of((config, model), steps=4)
    assert tokens == tokens_of((config, with_numbers(model)), steps=4)
    assert len({token for row in tokens for token in row}) > 4


@pytest.mark.parametrize("format", quick(list(QUANTIZED), "mxfp4"))
def test_a_directory_s_quantized_experts_stay_so_or_become_numbers(tmp_path, format):
    """Quantized experts of a directory must be loaded as they are with "keep", else dequantized.

    With a format as `quantized`, they must be quantized to it.
    """
    kind, form, said = QUANTIZED[format]
    config, model = decoder.random_model(
        quantizable(kind), expert_mesh(2), jnp.float32, quantized=form
    )
    publish(tmp_path, quantizable(kind) | {"quantization_config": said}, tensors_of(model), {})
    for i, params in enumerate(model.moe):
        save_moe(params, tmp_path, i)
    load = functools.partial(decoder.load_model, tmp_path, expert_mesh(2), jnp.float32)
    _, kept = load(quantized="keep")
    jax.tree.map(np.testing.assert_array_equal, kept.moe, model.moe)
    want = with_numbers(model).moe
    jax.tree.map(np.testing.assert_array_equal, load()[1].moe, want)
    for params in load(quantized=formats.MXFP4)[1].moe:
        assert params.wo.format == formats.Transposed.of(formats.MXFP4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"mlp_only_layers": [0]}, "experts in every layer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type of default or yarn"),
    ],
)
def test_a_model_that_is_neither_is_refused(changes, message):
    with pytest.raises(SystemExit, match=message):
        decoder.model_config(program.SHAPES["tiny"] | changes, None)


def test_the_bytes_of_a_step_are_those_of_the_chosen_experts_and_of_all_other_weights():
    config, model = random_model("tiny", ranks=1)
    _, state, _ = program.generate(config, model, PROMPTS[:1], 2)
    shape = program.SHAPES["tiny"]
    hidden, cached = shape["hidden_size"], 4 * (2 * 2 * 2 * 16) * (len(PROMPTS[0]) + 1)
    layer = 2 * hidden + 2 * 16 + (4 + 2 + 2 + 4) * 16 * hidden + 16 * hidden
    experts = 2 * 4 * 3 * hidden * shape["moe_intermediate_size"]
    whole = 4 * (2 * layer + experts + hidden + 256 * hidden) + cached
    assert program.bytes_of_step(config, model, state) == (whole, 4)


@pytest.mark.slow
def test_a_step_that_dequantizes_reads_and_writes_all_experts():
    config, model = decoder.random_model(
        quantizable("tiny_gpt_oss"), expert_mesh(1), jnp.float32, quantized=formats.MXFP4
    )
    assert decoder.format_of_experts(model) == "mxfp4"
    assert decoder.format_of_experts(with_numbers(model)) == "float32"
    _, state, _ = program.generate(config, model, PROMPTS[:1], 2)
    found, chosen = program.bytes_of_step(config, model, state)
    _, state, _ = program.generate(config, with_numbers(model), PROMPTS[:1], 2)
    plain, _ = program.bytes_of_step(config, with_numbers(model), state)
    numbers = 2 * 3 * 4 * 128 * 128
    # Half a byte and a 32nd for each number is read, and four bytes are written.
    assert chosen == 2 and found == plain + numbers * (1 / 2 + 1 / 32 + 4)
