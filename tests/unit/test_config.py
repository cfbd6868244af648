"""Configuration: strict; errors name file, key and what would be right; every YAML we ship loads."""

# Sections that a configuration may lack are read all the same: where one is missing, its test fails.
# pyright: reportOptionalMemberAccess=false

import ast
import gzip
import os
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml

from megatron_balance.cli.verify import read as read_plans
from megatron_balance.config import CONFIGS, load_cluster, load_model, load_scheme_table, names
from megatron_balance.cost import modules, table
from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.files import UnreadableError, json_text, open_lines, parse_json, read_text
from megatron_balance.ir.cluster import Cluster
from megatron_balance.lab.report.run import read as read_steps
from megatron_balance.planning.choice import Run, capacity, choose_planner, load_config, resolved, to_yaml
from megatron_balance.planning.layers import Layers
from megatron_balance.strict_yaml import read_yaml
from megatron_balance.workloads.lengths import _of_jsonl, read_lengths

CLUSTERS = ["a800", "a800-ib", "emulated", "h100", "h200", "h800"]
MODELS = ["flux-12b", "gpt-tiny", "llama2-32b", "llama3-8b", "moe-8x550m"]
HYBRIDS = {"qwen3.5-35b-a3b": 35, "nemotron-h-8b": 8.1, "kimi-linear-48b-a3b": 48}  # billions, as they are named
MODELS += [f"llama-{size}" for size in ("13b", "30b", "34b", "3b", "550m", "70b", "7b")]


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def message(path: Path, load: Callable[[Path], Any] = load_config) -> str:
    """One sentence, in which the folder is DIR."""
    with pytest.raises(BalanceError) as error:
        load(path)
    said = str(error.value).replace(str(path.parent), "DIR")
    assert "\n" not in said
    assert len(said) < 400
    return said


def files(kind: str) -> list[Path]:
    """Presets that we ship of a kind; there are some."""
    found = sorted(CONFIGS.glob(f"{kind}/*.yaml"))
    assert found
    return found


def test_what_a_configuration_leaves_out_is_what_the_pages_say_and_a_planner_is_a_name(write):
    # What a configuration leaves out is what the pages say.
    config = load_config(write("planner: te_ring\n"))
    assert (config.kernel, config.backward, config.gradient_wire) == ("auto", "auto", "fp32")
    assert (config.cluster, config.communication.safe, config.communication.sms) == (None, False, {})
    assert load_config(write("cluster: {ranks_per_node: 4}\n")).cluster.ranks_per_node == 4
    # A planner is a name or a section with a name.
    short = load_config(write("planner: zeppelin\n")).planner
    long = load_config(write("planner: {name: zeppelin, tokens_per_rank: 4096}\n")).planner
    assert (short.options.tokens_per_rank, long.options.tokens_per_rank) == (None, 4096)
    assert type(short.options) is type(long.options)
    assert choose_planner("te_ring", {"tokens_per_rank": 8}).options.tokens_per_rank == 8
    with pytest.raises(ConfigError, match="rule: unknown key"):
        choose_planner("te_ring", {"rule": "cost"})


def test_cluster_files_give_every_field():
    assert names("cluster") == CLUSTERS
    one_rate, by_kernel = {"attention_efficiency"}, {"attention_rates", "attention_kernel"}
    for name in CLUSTERS:
        given = yaml.safe_load((CONFIGS / "cluster" / f"{name}.yaml").read_text())
        assert set(given) in [set(Cluster.__dataclass_fields__) - other for other in (one_rate, by_kernel)], name
        cluster = load_cluster(name).build()
        assert cluster.name == name
        assert cluster.num_ranks >= 1
        assert cluster.node_size % cluster.ranks_per_nic == 0, name


def test_models_have_the_published_number_of_parameters():
    assert names("model") == sorted([*MODELS, *HYBRIDS])
    for name in (*MODELS, *HYBRIDS):
        model = load_model(name)
        assert model.name == name
        assert load_model(str(CONFIGS / "model" / f"{name}.yaml")) == model
    # OpenLLaMA 3B; LLaMA paper, Table 2: 6.7B, 13.0B, 32.5B
    llama = {"llama-3b": 3.43, "llama-7b": 6.74, "llama-13b": 13.02, "llama-30b": 32.53}
    for name, billions in (llama | {"llama3-8b": 8.03, "llama-70b": 68.98, "llama-550m": 0.551}).items():
        # norms are left out and are well below the tolerance
        assert modules.num_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=2e-3), name
    for name, billions in HYBRIDS.items():
        assert modules.num_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.03), name


