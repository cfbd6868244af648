"""Package, image, launch scripts, experiments and pins are complete and agree."""

import argparse
import functools
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_balance
from megatron_balance.cli.doctor import MEGATRON_CORE
from megatron_balance.config import CONFIGS, load_cluster, load_model
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_planner, load_config
from scripts.sbom import bill, packages
from tests.support.processes import ended

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "scripts" / "locks"
SLURM = ROOT / "scripts" / "slurm"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# Experiments, and the tensor parallelism of each.
MODELS = {"llama-3b": 1, "llama-7b": 1, "llama-13b": 2, "llama-30b": 2, "moe-8x550m": 1}
# Of the experiments whose paper did not run on A800.
PAPERS_MACHINES = {"llama-30b": "h200"}
SHELL = [*ROOT.glob("scripts/*.sh"), *SLURM.glob("*.sh"), *SLURM.glob("*.sbatch"), ROOT / "tools" / "gpu" / "run"]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def tool(name: str) -> str:
    # A linter: beside this Python, or on PATH.
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{name} is not installed; the extra `dev` brings it")
    return found


@pytest.mark.parametrize(
    "words", [("hadolint", str(ROOT / "Dockerfile")), ("shellcheck", "-x", *map(str, sorted(SHELL)))]
)
def test_the_dockerfile_and_scripts_are_clean(words):
    assert len(SHELL) > len(list(SLURM.glob("*.sh")))
    checked = ended([tool(words[0]), *words[1:]], cwd=ROOT)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


def argument(name: str) -> str:
    return re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)[0]


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def requirements(*extras: str) -> list[Any]:
    # Those of the package, or of extras of it.
    parse = pytest.importorskip("packaging.requirements").Requirement
    return [parse(word) for words in map(EXTRAS.get, extras) for word in words or PROJECT["dependencies"]]


def test_image_extras_and_doctor_name_the_same_versions():
    # Image extras and doctor name the same versions.
    locks = {name: packages((LOCKS / f"{name}.txt").read_text()) for name in ("image", "train", "dev")}
    assert all(("megatron-core", MEGATRON_CORE) in {(p.name, p.version) for p in lock} for lock in locks.values())
    assert any(f"megatron-core=={MEGATRON_CORE};" in word for word in EXTRAS["train"])
    te = f"pytorch]=={argument('TRANSFORMER_ENGINE')}"
    assert f"transformer-engine[core_cu13,{te}" in EXTRAS["te"]
    assert f"transformer-engine[core_cu12,{te}" in EXTRAS["te_cu12"]
    locked = {p.version for name in ("train", "dev") for p in locks[name] if p.name == "torch"}
    assert locked == {EXTRAS["te"][0].removeprefix("torch==")}
    # Metadata is static and agrees with the package.
    assert "dynamic" not in PROJECT
    assert PROJECT["version"] == megatron_balance.__version__
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert len((ROOT / "setup.py").read_text().split("\n\n")) == 2, "setup.py only calls setup()"


def test_each_cuda_has_extras_of_its_own_whose_pins_fit_each_other():
    assert {str(r.specifier) for r in requirements("te", "nccl") if r.name == "torch"} == {"==2.13.0"}
    assert all(r.specifier.contains("2.13.0") for r in requirements("train") if r.name == "torch")
    pins = {}
    for cuda, te, nccl in (("cu13", "te", "nccl"), ("cu12", "te_cu12", "nccl_cu12")):
        assert {extra for r in requirements(te) for extra in r.extras} == {f"core_{cuda}", "pytorch"}
        (pins[cuda],) = (r for r in requirements(nccl) if r.name.startswith("nvidia-nccl"))
        assert pins[cuda].name == f"nvidia-nccl-{cuda}"
    assert pins["cu12"].specifier.contains(str(pins["cu13"].specifier).removeprefix("=="))
    # torch's wheels for CUDA 12 are on an index of their own, under other versions
    assert not any(str(r.specifier).startswith("==") for r in requirements("te_cu12") if r.name == "torch")
    assert not [r for r in requirements("", *EXTRAS) if r.url], "an index refuses the upload"
    pytest.importorskip("torch")
    if importlib.metadata.version("torch").split("+")[0] != "2.13.0":
        pytest.skip("another torch is installed than the one that is pinned")
    wanted = [word for word in importlib.metadata.requires("torch") or [] if word.startswith("nvidia-nccl")]
    if not wanted:
        pytest.skip("this build of torch brings no NCCL")
    assert wanted[0].partition(";")[0].replace(" ", "") == f"{pins['cu13'].name}{pins['cu13'].specifier}"


