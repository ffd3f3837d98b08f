"""Chakra execution traces, read back with the protobuf runtime and compared with the plan node by node."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.decoder import _DecodeVarint32
from google.protobuf.unknown_fields import UnknownFieldSet

import pipelab
from pipelab import Cost, Plan, simulate
from pipelab.errors import UsageError
from pipelab.hub import chakra

# The part that is written of MLCommons' schema/protobuf/et_def.proto, commit 21585d8: number, type, repeated, message.
COMP, SEND, RECV = 4, 5, 6
U64, TEXT, ENUM, MESSAGE, I32, I64, BOOL = 4, 9, 13, 11, 5, 3, 8  # an enum is read as an unsigned number
FIELDS = {
    "GlobalMetadata": {"version": (1, TEXT)},
    "AttributeProto": {"name": (1, TEXT), "int32_val": (7, I32), "int64_val": (9, I64), "bool_val": (27, BOOL)},
    "Node": {
        "id": (1, U64),
        "name": (2, TEXT),
        "type": (3, ENUM),
        "ctrl_deps": (4, U64, "repeated"),
        "data_deps": (5, U64, "repeated"),
        "start_time_micros": (6, U64),
        "duration_micros": (7, U64),
        "attr": (10, MESSAGE, "repeated"),
    },
}


def messages():
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in FIELDS.items():
        made = file.message_type.add(name=message)
        for name, (number, kind, *repeated) in fields.items():
            made.field.add(name=name, number=number, type=kind, label=3 if repeated else 1)
            if kind == MESSAGE:
                made.field[-1].type_name = ".ChakraProtoMsg.AttributeProto"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = {name: pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in FIELDS}
    return {name: message_factory.GetMessageClass(kind) for name, kind in kinds.items()}


MESSAGES = messages()


def read(path):
    """Return the nodes of a file, each with its attributes by name."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        size, at = _DecodeVarint32(data, at)
        message = MESSAGES["Node" if found else "GlobalMetadata"]()
        message.ParseFromString(data[at : at + size])
        assert not UnknownFieldSet(message)
        found.append(message)
        at += size
    assert found.pop(0).version == "0.0.4"
    return found


def attributes(node):
    def value(attr):
        return {"is_cpu_op": attr.bool_val, "comm_size": attr.int64_val}.get(attr.name, attr.int32_val)

    return {attr.name: value(attr) for attr in node.attr}


PLANS = {
    "1f1b": pipelab.OneFOneB(4, 8),
    "interleaved-1f1b": pipelab.Interleaved1F1B(2, 4),
    "zbv": pipelab.ZBV(4, 8),
    "zb-h1": pipelab.ZBH1(3, 5),
    "pipedream": pipelab.PipeDream(2, 4),
    "pairs": pipelab.DualPipeV(2, 4),
    "large": pipelab.GPipe(2, 200),  # numbers of more than seven bits
}


@pytest.mark.parametrize("name", PLANS)
def test_every_node_is_an_action_or_a_transfer_of_the_plan(name, tmp_path):
    plan = PLANS[name].plan()
    graph = plan.graph()
    cost = Cost(forward=3, backward=5, activation_bytes=1000, boundary_gradient_bytes=700, unit="us", per="stage")
    ranks = [read(path) for path in chakra.export(plan, tmp_path, cost)]
    where = {action: each["rank"] for action, each in graph.nodes.items()}
    length = {str(event.action): event.duration for event in simulate(plan, cost).events}
    sent, received, at = Counter(), Counter(), {}
    for rank, nodes in enumerate(ranks):
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert all(need < node.id for node in nodes for need in node.data_deps)
        assert not any(attributes(node)["is_cpu_op"] for node in nodes)
        computed = [node for node in nodes if node.type == COMP]
        row = [str(plan.bound.codes.action(code)) for code in plan.bound.computing[rank]]
        assert [node.name for node in computed] == row
        assert [node.duration_micros for node in computed] == [round(length[word]) for word in row]
        for before, after in pairwise(computed):
            assert before.id in after.data_deps
        for node in nodes:
            if node.type in (SEND, RECV):
                about = attributes(node)
                key = (about["comm_src"], about["comm_dst"], about["comm_tag"], about["comm_size"])
                (sent if node.type == SEND else received)[key] += 1
                assert about["comm_src" if node.type == SEND else "comm_dst"] == rank
                at[node.type, key] = (rank, node)
    assert sent == received
    assert set(sent.values()) <= {1}
    crossed = set()
    for key in sent:
        (source, send), (target, recv) = at[SEND, key], at[RECV, key]
        (giver,) = (ranks[source][need] for need in send.data_deps)
        assert send.name == f"send {giver.name}"
        (needer,) = (node for node in ranks[target] if recv.id in node.data_deps)
        assert key[3] == (1000 if "F" in giver.name else 700)
        crossed.add((giver.name, needer.name))
    data = {(str(giver), str(needer)) for giver, needer, edge in graph.edges(data=True) if edge["kind"] == "data"}
    rank_of = {str(action): rank for action, rank in where.items()}
    assert crossed == {(giver, needer) for giver, needer in data if rank_of[giver] != rank_of[needer]}