def test_files_of_every_other_kind_load(write):
    kinds = {"cluster", "model", "planner", "experiment", "scheme"}
    assert {path.parent.name for path in CONFIGS.rglob("*.yaml")} == kinds
    for path in files("experiment"):
        config = load_config(path)
        assert config.planner is not None, path
        assert resolved(load_config(write(to_yaml(config)))) == resolved(config), path
    for path in files("planner"):
        config = load_config(write(f"planner: {path}\n"))
        assert config.planner.name == yaml.safe_load(path.read_text())["name"]
    assert all(load_scheme_table(path.stem).milliseconds for path in files("scheme"))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("planner: zeppelin", Layers(routing="pays", remap=True, remap_when="pays", once_per_node=True)),
        ("planner: te_ring\nrouting: {when: always, pieces: 2}", Layers(routing="always", pieces=2)),
        ("planner: zeppelin\nremap: true", Layers(routing="pays", remap=True, once_per_node=True)),
        ("planner: te_ring\nremap: {when: pays}", Layers(remap=True, remap_when="pays")),
        ("planner: te_ring", Layers()),
        ("planner: distca", Layers(routing="pays", once_per_node=True)),
        ("planner: distca\nonce_per_node: false\nrouting: never", Layers()),
        ("planner: packing\nonce_per_node: true", Layers(once_per_node=True)),
        ("planner: te_ring\nrouting: always\nremap: true", Layers(routing="always", remap=True)),
        ("planner: zeppelin\nrouting: never\nremap: false\nonce_per_node: false", Layers()),
        ("planner: ulysses", Layers(once_per_node=True)),
        ("planner: te_ring\nremap: {solver: highs}", Layers(remap=True, solver="highs")),
        ("planner: te_ring\nremap: {solver: gurobi}", Layers(remap=True, solver="gurobi")),
    ],
)
def test_layers_are_the_planners_own_unless_given_and_are_written_out(write, text, layers):
    config = load_config(write(text))
    assert config.planner.layers == layers
    again = load_config(write(to_yaml(config), "again.yaml"))
    assert again.planner.layers == layers
    written = resolved(config)
    assert resolved(again) == written
    assert written["routing"] == {"when": layers.routing, "pieces": layers.pieces}
    how = {"when": layers.remap_when, "solver": layers.solver}
    assert written["remap"] == (how if layers.remap else False)
    assert written["once_per_node"] == layers.once_per_node


def test_options_that_zeppelin_had_say_what_to_write_instead(write):
    for option, sentence in (
        ("rule: cost", "rule: rule cost is gone; write groups, with group_size 1 for rings of single ranks"),
        ("remapped: false", "remapped: is gone with rule cost; leave it out, and say remap beside "),
        ("routed: true", "routed: is gone with rule cost; leave it out, and say routing beside the planner"),
        ("weight_tokens: 1.0", "weight_tokens: is gone with rule cost; leave it out"),
        ("weight_communication: 0.1", "weight_communication: is gone with rule cost; leave it out"),
    ):
        assert sentence in message(write(f"planner: {{name: zeppelin, {option}}}"))


