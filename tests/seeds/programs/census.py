"""Not the documents': every worker tells rank 0 who it is and what torchrun told it; one gradient over all workers.

With `--die_once MARKER` rank 1 kills itself in the middle of a call, unless the file MARKER says that it has done so.
"""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import completion

import torchopt_dist as todist

VARIABLES = (
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
)


def who() -> dict[str, object]:
    told = {variable: os.environ[variable] for variable in VARIABLES}
    getters = {
        "world_size": todist.get_world_size(),
        "world_rank": todist.get_world_rank(),
        "local_world_size": todist.get_local_world_size(),
        "local_rank": todist.get_local_rank(),
        "worker_name": f"worker{todist.get_rank()}",
    }
    return {"pid": os.getpid(), "info": asdict(todist.get_world_info()), "getters": getters, "told": told}


def die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args) -> None:
    if args.die_once is not None:
        todist.remote_sync_call(die_once, args=(args.die_once,), partitioner=1)
    workers = [todist.remote_sync_call(who, partitioner=rank)[0] for rank in range(todist.get_world_size())]
    model = completion.build_model()
    loss = todist.remote_sync_call(
        completion.loss_of, args=(model, completion.data(7)), reducer=todist.mean_reducer
    )
    loss.backward()
    completion.save(args, "census", loss=loss, grads=[p.grad for p in model.parameters()])
    (args.out / "workers.json").write_text(json.dumps(workers))


if __name__ == "__main__":
    parser = completion.argparse.ArgumentParser()
    completion.add_arguments(parser)
    parser.add_argument("--die_once", type=Path, default=None)
    main(completion.begin(parser.parse_args()))
