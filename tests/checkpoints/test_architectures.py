"""Tests of the table of published models: it is complete, and consistent with the layer."""

from __future__ import annotations

import dataclasses

import pytest

from jax_ep.checkpoints.architectures import (
    PARAMETER_AXES,
    TABLE,
    OneOf,
    architectures,
)
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams


def layouts(row):
    """Returns one tuple of tensors for each combination of layouts that a row allows."""
    chosen = [()]
    for item in row.tensors:
        options = item.layouts if isinstance(item, OneOf) else ((item,),)
        chosen = [(*tensors, *option) for tensors in chosen for option in options]
    return chosen


def test_architectures_are_the_table_by_model_type():
    known = architectures()
    assert set(known) == {t for row in TABLE for t in row.model_types}
    assert all(model_type in row.model_types for model_type, row in known.items())
    assert known["kimi_k2"] is known["deepseek_v3"] and "Kimi-K2" in known["kimi_k2"].models


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.models)
def test_a_row_names_fields_parameters_and_axes_that_there_are(row):
    fields = {field.name for field in dataclasses.fields(MoEConfig)}
    assert set(row.fields) | set(row.fixed) <= fields and not set(row.fields) & set(row.fixed)
    for tensors in layouts(row):
        params = [param for tensor in tensors for param in tensor.params]
        assert len(params) == len(set(params))
        assert {"wi_0", "wo"} <= set(params) <= set(PARAMETER_AXES)
        assert ("gate" in params) or not tensors[0].params
        for tensor in tensors:
            assert bool(tensor.params) == bool(tensor.axes)
            stored = tensor.axes.replace("1", "").replace(" ", "")
            assert ("G" in stored) == (len(tensor.params) == 2)
            each = "E" if "{e}" in tensor.name else ""
            for param in tensor.params:
                axes = PARAMETER_AXES[param].replace("1", "")
                held = stored.replace("G", "").replace("D", "H")
                assert sorted(held + each) == sorted(axes)
            assert set(stored) - {"G", "R"} <= set(row.sizes)


def test_the_axes_are_of_the_layers_parameters():
    assert set(PARAMETER_AXES) == set(MoEParams._fields)
    assert PARAMETER_AXES["gate"] == "HR" and PARAMETER_AXES["wi_0_bias"] == "EF"


def test_the_models_that_people_run_are_there():
    models = " ".join(row.models for row in TABLE)
    wanted = "Mixtral Qwen2 Qwen3 Next DeepSeek-V2 DeepSeek-V3 Kimi-K2 GLM-4.5 OLMoE GPT-OSS Llama"
    wanted += " Granite ERNIE MiniMax-M2 Hunyuan LFM2 Jamba LongCat"
    assert not [name for name in wanted.split() if name not in models]
