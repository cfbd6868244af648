"""Times and memory constants that Hydraulis' authors publish for an A800 of 80 GB: Llama 7B, 13B, 32B.

Source: PKU-DAIR/Hetu, commit 9e47240, `examples/hydraulis/strategy/generate_strategy_{7b,13b,32b}.py`:
a, b and c in milliseconds of one stage (Hydraulis, arXiv 2412.07894, Appendix C.2), and the constants
of the memory model (C.1), with which `max_tokens` gives MaxLen. Numbers as published; none has CP.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.cost.fits import Quadratic
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme

MIB = 1 << 20
GPU_BYTES = 81252 * MIB
GAP_BYTES = 5000 * MIB
"""Bytes that the authors' framework takes beside the model, in every case."""
ALPHA = 0.75
"""Share of a parameter's state that all ranks split: three fp32 values of 12 against two of bf16."""
EMBEDDING_BYTES = 16


@dataclass(frozen=True, slots=True)
class Published:
    """One model's constants.

    `times`: (TP, PP) -> a, b, c in milliseconds. `activation`: by TP, bytes of a token, a layer and
    an element of hidden / TP. `state`: bytes of a layer in hidden^2, weights, gradients and
    optimizer. `margin_bytes`: left free.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    state: int
    margin_bytes: int
    activation: dict[int, int]
    times: dict[tuple[int, int], tuple[float, float, float]]

    def coefficients(self, scheme: Scheme) -> Quadratic:
        """Seconds of one stage under `scheme`.

        Raises:
            ConfigError: the authors publish none for it.
        """
        found = self.times.get((scheme.tensor, scheme.pipeline)) if scheme.context == 1 else None
        if found is None:
            known = ", ".join(str(each) for each in self.schemes())
            raise ConfigError(f"{self.name}: no published coefficients for {scheme}; there are {known}")
        a, b, c = found
        return Quadratic(a / 1e3, b / 1e3, c / 1e3)

    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes with published times."""
        return tuple(Scheme(tensor, pipeline) for tensor, pipeline in self.times)

    def max_tokens(self, scheme: Scheme, num_ranks: int) -> int:
        """MaxLen: most tokens of a microbatch, 0 where the state alone does not fit (Appendix C.1).

        The optimizer's state is over all `num_ranks`; PP microbatches of activations lie on the first
        stage. Differs from C.1 as printed: a stage that is first and last (PP 1) has two vocabulary
        tables. Logits are left out, as there.

        Raises:
            ConfigError: no published constant for this TP, or CP.
        """
        if scheme.tensor not in self.activation or scheme.context != 1:
            raise ConfigError(
                f"{self.name}: no published memory constants for {scheme}; there are some for CP 1 and TP "
                + ", ".join(map(str, self.activation))
            )
        layer_bytes = self.hidden_size**2 * self.state
        table_bytes = self.hidden_size * self.vocab_size * EMBEDDING_BYTES * (2 if scheme.pipeline == 1 else 1)
        shared = ALPHA / num_ranks
        own = (1 - ALPHA) / scheme.tensor
        state_bytes = self.num_layers * layer_bytes * (shared + own / scheme.pipeline) + table_bytes * (shared + own)
        token_bytes = self.num_layers * self.hidden_size / scheme.tensor * self.activation[scheme.tensor]
        return max(0, int((GPU_BYTES - GAP_BYTES - self.margin_bytes - state_bytes) / token_bytes))


