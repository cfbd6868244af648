"""The transport of the emulated cluster: gloo's rules (`sockets`) over TCP through token buckets
(`tcp`).

It describes what tools/emulated_cluster builds from network namespaces and `tc`, and is held
against measurements there (docs/simulator.md, "How near it is"). `simulate --transport sockets`
runs it.
"""
