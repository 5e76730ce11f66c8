"""Tests of quantized tensors that are only read, against each format's definition in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh
from support.published import deepseek_v3, files_of, publish

from jax_ep import checkpoints, formats
from jax_ep.checkpoints.encodings import Quantization, Scaled, open_tensor
from jax_ep.checkpoints.safetensors import Directory

H = F = 128
FLOAT8 = jnp.float8_e4m3fn


def repeated(scales, columns):
    return np.repeat(scales.astype(np.float64), columns // scales.shape[-1], axis=-1)


def float8(rng, rows, columns):
    values = rng.normal(scale=50, size=(rows, columns)).astype(FLOAT8)
    return values, values.astype(np.float64)


def exponents(rng, rows, blocks):
    """Returns exponents of two, as bytes to which 127 is added, and the powers of two."""
    power = rng.integers(-12, -6, size=(rows, blocks))
    return (power + 127).astype(np.uint8), 2.0**power


def float4(rng, rows, columns):
    """Returns bytes of two float4_e2m1, the first in the low bits, and the numbers.

    A float4_e2m1 has a sign, two bits of exponent with bias 1, and a bit of fraction.
    """
    codes = rng.integers(16, size=(rows, columns))
    exponent, fraction = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    return packed.astype(np.uint8), np.where(codes >= 8, -size, size)


# Each function returns a matrix's tensors, by what follows the module's name, and its numbers.


def per_channel(rng, rows, columns):
    values, numbers = float8(rng, rows, columns)
    scales = rng.uniform(1e-3, 4e-3, size=(rows, 1)).astype(jnp.bfloat16)
    return {"weight": values, "weight_scale": scales}, numbers * scales.astype(np.float64)


def per_tensor(rng, rows, columns):
    values, numbers = float8(rng, rows, columns)
    scale = np.float32(rng.uniform(1e-3, 4e-3))
    tensors = {"weight": values, "weight_scale": np.full(1, scale)}
    return tensors | {"input_scale": np.ones(1, np.float32)}, numbers * np.float64(scale)


def mxfp8(rng, rows, columns):
    values, numbers = float8(rng, rows, columns)
    stored, scales = exponents(rng, rows, columns // 32)
    return {"weight": values, "weight_scale": stored}, numbers * repeated(scales, columns)


def mxfp8_inverse(rng, rows, columns):
    tensors, numbers = mxfp8(rng, rows, columns)
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, numbers


def int8(rng, rows, columns):
    values = rng.integers(-128, 128, size=(rows, columns)).astype(np.int8)
    scales = rng.uniform(1e-3, 4e-3, size=(rows, 1)).astype(jnp.bfloat16)
    return {"weight": values, "weight_scale": scales}, values * scales.astype(np.float64)


def int4(rng, rows, columns):
    integers = rng.integers(-8, 8, size=(rows, columns))
    places = 16 ** np.arange(8, dtype=np.int64)
    packed = ((integers + 8).reshape(rows, -1, 8) * places).sum(axis=-1)
    scales = rng.uniform(0.01, 0.04, size=(rows, columns // 32)).astype(jnp.bfloat16)
    tensors = {"weight_packed": packed.astype(np.uint32).view(np.int32), "weight_scale": scales}
    tensors["weight_shape"] = np.array([rows, columns], np.int32)
    return tensors, integers * repeated(scales, columns)


def nvfp4(rng, rows, columns):
    packed, numbers = float4(rng, rows, columns)
    scales = rng.uniform(1, 100, size=(rows, columns // 16)).astype(FLOAT8)
    tensors = {"weight_packed": packed, "weight_scale": scales}
    tensors["weight_global_scale"] = np.full(1, 1024, np.float32)
    tensors["input_global_scale"] = np.full(1, 3, np.float32)
    return tensors, numbers * repeated(scales, columns) / 1024


def nvfp4_of_modelopt(rng, rows, columns):
    tensors, numbers = nvfp4(rng, rows, columns)
    stored = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    stored["weight_scale_2"] = np.array(2**-10, np.float32)
    return stored | {"input_scale": np.array(3, np.float32)}, numbers


def float4_of_deepseek_v4(rng, rows, columns):
    packed, numbers = float4(rng, rows, columns)
    stored, scales = exponents(rng, rows, columns // 32)
    tensors = {"weight": packed.view(np.int8), "scale": stored.view(jnp.float8_e8m0fnu)}
    return tensors, numbers * repeated(scales, columns)


CASES = {
    "float8 per channel": ("compressed-tensors", per_channel),
    "float8 per tensor": ("compressed-tensors", per_tensor),
    "MXFP8": ("compressed-tensors", mxfp8),
    "MXFP8, scale_inv": ("mxfp8", mxfp8_inverse),
    "int8 per channel": ("compressed-tensors", int8),
    "int4": ("compressed-tensors", int4),
    "NVFP4": ("compressed-tensors", nvfp4),
    "NVFP4 of ModelOpt": ("modelopt", nvfp4_of_modelopt),
    "float4 of DeepSeek-V4": ("fp8", float4_of_deepseek_v4),
}


def model(case):
    """Returns config.json, a block's tensors, and the numbers of its quantized matrices by name."""
    method, make = CASES[case]
    config, plain = deepseek_v3(h=H, f=F)
    config["quantization_config"] = {"quant_method": method}
    rng, tensors, numbers = np.random.default_rng(0), {}, {}
    for name, array in plain.items():
        if "expert" not in name:
            tensors[name] = array
            continue
        stored, numbers[name] = make(rng, *array.shape)
        module = name.removesuffix("weight")
        tensors |= {module + part: values for part, values in stored.items()}
    return config, tensors, numbers


