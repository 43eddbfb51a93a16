# completed:
import completion
import torch.distributed.autograd as dist_autograd
import torchopt.distributed as todist

import torch
import torch.distributed.rpc as rpc

def compute_loss(param):
    return param.mean()

# completed:
@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    with dist_autograd.context() as context_id:
        param = torch.nn.Parameter(torch.randn(2, 2), requires_grad=True)

        # The RPC call will detach the parameter from the autograd graph on worker1
        loss1 = rpc.rpc_sync('worker1', compute_loss, args=(param,))

        # The RPC call will keep connection to the parameter in the autograd graph on worker1
        loss2 = rpc.rpc_sync('worker1', compute_loss, args=(param.clone(),))

        # completed:
        # (torch waits for ever for a call of this context that takes no part in the backward, so loss1 does)
        dist_autograd.backward(context_id, [loss1, loss2])
        gradient = dist_autograd.get_gradients(context_id)[param]
    # todist's own call keeps the connection either way.
    todist.remote_sync_call(compute_loss, args=(param,), partitioner='worker1')[0].backward()
    completion.save(args, 'parameter_over_rpc', loss=loss1, grads=[gradient, param.grad])

if __name__ == '__main__':
    main(completion.parse_arguments())