def test_extras_change_nothing_that_an_environment_of_this_year_pinned():
    # verl's, whose Transformers is an older one than TRL's trainers are tested with, and TRL's own.
    verl = {"torch": "2.10.0", "transformers": "5.10.2", "accelerate": "1.13.0", "peft": "0.19.1", "numpy": "2.2.6"}
    trl = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2", "trl": "1.16.0"}

    def changed(environment: dict[str, str], *extras: str) -> set[str]:
        asked = [each for each in requirements(*extras) if each.name in environment]
        return {each.name for each in asked if not each.specifier.contains(environment[each.name])}

    assert not changed(verl, "", "torch")
    assert not changed(trl, "", "torch", "hf")
    assert changed(verl, "hf") == {"transformers", "accelerate", "peft"}, "the tested versions are floors"
    pytest.importorskip("trl")
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", ".[hf]"]
    done = ended([*words, "--disable-pip-version-check"], cwd=ROOT, check=True)
    assert re.findall(r"Would install (.*)", done.stdout) == [f"megatron-balance-{megatron_balance.__version__}"]


def installation(package: str, installed: str, folder: Path) -> str:
    # Arguments of the installation that the image makes of a package beside what is `installed`.
    step = next(each for each in DOCKERFILE.split("RUN ") if f"s/^{package}" in each).split("\n\n")[0]
    pip = f'if [ "$1" = list ]; then printf "%b" "{installed}"; else echo "$@" >>"{folder}/installed"; fi'
    for name, body in (("pip", pip), ("python", "echo 12")):
        program(folder / name, f"#!/bin/bash\n{body}\n")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "TRANSFORMER_ENGINE": argument("TRANSFORMER_ENGINE")}
    (folder / "scripts").mkdir()
    shutil.copytree(LOCKS, folder / "scripts" / "locks")
    (folder / "installed").touch()
    subprocess.run(["bash", "-o", "pipefail", "-c", step], env=environment, cwd=folder, check=True, timeout=60)
    return (folder / "installed").read_text()


OLD = ("", "transformer_engine==2.9.0+abc\\n")
NEW = ("transformer-engine==2.17.1\\n", "transformer_engine==2.17.1+c4f2d1a\\n", "transformer_engine==3.0\\n")


@pytest.mark.parametrize("installed", [*OLD, *NEW, "transformer_engine==2.20.0\\nnumpy==1.26\\n"])
def test_the_image_keeps_any_transformer_engine_from_the_minimum_up(tmp_path, installed):
    done, builds = installation("transformer", installed, tmp_path), installed in OLD
    assert ("transformer-engine-cu12==" in done) == bool(done) == builds, "the extension for the CUDA of its torch"


SERVE = ("pydantic==2.7.0\\npydantic_core==2.18.1\\n", "pydantic==2.13.5\\n")
DO_NOT = ("", *(f"pydantic=={version}\\n" for version in ("1.10.27", "2.6.4", "2.14.0", "3.0")))


@pytest.mark.parametrize("installed", [*SERVE, *DO_NOT, "pydantic_core==2.46.5\\npydantic-settings==2.9.0\\n"])
def test_the_image_keeps_a_pydantic_that_serves_us_and_megatron(tmp_path, installed):
    done, replaced = installation("pydantic", installed, tmp_path), installed not in SERVE
    ours = next(r.specifier for r in requirements("") if r.name == "pydantic")
    version = dict(line.split("==") for line in installed.split("\\n") if line).get("pydantic")
    # Megatron 0.19's own pyproject.toml: below 2.14, for what Transformer Engine imports.
    serves = version is not None and (ours & "<2.14").contains(version)
    assert (bool(done), serves) == (replaced, not replaced)
    assert "-r scripts/locks/pydantic.txt" in done or not replaced
    inside = {p.name: p.version for p in packages((tmp_path / "scripts" / "locks" / "image.txt").read_text())}
    assert ("pydantic" in inside) == replaced, "the bill has what was installed"
    if replaced:
        assert ours.contains(inside["pydantic"])
        assert inside["pydantic"].startswith("2.13.")