def test_a_section_in_another_file_is_found_and_an_int_becomes_a_float(write, tmp_path):
    # A section in another file is found relative to the file that names it.
    (tmp_path / "parts").mkdir()
    write("base: a800\nnum_ranks: 16\n", "parts/mine.yaml")
    cluster = load_config(write("cluster: parts/mine.yaml\n")).cluster.build()
    assert (cluster.num_ranks, cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (16, 2, 24e9)
    # Arguments win over the file, which wins over the preset.
    cluster = load_cluster("a800").build(num_ranks=16, ranks_per_node=4)
    assert (cluster.num_ranks, cluster.ranks_per_node, cluster.name) == (16, 4, "a800")
    # Int becomes float and an exponent without a point is a number.
    given = load_config(write("cluster: {nic_bytes_per_s: 1, intra_bytes_per_s: 4e11}\n")).cluster.given
    assert given == {"nic_bytes_per_s": 1.0, "intra_bytes_per_s": 4e11}
    assert type(given["nic_bytes_per_s"]) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("planner: {name: packing, token_per_rank: 4}", "planner.token_per_rank: unknown key, did you mean 'tokens_p"),
        ("planner: {name: zepelin}", "planner.name: unknown planner 'zepelin', did you mean 'zeppelin'?"),
        ("planner: {rule: cost}", "planner.name: missing; one of te_ring"),
        ("planner: {name: zeppelin, rule: papr}", "planner.rule: expected 'waves', 'groups' or 'paper', got 'papr'"),
        ("planner: {name: zeppelin, tokens_per_rank: 0}", "planner.tokens_per_rank: expected at least 1, got 0"),
        ("planner: {name: packing, tokens_per_rank: '4'}", "planner.tokens_per_rank: expected a whole number, got '4'"),
        ("planner: {name: packing, tokens_per_rank: 4.0}", "planner.tokens_per_rank: expected a whole number, got 4.0"),
        ("planner: {name: te_ring, tokens_per_rank: true}", "planner.tokens_per_rank: expected a whole number, got Tr"),
        ("planner: zepelin", "planner: no planner named 'zepelin', did you mean 'zeppelin'"),
        ("planner: [zeppelin]", "planner: expected 'name:' and options"),
        ("plannr: zeppelin", "plannr: unknown key, did you mean 'planner'?"),
        ("source: me", "source: unknown key"),
        ("model: {base: llama-7b, num_head: 4}", "model.num_head: unknown key, did you mean 'num_heads'?"),
        ("model: {num_heads: 4}", "model: num_kv_heads: missing"),
        ("model: {base: llama-7b, num_kv_heads: 5}", "model llama-7b: num_kv_heads 5 does not divide num_heads 32"),
        ("model: llama-8b", "model: no model named 'llama-8b', did you mean 'llama3-8b'?"),
        ("cluster: parts/none.yaml", "cannot be read: No such file or directory"),
        ("cluster: {base: 3}", "cluster.base: expected a name or a path to a YAML, got 3"),
        ("backward: kep", "backward: expected 'auto', 'keep' or 'replay', got 'kep'"),
        ("plan_ahead: yes", "plan_ahead: expected true or false, got 'yes'"),
        ("routing: sometimes", "routing: expected 'always', 'pays' or 'never', got 'sometimes'"),
        ("routings: always", "routings: unknown key, did you mean 'routing'?"),
        ("planner: te_ring\nrouting: {pieces: 0}", "routing.pieces: expected at least 1, got 0"),
        ("planner: te_ring\nrouting: {piece: 2}", "routing.piece: unknown key, did you mean 'pieces'?"),
        ("remap: yes", "remap: expected true, false or keys such as when, solver, got 'yes'"),
        ("remap: {solvr: exact}", "remap.solvr: unknown key, did you mean 'solver'?"),
        ("remap: {solver: gurob}", "remap.solver: expected 'exact', 'gurobi' or 'highs', got 'gurob'"),
        ("remap: {sides: both}", "remap.sides: both sides of a rank's link count; leave it out"),
        ("remap: {objective: total}", "remap.objective: the moves make both objectives least at once; leave it out"),
        (
            "remap: {solver: ortools}",
            "remap.solver: OR-Tools is no solver any more; write 'highs', or leave it out for",
        ),
        ("agreement_every: 0", "agreement_every: expected at least 1, got 0"),
        ("dataset: {tokens: 4}", "dataset.name: missing"),
        ("dataset: {name: arxiv, token: 4}", "dataset.token: unknown key, did you mean 'tokens'?"),
        ("dataset: {name: arxiv, tokens: 4, sed: 1}", "dataset.sed: unknown key, did you mean 'seed'?"),
        ("lengths: [1, a]", "lengths.1: expected a whole number, got 'a'"),
        ("planner: te_ring\nplanner: zeppelin", "2: not valid YAML: key 'planner' is given twice"),
        ("planner:\n  {}: te_ring", "2: not valid YAML: a key that is a list or a mapping itself"),
        ("a: [1", "1: not valid YAML"),
        ("- 1", "expected keys such as 'planner:', got [1]"),
        ("", "expected keys such as 'planner:', got None"),
    ],
)
def test_mistake_is_named_with_file_key_and_what_is_right(write, text, expected):
    # Behind the file, and its line where it is no YAML; a model says its own name.
    said, file = message(write(text)), "DIR/parts/none.yaml" if "parts/none" in text else "DIR/run.yaml"
    assert said.startswith(f"{file}:") or "num_kv_heads" in expected
    assert said.removeprefix(f"{file}:").lstrip().startswith(expected)


