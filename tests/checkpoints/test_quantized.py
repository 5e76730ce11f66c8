"""Tests of experts that stay quantized from checkpoint files to devices and back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.contract import assert_bitwise_equal
from support.float8 import error_of_norm
from support.meshes import expert_mesh, mesh
from support.published import (
    E,
    deepseek_v3,
    files_of,
    float8_model,
    gpt_oss_in_mxfp4,
    numbers,
    publish,
)
from support.selection import quick

import jax_ep
from jax_ep import checkpoints
from jax_ep.formats import FLOAT8_MATRICES, MXFP4, QuantizedArray, Transposed
from jax_ep.placement import Placement, balance, redistribute

MATRICES = ("wi_0", "wi_1", "wo")
H, F = 128, 256


float8 = functools.partial(float8_model, h=H, f=F)
MODELS = {
    "float8": float8,
    "bfloat16 scales": functools.partial(float8, scale_dtype=jnp.bfloat16),
    "mxfp4": gpt_oss_in_mxfp4,
}


def bytes_of(array):
    return [np.asarray(part).tobytes() for part in jax.tree.leaves(array)]


def matrices_of(params):
    arrays = params._asdict()
    return {n: a for n, a in arrays.items() if isinstance(a, QuantizedArray)}


@pytest.mark.parametrize("shape", quick([(8,), (4, 2)], (4, 2), unpack=False))
@pytest.mark.parametrize("model", quick([*MODELS], "mxfp4"))
def test_what_the_files_hold_is_kept(tmp_path, model, shape):
    """With quantized="keep", the devices must hold the stored bytes of quantized experts.

    The experts are split over the devices. Saving them must give back the same files.
    """
    config, tensors = MODELS[model]()
    publish(tmp_path, config, tensors)
    before = files_of(tmp_path)
    options = dict(mesh=mesh(shape, ("expert", "tensor")[: len(shape)]))
    if len(shape) > 1:
        options |= dict(tensor_axis="tensor")
    seen = []
    _, params = checkpoints.load_moe_params(
        tmp_path, 1, quantized="keep", progress=lambda *counts: seen.append(counts), **options
    )
    held = matrices_of(params)
    shared = ("shared_wi_0", "shared_wi_1", "shared_wo") if model != "mxfp4" else ()
    assert set(held) == {*MATRICES, *shared}

    # Each device holds an eighth of the stored bytes of the experts.
    stored = sum(
        array.nbytes
        for name, array in tensors.items()
        if ".experts." in name and not name.endswith("bias")
    )
    for device in options["mesh"].devices.flat:
        parts = jax.tree.leaves([held[name] for name in MATRICES])
        shards = [s for part in parts for s in part.addressable_shards if s.device == device]
        assert abs(sum(s.data.nbytes for s in shards) / (stored / 8) - 1) < 0.02
    assert seen[-1][0] == seen[-1][1] <= sum(a.nbytes for a in tensors.values())

    _, whole = checkpoints.load_moe_params(tmp_path, 1, quantized="keep")
    assert sum(a.nbytes for a in jax.tree.leaves(whole)) == sum(a.nbytes for a in tensors.values())
    assert bytes_of(whole) == bytes_of(params)
    _, plain = checkpoints.load_moe_params(tmp_path, 1)
    for name, array in held.items():
        assert isinstance(array.format, Transposed) and array.dtype == jnp.bfloat16
        assert array.shape == getattr(plain, name).shape
        assert bytes_of(array.dequantize()) == bytes_of(getattr(plain, name))
    checkpoints.save_moe(params, tmp_path, 1)
    assert files_of(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("model", ["float8", "mxfp4"])
def test_the_layer_computes_what_the_dequantized_one_does(tmp_path, model):
    """It must, in slots, too, which are moved, and from which the same files are saved."""
    config, tensors = MODELS[model]()
    publish(tmp_path, config, tensors)
    before = files_of(tmp_path)
    on = expert_mesh(4)
    load = functools.partial(checkpoints.load_moe, tmp_path, 1, mesh=on, num_slots=12)
    kept, plain = load(quantized="keep"), load()
    x = jnp.asarray(numbers(7, 4, 4, kept.wi_0.get_value().shape[1]), jnp.bfloat16)
    placement = Placement.in_order(num_experts=E, num_slots=12, num_ranks=4)[0]
    run = nnx.jit(lambda layer, x: layer(x, placement=placement)[0])
    with jax.set_mesh(on):
        got, want = (np.asarray(run(layer, x)) for layer in (kept, plain))
    assert np.abs(got).max() > 0
    if jax.default_backend() == "gpu" and getattr(kept, "shared_wo", None) is not None:
        # The kernel that reads the shared experts as they are stored does not round their numbers.
        assert error_of_norm(got, want) < 2.0**-7
    else:
        assert_bitwise_equal(got, want)
    other = balance(np.arange(1.0, E + 1)[None] ** 2, num_slots=12, num_ranks=4)[0]
    graph, state = nnx.split(kept)
    moved = nnx.merge(graph, redistribute(state, placement, other, mesh=on))
    assert moved.wo.get_value().shape[0] == 12
    checkpoints.save_moe(moved, tmp_path, 1, placement=other)
    assert files_of(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("format", [FLOAT8_MATRICES, MXFP4], ids=str)
def test_experts_are_quantized_while_they_are_loaded(tmp_path, format):
    publish(tmp_path, *deepseek_v3(dtype=jnp.bfloat16, h=H, f=F))
    _, plain = checkpoints.load_moe_params(tmp_path, 1)
    assert not matrices_of(checkpoints.load_moe_params(tmp_path, 1, quantized="keep")[1])
    _, params = checkpoints.load_moe_params(tmp_path, 1, mesh=expert_mesh(8), quantized=format)
    # Shared experts are not quantized.
    assert set(matrices_of(params)) == set(MATRICES)
    for name in MATRICES:
        got = getattr(params, name)
        want = jax_ep.quantize(np.asarray(getattr(plain, name)), Transposed.of(format))
        assert got.format == want.format and got.dtype == jnp.bfloat16
        assert bytes_of(got) == bytes_of(want)
        assert {s.data.shape[0] for s in got.values.addressable_shards} == {1}

    # Saving writes the dequantized numbers, and loading quantizes them to the same bytes.
    checkpoints.save_moe(params, tmp_path, 1)
    _, again = checkpoints.load_moe_params(tmp_path, 1)
    for name in MATRICES:
        assert bytes_of(getattr(again, name)) == bytes_of(getattr(params, name).dequantize())
    assert bytes_of(again.shared_wo) == bytes_of(plain.shared_wo)


def test_what_is_stored_in_the_asked_format_keeps_its_bytes(tmp_path):
    publish(tmp_path, *float8())
    kept, asked, other = (
        checkpoints.load_moe_params(tmp_path, 1, quantized=each)[1]
        for each in ("keep", "float8", "mxfp4")
    )
    of_model = checkpoints.load_model(tmp_path, quantized="float8").moe[1]
    assert bytes_of(of_model) == bytes_of(asked)
    assert asked.wi_0.format == Transposed.of(FLOAT8_MATRICES)
    for name in MATRICES:
        assert bytes_of(getattr(asked, name)) == bytes_of(getattr(kept, name))
        decoded = np.asarray(getattr(kept, name).dequantize(jnp.float32))
        want = jax_ep.quantize(decoded, Transposed.of(MXFP4))
        assert bytes_of(getattr(other, name)) == bytes_of(want)
    assert isinstance(asked.shared_wo, jax.Array)


@pytest.mark.parametrize("quantized", [None, "keep"])
def test_adapters_are_added_to_what_is_loaded_and_merged_into_what_is_saved(tmp_path, quantized):
    publish(tmp_path, *float8())
    _, old = checkpoints.load_moe_params(tmp_path, 1, param_dtype=jnp.float32)
    options = dict(param_dtype=jnp.float32, quantized=quantized, lora_scale=0.5)
    layer = checkpoints.load_moe(tmp_path, 1, lora_rank=2, rngs=nnx.Rngs(1), **options)
    assert isinstance(layer.wo.get_value(), QuantizedArray) == (quantized == "keep")
    # The adapters change nothing at first.
    before = files_of(tmp_path)
    checkpoints.save_moe(layer, tmp_path, 1)
    assert files_of(tmp_path) == before
    a, b = layer.wo_lora_a.get_value(), jax.random.normal(jax.random.key(2), (E, 2, H))
    layer.wo_lora_b.set_value(b)
    checkpoints.save_moe(layer, tmp_path, 1)
    _, new = checkpoints.load_moe_params(tmp_path, 1, param_dtype=jnp.float32)
    want = old.wo + 0.5 * np.einsum("efr,erh->efh", a, b)
    # Float8 has three bits after the first; numbers below 2^-6 of a scale are multiples of 2^-9.
    atol = np.abs(want).max() / 448 * 2**-9
    np.testing.assert_allclose(new.wo, want, rtol=2**-4, atol=atol)
    assert bytes_of(new._replace(wo=None)) == bytes_of(old._replace(wo=None))


def test_quantized_experts_are_saved_into_a_new_directory(tmp_path):
    """Experts must be saved quantized if config.json names their format, else decoded."""
    config, tensors = deepseek_v3(dtype=jnp.bfloat16, h=H, f=F)
    publish(tmp_path / "old", config, tensors)
    _, params = checkpoints.load_moe_params(tmp_path / "old", 1, quantized=FLOAT8_MATRICES)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    new = publish(tmp_path / "new", config)
    checkpoints.save_moe(params, new, 1)
    _, again = checkpoints.load_moe_params(new, 1, quantized="keep")
    for name in MATRICES:
        assert getattr(again, name).format == getattr(params, name).format
        assert bytes_of(getattr(again, name)) == bytes_of(getattr(params, name))
    # Replace one expert's `wo` by another one's. The files then have new bytes for it, and the same
    # bytes for all others.
    before = files_of(new)
    wo = jax.tree.map(lambda part: part[np.r_[:3, 4, 4:E]], jax.tree.map(np.asarray, again.wo))
    checkpoints.save_moe(again._replace(wo=wo), new, 1)
    assert files_of(new) != before
    _, changed = checkpoints.load_moe_params(new, 1, quantized="keep")
    assert bytes_of(changed) == bytes_of(again._replace(wo=wo))


def test_what_does_not_fit_is_refused(tmp_path):
    config, tensors = float8()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    mixed = {n: array for n, array in tensors.items() if n != name + "_scale_inv"}
    mixed[name] = tensors[name].astype(jnp.bfloat16)
    whole = publish(tmp_path / "whole", config, tensors)
    small = publish(tmp_path / "small", *float8_model(block=8, h=16, f=12))
    mixed = publish(tmp_path / "mixed", config, mixed)
    split = dict(mesh=mesh((1, 4), ("expert", "tensor")), tensor_axis="tensor")
    load = checkpoints.load_moe_params
    for folder, options, message in (
        (small, dict(quantized="fp8"), "quantized must be None, .* but is 'fp8'"),
        (small, dict(quantized="keep"), r"quantized must be None for wi_0 of shape \(8, 16, 12\)"),
        (small, dict(quantized=FLOAT8_MATRICES), r"quantized must be None .* 128 x 128 numbers"),
        (whole, dict(quantized="keep", **split), r"would hold \(8, 128, 64\): .* 128 x 128"),
        (mixed, dict(quantized="keep"), "wi_1 must be in one format .* float8_e4m3fn, none"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            load(folder, 1, **options)
    assert load(mixed, 1)[1].wi_1.shape == (E, H, F)
