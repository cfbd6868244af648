"""Configuration: strict, with errors that name the file, the key and what would be right; and every
YAML we ship loads."""

import ast
import gzip
import os
import random
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from megatron_balance.cli.verify import read as read_plans
from megatron_balance.config import CONFIGS, RemapChoice, load_cluster, load_model, load_scheme_table, names
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.table import load_table
from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.files import UnreadableError, json_text, open_lines, parse_json, read_text
from megatron_balance.ir.cluster import Cluster
from megatron_balance.lab.report.run import read as read_steps
from megatron_balance.planning.choice import Run, capacity, choose_planner, load_config, resolved, to_yaml
from megatron_balance.planning.layers import Layers
from megatron_balance.strict_yaml import read_yaml
from megatron_balance.workloads.lengths import _of_jsonl, read_lengths

CLUSTERS = ["a800", "a800-ib", "emulated", "h100", "h200", "h800"]
MODELS = [
    "flux-12b",
    "gpt-tiny",
    "llama-13b",
    "llama-30b",
    "llama-34b",
    "llama-3b",
    "llama-550m",
    "llama-70b",
    "llama-7b",
    "llama2-32b",
    "llama3-8b",
    "moe-8x550m",
]


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return str(error.value).replace(str(path.parent), "DIR")


def files(kind: str) -> list[Path]:
    """Presets that we ship of a kind; there are some."""
    found = sorted(CONFIGS.glob(f"{kind}/*.yaml"))
    assert found
    return found


def test_what_a_configuration_leaves_out_is_what_the_pages_say(write):
    config = load_config(write("planner: te_ring\n"))
    assert (config.kernel, config.backward, config.gradient_wire) == ("auto", "auto", "fp32")
    assert (config.cluster, config.communication.safe, config.communication.sms) == (None, False, {})


def test_the_documented_clusters_and_models_are_shipped():
    assert names("cluster") == CLUSTERS
    assert names("model") == sorted(MODELS)


def test_cluster_files_give_every_field():
    one_rate, by_kernel = {"attention_efficiency"}, {"attention_rates", "attention_kernel"}
    for name in CLUSTERS:
        given = yaml.safe_load((CONFIGS / "cluster" / f"{name}.yaml").read_text())
        assert set(given) in [set(Cluster.__dataclass_fields__) - other for other in (one_rate, by_kernel)], name
        cluster = load_cluster(name).build()
        assert cluster.name == name
        assert cluster.num_ranks >= 1
        assert cluster.node_size % cluster.ranks_per_nic == 0, name


def test_model_files_describe_models_of_their_names():
    for name in MODELS:
        model = load_model(name)
        assert model.name == name
        assert model.num_heads >= 1
        assert load_model(str(CONFIGS / "model" / f"{name}.yaml")) == model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3b", 3.43),  # OpenLLaMA 3B
        ("llama-7b", 6.74),  # LLaMA paper, Table 2: 6.7B
        ("llama-13b", 13.02),  # 13.0B
        ("llama-30b", 32.53),  # 32.5B
        ("llama3-8b", 8.03),
        ("llama-70b", 68.98),
        ("llama-550m", 0.551),
    ],
)
def test_model_sizes_add_up_to_the_published_number_of_parameters(name, billions):
    # 18 bytes of state a parameter; norms are left out and are well below the tolerance.
    assert num_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_experiment_files_load_and_their_resolved_forms_load_to_the_same(write):
    for path in files("experiment"):
        config = load_config(path)
        assert config.planner is not None, path
        again = load_config(write(to_yaml(config)))
        assert resolved(again) == resolved(config), path


def test_planner_files_load_as_a_section(write):
    for path in files("planner"):
        config = load_config(write(f"planner: {path}\n"))
        assert config.planner is not None, path
        assert config.planner.name == yaml.safe_load(path.read_text())["name"]


def test_tables_of_schemes_load():
    assert all(load_scheme_table(path.stem).milliseconds for path in files("scheme"))


