# completed:
import completion
from completion import build_model

import torchopt.distributed as todist

# completed:
compute_loss = todist.parallelize(reducer=todist.mean_reducer)(completion.loss_of)

@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    model = build_model()

    with todist.autograd.context() as context_id:
        # Forward pass
        loss = compute_loss(todist.module_clone(model, by='clone'), completion.data(7))  # e.g. remote calls

        # Backward pass
        grads = todist.autograd.grad(context_id, loss, model.parameters())

    # completed:
    assert all(p.grad is None for p in model.parameters())
    completion.save(args, 'todist_grad', loss=loss, grads=grads)

if __name__ == '__main__':
    main(completion.parse_arguments())
