"""Several processes train together as one does, and write one run folder."""

import json
import socket

import numpy as np
import processes
import pytest

TWO = """
common = dict(steps=4, checkpoint_every=2, mesh=MESH)
options = dict(held_out=examples[:3])
run("run", **common, options=options | dict(stop_after=3))
run("run", **common, options=options | dict(resume=True))
try:
    run("run", **common)
    refused = ""
except Exception as error:
    refused = f"{type(error).__name__}: {error}"

asked = []
class Store:
    def batch(self, batch, keys, values, taps=()):
        asked.append(batch.index.tolist())
        shape = len(batch.tokens), 2, batch.tokens.shape[1], 6
        return features.Features(np.zeros((shape[0], shape[2], 32)), {key: np.zeros(shape) for key in keys}, {value: np.zeros(shape) for value in values})
source = fit._batch_source(backbone, examples, fakes.HEAD, dataclasses.replace(RUN, **common), sharding.make_mesh(MESH), Store(), start=0)
whole, _, read = source()
print(json.dumps(dict(processes=jax.process_count(), losses=losses(root / "run"), refused=refused, asked=asked, whole=whole.index.tolist(),
    shape=read.hidden.shape)))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One process with one device, and two processes with one each, on an fsdp axis: each has half of the batch and of every parameter."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    joined = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    started = [processes.start(TWO.replace("MESH", "(1, 2, 1)"), folder / "two", **joined, JAX_PROCESS_ID=str(number)) for number in range(2)]
    try:
        two = [processes.finish(process) for process in started]
    finally:
        for process in started:
            process.kill()
    return processes.finish(processes.start(TWO.replace("MESH", "(1, 1, 1)"), folder / "one")), two, folder


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(both):
    """Stopped and resumed on the way, from a checkpoint that both wrote."""
    one, two, _ = both
    assert (one["processes"], [found["processes"] for found in two]) == (1, [2, 2])
    assert len(one["losses"]) == 4
    for found in two:
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_each_process_reads_its_own_rows(both):
    one, two, _ = both
    whole = one["whole"]
    for found, own in zip((one, *two), (whole, whole[:4], whole[4:]), strict=True):
        assert own in found["asked"] and {len(rows) for rows in found["asked"]} == {len(own)}  # later batches are read ahead
    assert all(found["shape"] == one["shape"] for found in two)


@pytest.mark.slow
def test_one_process_writes_and_all_are_refused_together(both):
    one, two, folder = both
    for found in (one, two[0]):
        assert found["refused"].startswith("RunError") and "holds a run already" in found["refused"]
    assert two[1]["refused"] == "MeshError: the first process failed; its message tells why"
    lines, alone = ([json.loads(line) for line in (folder / name / "run" / "metrics.jsonl").read_text().splitlines()] for name in ("two", "one"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("held_out") for line in lines] == [line.get("held_out") for line in alone] and "held_out" in lines[3]