def test_every_yaml_is_of_a_kind_that_is_tested_here():
    kinds = {path.parent.name for path in CONFIGS.rglob("*.yaml")}
    assert kinds == {"cluster", "model", "planner", "experiment", "scheme"}


def test_a_planner_is_a_name_or_a_section_with_a_name(write):
    short = load_config(write("planner: zeppelin\n")).planner
    long = load_config(write("planner: {name: zeppelin, tokens_per_rank: 4096}\n")).planner
    assert short is not None
    assert long is not None
    assert short.options.tokens_per_rank is None
    assert long.options.tokens_per_rank == 4096
    assert type(short.options) is type(long.options)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("planner: zeppelin", Layers(routing="pays", remap=True, remap_when="pays", once_per_node=True)),
        (
            "planner: zeppelin\nremap: true\nrouting: {when: always, pieces: 2}",
            Layers(routing="always", remap=True, pieces=2, once_per_node=True),
        ),
        ("planner: te_ring\nremap: {when: pays}", Layers(remap=True, remap_when="pays")),
        ("planner: te_ring", Layers()),
        ("planner: distca", Layers(routing="pays", once_per_node=True)),
        ("planner: distca\nonce_per_node: false\nrouting: never", Layers()),
        ("planner: packing\nonce_per_node: true", Layers(once_per_node=True)),
        ("planner: te_ring\nrouting: always\nremap: true", Layers(routing="always", remap=True)),
        ("planner: zeppelin\nrouting: never\nremap: false\nonce_per_node: false", Layers()),
        ("planner: ulysses", Layers(once_per_node=True)),
        ("planner: te_ring\nremap: {solver: highs}", Layers(remap=True, solver="highs")),
        (
            "planner: zeppelin\nremap: {solver: gurobi}",
            Layers(routing="pays", remap=True, solver="gurobi", once_per_node=True),
        ),
    ],
)
def test_layers_are_the_planners_own_unless_given_and_are_written_out(write, text, layers):
    config = load_config(write(text))
    assert config.planner is not None
    assert config.planner.layers == layers
    again = load_config(write(to_yaml(config), "again.yaml"))
    assert resolved(again) == resolved(config)
    assert again.planner is not None
    assert again.planner.layers == layers
    written = resolved(config)
    assert written["routing"] == {"when": layers.routing, "pieces": layers.pieces}
    how = {"when": layers.remap_when, "solver": layers.solver}
    assert written["remap"] == (how if layers.remap else False)
    assert written["once_per_node"] == layers.once_per_node


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("rule: cost", "rule: rule cost is gone; write groups, with group_size 1 for rings of single ranks"),
        (
            "remapped: false",
            r"remapped: is gone with rule cost; leave it out, and say remap beside .* \(remap: false\)",
        ),
        ("routed: true", "routed: is gone with rule cost; leave it out, and say routing beside the planner"),
        ("weight_tokens: 1.0", "weight_tokens: is gone with rule cost; leave it out"),
        ("weight_communication: 0.1", "weight_communication: is gone with rule cost; leave it out"),
    ],
)
def test_options_that_zeppelin_had_say_what_to_write_instead(write, option, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(write(f"planner: {{name: zeppelin, {option}}}"))


def test_solvers_of_a_remap_are_those_of_its_layer():
    assert RemapChoice().solver == Layers().solver
    assert get_type_hints(RemapChoice)["solver"] == get_type_hints(Layers)["solver"]


def test_a_section_in_another_file_is_found_relative_to_the_file_that_names_it(write, tmp_path):
    (tmp_path / "parts").mkdir()
    write("base: a800\nnum_ranks: 16\n", "parts/mine.yaml")
    config = load_config(write("cluster: parts/mine.yaml\n"))
    assert config.cluster is not None
    cluster = config.cluster.build()
    assert (cluster.num_ranks, cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (16, 2, 25e9)


def test_ranks_per_node_is_known_only_when_the_file_says_so(write):
    given, silent = (
        load_config(write("cluster: {ranks_per_node: 4}\n")),
        load_config(write("backward: replay\n", "b.yaml")),
    )
    assert given.cluster is not None
    assert given.cluster.ranks_per_node == 4
    assert silent.cluster is None


def test_arguments_win_over_the_file_which_wins_over_the_preset():
    cluster = load_cluster("a800").build(num_ranks=16, ranks_per_node=4)
    assert (cluster.num_ranks, cluster.ranks_per_node, cluster.name) == (16, 4, "a800")


def test_int_becomes_float_and_an_exponent_without_a_point_is_a_number(write):
    config = load_config(write("cluster: {nic_bytes_per_s: 1, intra_bytes_per_s: 4e11}\n"))
    assert config.cluster is not None
    assert config.cluster.given == {"nic_bytes_per_s": 1.0, "intra_bytes_per_s": 4e11}
    assert type(config.cluster.given["nic_bytes_per_s"]) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "planner: {name: zeppelin, token_per_rank: 4096}",
            "planner.token_per_rank: unknown key, did you mean 'tokens_per_rank'?",
        ),
        ("planner: {name: zepelin}", "planner.name: unknown planner 'zepelin', did you mean 'zeppelin'?"),
        ("planner: {rule: cost}", "planner.name: missing; one of te_ring"),
        ("planner: {name: zeppelin, rule: papr}", "planner.rule: expected 'waves', 'groups' or 'paper', got 'papr'"),
        ("planner: {name: zeppelin, tokens_per_rank: 0}", "planner: tokens_per_rank: expected at least 1 token, got 0"),
        (
            "planner: {name: zeppelin, tokens_per_rank: '4096'}",
            "planner.tokens_per_rank: expected a whole number, got '4096'",
        ),
        (
            "planner: {name: zeppelin, tokens_per_rank: 4096.0}",
            "planner.tokens_per_rank: expected a whole number, got 4096.0",
        ),
        (
            "planner: {name: zeppelin, tokens_per_rank: true}",
            "planner.tokens_per_rank: expected a whole number, got True",
        ),
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
            "remap.solver: OR-Tools is no solver any more; write 'highs', or leave it out for 'exact'",
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
    """Behind the file, and its line where it is no YAML; a model says its own name."""
    said, file = message(write(text)), "DIR/parts/none.yaml" if "parts/none" in text else "DIR/run.yaml"
    assert said.startswith(f"{file}:") or "num_kv_heads" in expected
    assert said.removeprefix(f"{file}:").lstrip().startswith(expected)


def test_mistake_in_a_section_file_names_that_file(write):
    write("name: zeppelin\ntoken_per_rank: 4\n", "mine.yaml")
    assert (
        message(write("planner: mine.yaml\n"))
        == "DIR/mine.yaml: token_per_rank: unknown key, did you mean 'tokens_per_rank'?"
    )


def test_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_binary_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot be read: not text: has a NUL byte"):
        load_config(tmp_path / "x.yaml")


def test_choosing_a_planner_by_keyword_checks_its_options():
    assert choose_planner("te_ring", {"tokens_per_rank": 8}).options.tokens_per_rank == 8
    with pytest.raises(ConfigError, match="rule: unknown key"):
        choose_planner("te_ring", {"rule": "cost"})


def test_capacity_of_a_model_that_does_not_fit_is_an_error_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"llama-70b does not fit h100: .* need 517 GB on each of 8 ranks, which have 80 GB"
    ):
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


