"""Tests of the Flax Linen layer: parameters, axes, state, and Linen's transforms."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
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

from jax_ep.linen import MoE
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import MoEMetrics
from jax_ep.moe.params import WEIGHTS, MoEParams

RULES = (("exp", "expert"), ("embed", None), ("mlp", None), ("layers", None))
layer: Any = functools.partial(MoE, num_experts=E, num_experts_per_token=K, mlp_dim=F)
LAYER = layer(num_shared_experts=S)


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    with jax.default_matmul_precision("float32"):
        yield


def variables_of(params: MoEParams) -> dict:
    weights = {name: w for name in WEIGHTS if (w := getattr(params, name)) is not None}
    variables: dict = {"params": {"gate": {"kernel": params.gate}, **weights}}
    if params.bias is not None:
        variables["router_state"] = {"gate": {"bias": params.bias}}
    return variables


def apply(module, *args, **kwargs) -> Any:
    return module.apply(*args, **kwargs)


def loss_and_grads(module, variables, x):
    """Returns ((loss, (output, metrics)), gradients of the parameters), as a training step has."""

    def loss(params):
        out, metrics = apply(module, variables | {"params": params}, x)
        return jnp.mean(out**2) + 0.1 * metrics.load_balance_loss, (out, metrics)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])


def test_parameters_and_logical_axes():
    module = layer(num_shared_experts=S, selection_bias=True, param_dtype=jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), make_x())
    specs = nn.get_partition_spec(variables)
    assert specs["params"] == {
        "gate": {"kernel": P("embed", None)},
        "wi_0": P("exp", "embed", "mlp"),
        "wi_1": P("exp", "embed", "mlp"),
        "wo": P("exp", "mlp", "embed"),
        "shared_wi_0": P("embed", "mlp"),
        "shared_wi_1": P("embed", "mlp"),
        "shared_wo": P("mlp", "embed"),
    }
    params = nn.unbox(variables)["params"]
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(jnp.shape, params) == {
        "gate": {"kernel": (H, E)},
        "wi_0": (E, H, F),
        "wi_1": (E, H, F),
        "wo": (E, F, H),
        "shared_wi_0": (H, S * F),
        "shared_wi_1": (H, S * F),
        "shared_wo": (S * F, H),
    }
    bias = variables["router_state"]["gate"]["bias"]
    assert bias.shape == (E,) and bias.dtype == jnp.float32
    plain = jax.eval_shape(layer().init, jax.random.key(0), make_x())
    assert set(plain) == {"params"}
    assert set(plain["params"]) == {"gate", "wi_0", "wi_1", "wo"}


@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, 8))
def test_matches_dense_numpy(num_ranks):
    params, x = make_params(bias=True), make_x()
    module = layer(num_shared_experts=S, selection_bias=True, score="sigmoid", scale=2.0)
    with jax.set_mesh(expert_mesh(num_ranks)):
        out, metrics = jax.jit(module.apply)(variables_of(params), x)
    want, counts = dense(params, x, score="sigmoid", scale=2.0)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.expert_counts, counts)
    assert isinstance(metrics, MoEMetrics) and metrics.num_dropped == 0


def test_init_and_eval_shape_on_an_explicit_mesh_that_does_not_divide_x():
    """`init` must accept a sample whose batch the ranks do not divide, such as a batch of one."""
    # This skips the test if there are fewer devices.
    mesh((2,), ("expert",))
    devices = jax.make_mesh((2,), ("expert",))
    assert devices.axis_types == (AxisType.Explicit,)
    x = make_x(shape=(1, 5))
    with jax.set_mesh(devices):
        variables = jax.eval_shape(LAYER.init, jax.random.key(0), x)
        out, metrics = jax.eval_shape(LAYER.apply, variables, x)
    assert nn.unbox(variables)["params"]["wi_0"].shape == (E, H, F)
    assert out.shape == x.shape and metrics.expert_counts.shape == (E,)


@pytest.mark.slow
def test_gradients_equal_on_one_and_eight_ranks():
    variables = variables_of(make_params())
    want = loss_and_grads(LAYER, variables, make_x())
    with jax.set_mesh(expert_mesh(8)):
        assert_close(loss_and_grads(LAYER, variables, make_x()), want)


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
        "matmul_dtype": jnp.float8_e4m3fn,
        "weights_on": "input",
        "dtype": jnp.bfloat16,
        "expert_axis": ("a", "b"),
        "batch_axes": ("a", "b"),
        "sequence_axes": "b",
        "fsdp_axes": (("embed", "d"),),
        "tensor_axis": "c",
        "mesh": expert_mesh(1, "a"),
        "implementation": "xla",
        "matmul_implementation": "xla",
    }
    config = MoEConfig.of(MoE(mlp_dim=F, **changed))
    assert {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} == changed
    defaults = MoEConfig(num_experts=E, num_experts_per_token=K)
    assert MoEConfig.of(layer()) == defaults


def test_logical_rules_shard_experts_over_the_expert_axis():
    devices = mesh((2, 4), ("data", "expert"))

    def init(key):
        return LAYER.init(key, make_x())

    specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(specs, devices, rules=RULES)
    variables = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(jax.random.key(0))
    wi_0 = variables["params"]["wi_0"]
    assert wi_0.sharding.spec == P("expert", None, None)
    assert {shard.data.shape for shard in wi_0.addressable_shards} == {(E // 4, H, F)}
    assert variables["params"]["gate"]["kernel"].sharding.is_fully_replicated
    with jax.set_mesh(devices):
        out, _ = jax.jit(LAYER.apply)(variables, make_x())
        # With rules, boxed parameters add sharding constraints, which must change nothing.
        with nn.logical_axis_rules(RULES):
            boxed = jax.jit(init)(jax.random.key(0))
            again, _ = jax.jit(LAYER.apply)(boxed, make_x())
            assert nn.unbox(boxed)["params"]["wi_0"].sharding.spec[0] == "expert"
    weights = jax.device_get(variables)["params"]
    want, _ = dense(MoEParams(weights.pop("gate")["kernel"], **weights), make_x())
    assert_close(out, again)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [dict(mlp_dim=7), dict(num_shared_experts=S + 1)], ids=str)
def test_parameters_of_other_sizes_are_refused_with_a_tensor_axis(changes):
    """Only in the caller's shard_map may a parameter hold a part of the columns."""
    variables = variables_of(make_params())
    options = dict(num_shared_experts=S, tensor_axis="tensor")
    layer(**options).apply(variables, make_x())
    with pytest.raises(flax.errors.ScopeParamShapeError, match="expected to generate shape"):
        layer(**options | changes).apply(variables, make_x())