def test_the_times_are_the_traces_in_whole_microseconds_and_a_shared_slot_counts_once(tmp_path):
    measured = simulate(pipelab.OneFOneB(2, 2), Cost(forward=0.0015, backward=0.25, unit="ms"))
    assert [node.duration_micros for node in read(chakra.export(measured, tmp_path)[0])[:2] if node.type == COMP] == [2]
    pairs = simulate(pipelab.DualPipeV(2, 4), Cost(pair=2.5, per="stage", unit="us"))
    for rank, path in enumerate(chakra.export(pairs, tmp_path)):
        spent = sum(node.duration_micros for node in read(path))
        assert spent == pytest.approx(pairs.busy[rank], abs=len(pairs.starts[rank]))


@pytest.mark.parametrize(
    "plan", [pipelab.DualPipe(2, 4), pipelab.with_gathers(pipelab.OneFOneB(2, 4))], ids=["R", "gather"]
)
def test_what_has_no_size_is_refused_before_a_file_is_written(plan, tmp_path):
    with pytest.raises(UsageError, match=r"does not know how many bytes it moves\n  try: a plan without \w"):
        chakra.export(plan, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_first_half_of_a_pair_in_one_slot_waits_for_what_both_halves_receive(tmp_path):
    plan = Plan.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")
    nodes = read(chakra.export(plan, tmp_path, Cost(pair=2.5, unit="us", per="stage"))[0])
    first = next(node for node in nodes if node.name == "0F1")
    assert {"0F0", "recv 1B0"} == {nodes[need].name for need in first.data_deps}
    apart = read(chakra.export(plan, tmp_path, Cost(unit="us"))[0])
    assert [apart[need].name for node in apart if node.name == "0F1" for need in node.data_deps] == ["0F0"]


def test_an_action_that_rounds_to_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"0F0 takes 300 ns.*whole microseconds\n  try: --unit us"):
        chakra.export(pipelab.GPipe(2, 4), tmp_path, Cost(forward=300, backward=700, unit="ns"))
    assert not list(tmp_path.iterdir())
    chakra.export(pipelab.ZBH1(2, 4), tmp_path, Cost(first_stage="as-run"))  # whose 0I0 takes no time at all


def test_the_command_writes_a_file_for_each_rank(pipelab_command, folder):
    code, output, _ = pipelab_command(
        "export", "chakra", "1f1b", "-r", "2", "--cost", "activation_bytes=5e6", "-o", "et"
    )
    assert (code, output) == (0, "wrote et/rank.0.et\nwrote et/rank.1.et\n")
    send = next(node for node in read(folder / "et" / "rank.0.et") if node.type == SEND)
    assert attributes(send) == {"is_cpu_op": False, "comm_size": 5_000_000, "comm_tag": 0, "comm_src": 0, "comm_dst": 1}


def test_a_plan_in_text_is_written_too(tmp_path):
    one, two = (read(path) for path in chakra.export(Plan.parse("0F0 0B0; 1F0 1B0"), tmp_path))
    assert [node.name for node in one] == ["0F0", "send 0F0", "recv 1B0", "0B0"]
    assert [node.name for node in two] == ["recv 0F0", "1F0", "1B0", "send 1B0"]
