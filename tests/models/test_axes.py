"""Tests of the mesh axes of a decoder: which there are, and what they split."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec
from support.meshes import model_mesh

from jax_ep.models.axes import (
    decoder_mesh,
    fsdp_axes,
    mesh_of,
    on_mesh,
    spec_of_moe,
    spec_of_weight,
)
from jax_ep.models.config import MODELS


@pytest.mark.needs_devices(4)
def test_a_mesh_leaves_out_optional_axes_of_one_rank():
    def axes(**sizes: int) -> dict[str, int]:
        return dict(decoder_mesh(jax.devices()[:4], sizes).shape)

    assert axes(data=1, fsdp=1, expert=4, tensor=1) == {"data": 1, "expert": 4}
    assert axes(data=1, fsdp=2, expert=2) == {"data": 1, "fsdp": 2, "expert": 2}
    assert axes(data=2, fsdp=1, expert=1, tensor=2) == {"data": 2, "expert": 1, "tensor": 2}


@pytest.mark.needs_devices(8)
def test_fsdp_splits_experts_if_their_number_allows_it():
    mesh = model_mesh(1, 2, 2, 2)
    assert fsdp_axes(8, mesh) == {"exp": "fsdp", "embed": "fsdp"}
    config = on_mesh(MODELS["tiny"], mesh)
    assert spec_of_moe("wi_0", config, mesh) == PartitionSpec(("expert", "fsdp"), None, "tensor")
    assert spec_of_moe("gate", config, mesh) == PartitionSpec("fsdp", None)
    # Six experts cannot be split over four ranks.
    assert fsdp_axes(6, mesh) == {"embed": "fsdp"}
    config = on_mesh(MODELS["tiny"].replace(num_experts=6), mesh)
    assert spec_of_moe("wo", config, mesh) == PartitionSpec("expert", "tensor", "fsdp")
    assert fsdp_axes(8, model_mesh(1, 2, 2)) == {}


@pytest.mark.needs_devices(8)
def test_weights_are_split_along_their_first_dimension_that_allows_it():
    mesh = model_mesh(1, 2, 2, 2)

    def spec(name: str, *shape: int) -> tuple:
        return tuple(spec_of_weight(f"model.layers.0.{name}", shape, mesh))

    assert spec("self_attn.q_proj.weight", 64, 32) == (("tensor", "fsdp"), None)
    assert spec("self_attn.q_proj.bias", 64) == ("tensor",)
    assert spec("self_attn.o_proj.weight", 32, 64) == ("fsdp", "tensor")
    assert spec("self_attn.k_proj.weight", 2, 32) == ("tensor", "fsdp")
    assert spec("input_layernorm.weight", 32) == (None,)
    assert tuple(spec_of_weight("lm_head.weight", (256, 32), mesh)) == (("tensor", "fsdp"), None)


@pytest.mark.needs_devices(8)
def test_a_mesh_has_as_many_expert_ranks_as_can_be():
    config = MODELS["tiny"]

    def shape(**parallel: int) -> dict[str, int]:
        return dict(mesh_of(config, jax.devices()[:8], **parallel).shape)

    assert shape() == {"data": 1, "expert": 8}
    assert shape(expert_parallel=2) == {"data": 4, "expert": 2}
    both = shape(fsdp=2, tensor_parallel=2)
    assert both == {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}
    with pytest.raises(ValueError, match="tensor_parallel must divide the 8 devices, but is 3"):
        shape(tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel must divide the 2 key-value heads"):
        shape(tensor_parallel=4)
    with pytest.raises(ValueError, match="fsdp must divide the 8 ranks that tensor_parallel"):
        shape(fsdp=3)
    with pytest.raises(ValueError, match="expert_parallel must divide the 4 ranks"):
        shape(fsdp=2, expert_parallel=8)
