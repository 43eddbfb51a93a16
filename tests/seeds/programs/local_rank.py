# completed:
import completion

import torch
import torchopt.distributed as todist

def worker_init_fn():
    local_rank = todist.get_local_rank()
    torch.cuda.set_device(local_rank)

@todist.auto_init_rpc(worker_init_fn)
def main():
    # completed:
    info = todist.get_world_info()
    ranks = [info.world_rank, todist.get_rank(), todist.get_world_rank(), todist.get_worker_id()]
    places = [info.local_rank, todist.get_local_rank()]
    sizes = [todist.get_world_size(), todist.get_local_world_size()]
    w = torch.arange(1.0, 4.0, requires_grad=True)
    last = todist.get_world_size() - 1
    [loss] = todist.remote_sync_call(cube, args=(w,), partitioner=last)
    loss.backward()
    completion.save(args, 'local_rank', ranks=ranks, places=places, sizes=sizes, loss=loss, grads=[w.grad])

# completed:
def cube(w):
    return (w**3).sum()

if __name__ == '__main__':
    args = completion.parse_arguments()
    main()