def wanted(numbers):
    """Returns the parameters wi_0, wi_1 and wo of a block of `numbers`, as float32."""

    def of(projection):
        each = [numbers[f"model.layers.1.mlp.experts.{e}.{projection}.weight"] for e in range(8)]
        return np.stack(each).swapaxes(1, 2).astype(np.float32)

    return dict(wi_0=of("gate_proj"), wi_1=of("up_proj"), wo=of("down_proj"))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_definition(tmp_path, case):
    """They must be dequantized, also in no MoE block, or be quantized to float8 while loaded."""
    config, tensors, numbers = model(case)
    stored, attention = CASES[case][1](np.random.default_rng(2), 16, 64)
    module = "model.layers.1.self_attn.q_proj."
    tensors |= {module + part: values for part, values in stored.items()}
    folder = publish(tmp_path, config, tensors)
    split = dict(mesh=mesh((4, 2), ("expert", "tensor")), tensor_axis="tensor")
    _, params = checkpoints.load_moe_params(folder, 1, param_dtype=np.float32, **split)
    whole = checkpoints.load_model(folder, param_dtype=np.float32)
    shared = numbers["model.layers.1.mlp.shared_experts.down_proj.weight"]
    for loaded in (params, whole.moe[1]):
        for name, want in wanted(numbers).items():
            np.testing.assert_array_equal(getattr(loaded, name), want, err_msg=name)
        np.testing.assert_array_equal(loaded.shared_wo, shared.T.astype(np.float32))
    assert set(whole.weights) == {module + "weight"}
    np.testing.assert_array_equal(whole.weights[module + "weight"], attention.astype(np.float32))

    format = formats.FLOAT8_MATRICES
    _, params = checkpoints.load_moe_params(folder, 1, quantized=format)
    assert params.shared_wo.dtype == jnp.bfloat16
    for name, want in wanted(numbers).items():
        values, scales = format.encode(want.swapaxes(1, 2))
        got = getattr(params, name)
        np.testing.assert_array_equal(np.asarray(got.values).view(np.uint8), values.view(np.uint8))
        np.testing.assert_array_equal(got.scales, scales)


