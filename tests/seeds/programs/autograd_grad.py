# completed: nothing in it is distributed, and every worker runs it
import completion
from completion import build_model
from completion import loss_of as compute_loss

args = completion.parse_arguments()
data = completion.data(7)

import torch

model = build_model()
loss = compute_loss(model, data)

params = tuple(model.parameters())
grads = torch.autograd.grad(loss, params)

print(grads)

# completed:
completion.save(args, 'autograd_grad', loss=loss, grads=grads)
