"""One process of a generation: it meets the others as its environment says, adds up rank + 1 over all, and prints what it saw.

With "resolve" for a framework it reads TF_CONFIGs from its standard input, one a line, and prints what TensorFlow makes of each.
"""
import json
import os
import sys


def pytorch():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def tensorflow():
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(rank + 1.0)))
    return rank, strategy.num_replicas_in_sync, int(total.numpy())


def jax():
    import jax
    from jax.experimental import multihost_utils

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"]))
    rank = jax.process_index()
    total = multihost_utils.process_allgather(jax.numpy.array([rank + 1])).sum()
    return rank, jax.process_count(), int(total)


def resolve():
    import tensorflow as tf

    for line in sys.stdin:
        os.environ["TF_CONFIG"] = line
        r = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        print(json.dumps({"cluster": r.cluster_spec().as_dict(), "task": {"type": r.task_type, "index": r.task_id}}))


os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
if sys.argv[1] == "resolve":
    resolve()
else:
    print(*{"pytorch": pytorch, "tensorflow": tensorflow, "jax": jax}[sys.argv[1]](), flush=True)