def test_the_image_keeps_nvidias_entrypoint_is_not_root_and_copies_what_the_context_holds():
    assert not re.search(r"^ENTRYPOINT", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE) == ['["megatron-balance", "doctor"]']
    assert not any("apex" in line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] not in ("root", "0")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for words in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in words.split()}
    assert copied == kept
    assert all((ROOT / word).exists() for word in copied)


def test_wheel_and_sdist_hold_every_module_patch_and_preset(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel and the sdist")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("megatron_balance", "patches", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    program = "import setuptools.build_meta as b; print(b.build_wheel('dist')); print(b.build_sdist('dist'))"
    built = ended([sys.executable, "-c", program], cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as source:
        in_wheel = set(archive.namelist())
        in_sdist = {member.name.partition("/")[2] for member in source.getmembers() if member.isfile()}
    files = (Path(at) / name for at, _, names in os.walk(ROOT / "megatron_balance", followlinks=True) for name in names)
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".pyc", ".md")}
    some = ("patches/training_loop.py", "configs/cluster/h200.yaml", "py.typed")
    assert {f"megatron_balance/{name}" for name in some} <= wanted
    assert wanted - in_wheel == wanted - in_sdist == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= in_sdist


def test_an_experiment_is_the_papers_model_and_lengths_on_whatever_machine():
    assert {path.stem for path in (SLURM / "models").glob("*.args")} == set(MODELS)
    assert {path.stem for path in (CONFIGS / "experiment").glob("*.yaml") if "tiny" not in path.stem} == set(MODELS)
    for model in MODELS:
        path = CONFIGS / "experiment" / f"{model}.yaml"
        config: Any = load_config(path)
        assert (config.planner.name, config.model.name) == ("zeppelin", model)
        assert not config.cluster.names_machine
        assert f"--cluster {PAPERS_MACHINES.get(model, 'a800')} plans for the paper's machine" in path.read_text()
        assert config.dataset.tokens == 4096 * config.cluster.build().num_ranks


def words(path: Path) -> list[str]:
    # The flags of an .args file, as the launcher reads them.
    return [word for line in path.read_text().splitlines() for word in line.partition("#")[0].split()]


@pytest.mark.megatron
@pytest.mark.parametrize("model", MODELS)
def test_the_flags_are_megatrons_and_the_sizes_are_those_of_the_preset(model):
    parser = megatrons_parser()
    from megatron_balance.megatron.flags import check_arguments

    flags = [*words(SLURM / "training.args"), *words(SLURM / "models" / f"{model}.args")]
    lengths = ["--seq-length", "4096", "--max-position-embeddings", "4096"]
    args = parser.parse_args([*flags, "--balance-config", "x.yaml", *lengths])
    check_arguments(args)
    preset = load_model(model)
    alike = {"ffn_hidden_size": "ffn_size", "num_attention_heads": "num_heads", "kv_channels": "head_dim"}
    alike |= {name: name for name in ("num_layers", "hidden_size", "vocab_size")} | {"swiglu": "gated_ffn"}
    for theirs, ours in alike.items():
        assert getattr(args, theirs) == getattr(preset, ours), theirs
    assert (args.num_experts or 0, args.tensor_model_parallel_size) == (preset.num_experts, MODELS[model])
    assert preset.num_kv_heads == preset.num_heads  # or --num-query-groups would be missing