def test_the_file_with_the_mistake_is_named(write, tmp_path):
    write("name: zeppelin\ntoken_per_rank: 4\n", "mine.yaml")
    said = "DIR/mine.yaml: token_per_rank: unknown key, did you mean 'tokens_per_rank'?"
    assert message(write("planner: mine.yaml\n")) == said
    assert message(tmp_path / "nowhere.yaml").startswith("DIR/nowhere.yaml: cannot be read: No such file")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert message(tmp_path / "x.yaml").startswith("DIR/x.yaml: cannot be read: not text: has a NUL byte")


def test_capacity_of_a_model_that_does_not_fit_is_an_error_with_the_numbers():
    said = r"llama-70b does not fit h100: .* need 517 GB on each of 8 ranks, which have 80 GB"
    with pytest.raises(ConfigError, match=said):
        capacity(load_cluster("h100").build(num_ranks=8), load_model("llama-70b"))


def test_kernels_that_the_configuration_allows_are_those_of_the_runtime():
    torch = pytest.importorskip("torch")
    from megatron_balance.runtime.kernels import choose_kernel

    with pytest.raises(ConfigError) as error:
        choose_kernel("none", torch.device("cpu"), torch.float32, 64)
    known = str(error.value).partition("known: ")[2].split(", ")
    assert known == list(get_args(Run.model_fields["kernel"].annotation))


# Files that are not what they should be: one sentence each, and little is read of them.

ALIASES = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(8 * [f'*{before}'])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ALIASES, "its aliases stand for more than 100000 keys and values"),
        ("a: &a [*a]\n", "an alias stands for itself"),
        ("[" * 100_000, "it nests too deeply"),
        ("a: " + "{a: " * 150 + "}" * 150, "it nests too deeply"),
        ("num_ranks: " + "9" * 5000, "a number of 5000 characters"),
        ("\0", "has a NUL byte"),
        ("a: \x0f", "unacceptable character #x000f: special characters are not allowed in"),
        ("a" * 200_000, "longer than 131072 bytes"),
    ],
)
def test_yaml_is_bounded(write, text: str, said: str) -> None:
    assert said in message(write(text), read_yaml)
    within = write("a: &a [1, {b: 2}]\nc: [*a, *a]\n")
    assert read_yaml(within) == {"a": [1, {"b": 2}], "c": 2 * [[1, {"b": 2}]]}


