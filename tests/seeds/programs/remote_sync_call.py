# completed:
import completion
import torch

import torchopt.distributed as todist

# completed:
def worker_init_fn():
    torch.manual_seed(todist.get_rank())

def func(arg1, arg2, power, *, scale):
    return scale * (arg1 * arg2).pow(power).sum()

@todist.auto_init_rpc(worker_init_fn)
def main():
    # completed:
    worker_id = (todist.get_rank() + 1) % todist.get_world_size()
    arg1, arg2 = torch.arange(1.0, 4.0, requires_grad=True), torch.tensor([3.0, 5.0, 7.0], requires_grad=True)

    # Execute the function on the remote worker
    result = todist.remote_sync_call(
        func,
        args=(arg1, arg2, 3),
        kwargs={'scale': 0.5},
        partitioner=worker_id,
    )

    # completed:
    [loss] = result  # without a reducer the result is the list of the workers' results
    loss.backward()
    completion.save(args, 'remote_sync_call', loss=loss, grads=[arg1.grad, arg2.grad])

if __name__ == '__main__':
    args = completion.parse_arguments()
    main()
