"""Proofs: five questions about a plan, in the order in which `runs.prove` asks them.

| question | by | when it runs |
|---|---|---|
| structure: does it name what is there, and each query with its keys once | `structure` | every plan |
| meaning: does its program compute attention, and the gradient, exactly once | `meaning` | on demand |
| what ranks run: is it that program, on the ways that the plan says | `runs` | on demand |
| order: does each step find what it needs | `runs` | on demand |
| issue order: one of all ranks' group calls, so that none waits for ever | `runs` | on demand |

Of recurrent layers, `recurrent` asks whether each piece gets the state before it, once.

On demand: `verify` and `plan --verify`; in training the first steps and then one of every
`prove_every`, beside planning (`planning.proofs`). Of rings and waves of 64 ranks and more each
rank of a job proves its own part instead (`runs.prove_rank`): all of te_ring on 256 ranks takes 6.8
GB.
"""