READERS: list[Callable[[Path], Any]] = [read_lengths, table.load_table, read_plans, lambda path: _of_jsonl(path, "")]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 1_000_000, "brackets nest too deeply"),
        (b"[" + b"9" * 5000 + b"]", "a whole number beyond 64 bits: 9999"),
        (b"[9223372036854775808]", "a whole number beyond 64 bits: 9223372036854775808"),
        (b"\0" * 5000, "has a NUL byte"),
        (b"[4096, \xff]", "not UTF-8 text"),
        (b"[4096,", "not JSON"),
    ],
)
def test_json_is_bounded(tmp_path: Path, read: Callable[[Path], Any], content: bytes, said: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    assert said in message(path, read)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
@pytest.mark.parametrize("read", [*READERS, read_yaml, load_cluster, read_steps])
def test_an_endless_device_ends_at_once(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "zero.yaml"
    path.symlink_to("/dev/zero")
    said = message(path, lambda path: read(str(path)) if read is load_cluster else read(path))
    assert "NUL byte" in said or "not a file" in said


def test_whole_numbers_of_64_bits_are_read_and_text_is_bounded(tmp_path: Path) -> None:
    largest = parse_json("[9223372036854775807, -9223372036854775808, 1.2345678901234567890123]")[:2]
    assert largest == [2**63 - 1, -(2**63)]
    path = tmp_path / "text"
    path.write_text("grün" * 1000, encoding="utf-8")
    assert read_text(path) == "grün" * 1000
    with pytest.raises(UnreadableError, match="longer than 4999 bytes"):
        read_text(path, 4999)


def test_a_cluster_that_cannot_be_is_refused(write) -> None:
    for keys, said in (
        ("base: ./run.yaml", "is based on itself"),
        ("base: h200\nnic_bytes_per_s: 0.0", "nic_bytes_per_s: expected more than 0, got 0.0"),
        ("base: h200\nall_to_all_efficiency: 1.1", "all_to_all_efficiency: expected at most 1, got 1.1"),
        ("base: h200\nlinear_efficiency: 50.0", "linear_efficiency: expected at most 1, got 50.0"),
        ("base: h200\nflops_per_s: -1.0", "flops_per_s: expected more than 0"),
        ("base: h200\nranks_per_nic: 0", "expected ranks_per_nic of at least 1"),
        ("base: h200\nintra_alpha_s: -1.0", "intra_alpha_s: expected seconds of at least 0"),
    ):
        assert said in message(write(keys), lambda path: load_cluster(str(path)).build())
    one, _ = write("base: ./two.yaml", "one.yaml"), write("base: ./one.yaml", "two.yaml")
    assert "is based on itself (one.yaml -> two.yaml -> one.yaml)" in message(one, lambda path: load_cluster(str(path)))


class Frames:
    """Stands in for the package zstandard: zlib's objects answer the same calls."""

    def __init__(self, max_window_size: int) -> None:
        assert max_window_size == 2**31, "files of zstd --long"

    def decompressobj(self) -> Any:
        return zlib.decompressobj(wbits=31)


def test_a_zst_file_is_read_to_the_end_of_its_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's own `open` ends at the first frame, and in the middle of one without a word.
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdDecompressor=Frames))
    monkeypatch.setattr("megatron_balance.files.ZSTD", ("zstandard",))
    parts = [random.Random(0).randbytes(3000).hex(), "a", "b" * 200_000]
    frames, file = [gzip.compress(part.encode()) for part in parts], tmp_path / "lines.zst"
    file.write_bytes(b"".join(frames))
    assert read_text(file) == "".join(parts)
    with open_lines(file) as lines:
        assert next(iter(lines)) == "".join(parts)
    file.write_bytes(b"".join(frames)[:-20])
    with pytest.raises(UnreadableError, match="it ends before its last frame does"):
        read_text(file)
    with pytest.raises(UnreadableError, match="it ends before its last frame does"), open_lines(file) as lines:
        list(lines)
    file.write_bytes(b"")
    assert read_text(file) == ""


def test_written_json_has_null_for_what_is_no_number_wherever_it_is_written() -> None:
    # Written json has null for what is no number.
    rows = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], 2: "NaN"}
    assert json_text(rows) == '{"a": [1.5, null, [null, {"b": null}]], "2": "NaN"}'
    assert json_text([1], indent=1) == "[\n 1\n]"
    # No json is written that other readers refuse.
    # Python writes NaN and Infinity, which JSON does not have, unless told not to.
    lax: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "json.dump" in text else ():
            keywords = {each.arg for each in node.keywords} if isinstance(node, ast.Call) else {"allow_nan"}
            if "allow_nan" not in keywords and ast.unparse(node).startswith(("json.dump(", "json.dumps(")):
                lax.append(f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node)}")
    quoted = ("lab/report/run.py", "workloads/lengths.py", "workloads/lengths.py", "cost/table.py")  # in messages
    assert [each for each in lax if each.partition(":")[0] not in {*INSIDE, *quoted}] == []


PACKAGE = Path(__file__).resolve().parents[2] / "megatron_balance"
# The writer itself; what goes to our own planning process, or has whole numbers and names alone.
INSIDE = {"files.py", "planning/step_planner.py", "ir/step.py"}