@pytest.mark.parametrize("case", CASES)
def test_scales_of_damaged_files_are_refused(tmp_path, case):
    config, tensors, _ = model(case)
    module = "model.layers.1.mlp.experts.0.up_proj."
    scales = ("scale", *(f"weight_{part}" for part in ("scale", "scale_inv", "scale_2")))
    for name in (module + part for part in (*scales, "weight_global_scale")):
        if name not in tensors:
            continue
        stored = tensors[name].copy()
        if stored.itemsize == 1:
            stored.view(np.uint8).flat[0] = 255  # NaN in float8, and as an exponent
        else:
            stored.flat[0] = np.nan
        folder = publish(tmp_path, config, tensors | {name: stored})
        with pytest.raises(ValueError, match=f"{name} in .* finite and above 0, but has"):
            checkpoints.load_moe_params(folder, 1)


@pytest.mark.parametrize("case", ["int4", "float8 per tensor"])
def test_only_unchanged_numbers_are_saved(tmp_path, case):
    config, tensors, _ = model(case)
    folder = publish(tmp_path, config, tensors)
    before = files_of(folder)
    params = checkpoints.load_moe_params(folder, 1)[1]
    checkpoints.save_moe(params, folder, 1)
    for changed, layer, message in (
        (params._replace(wo=2 * params.wo), 1, "down_proj.weight in .* is only read, so it cannot"),
        (params, 2, "an MoE block can only be added to a directory that"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoints.save_moe(changed, folder, layer)
    assert files_of(folder) == before


def test_numbers_of_an_unknown_meaning_are_refused(tmp_path):
    config, tensors, _ = model("int4")
    module = "model.layers.1.mlp.experts.0.up_proj."
    for name, array, message in (
        ("weight_zero_point", np.zeros((16, 4), np.int32), "weight_zero_point, which .* do not"),
        ("weight_scale", np.ones((F, 3), np.float32), r"weight_scale must have a scale for .*3\)"),
    ):
        folder = publish(tmp_path, config, tensors | {module + name: array})
        with pytest.raises(ValueError, match=message):
            checkpoints.load_moe_params(folder, 1)


@pytest.mark.parametrize(
    "values, scales, more, message",
    [
        # Integers of 2 bits (BitNet) or 4 (AWQ of ModelOpt), which are no float4.
        (np.uint8, np.float32, {}, "but is uint8 with w.weight_scale of float32"),
        (np.int8, FLOAT8, {}, "but is int8 with w.weight_scale of float8_e4m3fn"),
        (np.int8, np.float32, {"zero_point": np.ones((4, 1), np.int8)}, "zero_point in .* is int8"),
        # Integers of 8 bits in an int32 are a quarter of the columns.
        (np.int32, np.float32, {"shape": np.array([4, 32], np.int32)}, r"4, 64\) .* is \(4, 32"),
    ],
    ids=["uint8", "NVFP4 in int8", "zero point", "8 bits in int32"],
)
def test_values_outside_of_blocks_that_no_format_defines_are_refused(
    tmp_path, values, scales, more, message
):
    config, tensors, _ = model("int4")
    attention = {"w.weight": np.ones((4, 8), values), "w.weight_scale": np.ones((4, 1), scales)}
    attention |= {f"w.weight_{name}": np.asarray(array) for name, array in more.items()}
    publish(tmp_path, config, tensors | attention)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_model(tmp_path)


@pytest.mark.parametrize("shape", [(3, 2, 4), (3,), ()])
def test_slices_of_a_tensor_of_all_experts(tmp_path, shape):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, 4, 64)).astype(FLOAT8)
    scales = rng.uniform(size=shape).astype(np.float32)
    folder = publish(tmp_path, {}, {"w": values, "w_scale": scales})
    w = open_tensor(Directory(folder), "w", Quantization("fp8"))
    assert isinstance(w, Scaled) and w.shape == (3, 4, 64)
    axes = scales.reshape(*shape, *(1,) * (3 - len(shape)))
    for axis, size in enumerate((3, 4, 64)):
        axes = np.repeat(axes, size // axes.shape[axis], axis=axis)
    want = values.astype(np.float32) * axes
    whole = slice(None)
    for index in [
        (whole, whole, whole),
        (slice(1, 2), slice(1, 4, 2), slice(5, 50)),
        (slice(2, 3), slice(0, 2), slice(1, 64, 2)),
    ]:
        np.testing.assert_array_equal(w.read(index), want[index])
