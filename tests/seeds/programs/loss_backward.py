# completed: the loss is distributed, and the document's lines are none the wiser
import completion
import torchopt.distributed as todist
from completion import build_model

compute_loss = todist.parallelize(reducer=todist.mean_reducer)(completion.loss_of)
args = completion.parse_arguments()
data, lr = completion.data(7), args.lr

import torch
import torch.optim as optim

# completed:
@todist.auto_init_rpc()
@todist.rank_zero_only
def main():
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=lr)

    loss = compute_loss(model, data)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    # completed:
    parameters = list(model.parameters())
    completion.save(args, 'loss_backward', loss=loss, grads=[p.grad for p in parameters], stepped=parameters)

if __name__ == '__main__':
    main()
