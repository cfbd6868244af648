"""The facts of a training job that plans are made for; the session has them."""

from __future__ import annotations

import argparse
from typing import Protocol

from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.data import Documents
from megatron_balance.planning.choice import Run
from megatron_balance.training.data_identity import DataIdentity
from megatron_balance.training.pool import Pool


class PlannedJob(Protocol):
    """The part of `session.Session` that planning reads, so that planning need not know the
    session.
    """

    args: argparse.Namespace
    """Megatron's."""
    config: Run
    joint: bool
    """Whether all pipeline stages attend together, tick by tick."""
    layout: Strategy
    """That of the command line."""
    candidates: tuple[Strategy, ...]
    """Strategies that training changes between; none: it runs the layout."""
    ping_pong: bool
    """Whether microbatches run as two nano-batches."""
    train_data: Documents | None
    """The training samples if they are ours."""

    @property
    def pool(self) -> Pool: ...

    @property
    def row_multiple(self) -> int:
        """The number of which a rank's rows are a multiple."""
        ...

    def data_identity(self) -> DataIdentity:
        """Identity of the training samples. Collective over the world at the first call."""
        ...

    def cluster(self) -> Cluster:
        """The pool as planners see it."""
        ...

    def joint_cluster(self) -> Cluster:
        """The pools of all stages as planners see them."""
        ...

    def gpus(self) -> Cluster:
        """All GPUs of the job, as planners of strategies see them."""
        ...

    def model(self, tensor: int | None = None) -> Model:
        """The model as planners see it on one of `tensor` tensor-parallel ranks; None: as laid out."""
        ...
