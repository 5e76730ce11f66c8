"""Tests of the Flax NNX layer: parameters, axes, state, and NNX's transforms."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.dense_moe import (
    BATCH,
    SEQUENCE,
    E,
    F,
    H,
    K,
    S,
    assert_close,
    assert_equal,
    dense,
    make_params,
    make_x,
)
from support.jaxprs import executions
from support.meshes import RANK_COUNTS, expert_mesh, mesh
from support.selection import quick

from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import MoEMetrics
from jax_ep.moe.params import WEIGHTS, MoEParams
from jax_ep.nnx import MoE, RouterState

RULES = (("exp", "expert"), ("embed", None), ("mlp", None), ("layers", None))


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    with jax.default_matmul_precision("float32"):
        yield


def layer(seed: int = 0, **changes) -> Any:
    sizes: dict = dict(num_experts=E, num_experts_per_token=K)
    return MoE(H, F, **(sizes | changes), rngs=nnx.Rngs(seed))


def test_an_initializer_may_be_a_function_of_three_arguments():
    module = layer(kernel_init=lambda key, shape, dtype: jnp.full(shape, 0.5, dtype))
    np.testing.assert_array_equal(module.wo.get_value(), np.full((E, F, H), 0.5))


def layer_of(params: MoEParams, **changes) -> Any:
    shared = 0 if params.shared_wo is None else S
    zeros = jax.nn.initializers.zeros
    changes |= dict(num_shared_experts=shared, kernel_init=zeros, gate_init=zeros)
    module = layer(selection_bias=params.bias is not None, **changes)
    module.gate.kernel.set_value(params.gate)
    if params.bias is not None:
        module.gate.bias.set_value(params.bias)
    for name in WEIGHTS:
        if (value := getattr(params, name)) is not None:
            getattr(module, name).set_value(value)
    return module


@nnx.jit
def call(module, *args):
    return module(*args)


@nnx.jit
def loss_and_grads(module, x):
    def loss(module, x):
        out, metrics = module(x)
        return jnp.mean(out**2) + 0.1 * metrics.load_balance_loss, (out, metrics)

    value, grads = nnx.value_and_grad(loss, has_aux=True)(module, x)
    return value, nnx.to_pure_dict(grads)


def test_parameters_and_logical_axes():
    make = functools.partial(layer, num_shared_experts=S, param_dtype=jnp.bfloat16)
    module = nnx.eval_shape(lambda: make(selection_bias=True))
    params = nnx.state(module, nnx.Param)
    assert nnx.to_pure_dict(nnx.get_partition_spec(params)) == {
        "gate": {"kernel": P("embed", None)},
        "wi_0": P("exp", "embed", "mlp"),
        "wi_1": P("exp", "embed", "mlp"),
        "wo": P("exp", "mlp", "embed"),
        "shared_wi_0": P("embed", "mlp"),
        "shared_wi_1": P("embed", "mlp"),
        "shared_wo": P("mlp", "embed"),
    }
    arrays = nnx.to_pure_dict(params)
    assert {a.dtype for a in jax.tree.leaves(arrays)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(jnp.shape, arrays) == {
        "gate": {"kernel": (H, E)},
        "wi_0": (E, H, F),
        "wi_1": (E, H, F),
        "wo": (E, F, H),
        "shared_wi_0": (H, S * F),
        "shared_wi_1": (H, S * F),
        "shared_wo": (S * F, H),
    }
    state = nnx.to_pure_dict(nnx.state(module, RouterState))
    assert state["gate"]["bias"].shape == (E,) and state["gate"]["bias"].dtype == jnp.float32
    plain = nnx.eval_shape(layer)
    assert set(nnx.to_pure_dict(nnx.state(plain))) == {"gate", "wi_0", "wi_1", "wo"}
    assert not jax.tree.leaves(nnx.state(plain, RouterState))


@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, 8))
def test_matches_dense_numpy(num_ranks):
    module = layer_of(make_params(bias=True), score="sigmoid", scale=2.0)
    with jax.set_mesh(expert_mesh(num_ranks)):
        out, metrics = call(module, make_x())
    want, counts = dense(make_params(bias=True), make_x(), score="sigmoid", scale=2.0)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert isinstance(metrics, MoEMetrics) and metrics.num_dropped == 0


def test_gradients_equal_on_one_and_eight_ranks():
    want = loss_and_grads(layer_of(make_params()), make_x())
    with jax.set_mesh(expert_mesh(8)):
        assert_close(loss_and_grads(layer_of(make_params()), make_x()), want)


def test_attributes_reach_the_core():
    changed: dict = {
        "num_experts": 6,
        "num_experts_per_token": 2,
        "score": "sigmoid",
        "choose_by": "logit",
        "num_groups": 3,
        "groups_kept": 2,
        "group_score": "max",
        "normalize": False,
        "normalize_epsilon": 1e-6,
        "scale": 2.5,
        "router": lambda x, logits: None,
        "router_dtype": jnp.bfloat16,
        "balance_convention": "transformers",
        "capacity_factor": 1.25,
        "overflow": "tail",
        "host_capacity_factor": 0.5,
        "num_slots": 64,
        "zero_experts": 1,
        "identity_experts": 2,
        "constant_experts": 3,
        "free_expert_factor": 0.5,
        "record_choices": True,
        "token_chunks": 4,
        "expert_alignment": 8,
        "wire_dtype": jnp.float8_e4m3fn,
        "activation": jax.nn.gelu,
        "gating": jnp.multiply,
        "clamp": 7.0,
        "weights_on": "input",
        "dtype": jnp.bfloat16,
        "expert_axis": ("a", "b"),
        "batch_axes": ("a", "b"),
        "tensor_axis": "c",
        "mesh": expert_mesh(1, "a"),
        "implementation": "two_level",
        "matmul_implementation": "xla",
    }
    assert nnx.eval_shape(lambda: layer(**changed)).config == MoEConfig(**changed)
    assert nnx.eval_shape(layer).config == MoEConfig(num_experts=E, num_experts_per_token=K)


SOME_RULES = [RULES, RULES[:1], (), (("embed", "data"),), (("exp", ("expert",)), ("mlp", "data"))]


@pytest.mark.parametrize("kind", quick(["Auto", "Explicit", "mixed"], "Explicit"))
@pytest.mark.parametrize("rules", SOME_RULES, ids=str)
def test_experts_are_born_sharded_whatever_rules_there_are(rules, kind):
    """Experts must be sharded over expert_axis without a rule, other axes only by rules."""
    auto, explicit = AxisType.Auto, AxisType.Explicit
    # This skips the test if there are fewer devices.
    mesh((2, 4), ("data", "expert"))
    types = dict(Auto=(auto, auto), Explicit=(explicit, explicit), mixed=(auto, explicit))[kind]
    devices = jax.make_mesh((2, 4), ("data", "expert"), axis_types=types)
    over = dict(rules)
    shape = (E // 4, H // (2 if "embed" in over and over["embed"] else 1),
             F // (2 if over.get("mlp") else 1))  # fmt: skip
    make = functools.partial(layer, kernel_init=jax.nn.initializers.ones)
    with jax.set_mesh(devices), nnx.logical_axis_rules(rules):
        for module in (make(), nnx.jit(make)()):
            wi_0 = module.wi_0.get_value()
            assert {shard.data.shape for shard in wi_0.addressable_shards} == {shape}
            gate = module.gate.kernel.get_value()
            assert gate.addressable_shards[0].data.shape == (shape[1], E)
        if kind != "mixed":
            abstract = nnx.eval_shape(make).wi_0.get_value()
            assert abstract.sharding.spec[0] in ("expert", ("expert",))


def test_flax_finds_where_the_parameters_of_a_mesh_of_their_own_are():
    devices = mesh((2, 4), ("data", "expert"))
    module = layer(mesh=devices, kernel_init=jax.nn.initializers.ones)
    params = nnx.state(module, nnx.Param)
    named = nnx.get_named_sharding(params, devices)
    same = jax.tree.map(lambda n, p: n.is_equivalent_to(p.sharding, p.ndim), named, params)
    assert jax.tree.leaves(same) == [True] * 4
    assert module.wi_0.get_value().addressable_shards[0].data.shape == (E // 4, H, F)


@pytest.mark.slow
def test_output_does_not_depend_on_where_parameters_are_born():
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        got = call(layer(), make_x())
    assert_close(got, call(layer(), make_x()))


def test_every_rank_has_all_experts_on_a_mesh_without_their_axis():
    with jax.set_mesh(mesh((8,), ("data",))), nnx.logical_axis_rules(RULES):
        module = layer(kernel_init=jax.nn.initializers.ones)
    assert module.wi_0.get_value().addressable_shards[0].data.shape == (E, H, F)


def test_a_rule_that_names_no_axis_of_the_mesh_is_an_error():
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        for rule in (("exp", "experts"), ("embed", "fsdp")):
            with nnx.logical_axis_rules((rule,)), pytest.raises(ValueError, match=rule[1]):
                layer()


def test_a_layer_can_be_pickled_and_copied():
    module = layer(selection_bias=True, num_shared_experts=S)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert other.config == module.config
        assert_close(call(other, make_x()), call(module, make_x()))


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="num_expert_groups"):
        layer(num_expert_groups=2)


@pytest.mark.slow
def test_checkpoint_of_one_mesh_loads_on_another(tmp_path):
    def make(num_ranks):
        with jax.set_mesh(expert_mesh(num_ranks)), nnx.logical_axis_rules(RULES):
            module = nnx.jit(functools.partial(layer, num_ranks, selection_bias=True))()
            got = jax.device_get(nnx.jit(lambda module, x: module(x))(module, make_x()))
        return module, got

    module, want = make(8)
    other, _ = make(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "moe", nnx.to_pure_dict(nnx.state(module)))
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
            nnx.to_pure_dict(nnx.state(other)),
        )
        loaded = checkpointer.restore(tmp_path / "moe", abstract)
    nnx.update(other, loaded)
    assert other.wi_0.get_value().addressable_shards[0].data.shape == (E // 2, H, F)
    with jax.set_mesh(expert_mesh(2)):
        got = nnx.jit(lambda module, x: module(x))(other, make_x())
    assert_close(jax.device_get(got), want)


@pytest.mark.slow
def test_bfloat16_compute_with_float32_parameters():
    module = layer_of(make_params(), dtype=jnp.bfloat16)
    (_, (out, _)), grads = loss_and_grads(module, make_x())
    assert out.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    want, _ = dense(make_params(), make_x())
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.05)


def test_drops_are_reported():
    params = make_params(shared=False)
    with jax.set_mesh(expert_mesh(4)):
        _, tight = call(layer_of(params, capacity_factor=0.25), make_x())
        _, ample = call(layer_of(params, capacity_factor=4.0), make_x())
    # Each of the 4 ranks keeps at most a quarter of its 24 rows, rounded up to a multiple of 8.
    assert tight.num_dropped >= BATCH * SEQUENCE * K - 4 * 8
    assert ample.num_dropped == 0


def test_masked_tokens_are_not_routed():
    mask = jnp.arange(SEQUENCE) < jnp.arange(BATCH)[:, None]
    out, metrics = call(layer_of(make_params(shared=False)), make_x(), mask)
    np.testing.assert_array_equal(out[~mask], 0.0)
    assert metrics.expert_counts.sum() == mask.sum() * K


@pytest.mark.slow
def test_scan_and_remat():
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs):
        return MoE(H, F, num_experts=E, num_experts_per_token=K, selection_bias=True, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def scan(x, module):
        out, metrics = module(x)
        return x + out, metrics

    def loss(stack, x):
        x, metrics = scan(x, stack)
        return jnp.mean(x**2) + 0.1 * jnp.sum(metrics.load_balance_loss)

    stack = make(nnx.Rngs(0).split(4))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stack)))
    assert specs["wi_0"] == P("layers", "exp", "embed", "mlp")
    graph, state = nnx.split(stack)

    def looped(state, x):
        losses = 0.0
        for i in range(4):
            out, metrics = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(x)
            x, losses = x + out, losses + metrics.load_balance_loss
        return jnp.mean(x**2) + 0.1 * losses

    want, want_grads = jax.jit(jax.value_and_grad(looped))(state, make_x())
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        value, grads = nnx.jit(nnx.value_and_grad(loss))(stack, make_x())
    want_grads = nnx.to_pure_dict(want_grads)
    del want_grads["gate"]["bias"]
    assert_close((value, nnx.to_pure_dict(grads)), (want, want_grads))


@pytest.mark.slow
def test_experts_quantized_once_for_the_microbatches_of_a_stack():
    batches = jax.random.normal(jax.random.key(1), (3, 16, 128))

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        options = {"num_experts": 4, "num_experts_per_token": 2}
        return MoE(128, 128, **options, matmul_dtype=jnp.float8_e4m3fn, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def run(x, layer, quantized):
        return x + layer(x, quantized_experts=quantized)[0]

    def loss(stack, quantized, x):
        out = run(x, stack, quantized)
        return jnp.sum(jnp.sin(out)), out

    def step(state, once):
        stack = nnx.merge(graph, state)
        quantized = nnx.vmap(MoE.quantize_experts)(stack) if once else None

        @nnx.scan(in_axes=(nnx.Carry, None, None, 0), out_axes=(nnx.Carry, 0))
        def accumulate(total, stack, quantized, x):
            grads, out = nnx.grad(loss, has_aux=True)(stack, quantized, x)
            return jax.tree.map(jnp.add, total, grads), out

        return accumulate(jax.tree.map(jnp.zeros_like, state), stack, quantized, batches)

    each, once = (functools.partial(step, once=once) for once in (False, True))
    with jax.set_mesh(expert_mesh(2)):
        stack = make(nnx.Rngs(0))
        graph, state = nnx.split(stack)
        counts = [
            executions(jax.make_jaxpr(run)(state).jaxpr, "quantize_float8_matrices")
            for run in (each, once)
        ]
        assert_equal(jax.jit(once)(state), jax.jit(each)(state))
        quantized = nnx.jit(nnx.vmap(MoE.quantize_experts))(stack)
    # Without reuse, three matrices in two layers are quantized for each of three microbatches.
    assert counts == [3 * 2 * 3, 3 * 2]
    for array in jax.tree.leaves(quantized):
        assert array.sharding.spec[:2] == (None, "expert")
        assert array.addressable_shards[0].data.shape == (2, 2, *array.shape[2:])


def test_selection_bias_changes_when_told_and_only_then():
    module = layer_of(make_params()._replace(bias=jnp.zeros(E)))
    _, metrics = call(module, make_x())
    np.testing.assert_array_equal(module.gate.bias.get_value(), 0.0)

    @nnx.jit
    def step(module, x):
        _, metrics = module(x)
        module.update_bias(metrics.expert_counts, 0.5)
        return metrics

    with jax.set_mesh(expert_mesh(8)):
        step(module, make_x())
    counts = np.asarray(metrics.expert_counts)
    want = 0.5 * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(module.gate.bias.get_value(), want)
    with jax.set_mesh(expert_mesh(8)):
        _, moved = call(module, make_x())
    assert np.std(moved.expert_counts) != np.std(counts)


def test_a_stack_of_layers_is_stepped_at_once():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return MoE(H, F, num_experts=E, num_experts_per_token=K, selection_bias=True, rngs=rngs)

    stack = make(nnx.Rngs(0))
    counts = jnp.stack([jnp.arange(E), jnp.arange(E)[::-1]])
    stack.update_bias(counts, 0.5)
    bias = stack.gate.bias.get_value()
    np.testing.assert_array_equal(bias, 0.5 * np.sign((E - 1) / 2 - counts))


@pytest.mark.slow
def test_training_learns_and_leaves_the_bias_alone():
    x, target = make_x(), jnp.roll(make_x(), 1, axis=-1)

    @nnx.jit
    def step(module, optimizer, x):
        def loss(module):
            out, metrics = module(x)
            return jnp.mean((out - target) ** 2) + 0.01 * metrics.load_balance_loss

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    with jax.set_mesh(mesh((2, 4), ("data", "expert"))), nnx.logical_axis_rules(RULES):
        module = nnx.jit(lambda: layer(selection_bias=True, dtype=jnp.bfloat16))()
        optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
        losses = [float(step(module, optimizer, x)) for _ in range(30)]
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_array_equal(module.gate.bias.get_value(), 0.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_experts=-1), "num_experts must be at least 1, but is -1"),
        (dict(num_experts_per_token=9), "num_experts_per_token must be at most the 8 .* but is 9"),
        (dict(num_groups=3), "num_groups must divide the 8 experts .* but is 3"),
        (dict(score="tanh"), "score must be one of .* but is 'tanh'"),
        (dict(capacity_factor=-1.0), "capacity_factor must be above 0.* but is -1.0"),
        (dict(expert_axis="ep", mesh=expert_mesh(1)), r"expert_axis \('ep',\) must name axes"),
    ],
)
def test_errors_name_the_attribute(changes, message):
    with pytest.raises(ValueError, match=message):
        call(layer_of(make_params(shared=False), **changes), make_x())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_shared_experts=-1), "num_shared_experts must be at least 0, but is -1"),
        (dict(shared_dim=-3), "shared_dim must be at least 0, but is -3"),
        (dict(num_experts=8.0), "num_experts must be a static integer, but is 8.0"),
        (dict(num_experts_per_token=2.0), "num_experts_per_token must be a static integer"),
        (dict(zero_experts=1.0), "zero_experts must be a static integer"),
        (dict(gated="no"), "gated must be True or False, but is 'no'"),
        (dict(kernel_init=None), "kernel_init must be an initializer.* but is None"),
        (dict(mesh="x"), "mesh must be a jax.sharding.Mesh"),
    ],
)
def test_a_layer_is_not_made_of_what_does_not_fit(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        layer(**changes)


def test_axes_may_be_a_list():
    with jax.set_mesh(expert_mesh(8)):
        x, module = make_x(), layer(expert_axis=["expert"], batch_axes=["expert"])
        np.testing.assert_array_equal(call(module, x)[0], call(layer(), x)[0])


def test_update_bias_without_a_bias():
    with pytest.raises(ValueError, match="update_bias needs selection_bias=True"):
        layer().update_bias(jnp.zeros(E), 0.1)


def test_num_experts_must_be_a_multiple_of_the_ranks():
    with (
        jax.set_mesh(expert_mesh(8)),
        pytest.raises(
            ValueError, match="num_experts must be a multiple of the 8 ranks .* but is 12"
        ),
    ):
        call(layer(num_experts=12), make_x())


@pytest.mark.parametrize("num_slots, fits", [(12, False), (16, True)])
def test_num_slots_must_be_a_multiple_of_the_ranks_where_there_are_slots(num_slots, fits):
    """With num_slots, the ranks must divide the slots, but need not divide the experts."""
    with jax.set_mesh(expert_mesh(8)):
        if fits:
            assert layer(num_experts=12, num_slots=num_slots).wo.get_value().shape[0] == num_slots
            return
        with pytest.raises(ValueError, match="num_slots must be a multiple of the 8 ranks .* 12"):
            layer(num_experts=10, num_slots=num_slots)


def test_a_param_dtype_that_arrays_do_not_have_is_named():
    with pytest.raises(TypeError, match="param_dtype must be .* but is .*float64"):
        layer(param_dtype=jnp.float64)


@pytest.mark.parametrize("num_layers", [3, 4])
@pytest.mark.parametrize("options", [{}, {"transform_metadata": {nnx.PARTITION_NAME: None}}])
def test_a_stack_trains_on_explicit_axes(num_layers, options):
    """A stack of layers must train on a mesh of explicit axes.

    If the stack is made without transform_metadata, its parameters' logical axes lack one for the
    axis of layers.
    """

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, **options)
    def stack(rngs):
        return MoE(H, F, num_experts=E, num_experts_per_token=K, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)
    def run(x, module):
        return x + module(x)[0]

    @nnx.jit
    def step(module, optimizer, x):
        gradients = nnx.grad(lambda module: jnp.sum(run(x, module) ** 2))(module)
        optimizer.update(module, gradients)

    with jax.set_mesh(mesh((2, 4), ("data", "expert"), AxisType.Explicit)):
        module = stack(nnx.Rngs(0))
        before = np.asarray(module.wi_0.get_value())
        optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
        step(module, optimizer, make_x())
        state = optimizer.opt_state[0].mu.wi_0.get_value()
        for array in (module.wi_0.get_value(), state):
            assert jax.typeof(array).sharding.spec == P(None, "expert", None, None)
    assert np.abs(np.asarray(module.wi_0.get_value()) - before).max() > 0