PUBLISHED: dict[str, Published] = {
    "7b": Published(
        name="7b",
        hidden_size=4096,
        num_layers=32,
        vocab_size=30592,
        state=210,
        margin_bytes=6144 * MIB,
        activation={1: 38, 2: 39, 4: 42, 8: 48, 16: 61},
        times={
            (1, 2): (1.37240947e-06, 0.094647781, 15.047058823529596),
            (1, 4): (9.55466937e-07, 0.0455224977, 14.273684210526312),
            (1, 8): (4.71839253e-07, 0.0237632988, 7.743478260869608),
            (2, 1): (2.05448457e-06, 0.0967076442, 65.1789772727277),
            (2, 2): (1.02663458e-06, 0.0490736142, 31.866721513780817),
            (2, 4): (5.24734001e-07, 0.0249896203, 17.471602082128697),
            (2, 8): (2.61470756e-07, 0.0132181135, 8.658958432871657),
            (4, 1): (1.0304334e-06, 0.0564777342, 56.697764041516166),
            (4, 2): (5.16172276e-07, 0.0285116473, 28.989771080846594),
            (4, 4): (2.579195e-07, 0.0146761838, 14.982966035778986),
            (8, 1): (5.06885473e-07, 0.0366182377, 44.317477753058256),
            (8, 2): (2.53715597e-07, 0.0184675589, 22.976470588235316),
            (16, 1): (3.01808129e-07, 0.0292311085, 65.23634593993279),
        },
    ),
    "13b": Published(
        name="13b",
        hidden_size=5120,
        num_layers=40,
        vocab_size=30592,
        state=210,
        margin_bytes=8192 * MIB,
        activation={1: 38, 2: 39, 4: 39, 8: 48},
        times={
            (1, 1): (1.03359006e-05, 0.312262914, 91.37538699690367),
            (1, 2): (2.33212956e-06, 0.168111063, 37.86567681070392),
            (1, 4): (1.25504641e-06, 0.0851150701, 20.19215142652746),
            (1, 8): (7.57890093e-07, 0.0424526643, 13.324264844697922),
            (2, 1): (2.93719955e-06, 0.180090146, 75.87395881841167),
            (2, 2): (1.53436151e-06, 0.0900918438, 40.48058869844306),
            (2, 4): (7.97420826e-07, 0.0452101722, 23.26089691411994),
            (2, 8): (4.03752453e-07, 0.0233333496, 11.803803239246747),
            (4, 1): (1.62871921e-06, 0.0997626395, 76.43818547098908),
            (4, 2): (8.12710963e-07, 0.0500755835, 39.53936966798551),
            (4, 4): (3.94357054e-07, 0.0259475095, 18.2104987061378),
            (8, 1): (6.59233262e-07, 0.0666817542, 50.37694379271386),
        },
    ),
    "32b": Published(
        name="32b",
        hidden_size=6656,
        num_layers=60,
        vocab_size=30592,
        state=201,
        margin_bytes=10240 * MIB,
        activation={1: 36, 2: 36, 4: 37, 8: 42, 16: 50},
        times={
            (1, 2): (0.0, 0.48988971, 22.882352941176805),
            (1, 4): (9.39192752e-07, 0.212596087, 35.99468155683377),
            (2, 1): (2.97455561e-05, 0.386957078, 156.2008928571429),
            (2, 2): (3.73416233e-06, 0.213060059, 80.71665943745563),
            (2, 4): (1.97033746e-06, 0.106558744, 42.94488582340546),
            (2, 6): (1.31605318e-06, 0.0718051676, 28.616273292576068),
            (4, 1): (3.86950049e-06, 0.238996833, 120.69476474631483),
            (4, 2): (2.04563898e-06, 0.118301177, 65.4239195557368),
            (4, 4): (1.05779156e-06, 0.0592119769, 35.33534922208071),
            (4, 6): (7.02993498e-07, 0.039850898, 24.07199162618781),
            (8, 1): (2.12548718e-06, 0.141411593, 122.91021345581066),
            (8, 2): (1.06789378e-06, 0.071058246, 61.76782590869129),
            (8, 3): (6.85518086e-07, 0.0482754236, 38.06972982282218),
            (8, 4): (4.91076016e-07, 0.0370804063, 25.442409002069667),
            (16, 1): (1.37779723e-06, 0.102435387, 145.74761115393085),
        },
    ),
}
"""By the size that names the model."""
