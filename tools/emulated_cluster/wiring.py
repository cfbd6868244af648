"""The links of a cluster as commands of `ip` and `tc`, by namespace.

One namespace per rank, `n<node>r<local rank>`, with one address and two interfaces: `nic` leads to
the other nodes and is shaped; `fast` leads to the ranks of the same node. The address asked for
alone selects the interface: gloo never binds the socket it connects with, so several addresses in
one namespace would all leave by the first. One namespace per node, `n<node>`, holds the bridge of
its fast links and, for each NIC that several ranks share, a bridge with one shaped uplink. The
namespace `fabric` is the switch between the nodes.

Shaping is by tbf, on both ends of each link: `nic` (or the uplink) for what is sent, the switch's
port for what is received.
"""

from collections import defaultdict

from tools.emulated_cluster.topology import NIC, Topology

FABRIC = "fabric"
MTU = 9000
GOODPUT = (MTU - 20 - 32) / (MTU + 14)
"""Of what a NIC carries, the share that is no header of IP, TCP or Ethernet."""
FIRST_INDEX = 1000

# A burst smaller than one segmentation-offload packet makes tbf cut packets itself, a large one
# blurs the rate; so packets are kept small.
NIC_PACKET_BYTES, NIC_BURST_BYTES = 16384, 20480
FAST_PACKET_BYTES, FAST_BURST_BYTES = 32768, 40960
UNSHAPED_PACKET_BYTES = 65536
QUEUE_BYTES = 16 << 20  # more than all that senders may have in flight: nothing is dropped

RANK_SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",  # bbr paces by itself
    "net/ipv4/tcp_rmem": "4096 131072 2097152",
    # On a NIC that several ranks share, acknowledgements queue behind data; short send buffers keep
    # that queue short.
    "net/ipv4/tcp_wmem": "4096 131072 262144",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
}
QUIET_SETTINGS = {"net/ipv6/conf/all/disable_ipv6": "1", "net/ipv6/conf/default/disable_ipv6": "1"}
"""No router or group discovery: what a counter counts was sent by a rank."""

Commands = dict[str, list[str]]
"""Lines for `ip -batch` or `tc -batch`, by namespace."""


def node_name(node: int) -> str:
    return f"n{node}"


def rank_name(topology: Topology, rank: int) -> str:
    return f"n{topology.node(rank)}r{topology.local_rank(rank)}"


def namespaces(topology: Topology) -> list[str]:
    nodes = [node_name(node) for node in range(topology.num_nodes)]
    return [FABRIC, *nodes, *(rank_name(topology, rank) for rank in range(topology.world_size))]


def nic_device(topology: Topology, node: int, nic: int) -> tuple[str, str]:
    """The namespace and the interface whose counters and shaping are those of a NIC."""
    if topology.ranks_per_nic == 1:
        return f"n{node}r{nic}", NIC
    return node_name(node), f"up{nic}"


def cables(topology: Topology, tag: str) -> list[str]:
    """`ip` commands that create every pair of interfaces, each end in its namespace."""
    pairs: list[tuple[str, str, str, str]] = []
    for node in range(topology.num_nodes):
        for nic in range(topology.nics_per_node):
            pairs.append((*nic_device(topology, node, nic), FABRIC, _port(node, nic)))
        for local in range(topology.ranks_per_node):
            pairs.append((f"n{node}r{local}", "fast", node_name(node), f"fast{local}"))
            if topology.ranks_per_nic > 1:
                pairs.append((f"n{node}r{local}", NIC, node_name(node), f"nic{local}"))
    # Interface numbers of their own: where both ends have the same number in their namespaces, the
    # kernel takes up to a second to see that the link is up (linkwatch_urgent_event), and the first
    # connections wait for it.
    return [
        f"link add dev {a} index {FIRST_INDEX + 2 * k} mtu {MTU} netns {tag}-{here} type veth "
        f"peer name {b} index {FIRST_INDEX + 2 * k + 1} mtu {MTU} netns {tag}-{there}"
        for k, (here, a, there, b) in enumerate(pairs)
    ]


def interfaces(topology: Topology) -> Commands:
    """`ip` commands that make bridges, plug the interfaces in, and give the ranks addresses and
    routes.
    """
    commands: Commands = defaultdict(list)
    ports = [_port(node, nic) for node in range(topology.num_nodes) for nic in range(topology.nics_per_node)]
    commands[FABRIC] = _bridge("fabric", ports)
    for node in range(topology.num_nodes):
        locals_ = range(topology.ranks_per_node)
        commands[node_name(node)] += _bridge("fast", [f"fast{local}" for local in locals_])
        if topology.ranks_per_nic > 1:
            for nic in range(topology.nics_per_node):
                sharing = [f"nic{local}" for local in locals_ if local // topology.ranks_per_nic == nic]
                commands[node_name(node)] += _bridge(f"shared{nic}", [f"up{nic}", *sharing])
    for rank in range(topology.world_size):
        address = topology.address(rank)
        commands[rank_name(topology, rank)] = [
            "link set dev lo up",
            "link set dev fast up",
            f"link set dev {NIC} up",
            f"addr add {address}/16 dev {NIC}",
            f"route add 10.201.{topology.node(rank)}.0/24 dev fast src {address}",
        ]
    return commands


def packet_sizes(topology: Topology) -> Commands:
    """`ip` commands that bound what the ranks hand to an interface at once, so that a burst holds
    it.
    """
    fast = UNSHAPED_PACKET_BYTES if topology.intra_bits_per_s is None else FAST_PACKET_BYTES
    sizes = [f"link set dev {NIC} gso_max_size {NIC_PACKET_BYTES}", f"link set dev fast gso_max_size {fast}"]
    return {rank_name(topology, rank): sizes for rank in range(topology.world_size)}


def shaping(topology: Topology) -> Commands:
    """`tc` commands that set the rate of every link, whatever it was before."""
    commands: Commands = defaultdict(list)
    nic = f"tbf rate {topology.nic_bits_per_s}bit burst {NIC_BURST_BYTES} limit {QUEUE_BYTES}"
    fast = "noqueue"
    if topology.intra_bits_per_s is not None:
        fast = f"tbf rate {topology.intra_bits_per_s}bit burst {FAST_BURST_BYTES} limit {QUEUE_BYTES}"
    for node in range(topology.num_nodes):
        for k in range(topology.nics_per_node):
            namespace, device = nic_device(topology, node, k)
            commands[namespace].append(f"qdisc replace dev {device} root {nic}")
            commands[FABRIC].append(f"qdisc replace dev {_port(node, k)} root {nic}")
        for local in range(topology.ranks_per_node):
            commands[f"n{node}r{local}"].append(f"qdisc replace dev fast root {fast}")
            commands[node_name(node)].append(f"qdisc replace dev fast{local} root {fast}")
    return commands


def sending(topology: Topology, node: int, nic: int, bits_per_s: int, queue_bytes: int) -> Commands:
    """`tc` commands that shape what one NIC sends; what does not fit its queue is dropped."""
    namespace, device = nic_device(topology, node, nic)
    shaped = f"tbf rate {bits_per_s}bit burst {NIC_BURST_BYTES} limit {queue_bytes}"
    return {namespace: [f"qdisc replace dev {device} root {shaped}"]}


def _port(node: int, nic: int) -> str:
    return f"p{node}_{nic}"


def _bridge(name: str, ports: list[str]) -> list[str]:
    plugged = [f"link set dev {port} master {name} up" for port in ports]
    return [f"link add dev {name} type bridge", f"link set dev {name} mtu {MTU} up", *plugged]
