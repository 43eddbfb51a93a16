"""Not the documents': one loss, its gradient taken in every way that they and DESIGN.md name."""

import completion
import torch

import torchopt.distributed as todist

compute_loss = todist.parallelize(reducer=todist.mean_reducer)(completion.loss_of)


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args):
    batch = completion.data(11)
    for clone in (False, True):
        for way in ("backward", "grad", "context_backward", "context_grad", "second_order"):
            model = completion.build_model()
            parameters = list(model.parameters())
            sent = todist.module_clone(model, by="clone") if clone else model
            if way == "backward":
                loss = compute_loss(sent, batch)
                loss.backward()
                grads = [p.grad for p in parameters]
            elif way == "grad":
                loss = compute_loss(sent, batch)
                grads = torch.autograd.grad(loss, parameters)
            elif way == "second_order":
                loss = compute_loss(sent, batch)
                first = torch.autograd.grad(loss, parameters, create_graph=True)
                grads = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
            else:
                with todist.autograd.context() as context_id:
                    loss = compute_loss(sent, batch)
                    if way == "context_grad":
                        grads = todist.autograd.grad(context_id, loss, parameters)
                    else:
                        todist.autograd.backward(context_id, loss)
                        grads = [p.grad for p in parameters]
            name = f"every_way-{way}-{'clone' if clone else 'plain'}"
            completion.save(args, name, loss=loss, grads=grads)


if __name__ == "__main__":
    main(completion.parse_arguments())
