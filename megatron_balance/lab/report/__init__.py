"""One self-contained HTML page that says where the time of a step goes, what limits it, and what
would help (verb `report`).

Figures first, words after: `study` (a simulated comparison) and `run` (a training run's
`steps.jsonl`) make one JSON document each; `simulated` and `trained` turn a document into a page
(`page`), and compute nothing that is not in it.
"""