class Cluster:
    # Slurm's programs as stand-ins that write down how they were called, and a job's variables.
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name, answer in (("srun", ""), ("sbatch", ""), ("scontrol", "printf 'node7\\nnode8\\n'")):
            text = f'#!/usr/bin/env bash\nprintf "%s\\n" {name} "$@" >>"{self.calls}"\n{answer}\n'
            program(folder / "bin" / name, text)
        (folder / "corpus.bin").touch()
        (folder / "corpus.idx").touch()
        self.environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), "REPO": str(ROOT)}
        self.environment |= {"DATA": str(folder / "corpus"), "OUT": str(folder / "out")}

    def run(self, script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return ended(["bash", str(SLURM / script), *options], env={**self.environment, **variables})

    def printed(self, *options: str, script: str = "single_node.sbatch", **variables: str) -> list[str]:
        # The words of the command that a dry run prints.
        done = self.run(script, "--dry-run", *options, **variables)
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-10]"}
JOB["script"] = "multi_node.sbatch"


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def mounts(command: list[str]) -> list[str]:
    (word,) = (word for word in command if word.startswith("--container-mounts="))
    return word.partition("=")[2].split(",")


def test_what_is_printed_is_what_is_run_on_every_node_and_a_dry_run_starts_nothing(cluster):
    # A dry run prints the command and starts nothing.
    command = cluster.printed()
    assert command[:3] == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "OMP_NUM_THREADS=1", "srun"]
    assert after(command, "--balance-config") == str(CONFIGS.resolve() / "experiment" / "llama-7b.yaml")
    assert (after(command, "--seq-length"), after(command, "--context-parallel-size")) == ("32768", "8")
    assert cluster.calls.read_text().split() == ["sbatch", "--test-only", str(SLURM / "single_node.sbatch")]
    assert not (cluster.folder / "out").exists()
    # What is printed is what is run on every node.
    variables = {name: value for name, value in JOB.items() if name != "script"}
    command = cluster.printed("--train-iters", "7", **JOB)
    cluster.calls.unlink()
    done = cluster.run(JOB["script"], "--train-iters", "7", **variables)
    assert done.returncode == 0, done.stderr
    called = cluster.calls.read_text().splitlines()
    assert called[:4] == ["scontrol", "show", "hostnames", "node[7-10]"]
    assert called[4:] == command[2:]
    assert command[-2:] == ["--train-iters", "7"]  # the last one counts in Megatron's parser
    # one launcher a node
    slurms = {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1"}
    assert slurms | {"--nnodes=4", "--nproc-per-node=8", "--master-addr=node7", "--master-port=20041"} <= set(command)
    assert 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' in command
    assert (after(command, "--seq-length"), after(command, "--context-parallel-size")) == ("131072", "32")
    assert not any("container" in word for word in command)


@pytest.mark.parametrize("technique", PLANNERS)
def test_one_variable_chooses_any_planner(cluster, technique):
    command = cluster.printed(TECHNIQUE=technique, EXPERIMENT="llama-13b", **JOB)
    config: Any = load_config(after(command, "--balance-config"), planner=after(command, "--balance-planner"))
    assert config.planner.name == technique
    replicas = technique in ("hydraulis", "megatron")
    context = "4" if replicas else "16"
    assert (after(command, "--tensor-model-parallel-size"), after(command, "--context-parallel-size")) == ("2", context)
    assert after(command, "--seq-length") == ("32768" if replicas else "131072")
    assert ("--overlap-param-gather" in command) == (technique != "hydraulis"), "its strategies are refused with it"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in command


def test_one_connection_only_where_megatron_asks_for_it(cluster):
    # With it kernels start in the order of their launches, and what a strategy pulls cannot hide.
    command = cluster.printed(TECHNIQUE="hydraulis", CONTEXT="1")
    assert command[:2] == ["OMP_NUM_THREADS=1", "srun"]
    assert (after(command, "--context-parallel-size"), after(command, "--global-batch-size")) == ("1", "32")
    given = cluster.printed("--context-parallel-size", "2", TECHNIQUE="hydraulis", CONTEXT="1")
    assert given[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1", "the last word counts"
    for technique in ("hydraulis", "megatron"):
        said = cluster.run("single_node.sbatch", "--dry-run", TECHNIQUE=technique).stderr
        assert ("what strategies of hydraulis pull does not hide behind" in said) == (technique == "hydraulis")
    assert cluster.run("single_node.sbatch", "--dry-run", TECHNIQUE="hydraulis", CONTEXT="1").stderr == ""


@pytest.mark.parametrize("technique", ["hydraulis", "megatron"])
def test_any_number_of_gpus_has_a_layout_of_several_replicas(cluster, technique):
    # 3 and 7 GPUs, which half of them do not divide, too; what a user sets is refused by its name.
    for nodes, gpus, stages in ((1, 2, 1), (1, 3, 1), (1, 6, 1), (1, 7, 1), (3, 8, 2), (3, 5, 2), (2, 7, 1)):
        job = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus), "TECHNIQUE": technique}
        flags = ["--dry-run", "--pipeline-model-parallel-size", str(stages)]
        done = cluster.run("multi_node.sbatch", *flags, **job)
        if nodes * gpus % stages:
            said = f"error: {nodes} nodes of {gpus} GPUs cannot hold tensor parallelism of 1 and"
            assert done.stderr.startswith(said), job
            continue
        command = shlex.split(done.stdout)
        replica = stages * int(after(command, "--context-parallel-size"))
        assert nodes * gpus % replica == 0, job
        assert int(after(command, "--global-batch-size")) == 4 * nodes * gpus // replica >= 8, job
        said = cluster.run("multi_node.sbatch", *flags, **job, CONTEXT="4").stderr
        assert said.startswith("error: CONTEXT=4: ") == (nodes * gpus % (4 * stages) != 0), job


