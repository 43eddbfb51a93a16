# completed:
import completion
import torchopt.distributed as todist

import torch
import torch.distributed.autograd as dist_autograd

# completed:
compute_loss = todist.parallelize(reducer=todist.mean_reducer)(completion.loss_of)

@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    model = completion.build_model()
    batch = completion.data(7)

    with dist_autograd.context() as context_id:
        # Forward pass
        loss = compute_loss(model, batch)  # e.g. remote calls

        # Backward pass
        dist_autograd.backward(context_id, [loss])

        # Retrieve the gradients from the context.
        grad_dict = dist_autograd.get_gradients(context_id)  # type: Dict[Tensor, Tensor]

        # completed:
        grads = [grad_dict[p] for p in model.parameters()]
        completion.save(args, 'dist_autograd_context', loss=loss, grads=grads)

if __name__ == '__main__':
    main(completion.parse_arguments())
