"""Release configurations of Megatron, scaled down, trained with a plan beside one rank, on CPUs.

    python -m tools.release CHECKOUT [--steps 5]

CHECKOUT: a checkout of Megatron-LM. Reads the GPT and Mixtral configurations of
`tests/functional_tests/test_cases/*/*release*`. What makes the model and the parallelism is kept,
sizes are small (`SIZES`), and what needs a GPU is replaced. Prints a table: ranks, replacements, and
the largest relative difference of loss and gradient norm over the steps. Configurations that are the
same once scaled are trained once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.megatron.conftest import DOCUMENT_LENGTHS, NUM_DOCUMENTS, Run, Train, started, train_with, write_corpus
from tests.megatron.test_parity import options_of, two_nodes
from tests.support.megatron_run import Trainer

SUITES = ("gpt", "mixtral")
KEPT = (
    *("normalization", "norm-epsilon", "swiglu", "squared-relu", "disable-bias-linear", "init-method-std"),
    *("untie-embeddings-and-output-weights", "position-embedding-type", "rotary-percent", "rotary-base"),
    *("rotary-scaling-factor", "mscale", "mscale-all-dim", "multi-latent-attention", "qk-layernorm"),
    *("mtp-num-layers", "mtp-loss-scaling-factor", "clip-grad", "weight-decay", "adam-beta1", "adam-beta2"),
    *("moe-router-load-balancing-type", "moe-router-pre-softmax", "moe-router-topk-scaling-factor"),
    *("moe-router-score-function", "moe-router-enable-expert-bias", "moe-router-bias-update-rate"),
    *("moe-router-dtype", "moe-aux-loss-coeff", "moe-token-dispatcher-type", "use-distributed-optimizer"),
    *("overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap", "num-layers-per-virtual-pipeline-stage"),
)
"""Flags that are handed on as they are."""
SIZES: dict[str, Any] = {
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "kv-channels": 4,
    "q-lora-rank": 16,
    "kv-lora-rank": 8,
    "qk-head-dim": 4,
    "qk-pos-emb-head-dim": 4,
    "v-head-dim": 6,
    "num-experts": 8,
    "moe-ffn-hidden-size": 32,
    "moe-shared-expert-intermediate-size": 32,
    "moe-router-topk": 2,
    "moe-router-num-groups": 4,
    "moe-router-group-topk": 2,
    "moe-layer-freq": "([0]*1+[1]*3)",
    "num-layers": 4,
}
"""Values of flags of size, where a configuration gives the flag."""
REPLACED = {
    "transformer-impl": "Transformer Engine: Megatron's own layers",
    "bf16": "bf16: fp32",
    "apply-layernorm-1p": "LayerNorm1p: LayerNorm",
    "moe-permute-fusion": "fused permutation: plain",
    "moe-grouped-gemm": "grouped GEMM: one expert after the other",
    "cross-entropy-loss-fusion": "fused cross entropy: plain",
    "pipeline-model-parallel-layout": "layout of stages: even",
    "tp-comm-overlap": "TP overlap: left out",
}
"""By flag that needs a GPU: its name, and its replacement."""


def scaled(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int, list[str]]:
    """Split a configuration into flags of the model and of the parallelism, ranks and replacements."""
    flags = {name.removeprefix("--"): value for name, value in given.items()}
    model: dict[str, Any] = {"group-query-attention": bool(flags.get("group-query-attention"))}
    model |= {"num-query-groups": None, "swiglu": False, "disable-bias-linear": False, "normalization": "LayerNorm"}
    model |= {"untie-embeddings-and-output-weights": False}
    model |= {name: flags[name] for name in KEPT if name in flags}
    model |= {name: size for name, size in SIZES.items() if name in flags}
    replaced = [what for name, what in REPLACED.items() if flags.get(name)]
    if model.get("moe-token-dispatcher-type") == "flex":
        model["moe-token-dispatcher-type"] = "alltoall"
        replaced.append("dispatcher flex: alltoall")
    parallel: dict[str, Any] = {"context-parallel-size": 2}
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "expert-model-parallel-size")
    parallel |= {name: 2 for name in names if int(flags.get(name, 1)) > 1}
    parallel["sequence-parallel"] = "tensor-model-parallel-size" in parallel
    if "num-experts" in flags:
        parallel["expert-tensor-parallel-size"] = 1
    several = ("num-layers-per-virtual-pipeline-stage", "overlap-grad-reduce", "overlap-param-gather")
    for name in (*several, "tp-comm-overlap"):
        parallel[name] = model.pop(name, None)
    if parallel[several[0]]:
        parallel[several[0]] = 1
    return model, parallel, 2 ** (1 + sum(name in parallel for name in names[:2])), replaced


def worst(run: Run, reference: Run) -> float:
    """The largest relative difference of losses and gradient norms."""
    return max(
        abs(got - wanted) / abs(wanted)
        for name in ("loss", "grad_norm")
        for got, wanted in zip(run.column(name), reference.column(name), strict=True)
    )


def row(train: Train, folder: Path, given: dict[str, Any], steps: int) -> str:
    """Ranks, replacements and difference of a configuration, as cells of the table."""
    model, parallel, ranks, replaced = scaled(given)
    run = {**model, "global-batch-size": 4, "micro-batch-size": 1, "train-iters": steps}
    flags = started(train, folder, run)
    one = train(1, "te_ring", flags)
    ours = train(ranks, options_of("zeppelin"), {**flags, **parallel}, config=two_nodes(2))
    assert sum(sum(step["counters"]["kv_tokens_received"]) for step in ours.steps) > 0, "attention was not cut"
    axes = {"tensor": "TP", "pipeline": "PP", "expert": "EP"}
    names = [axis for name, axis in axes.items() if f"{name}-model-parallel-size" in parallel]
    return (
        f"{ranks}: {' '.join(f'{axis}2' for axis in ['CP', *names])} | {'; '.join(replaced)} | {worst(ours, one):.1e}"
    )


def main() -> int:
    """Print the table of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    cases = args.checkout / "tests" / "functional_tests" / "test_cases"
    files = [path for suite in SUITES for path in sorted(cases.glob(f"{suite}/*release*/model_config.yaml"))]
    if not files:
        parser.error(f"{args.checkout}: expected a checkout of Megatron-LM, with tests/functional_tests/test_cases")
    sys.stdout.write("| configuration | ranks | replaced | difference |\n|---|---|---|---|\n")
    done: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, trainer = Path(name), Trainer()

        class Folders:
            """Folders by name, as pytest's factory makes them."""

            def mktemp(self, word: str) -> Path:
                """A new folder."""
                return Path(tempfile.mkdtemp(prefix=word, dir=folder))

        lengths = (DOCUMENT_LENGTHS * NUM_DOCUMENTS)[:NUM_DOCUMENTS]
        folders: Any = Folders()
        train = train_with(trainer, write_corpus(folder / "documents", lengths), folders)
        for path in files:
            given = yaml.safe_load(path.read_text())["MODEL_ARGS"]
            key = str(scaled(given))
            if key not in done:
                try:
                    done[key] = row(train, folders.mktemp("checkpoint"), given, args.steps)
                except AssertionError as error:
                    done[key] = f"failed | {' '.join(str(error).split())[-300:]} |"
            sys.stdout.write(f"| {path.parent.name} | {done[key]} |\n")
            sys.stdout.flush()
        trainer.close()
    return int(any("failed" in each for each in done.values()))


if __name__ == "__main__":
    sys.exit(main())