def test_the_planner_of_ones_own_configuration_gets_its_layout(cluster):
    own = cluster.folder / "balance.yaml"
    for section in ("wlb_llm", "{name: wlb_llm, thresholds: [9]}", "\n  name: wlb_llm  # mine"):
        own.write_text(f"data: documents\nplanner: {section}\nmodel: llama-7b\n")
        command = cluster.printed(BALANCE_CONFIG=str(own))
        layout = (after(command, "--global-batch-size"), after(command, "--context-parallel-size"))
        assert layout == ("4", "8"), section


@functools.cache
def megatrons_parser():
    pytest.importorskip("megatron.training")
    from megatron.training.arguments import add_megatron_arguments

    from megatron_balance.megatron.flags import add_balance_arguments

    return add_balance_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def job_of(command: list[str], num_ranks: int) -> Any:
    # The job that a launcher's command makes, as far as planning reads it; on H100s.
    from megatron_balance.megatron import ping_pong, ways
    from megatron_balance.runtime.groups import single
    from megatron_balance.training.pool import Pool

    args = megatrons_parser().parse_args(command[command.index("--balance-config") :])
    args.rank, args.world_size = 0, num_ranks
    args.mtp_num_layers = args.virtual_pipeline_model_parallel_size = None
    args.data_parallel_size = num_ranks // (args.tensor_model_parallel_size * args.context_parallel_size)
    config: Any = load_config(args.balance_config, planner=args.balance_planner)
    alone = args.context_parallel_size if config.planner.planner.pipelines else num_ranks
    layout = ways.layout_of(args)
    told = {"args": args, "config": config, "layout": layout, "joint": False, "row_multiple": 1}
    told |= {"ping_pong": ping_pong.wanted(args, config), "candidates": ways.candidates_of(args, config, layout)}
    return SimpleNamespace(
        **told,
        pool=Pool(single(), 1, (0,), (0,)),
        cluster=lambda: load_cluster("h100").build(num_ranks=alone, ranks_per_node=min(alone, 8)),
        model=lambda _=1: load_model("llama-7b"),
    )


