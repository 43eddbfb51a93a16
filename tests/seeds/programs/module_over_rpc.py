# completed:
import completion
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torchopt.distributed as todist

import torch
import torch.nn as nn
import torchopt

def compute_loss(model, batch):
    # completed:
    loss = model(batch).square().mean()
    return loss

# completed:
@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    batch = completion.data(7)[:, :2]
    with dist_autograd.context() as context_id:
        model = nn.Linear(2, 2)
        tuple(model.parameters())  # -> `nn.Parameter`s

        cloned_model = torchopt.module_clone(model, by='clone')
        tuple(cloned_model.parameters())  # -> `torch.Tensor`s with `CloneBackward` grad_fn

        # The RPC call will detach the parameter from the autograd graph on worker1
        loss1 = rpc.rpc_sync('worker1', compute_loss, args=(model, batch))

        # The RPC call will keep the connection to the parameter in the autograd graph on worker1
        loss2 = rpc.rpc_sync('worker1', compute_loss, args=(cloned_model, batch))

        # completed:
        # (torch waits for ever for a call of this context that takes no part in the backward, so loss1 does)
        dist_autograd.backward(context_id, [loss1, loss2])
        gradients = dist_autograd.get_gradients(context_id)
        grads = [gradients[p] for p in model.parameters()]
    # todist's own call keeps the connection either way.
    todist.remote_sync_call(compute_loss, args=(model, batch), partitioner='worker1')[0].backward()
    grads += [p.grad for p in model.parameters()]
    completion.save(args, 'module_over_rpc', loss=loss1, grads=grads)

if __name__ == '__main__':
    main(completion.parse_arguments())
