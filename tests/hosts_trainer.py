"""One host of a trainer over several processes, for `test_trainer_mesh`: trains, and writes what it has to a file.

Arguments: rank, number of hosts, coordinator's port, file to write, case ("full" or "lora").
"""

from __future__ import annotations

import pathlib
import pickle
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from test_trainer import LORA, SPEC, drawn_params
from test_trainer_mesh import ADAM, LOSS, first_share, make_split, rollouts, start_adapter

from locojax.models import sharding
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.training.publish import Publisher


def agree(phase, ints):
    rows = np.asarray(multihost_utils.process_allgather(np.asarray(ints, np.int32)))
    return rows.reshape(jax.process_count(), -1).astype(np.int64)


def main(rank: int, size: int, port: int, out: pathlib.Path, case: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    mesh = make_mesh(MeshSpec())
    lora = LORA if case == "lora" else None
    trainer = make_split(SPEC, drawn_params(), lora, mesh, agree)
    if lora is not None:
        start_adapter(trainer)
    own = rollouts()[first_share(rank, size)]
    found = {}
    # Together; then the last host has nothing; then nobody has.
    for name, data in (("both", own), ("first", own if rank < size - 1 else []), ("none", [])):
        result = trainer.forward_backward(data, LOSS[case], score="active")
        gradient = None if name == "none" else sharding.gathered(trainer.accumulated_gradient)
        step = trainer.optim_step(ADAM)
        found[name] = (gradient, result, step.applied)
    scored = trainer.forward(own, "cross_entropy")
    found["scored"] = [output["logprobs"] for output in scored.outputs]
    try:
        trainer.forward(own if rank else [own[0], object()], "no such loss" if rank == 0 else "cross_entropy")
    except Exception as error:  # what it is, the test reads
        found["refused"] = f"{type(error).__name__}: {error}"
    state = trainer.state()
    found["state"] = sharding.gathered(state)
    trainer.restore(state)  # global arrays
    trainer.restore(found["state"])  # numpy
    found["restored"] = sharding.gathered(trainer.state())
    published = Publisher(trainer).publish()
    found["published"] = jax.tree.map(np.asarray, (published.weights, published.adapters))
    found["devices"] = {str(leaf.devices()) for leaf in jax.tree.leaves(published.weights)}
    found["share"] = [
        leaf.addressable_shards[0].data.nbytes / leaf.nbytes for leaf in jax.tree.leaves(trainer.trainable)
    ]
    out.write_bytes(pickle.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]), sys.argv[5])