@pytest.mark.megatron
@pytest.mark.parametrize("technique", PLANNERS)
def test_the_plan_of_a_dry_run_is_what_the_technique_is_for(cluster, technique):
    # And the product says nothing against the layout, but against one microbatch of one replica.
    pytest.importorskip("megatron.training")
    from megatron_balance.megatron import planning, ways
    from megatron_balance.planning.step_planner import StepPlanner

    command = cluster.printed(TECHNIQUE=technique, TOKENS="2048")
    job = job_of(command, num_ranks=8)
    assert ways.way_reasons(job.args, job.config) == []
    assert ways.idle_reason(job.args, job.config, job.cluster()) is None
    count = job.args.global_batch_size // job.args.data_parallel_size
    documents = [700, 40, 200, 90, 1000, 18] if job.args.data_parallel_size == 1 else [900, 124, 500, 300, 200, 24]
    dealt = [[length - at for length in documents] for at in range(count)]
    step, _ = StepPlanner(planning.plan_spec(job, joint=False)).plan(dealt)
    trained = sorted(length for plan in step.plans for length in plan.lengths)
    assert trained == sorted(length for lengths in dealt for length in lengths)
    if technique in ("hydraulis", "megatron"):
        assert step.strategy is not None
        assert [str(each) for each in step.strategy.pipelines] == 2 * ["tp1-pp1-cp4"]
        assert min(step.num_microbatches) > 1
        loads = [sorted(length for m in range_ for length in step.plans[m].lengths) for range_ in step.pipelines]
        assert loads[0] != loads[1], "each replica has sequences of its own"
    elif technique == "wlb_llm":
        assert len(step.members) == 4
        assert sorted(sorted(plan.lengths) for plan in step.plans) != sorted(map(sorted, dealt)), "documents moved"
    else:
        assert len(step.members) == 1
        assert {plan.num_ranks for plan in step.plans} == {8}
    one = cluster.printed(TECHNIQUE=technique, CONTEXT="8", MICROBATCHES="1", TOKENS="2048")
    before = job_of(one, num_ranks=8)
    said = ways.idle_reason(before.args, before.config, before.cluster())
    assert (said is not None) == (technique in ("hydraulis", "megatron", "wlb_llm"))
    assert said is None or said.startswith(f"planner {technique} ")
    # On one GPU there is nothing to place or deal, nor in a topology of one group.
    command = cluster.printed(TECHNIQUE=technique, MICROBATCHES="1", SLURM_GPUS_ON_NODE="1")
    job = job_of(command, num_ranks=1)
    assert f"planner {technique} " in str(ways.idle_reason(job.args, job.config, job.cluster()))
    if technique == "knapformer":
        for topology, idle in (("node", True), ("g8n1", True), ("g4n2", False), ("auto", False)):
            planner = choose_planner("knapformer", {"topology": topology})
            config = job.config.model_copy(update={"planner": planner})
            said = ways.idle_reason(job.args, config, load_cluster("h100").build(num_ranks=8, ranks_per_node=8))
            assert (said is not None) == idle, topology


def test_one_variable_names_the_machine_and_without_it_the_machine_says(cluster):
    assert "--balance-cluster" not in cluster.printed()
    own = cluster.folder / "machines" / "ours.yaml"
    own.parent.mkdir()
    own.write_text("base: h200\nranks_per_nic: 2\n")
    for named, machine, ranks_per_nic in (("h100", "h100", 1), (str(own), "h200", 2)):
        command = cluster.printed(CLUSTER=named, IMAGE="/images/balance.sqsh")
        assert after(command, "--balance-cluster") == named
        config: Any = load_config(after(command, "--balance-config"), cluster=named)
        built = config.cluster.build()
        assert (built.name, built.ranks_per_nic, config.cluster.names_machine) == (machine, ranks_per_nic, True)
        assert (f"{own.parent}:{own.parent}" in mounts(command)) == (named != "h100")


def test_with_an_image_the_job_runs_in_a_container_that_has_ones_own_files(cluster):
    own = cluster.folder / "mine" / "pretrain_gpt.py"
    config = cluster.folder / "ours" / "balance.yaml"  # with what it names beside it, such as a cost table
    own.parent.mkdir()
    own.touch()
    config.parent.mkdir()
    config.write_text("planner: zeppelin\n")
    given = {"SCRIPT": str(own), "MOUNTS": "/cache:/cache", "CHECKPOINTS": "/scratch/run"}
    command = cluster.printed(IMAGE="/images/balance.sqsh", BALANCE_CONFIG=str(config), **given)
    assert "--container-image=/images/balance.sqsh" in command
    assert after(command, "--balance-config") == str(config)
    beside = {f"{path}:{path}" for path in (own.parent, config.parent, ROOT)}
    assert beside | {"/cache:/cache", "/scratch/run:/scratch/run"} <= {*mounts(command)}
    at = command.index("-m")
    assert command[at : at + 3] == ["-m", "megatron_balance.launch", str(own)]
    assert (after(command, "--save"), after(command, "--load")) == ("/scratch/run", "/scratch/run")


