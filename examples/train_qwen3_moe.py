"""Train a Qwen3-MoE or GPT-OSS, evaluate it on held-out text, and write it as a published model.

    python train_qwen3_moe.py --model=tiny --checkpoint_dir=run --export_dir=tiny    # two CPU cores
    python train_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --data=tokens.npy --document_end=151643 \\
        --learning_rate=1e-5 --remat=experts --checkpoint_dir=run --export_dir=tuned
    python train_qwen3_moe.py --checkpoint=tuned --data=tokens.npy --steps=0    # only evaluates

`--help` lists all flags. A run with --checkpoint_dir may be killed and started again, on any mesh
and number of processes, and goes on exactly. The mesh is data x fsdp x expert x tensor, of all GPUs
or of eight virtual CPU devices. To copy this file, you need only `pip install jax_ep[examples]`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.checkpoints.model import holds_model
from jax_ep.flags import Flags, at_least, integer, number
from jax_ep.models import launch, published, train_step
from jax_ep.models.axes import mesh_of
from jax_ep.models.config import PUBLISHED, SIZES, DecoderConfig
from jax_ep.models.decoder import REMAT, Decoder
from jax_ep.models.launch import blamed_flag, file, folder, print_once
from jax_ep.models.metrics_log import MetricsLog


def parse(argv: list[str]) -> argparse.Namespace:
    flags = Flags(None, __doc__.partition("\n")[0])
    flag = flags.add
    index, above = at_least(0), at_least(1e-9, float)
    flag("model", "qwen3-30b-a3b", "Model with random weights.", choices=PUBLISHED)
    for name in SIZES:
        flag(name, None, "Size in place of --model's; with --checkpoint only num_layers.", integer)
    flag("checkpoint", None, "Published directory to start from in place of random weights.")
    flag("data", None, "Files of token ids (.npy) or text, by commas. Default: a small text.")
    flag("document_end", None, "Id of the token after a document. Default: 0 for bytes.", index)
    flag("seq_len", None, "Tokens in a sequence. Default: 4096; tiny models: 64.", integer)
    flag("batch_size", None, "Sequences in a step. Default: 8, or one for each rank.", integer)
    flag("schedule", "cosine", "Learning rate after warm-up.", choices=["cosine", "constant"])
    flag("decay_steps", None, "Step at which cosine ends, at a tenth. Default: --steps.", integer)
    flag("warmup_steps", 10, "Steps over which the learning rate rises from 0.", index)
    flag("learning_rate", 3e-4, "Highest learning rate of AdamW.", above)
    flag("weight_decay", 0.1, "AdamW's weight decay, of matrices only.", number)
    flag("clip_norm", 1.0, "Highest norm of the gradients.", above)
    flag("balance_weight", 1e-3, "Factor of the load-balance loss.", number)
    flag("router_z_weight", 1e-4, "Factor of the router's z-loss.", number)
    flag("bias_rate", 0.0, "Change of the selection biases in a step. 0: no biases.", number)
    dtypes = ["float32", "bfloat16"]
    flag("param_dtype", "float32", "Dtype of parameters and moments.", choices=dtypes)
    flag("matmul_dtype", None, "Dtype that experts multiply.", choices=["float8_e4m3fn"])
    flag("wire_dtype", None, "Dtype that tokens are sent to experts in.", choices=["float8_e4m3fn"])
    flag("seed", 0, "Seed of weights and batches.", index)
    # A run continues a checkpoint only with the same values of the flags above.
    fixed = list(vars(flags.parse_args([])))
    flag("steps", 100, "Steps to train; 0 only evaluates.", index)
    flag("microbatches", 1, "Parts of a batch, whose gradients are added up.", integer)
    flag("capacity_factor", None, "Rows of a receive buffer, by their mean. Default: any.", above)
    flag("remat", "none", "What a layer keeps for its backward pass.", choices=REMAT)
    flag("loss_chunk", 1024, "Tokens whose logits a device holds at a time.", integer)
    flag("expert_parallel", None, "Ranks to spread experts over. Default: the most.", integer)
    flag("fsdp", 1, "Ranks to split every matrix over.", integer)
    flag("tensor_parallel", 1, "Ranks to split heads and experts' columns over.", integer)
    flag("checkpoint_dir", None, "Folder of Orbax checkpoints, shared by all processes.", folder)
    flag("checkpoint_every", 100, "Steps between checkpoints.", integer)
    flag("eval_data", None, "Files to evaluate on. Default: the last tenth of each of --data.")
    flag("eval_every", 50, "Steps between evaluations; the end is always evaluated.", integer)
    flag("eval_batches", 8, "Most batches of an evaluation.", integer)
    flag("export_dir", None, "New directory to write the trained model to, as published.", folder)
    flag("export_dtype", "bfloat16", "Dtype of what --export_dir gets.", choices=dtypes)
    flag("metrics_file", None, "JSON lines. Default: metrics.jsonl in --checkpoint_dir.", file)
    flag("tensorboard_dir", None, "Folder of metrics for TensorBoard.", folder)
    flag("trace", None, "File .npz of the evaluation's choices of experts.", file)
    flag("profile_dir", None, "Folder for jax.profiler's trace of three steps.", folder)
    flag("log_every", 10, "Steps between lines of progress.", integer)
    flag("coordinator", None, "HOST:PORT of process 0. Not needed under srun and mpirun.")
    flag("num_processes", None, "Processes that run this program together.", integer)
    flag("process_id", None, "Number of this process.", index)
    flag("heartbeat_seconds", 60, "Silence after which a process is taken for dead.", integer)
    args = flags.parse_args(argv)
    args.fixed = fixed
    return args


def load_tokens(files: Sequence[str], vocab: int, tokenizer: Any, end: int | None) -> list[Any]:
    """Reads files, each as a stream of token ids [N]; without files, reads a small text.

    A file .npy has the ids and is memory-mapped. Any other file is a document of text, whose tokens
    are `tokenizer`'s, or bytes. `end` is the id of the token that follows each document of text.
    """

    def encoded(*texts: str) -> np.ndarray:
        encode = tokenizer.encode if tokenizer else lambda text: list(text.encode())
        ids = (encode(text) for text in texts)
        return np.array([i for found in ids for i in [*getattr(found, "ids", found), *after]])

    after, streams = [] if end is None else [end], {}
    for path in files:
        npy = path.endswith(".npy")
        streams[path] = np.load(path, "r") if npy else encoded(Path(path).read_text())
    if not files:
        streams["the small text"] = encoded(*(topics[name] for name in sorted(topics)))
    for name, ids in streams.items():
        first = ids[: 10**6]  # of a large file, only the beginning is looked at
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise ValueError(f"{name} must have [N] integers, but has {ids.dtype} {ids.shape}")
        if first.min() < 0 or first.max() >= vocab:
            raise ValueError(f"{name} must have token ids below {vocab}, but has {first.max()}")
    return list(streams.values())


def windows(streams: Sequence[np.ndarray], seq_len: int) -> grain.MapDataset:
    """Cuts streams into windows of `seq_len` inputs, and one more token as the last target."""

    def of(ids: np.ndarray) -> grain.MapDataset:
        ends = grain.MapDataset.range(seq_len, len(ids), seq_len)
        return ends.map(lambda end: ids[end - seq_len : end + 1].astype(np.int32))

    return grain.MapDataset.concatenate([of(ids) for ids in streams if len(ids) > seq_len])


def optimizer_of(args: argparse.Namespace) -> tuple[optax.GradientTransformation, Any]:
    rate, warmup = args.learning_rate, args.warmup_steps
    # Without warm-up, the schedule of Optax stays at its first value.
    schedule = optax.warmup_constant_schedule(0.0 if warmup else rate, rate, warmup)
    if args.schedule == "cosine":
        end = max(args.decay_steps, warmup + 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, end, rate / 10)

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.ndim > 1 and "bias" not in jax.tree_util.keystr(path), params
        )

    adam = optax.adamw(schedule, b2=0.95, weight_decay=args.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(args.clip_norm), adam), schedule


class Program:
    """The model, its state on the mesh, its data, and the compiled steps."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        folder = Path(args.checkpoint) if args.checkpoint else None
        sizes = {key: getattr(args, name) for name, key in SIZES.items() if getattr(args, name)}
        self.published = published.config_of(folder or args.model, sizes)
        config = DecoderConfig.of(self.published, folder or Path()).replace(
            matmul_dtype=args.matmul_dtype,
            wire_dtype=args.wire_dtype,
            capacity_factor=args.capacity_factor,
            selection_bias=args.bias_rate > 0,
            record_choices=args.trace is not None,
        )
        if args.export_dir and args.bias_rate:
            raise SystemExit("--bias_rate must be 0 with --export_dir, which cannot hold biases")
        if args.export_dir and holds_model(Path(args.export_dir)):
            raise SystemExit(f"--export_dir={args.export_dir} must hold no model, but does")
        parallel = {n: getattr(args, n) for n in ("expert_parallel", "fsdp", "tensor_parallel")}
        self.mesh = mesh_of(config, jax.devices(), **parallel)
        jax.set_mesh(self.mesh)
        args.seq_len = args.seq_len or (64 if config.hidden < 1024 else 4096)
        args.decay_steps = args.decay_steps or args.steps
        parts = train_step.num_batch_ranks(self.mesh) * args.microbatches
        args.batch_size = args.batch_size or max(8, parts)
        if args.batch_size % parts:
            raise SystemExit(
                f"--batch_size={args.batch_size} must be a multiple of {parts}, the ranks that "
                f"sequences are split over times --microbatches={args.microbatches}"
            )
        self.rows = args.batch_size // args.microbatches
        training, self.held_out, end = self.load_data(config, folder)
        shuffled = training.seed(args.seed).shuffle().repeat()
        # Every process reads the whole batch, so that any number of processes can resume the run.
        self.batches = iter(shuffled.batch(args.batch_size).to_iter_dataset())
        options = {"remat": args.remat, "loss_chunk": args.loss_chunk}
        model = Decoder(config=config, param_dtype=jnp.dtype(args.param_dtype), **options)
        optimizer, self.schedule = optimizer_of(args)
        self.config, layout = config, train_step.make_layout(model, optimizer, self.mesh)
        self.batch_spec = layout.batch.spec
        objective = train_step.Objective(
            balance=args.balance_weight,
            router_z=args.router_z_weight,
            bias_rate=args.bias_rate,
            document_end=end,
        )
        step = train_step.make_train_step(model, optimizer, layout, objective)
        eval_step = train_step.make_eval_step(model, layout, objective)
        shapes = train_step.init_state(model, optimizer, layout, args.seed, only_shapes=True)
        batch = jax.ShapeDtypeStruct((args.microbatches, self.rows, args.seq_len + 1), np.int32)
        # Traces both steps, so that flags that do not fit are refused before any work begins.
        lowered = step.lower(shapes, batch) if args.steps else None
        eval_batch = jax.ShapeDtypeStruct(batch.shape[1:], np.int32)
        lowered_eval = eval_step.lower(shapes, eval_batch)
        self.state: Any = None
        self.manager: Any = None
        if args.checkpoint_dir:
            where = Path(args.checkpoint_dir).absolute()
            where.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
            self.manager = ocp.CheckpointManager(where, options=options)
            self.restore(shapes)
        if self.state is None:
            params = None
            if folder:
                params = published.load_params(
                    folder, config, self.mesh, model.param_dtype, layout.state.params
                )
            self.state = train_step.init_state(model, optimizer, layout, args.seed, params)
        self.start, begin = int(self.state.step), time.perf_counter()
        self.step: Any = lowered.compile() if lowered and self.start < args.steps else None
        self.eval_step = lowered_eval.compile()
        self.compile_seconds = time.perf_counter() - begin
        path = args.metrics_file
        if path is None and args.checkpoint_dir:
            path = f"{args.checkpoint_dir}/metrics.jsonl"
        self.metrics = MetricsLog(path, args.tensorboard_dir, self.start)

    def load_data(self, config: DecoderConfig, folder: Path | None) -> tuple[Any, Any, int | None]:
        """Returns the windows to train and to evaluate on, and the token that ends a document."""
        args, tokenizer, end = self.args, None, self.args.document_end
        if folder and (folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if end is None and not args.data:
            end = next(iter(config.stop_tokens), None) if tokenizer else 0
        if end is not None and end >= config.vocab:
            raise SystemExit(f"--document_end must be below {config.vocab}, but is {end}")
        parts = {}
        for name in ("data", "eval_data") if args.eval_data else ("data",):
            files = getattr(args, name).split(",") if getattr(args, name) else []
            try:
                parts[name] = load_tokens(files, config.vocab, tokenizer, end)
            except (OSError, ValueError) as error:
                raise SystemExit(f"--{name}={getattr(args, name)}: {error}") from error
        # Without --eval_data, the last tenth of each stream is held out.
        if not args.eval_data:
            parts["eval_data"] = [ids[len(ids) * 9 // 10 :] for ids in parts["data"]]
            parts["data"] = [ids[: len(ids) * 9 // 10] for ids in parts["data"]]
        for name, streams in parts.items():
            least = args.seq_len * (self.rows if name == "eval_data" else 1) + 1
            if max(map(len, streams)) < least:
                raise SystemExit(
                    f"--{name} must have a file of {least} tokens to be cut into sequences of "
                    f"--seq_len={args.seq_len}, but the longest has {max(map(len, streams))}"
                )
        held_out = windows(parts["eval_data"], args.seq_len).batch(self.rows, drop_remainder=True)
        return windows(parts["data"], args.seq_len), held_out, end

    def restore(self, shapes: train_step.TrainState) -> None:
        """Restores the newest complete checkpoint, if there is one, onto this run's mesh."""
        args, step = self.args, self.manager.latest_step()
        if step is None:
            return
        items = ocp.args.Composite(run=ocp.args.JsonRestore())
        run = self.manager.restore(step, args=items)["run"]
        # The saved flags must be the same, and --steps a number that the run has not passed.
        wanted = run["flags"] | {"steps": max(step, args.steps)}
        for name, value in wanted.items():
            if getattr(args, name) != value:
                self.manager.close()
                raise SystemExit(
                    f"--{name}={getattr(args, name)} must be {value} to go on with the run in "
                    f"--checkpoint_dir={args.checkpoint_dir}, which is at step {step}"
                )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        self.state = self.manager.restore(step, args=items)["state"]
        self.batches.set_state(run["data"])

    def save(self, step: int) -> None:
        """Copies the state to the host; Orbax writes it to disk while training goes on."""
        flags = {name: getattr(self.args, name) for name in self.args.fixed}
        run = ocp.args.JsonSave({"flags": flags, "data": self.batches.get_state()})
        items = ocp.args.Composite(state=ocp.args.StandardSave(self.state), run=run)
        self.manager.save(step, args=items)

    def put(self, batch: np.ndarray) -> jax.Array:
        # A batch to evaluate on lacks the first axis, that of microbatches.
        spec = PartitionSpec(*self.batch_spec[3 - batch.ndim :])
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])

    def evaluate(self, step: int) -> None:
        sums, choices = [], []
        for i in range(min(len(self.held_out), self.args.eval_batches)):
            found = self.eval_step(self.state, self.put(self.held_out[i]))
            sums.append((found["loss"], found["tokens"]))
            if self.args.trace:
                chosen = np.asarray(found["topk_idx"], np.int16)
                choices.append(chosen.reshape(len(chosen), -1, chosen.shape[-1]))
        loss, tokens = np.sum(jax.device_get(sums), axis=0)
        mean = float(loss / tokens)
        shown = f"held-out loss {mean:.4f} nats/token, perplexity {math.exp(min(mean, 700)):.2f}"
        print_once(f"step {step}: {shown}")
        self.metrics.write(step, {"eval_loss": mean})
        if self.args.trace and jax.process_index() == 0:
            number = self.config.num_experts
            Path(self.args.trace).parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(self.args.trace, topk_idx=np.stack(choices), num_experts=number)

    def train(self) -> None:
        args, start = self.args, self.start
        tokens, begin = args.batch_size * args.seq_len, time.perf_counter()

        def report(step: int, metrics: dict[str, Any]) -> None:
            nonlocal begin
            self.metrics.write(step, jax.device_get(metrics) | {"rate": self.schedule(step)})
            now = time.perf_counter()
            each = (now - begin) / max(1, step - start)
            # The first step, which is slower than others, counts in no other step's rate.
            begin = now if step == start else begin
            # The second step is the first whose time tells what is left.
            regular = step == start + 1 or (step > start and (step + 1) % args.log_every == 0)
            if regular or step + 1 == args.steps:
                left = timedelta(seconds=round(each * (args.steps - step - 1)))
                text = f"loss {metrics['loss']:.4f}, {metrics['num_dropped']:.0f} dropped"
                text += f", {tokens / each:,.0f} tokens/s, {left} left"
                print_once(f"step {step + 1}/{args.steps}: {text}")

        waiting: list[tuple[int, dict[str, Any]]] = []
        for step in range(start, args.steps):
            if args.profile_dir and step == start + 2:
                jax.profiler.start_trace(args.profile_dir)
            batch = next(self.batches).reshape(args.microbatches, self.rows, -1)
            self.state, metrics = self.step(self.state, self.put(batch))
            waiting.append((step, metrics))
            done = step + 1
            last = done == args.steps
            saves = self.manager and (last or done % args.checkpoint_every == 0)
            evaluates = done % args.eval_every == 0 and not last
            profiled = args.profile_dir and start + 2 < done and (last or done == start + 5)
            # One step stays queued, so that the devices never idle.
            while len(waiting) > (0 if saves or evaluates or profiled or last else 1):
                report(*waiting.pop(0))
            if profiled and done <= start + 5:
                jax.profiler.stop_trace()
            if saves:
                self.save(done)
            if evaluates:
                self.evaluate(done)
        if self.manager:
            self.manager.close()


def run(args: argparse.Namespace) -> None:
    try:
        program = Program(args)
    except (OSError, TypeError, ValueError) as error:
        text = " ".join(f"{error}".split())
        paths = "metrics_file", "tensorboard_dir", "checkpoint_dir", "checkpoint"
        flag = blamed_flag(text, args, vars(args).keys() - {"fixed"}, paths)
        flag = flag or ("checkpoint" if args.checkpoint else "model")
        raise SystemExit(f"--{flag}: {text}") from error
    config, mesh = program.config, program.mesh
    shape = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    number = sum(x.size for x in jax.tree.leaves(program.state.params))
    print_once(
        f"{number:,} parameters, {config.active_params():,} for each token, in "
        f"{config.num_layers} layers on {mesh.size} x {mesh.devices.flat[0].device_kind} ({shape})"
    )
    print_once(f"step {program.start} of {args.steps}; compiled in {program.compile_seconds:.1f} s")
    if args.param_dtype == "bfloat16":
        print_once("--param_dtype=bfloat16 loses updates below 1/512 of a parameter")
    program.train()
    program.evaluate(args.steps)
    if args.export_dir:
        end = {} if args.checkpoint or args.data else {"eos_token_id": 0}
        options = {"dtype": args.export_dtype, "source": args.checkpoint}
        config_json = program.published | end
        published.save_params(args.export_dir, config_json, program.state.params, **options)
        print_once(f"wrote {args.export_dir}")


def main(argv: list[str]) -> None:
    args = parse(argv)
    names = "coordinator", "num_processes", "process_id", "heartbeat_seconds"
    group = {name: getattr(args, name) for name in names}
    launch.run(lambda: run(args), cpu_devices=8, **group)


if __name__ == "__main__":
    main(sys.argv[1:])