def message_of(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(BalanceError) as error:
        read(path)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


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
def test_yaml_is_bounded(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    assert said in message_of(read_yaml, path)


def test_aliases_within_bounds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("a: &a [1, {b: 2}]\nc: [*a, *a]\n")
    assert read_yaml(path) == {"a": [1, {"b": 2}], "c": 2 * [[1, {"b": 2}]]}


READERS: list[Callable[[Path], Any]] = [read_lengths, load_table, read_plans, lambda path: _of_jsonl(path, "")]


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
    assert said in message_of(read, path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
@pytest.mark.parametrize("read", [*READERS, read_yaml, load_cluster, read_steps])
def test_an_endless_device_ends_at_once(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "zero.yaml"
    path.symlink_to("/dev/zero")
    said = message_of(lambda path: read(str(path)) if read is load_cluster else read(path), path)
    assert "NUL byte" in said or "not a file" in said


def test_whole_numbers_of_64_bits_are_read_and_text_is_bounded(tmp_path: Path) -> None:
    assert parse_json("[9223372036854775807, -9223372036854775808, 1.2345678901234567890123]")[:2] == [
        2**63 - 1,
        -(2**63),
    ]
    path = tmp_path / "text"
    path.write_text("grün" * 1000, encoding="utf-8")
    assert read_text(path) == "grün" * 1000
    with pytest.raises(UnreadableError, match="longer than 4999 bytes"):
        read_text(path, 4999)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("base: ./some.yaml", "is based on itself"),
        ("base: h200\nnic_bytes_per_s: 0.0", "nic_bytes_per_s: expected more than 0, got 0.0"),
        ("base: h200\nlinear_efficiency: 50.0", "linear_efficiency: expected at most 1, got 50.0"),
        ("base: h200\nflops_per_s: -1.0", "flops_per_s: expected more than 0"),
        ("base: h200\nranks_per_nic: 0", "expected ranks_per_nic of at least 1"),
        ("base: h200\nintra_alpha_s: -1.0", "intra_alpha_s: expected seconds of at least 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, keys: str, said: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(keys)
    assert said in message_of(lambda path: load_cluster(str(path)).build(), path)


def test_two_clusters_may_not_be_based_on_each_other(tmp_path: Path) -> None:
    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"base: ./{base}.yaml\n")
    with pytest.raises(ConfigError, match=r"is based on itself \(one.yaml -> two.yaml -> one.yaml\)"):
        load_cluster(str(tmp_path / "one.yaml"))


class Frames:
    """Stands in for the package zstandard: zlib's objects answer the same calls."""

    def __init__(self, max_window_size: int) -> None:
        assert max_window_size == 2**31, "files of zstd --long"

    def decompressobj(self) -> Any:
        return zlib.decompressobj(wbits=31)


def test_a_zst_file_is_read_to_the_end_of_its_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own `open` ends at the first frame, and in the middle of one without a word."""
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdDecompressor=Frames))
    monkeypatch.setattr("megatron_balance.files.ZSTD", ("zstandard",))
    parts = [random.Random(0).randbytes(3000).hex(), "a", "b" * 200_000]
    frames, file = [gzip.compress(part.encode()) for part in parts], tmp_path / "lines.zst"
    file.write_bytes(b"".join(frames))
    assert read_text(file) == "".join(parts)
    with open_lines(file) as lines:
        assert next(iter(lines)) == "".join(parts)
    file.write_bytes(b"".join(frames)[:-20])
    for read in (read_text, lambda path: list(lines_of(path))):
        with pytest.raises(UnreadableError, match="it ends before its last frame does"):
            read(file)
    file.write_bytes(b"")
    assert read_text(file) == ""


def lines_of(path: Path) -> Iterator[str]:
    with open_lines(path) as lines:
        yield from lines


def test_written_json_has_null_for_what_is_no_number() -> None:
    rows = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], 2: "NaN"}
    assert json_text(rows) == '{"a": [1.5, null, [null, {"b": null}]], "2": "NaN"}'
    assert json_text([1], indent=1) == "[\n 1\n]"


PACKAGE = Path(__file__).resolve().parents[2] / "megatron_balance"
# The writer itself; what goes to our own planning process, or has whole numbers and names alone.
INSIDE = {"files.py", "planning/step_planner.py", "ir/step.py"}


def test_no_json_is_written_that_other_readers_refuse() -> None:
    """Python writes NaN and Infinity, which JSON does not have, unless told not to."""
    lax: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "json.dump" in text else ():
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.dump", "json.dumps"):
                continue
            if "allow_nan" not in {each.arg for each in node.keywords}:
                lax.append(f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node)}")
    quoted = ("lab/report/run.py", "workloads/lengths.py", "workloads/lengths.py", "cost/table.py")  # in messages
    assert [each for each in lax if each.partition(":")[0] not in {*INSIDE, *quoted}] == []