def test_a_mistake_is_one_sentence_before_anything_starts(cluster):
    for variables, said in (
        ({"EXPERIMENT": "llama-8b"}, "EXPERIMENT=llama-8b"),
        ({"TECHNIQUE": "zepelin"}, "TECHNIQUE=zepelin: no such planner; there are: auto "),
        ({"CLUSTER": "h1000"}, "CLUSTER=h1000: no such file or name; there are: a800"),
        ({"DATA": ""}, "DATA is not set"),
        ({"DATA": "/nowhere/corpus"}, "no /nowhere/corpus.bin"),
        ({"SCRIPT": "/nowhere/pretrain.py"}, "SCRIPT=/nowhere/pretrain.py: no such file"),
        ({"EXPERIMENT": "llama-13b", "SLURM_GPUS_ON_NODE": "1"}, "cannot hold tensor parallelism of 2"),
    ):
        done = cluster.run("single_node.sbatch", **variables)
        assert (done.returncode, done.stderr.startswith("error: ")) == (2, True)
        assert said in done.stderr
        assert not cluster.calls.exists()
    refusal = "sbatch: error: Requested node configuration is not available"  # Slurm's own
    (cluster.folder / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{refusal}' >&2\nexit 1\n")
    done = cluster.run("multi_node.sbatch", "--dry-run")
    assert (done.returncode, refusal in done.stderr) == (2, True)


# Locks of the set-up and of the image: hashes, no proprietary package, and the bill of materials.


def test_locks_hold_what_the_package_asks_for_with_hashes_and_no_host():
    wanted = {"image": [""], "train": ["", "train", "report"]}
    wanted["dev"] = ["", "train", "hf", "titan", "dev", "docs", "gurobi", "highs"]
    versions: dict[str, dict[str, str]] = {}
    for path in sorted(LOCKS.glob("*.txt")):
        inside = packages(path.read_text())  # raises for an entry without a hash
        assert len({package.name for package in inside}) == len(inside), path.name
        assert "://" not in path.read_text(), f"{path.name}: which index serves it is not the lock's business"
        versions[path.stem] = {package.name: package.version for package in inside}
    for lock, extras in wanted.items():
        for requirement in requirements(*extras):
            if requirement.name in ("megatron-balance", "numpy" if lock == "image" else ""):
                continue
            of_base = lock == "image" and requirement.name == "pydantic"
            found = versions["pydantic" if of_base else lock][requirement.name.lower()]
            assert requirement.specifier.contains(found), (lock, str(requirement))
    assert versions["train"].items() <= versions["dev"].items(), "one environment serves the demo and the tests"


def test_the_image_has_no_proprietary_package_unless_asked_and_the_bill_names_every_one():
    # The image has no proprietary package unless asked.
    assert not [p.name for p in packages((LOCKS / "image.txt").read_text()) if p.name == "gurobipy"]
    assert re.search(r"^ARG GUROBI=$", DOCKERFILE, re.MULTILINE)
    step = next(line for line in DOCKERFILE.splitlines() if line.startswith("RUN if") and "gurobi.txt" in line)
    shell = ["bash", "-c", "pip() { echo installs; }; " + step.removeprefix("RUN ")]
    for given, installs in (("", 0), ("1", 1)):
        done = ended(shell, env={"PATH": os.environ["PATH"], "GUROBI": given}, check=True)
        assert done.stdout.count("installs") == installs
    # The bill of materials names every package of a lock and what needs it.
    lock = (LOCKS / "image.txt").read_text() + (LOCKS / "pydantic.txt").read_text()
    told = bill(lock, PROJECT)
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told == bill(lock, PROJECT), "of one lock there is one bill"
    assert [component["name"] for component in told["components"]] == re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)
    assert lock.count("--hash=") == sum(len(component["hashes"]) for component in told["components"])
    needs = {line["ref"].split("@")[0]: {on.split("@")[0] for on in line["dependsOn"]} for line in told["dependencies"]}
    assert {"pkg:pypi/pydantic-core", "pkg:pypi/annotated-types"} <= needs["pkg:pypi/pydantic"]
    assert {"pkg:pypi/pydantic", "pkg:pypi/megatron-core"} <= needs["pkg:pypi/megatron-balance"]
    assert "pkg:pypi/mdurl" not in needs["pkg:pypi/megatron-balance"]
    for broken, said in ((lock.replace("--hash=", "--size="), "line 2: expected"), ("rich==15.0.0\n", "no hash")):
        with pytest.raises(ValueError, match=said):
            bill(broken, PROJECT)