@pytest.mark.slow
def test_checkpoint_of_one_mesh_loads_on_another(tmp_path):
    shards = {"wi_0": P("expert"), "wi_1": P("expert"), "wo": P("expert")}

    def place(tree, num_ranks):
        devices = expert_mesh(num_ranks)
        return jax.tree_util.tree_map_with_path(
            lambda path, a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(devices, shards.get(path[-1].key, P()))
            ),
            tree,
        )

    variables = variables_of(make_params(bias=True))
    module = layer(num_shared_experts=S, selection_bias=True)
    eight = place(variables, 8)
    saved = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), variables, eight)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "moe", saved)
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "moe", place(variables, 2))
    assert loaded["params"]["wi_0"].addressable_shards[0].data.shape == (E // 2, H, F)
    with jax.set_mesh(expert_mesh(8)):
        want = jax.jit(module.apply)(saved, make_x())
    with jax.set_mesh(expert_mesh(2)):
        got = jax.jit(module.apply)(loaded, make_x())
    assert_close(jax.device_get(got), jax.device_get(want))


@pytest.mark.slow
def test_bfloat16_compute_with_float32_parameters():
    module = layer(num_shared_experts=S, dtype=jnp.bfloat16)
    variables = variables_of(make_params())
    (_, (out, _)), grads = loss_and_grads(module, variables, make_x())
    assert out.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    want, _ = dense(make_params(), make_x())
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.05)


