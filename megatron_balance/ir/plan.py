"""Plans, as planners make them: compact, hashable, printable; no object per rank and fragment, no
tensors.

`ir.step` has the plan of a whole optimizer step.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias, cast

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.files import parse_json
from megatron_balance.ir import forest
from megatron_balance.ir.columns import Move, Placed, Rows, Task
from megatron_balance.ir.mask import CAUSAL, Mask, mask_named

FORMAT = "megatron-balance plan 3"

NO_MOVES = Rows(Move.WIDTH)

# In `Routing.zones`: the exchanges of the remap.
REMAP = -1


@dataclass(frozen=True, slots=True)
class Zone:
    """Sequences that share a group of ranks, a placement and a comm pattern.

    `pattern` names a comm pattern (`patterns`): "ring" and "all_gather" place zigzag,
    "gather_documents" and "gather_sequence" in even chunks, "head_exchange" and
    "chunk_exchange" contiguously, "head_ring" zigzag over groups. A zone on one rank is local
    whatever its comm pattern. `name` is for people and reports (inter-node, intra-node, local, pool).

    `group_size`: for a pattern that nests another one ("head_ring"), how many ranks in a row form a
    group; 0: there are no groups. JSON names it where it is not 0.
    """

    name: str
    pattern: str
    ranks: tuple[int, ...]
    seqs: tuple[int, ...]
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class TaskTable:
    """Explicit placement and tasks: any cut of the (query, key) triangle, on any rank.

    `fragments`: `Placed` rows. `tasks`: `Task` rows.
    """

    name: str
    fragments: Rows
    tasks: Rows
    pattern: str = "dispatch"

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(sorted({row[Placed.SEQ] for row in self.fragments}))


@dataclass(frozen=True, slots=True)
class SharedZone:
    """Sequences cut anywhere over groups of ranks, attended in one schedule: comm pattern "waves".

    `fragments`: `Placed` rows; every query attends in the group that holds it, to all keys that the
    mask shows it. Ranks `group_size` in a row form a group. `waves`: in how many parts the keys of
    other groups come. `lead`: tokens of each group whose heads are exchanged first, so that it
    attends to them while the exchange of the others is under way; 0: all at once.
    """

    name: str
    fragments: Rows
    group_size: int
    waves: int
    lead: int = 0
    pattern: str = "waves"

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(sorted({row[Placed.SEQ] for row in self.fragments}))


AnyPlanZone: TypeAlias = Zone | TaskTable | SharedZone


@dataclass(frozen=True, slots=True)
class Routing:
    """The transfers between nodes that go over all NICs of both nodes (Zeppelin, section 3.3).

    Routed are those of `zones` (indices into the plan's zones; `REMAP`: of the remap) that move
    `min_tokens` or more from one rank to another in one exchange. `ranks_per_nic`: neighbouring
    ranks of a node that share a NIC. `pieces`: number of pieces of one transfer on each NIC.
    """

    ranks_per_nic: int
    zones: tuple[int, ...]
    min_tokens: int = 1
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """One microbatch of the pool. Zones are in issue order: inter-node first, then intra-node, then
    local.

    `moves`: the remap (Zeppelin, section 3.4), `Move` rows by src, then dst: the last tokens of
    what the zones place on src are owned by dst outside attention. Empty: the linear layout is the
    attention layout. `mask`: of all sequences; JSON names it where it is not causal, and lists the
    trees of a forest beside it. `note`: why a planner decided so, for the log; no decision, and not in
    the fingerprint.
    """

    planner: str
    lengths: tuple[int, ...]
    num_ranks: int
    ranks_per_node: int
    num_heads: int
    num_kv_heads: int
    zones: tuple[AnyPlanZone, ...]
    moves: Rows = NO_MOVES
    routing: Routing | None = None
    mask: Mask = CAUSAL
    note: str = ""
    _fingerprint: str = field(default="", init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def fingerprint(self) -> str:
        """Sixteen hex digits that differ when any decision differs; equal on every host and Python."""
        # Worked out once: large plans are long texts.
        if not self._fingerprint:
            text = to_json(replace(self, note=""))
            object.__setattr__(self, "_fingerprint", hashlib.sha256(text.encode()).hexdigest()[:16])
        return self._fingerprint


_PLAIN = ("planner", "lengths", "num_ranks", "ranks_per_node", "num_heads", "num_kv_heads")


def to_json(plan: MicrobatchPlan) -> str:
    """The plan as one line of JSON with a fixed key order."""
    body = {
        "format": FORMAT,
        **{key: getattr(plan, key) for key in _PLAIN},
        "zones": [_zone_to_json(z) for z in plan.zones],
        "moves": list(plan.moves),
        "routing": None if plan.routing is None else asdict(plan.routing),
        **({} if plan.mask == CAUSAL else {"mask": plan.mask.name}),
        **({"trees": plan.mask.trees} if isinstance(plan.mask, forest.Forest) else {}),
        **({"note": plan.note} if plan.note else {}),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _zone_to_json(zone: AnyPlanZone) -> dict[str, object]:
    if isinstance(zone, Zone):
        body = asdict(zone)
        return body if zone.group_size else {key: body[key] for key in body if key != "group_size"}
    if isinstance(zone, SharedZone):
        body = {"name": zone.name, "pattern": zone.pattern, "fragments": list(zone.fragments)}
        lead = {"lead": zone.lead} if zone.lead else {}
        return {**body, "group_size": zone.group_size, "waves": zone.waves, **lead}
    return {"name": zone.name, "pattern": zone.pattern, "fragments": list(zone.fragments), "tasks": list(zone.tasks)}


def from_json(text: str) -> MicrobatchPlan:
    """The plan that `to_json` wrote; ConfigError: not a plan, or one of another format."""
    try:
        loaded: Any = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"not a plan: {error}") from None
    return from_body(loaded)


def from_body(loaded: Any) -> MicrobatchPlan:
    """The plan of parsed JSON; as `from_json`."""
    body = cast(dict[str, Any], loaded) if isinstance(loaded, dict) else {}
    written = body.get("format")
    if written != FORMAT:
        raise ConfigError(
            f"not a plan of this version: expected format {FORMAT!r}, got {written!r}; plan the batch again"
        )
    try:
        return MicrobatchPlan(
            planner=str(body["planner"]),
            lengths=_ints(body["lengths"]),
            num_ranks=int(body["num_ranks"]),
            ranks_per_node=int(body["ranks_per_node"]),
            num_heads=int(body["num_heads"]),
            num_kv_heads=int(body["num_kv_heads"]),
            zones=tuple(_zone_from_json(z) for z in body["zones"]),
            moves=Rows.of(Move.WIDTH, body["moves"]),
            routing=_routing_from_json(body["routing"]),
            mask=_mask_from_json(str(body.get("mask", CAUSAL.name)), body.get("trees")),
            note=str(body.get("note", "")),
        )
    except MALFORMED as error:
        raise ConfigError(f"damaged plan: {type(error).__name__}: {error}") from None


def _mask_from_json(name: str, trees: Any) -> Mask:
    return mask_named(name) if trees is None else forest.named(name, trees)


def _zone_from_json(zone: dict[str, Any]) -> AnyPlanZone:
    if "waves" in zone:
        return SharedZone(
            name=str(zone["name"]),
            pattern=str(zone["pattern"]),
            fragments=Rows.of(Placed.WIDTH, zone["fragments"]),
            group_size=int(zone["group_size"]),
            waves=int(zone["waves"]),
            lead=int(zone.get("lead", 0)),
        )
    if "tasks" in zone:
        return TaskTable(
            name=str(zone["name"]),
            pattern=str(zone["pattern"]),
            fragments=Rows.of(Placed.WIDTH, zone["fragments"]),
            tasks=Rows.of(Task.WIDTH, zone["tasks"]),
        )
    ranks, seqs = _ints(zone["ranks"]), _ints(zone["seqs"])
    return Zone(str(zone["name"]), str(zone["pattern"]), ranks, seqs, int(zone.get("group_size", 0)))


def _routing_from_json(routing: dict[str, Any] | None) -> Routing | None:
    if routing is None:
        return None
    return Routing(
        int(routing["ranks_per_nic"]), _ints(routing["zones"]), int(routing["min_tokens"]), int(routing["pieces"])
    )


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int for v in cast(list[Any], values)):
        raise ValueError(f"expected a list of whole numbers, got {values!r:.80}")
    return tuple(cast(list[int], values))
