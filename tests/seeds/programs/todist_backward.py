# completed:
import completion
from completion import build_model

import torch
import torchopt.distributed as todist

# completed:
compute_loss = todist.parallelize(reducer=todist.mean_reducer)(completion.loss_of)

@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    lr = args.lr

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    with todist.autograd.context() as context_id:
        # Forward pass
        loss = compute_loss(model, completion.data(7))  # e.g. remote calls

        # Backward pass
        optimizer.zero_grad()
        todist.autograd.backward(context_id, loss)
        optimizer.step()

    # completed:
    parameters = list(model.parameters())
    completion.save(args, 'todist_backward', loss=loss, grads=[p.grad for p in parameters], stepped=parameters)

if __name__ == '__main__':
    main(completion.parse_arguments())