@pytest.mark.slow
def test_drops_are_reported():
    variables = variables_of(make_params(shared=False))
    with jax.set_mesh(expert_mesh(4)):
        _, tight = jax.jit(layer(capacity_factor=0.25).apply)(variables, make_x())
        _, ample = jax.jit(layer(capacity_factor=4.0).apply)(variables, make_x())
    # Each of the 4 ranks keeps at most a quarter of its 24 rows, rounded up to a multiple of 8.
    assert tight.num_dropped >= BATCH * SEQUENCE * K - 4 * 8
    assert ample.num_dropped == 0


def test_a_scanned_stack_replays_the_choices_that_it_recorded():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, topk_idx):
            y, metrics = layer(record_choices=True)(x, topk_idx=topk_idx)
            return x + y, metrics

    stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)()
    x = make_x()
    variables = nn.unbox(stack.init(jax.random.key(0), x, None))

    @jax.jit
    def step(variables, topk_idx):
        def loss(variables):
            out, metrics = stack.apply(variables, x, topk_idx)
            return jnp.mean(out**2), (out, metrics.topk_idx)

        return jax.grad(loss, has_aux=True)(variables)

    with jax.set_mesh(expert_mesh(4)):
        grads, (out, topk_idx) = step(variables, None)
        again, (replayed, same) = step(variables, topk_idx)
    assert topk_idx.shape == (2, BATCH, SEQUENCE, K) and np.any(topk_idx[0] != topk_idx[1])
    np.testing.assert_array_equal(replayed, out)
    np.testing.assert_array_equal(same, topk_idx)
    assert_close(again, grads)
    assert np.any(again["params"]["MoE_0"]["gate"]["kernel"] != 0)


def test_masked_tokens_are_not_routed():
    mask = jnp.arange(SEQUENCE) < jnp.arange(BATCH)[:, None]
    variables = variables_of(make_params(shared=False))
    out, metrics = jax.jit(layer().apply)(variables, make_x(), mask)
    np.testing.assert_array_equal(out[~mask], 0.0)
    assert metrics.expert_counts.sum() == mask.sum() * K