def test_continuous_integration_says_what_it_installs():
    text = (ROOT / ".ci" / "run").read_text()
    line = next(line for line in text.splitlines() if line.startswith('echo "== packages'))
    done = ended(["bash", "-c", f"browser() {{ echo chromium; }}; {line}"], cwd=ROOT, check=True)
    count, beside = (len(packages((LOCKS / name).read_text())) for name in ("dev.txt", "upstream.txt"))
    assert done.stderr == (
        f"== packages: {count} of scripts/locks/dev.txt, and {beside} wheels of upstream.txt beside them, by hash, "
        "into .venv; browser: chromium\n"
    )
    assert "installing chromium from Debian" in text


# scripts/setup_env.sh: finds a Python that is new enough, or says what to install.

SETUP = ROOT / "scripts" / "setup_env.sh"


def test_a_wheel_that_cannot_be_had_is_said_and_leaves_the_others(tmp_path):
    # The program in place of Python has a package index with two wheels and a source of four.
    copy = 'while [ "$1" != --dest ]; do shift; done; cp "$WHEELS"/*.{whl,gz} "$2"'
    fetch = f'case "$*" in *pip*flash*) exit 1;; *pip*) {copy};; *) exec "$REAL" "$@";; esac'
    program(tmp_path / "python", f"#!/bin/bash\n{fetch}\n")
    for wheel, names in (
        ("transformer_engine-2.17.1-py3-none-any", ("transformer_engine/a.py", "transformer_engine/a.so")),
        ("megatron_core-0.18.2-cp312-cp312-manylinux", ("megatron/helpers.so", "megatron/helpers.cpp")),
    ):
        with zipfile.ZipFile(tmp_path / f"{wheel}.whl", "w") as archive:
            for name in names:
                archive.writestr(name, "x = 1")
    with tarfile.open(tmp_path / "mamba_ssm-2.3.2.post1.tar.gz", "w:gz") as archive:
        for name in ("a.py", "a.cu"):
            archive.add(tmp_path / "python", f"mamba_ssm-2.3.2.post1/mamba_ssm/{name}")
    unpack = ["bash", "-c", f"source {SETUP}; PYTHON={tmp_path}/python; unpack_upstream {tmp_path}/up"]
    done = ended(unpack, env={"PATH": os.environ["PATH"], "WHEELS": str(tmp_path), "REAL": sys.executable})
    assert done.returncode == 1
    assert "The wheel of flash-attn-4==4.0.0b11 could not be had; the tests that need it will skip." in done.stderr
    unpacked = {str(path.relative_to(tmp_path / "up")) for path in (tmp_path / "up").rglob("*") if path.is_file()}
    python = {"transformer_engine-2.17.1/transformer_engine/a.py", "mamba_ssm-2.3.2.post1/mamba_ssm/a.py"}
    assert unpacked == {*python, "megatron_core-0.18.2/megatron/helpers.so"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the interpreter that is found must be 3.12 or later")
def test_python_is_found_or_it_is_said_what_to_install(tmp_path):
    bash = ["bash", "-c", f"PATH={tmp_path}/bin; source {SETUP}; find_python"]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    # The answer of an interpreter that is too old, or of a pyenv shim without a version, to any check.
    for name in ("python3", "python3.12"):
        program(tmp_path / "bin" / name, "#!/bin/sh\nexit 1\n")
    found = ended(bash, env=environment)
    assert (found.returncode, found.stdout) == (1, "")
    assert "error: no Python 3.12 or later" in found.stderr
    assert "pyenv install 3.12" in found.stderr
    # of pyenv, behind shims that do not work; and on PATH
    for where in (tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", tmp_path / "bin" / "python3.12"):
        program(where, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        found = ended(bash, env=environment)
        assert found.returncode == 0, found.stderr
        assert os.path.samefile(found.stdout.strip(), sys.executable)
        where.unlink()