class Stack(nn.Module):
    """Four residual MoE blocks: a scan over a rematerialized block."""

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            out, metrics = block(x)
            return x + out, metrics

        scan = nn.scan(
            nn.remat(body, prevent_cse=False),
            variable_axes={"params": 0, "router_state": 0},
            split_rngs={"params": True},
            length=4,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, metrics = scan(layer(selection_bias=True, name="moe"), x, None)
        return x, jax.tree.map(lambda m: m.sum(0), metrics)


@pytest.mark.slow
def test_scan_and_remat():
    boxed = jax.jit(Stack().init)(jax.random.key(0), make_x())
    specs = nn.get_partition_spec(boxed)
    assert specs["params"]["moe"]["wi_0"] == P("layers", "exp", "embed", "mlp")
    variables = nn.unbox(boxed)
    assert variables["router_state"]["moe"]["gate"]["bias"].shape == (4, E)

    def looped(params):
        x, losses = make_x(), 0.0
        for i in range(4):
            own = jax.tree.map(lambda a, i=i: a[i], variables | {"params": params})
            own = {name: tree["moe"] for name, tree in own.items()}
            out, metrics = apply(layer(selection_bias=True), own, x)
            x, losses = x + out, losses + metrics.load_balance_loss
        return jnp.mean(x**2) + 0.1 * losses

    want = jax.jit(jax.value_and_grad(looped))(variables["params"])
    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        (value, _), grads = loss_and_grads(Stack(), variables, make_x())
    assert_close((value, grads), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_with_this_ranks_experts(check_vma):
    variables = variables_of(make_params())["params"]
    want, _ = dense(make_params(), make_x())
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("expert") if path[-1].key in ("wi_0", "wi_1", "wo") else P(), variables
    )
    apply = jax.shard_map(
        lambda params, x: LAYER.apply({"params": params}, x),
        mesh=expert_mesh(4),
        in_specs=(specs, P("expert")),
        out_specs=(P("expert"), P()),
        check_vma=check_vma,
    )
    out, metrics = jax.jit(apply)(variables, make_x())
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert metrics.expert_counts.sum() == BATCH * SEQUENCE * K


FLOAT8 = functools.partial(MoE, 4, 2, 128, matmul_dtype=jnp.float8_e4m3fn)


class Float8Stack(nn.Module):
    """Two layers; their experts' matrices may be passed in already quantized to float8."""

    @nn.compact
    def __call__(self, x, quantized_experts):
        scan = nn.scan(
            lambda block, x, quantized: (x + block(x, quantized_experts=quantized)[0], None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(FLOAT8(name="moe"), x, quantized_experts)[0]


@pytest.mark.slow
def test_experts_quantized_once_for_the_microbatches_of_a_stack():
    batches = jax.random.normal(jax.random.key(1), (3, 16, 128))
    params = nn.unbox(Float8Stack().init(jax.random.key(0), batches[0], None))["params"]

    def quantize(params):
        one = functools.partial(FLOAT8().apply, method="quantize_experts")
        return jax.vmap(lambda layer: one({"params": layer}))(params["moe"])

    def step(params, once):
        quantized = quantize(params) if once else None

        def loss(params, x):
            out = Float8Stack().apply({"params": params}, x, quantized)
            return jnp.sum(jnp.sin(out)), out

        def accumulate(total, x):
            grads, out = jax.grad(loss, has_aux=True)(params, x)
            return jax.tree.map(jnp.add, total, grads), out

        return jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batches)

    each, once = (functools.partial(step, once=once) for once in (False, True))
    with jax.set_mesh(expert_mesh(2)):
        counts = [
            executions(jax.make_jaxpr(run)(params).jaxpr, "quantize_float8_matrices")
            for run in (each, once)
        ]
        assert_equal(jax.jit(once)(params), jax.jit(each)(params))
        quantized = jax.jit(quantize)(params)
    # Without reuse, three matrices in two layers are quantized for each of three microbatches.
    assert counts == [3 * 2 * 3, 3 * 2]
    for array in jax.tree.leaves(quantized):
        assert array.sharding.spec[:2] == (None, "expert")
        assert array.addressable_shards[0].data.shape == (2, 2, *array.shape[2:])


def test_experts_are_quantized_of_parameters_and_for_float8():
    with pytest.raises(ValueError, match="quantize_experts needs the layer's parameters"):
        FLOAT8().apply({}, method="quantize_experts")
    params = FLOAT8().init(jax.random.key(0), jnp.ones((4, 128)))
    with pytest.raises(ValueError, match="config.matmul_dtype must be a dtype"):
        MoE(4, 2, 128).apply(params, method="quantize_experts")
    of_one = FLOAT8().apply(params, method="quantize_experts")
    of_two = jax.tree.map(lambda a: jnp.stack([a, a]), of_one)
    with pytest.raises(ValueError, match="quantized_experts.wi_0 must have the shape of wi_0"):
        FLOAT8().apply(params, jnp.ones((4, 128)), quantized_experts=of_two)


def scanned(**options):
    """Makes a scan of two layers with a selection bias, with further `options` of nn.scan.

    The parameters' axis of layers gets no logical name.
    """

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda block, x, _: (x + block(x)[0], None),
                split_rngs={"params": True},
                length=2,
                **options,
            )
            return scan(layer(selection_bias=True, name="moe"), x, None)[0]

    return Scanned()


def test_scan_without_a_name_for_the_new_axis():
    module = scanned(variable_axes={"params": 0, "router_state": 0})
    boxed = jax.jit(module.init)(jax.random.key(0), make_x())
    specs = nn.get_partition_spec(boxed)["params"]["moe"]
    assert specs["wi_0"] == P(None, "exp", "embed", "mlp")
    assert specs["gate"]["kernel"] == P(None, "embed", None)
    x, step = make_x(), jax.jit(layer(selection_bias=True).apply)
    for i in range(2):
        own = jax.tree.map(lambda a, i=i: a[i], nn.unbox(boxed))
        own = {name: tree["moe"] for name, tree in own.items()}
        x = x + step(own, x)[0]
    assert_close(jax.jit(module.apply)(boxed, make_x()), x)


def test_scan_that_leaves_out_the_selection_bias_says_what_to_do():
    module = scanned(variable_axes={"params": 0})
    with pytest.raises(ValueError, match='variable_axes={"params": 0, "router_state": 0}'):
        module.init(jax.random.key(0), make_x())
    variables = variables_of(make_params(bias=True, shared=False))
    with pytest.raises(ValueError, match='selection_bias=True .*collection "router_state"'):
        apply(layer(selection_bias=True), {"params": variables["params"]}, make_x())


class Owner(nn.Module):
    """A module that owns a layer and updates its selection bias within the forward pass."""

    @nn.compact
    def __call__(self, x, rate):
        moe_layer = layer(num_shared_experts=S, selection_bias=True, name="moe")
        out, metrics = moe_layer(x)
        if not self.is_initializing():
            moe_layer.update_bias(metrics.expert_counts, rate)
        return out, metrics


def test_selection_bias_changes_when_told_and_only_then():
    module = layer(num_shared_experts=S, selection_bias=True)
    variables = variables_of(make_params()._replace(bias=jnp.zeros(E)))
    step = jax.jit(functools.partial(module.apply, mutable=["router_state"]))
    (_, metrics), state = step(variables, make_x())
    np.testing.assert_array_equal(state["router_state"]["gate"]["bias"], 0.0)

    update = functools.partial(module.apply, method="update_bias", mutable=["router_state"])
    _, state = update(variables, metrics.expert_counts, 0.5)
    counts = np.asarray(metrics.expert_counts)
    want = 0.5 * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(state["router_state"]["gate"]["bias"], want)
    (_, moved), _ = step(variables | state, make_x())
    assert np.std(moved.expert_counts) != np.std(counts)

    owned = {name: {"moe": tree} for name, tree in variables.items()}
    with jax.set_mesh(expert_mesh(8)):
        _, state = jax.jit(functools.partial(Owner().apply, mutable=["router_state"]))(
            owned, make_x(), 0.5
        )
    np.testing.assert_allclose(state["router_state"]["moe"]["gate"]["bias"], want)


@pytest.mark.slow
def test_training_learns_and_leaves_the_bias_alone():
    module = layer(selection_bias=True, dtype=jnp.bfloat16)
    x, target = make_x(), jnp.roll(make_x(), 1, axis=-1)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, opt_state):
        def loss(params):
            out, metrics = apply(module, {"params": params, **state}, x)
            return jnp.mean((out - target) ** 2) + 0.01 * metrics.load_balance_loss

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    with jax.set_mesh(mesh((2, 4), ("data", "expert"))):
        state = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))
        params = state.pop("params")
        opt_state, losses = optimizer.init(params), []
        for _ in range(30):
            params, opt_state, value = step(params, state, opt_state)
            losses.append(float(value))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    "module, message",
    [
        (layer(num_experts=-1), "num_experts must be at least 1, but is -1"),
        (layer(num_shared_experts=-1), "num_shared_experts must be at least 0, but is -1"),
        (
            layer(num_experts_per_token=E + 1),
            "num_experts_per_token must be at most the 8 .* but is 9",
        ),
        (layer(num_groups=3), "num_groups must divide the 8 experts .* but is 3"),
        (layer(score="tanh"), "score must be one of .* but is 'tanh'"),
        (layer(capacity_factor=-1.0), "capacity_factor must be above 0.* but is -1.0"),
        (layer(expert_axis="ep", mesh=expert_mesh(1)), r"expert_axis \('ep',\) must name axes"),
    ],
)
def test_errors_name_the_attribute(module, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), make_x())


def test_a_scalar_is_no_token():
    with pytest.raises(ValueError, match="x must be .*but is a scalar"):
        jax.eval_shape(LAYER.init, jax.random.key(0), jnp.ones(()))


def test_update_bias_without_a_bias():
    with pytest.raises(ValueError, match="update_bias needs selection_bias=True"):
        LAYER.apply(variables_of(make_params()), jnp.zeros(E), 0.1, method="update_bias")


def test_num_experts_must_be_a_multiple_of_the_ranks():
    with (
        jax.set_mesh(expert_mesh(8)),
        pytest.raises(
            ValueError, match="num_experts must be a multiple of the 8 ranks .* but is 12"
        ),
    ):
        jax.eval_shape(layer(num_experts=12).init, jax.random.key(0), make_x())


def test_a_param_dtype_that_arrays_do_not_have_is_named():
    with pytest.raises(TypeError, match="param_dtype must be .* but is .*float64"):
        layer(param_dtype=jnp.float64).init(jax.random.key(0), make_x())
