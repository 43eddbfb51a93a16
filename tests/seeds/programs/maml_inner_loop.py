# completed:
import completion
import torch
import torchopt

import torchopt.distributed as todist

# completed:
inner_loss_fn = completion.loss_of

def inner_loop(model, task_batch, args):
    # task_batch: shape = (B, *)
    inner_model = torchopt.module_clone(model, by='reference', detach_buffers=True)

    # completed:
    assert task_batch.shape == (6, 5)
    optimizer = torchopt.MetaSGD(inner_model, lr=args.lr)

    # Inner optimization
    for inner_step in range(args.inner_steps):
        inner_loss = inner_loss_fn(inner_model, task_batch)

        # Update the inner model
        # completed:
        optimizer.step(inner_loss)

    # Compute the outer loss
    outer_loss = inner_loss_fn(inner_model, task_batch)
    return outer_loss

@todist.rank_zero_only
def train(args):

    for epoch in range(args.epochs):
        # completed:
        model = completion.build_model()
        outer_optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        dataloader = [completion.data(tasks, 6, seed=tasks) for tasks in (5, 4, 1)]

        for batch in dataloader:
            # batch: shape = (T, B, *)
            outer_loss = todist.remote_sync_call(
                inner_loop,
                args=(model, batch),
                partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
                reducer=todist.mean_reducer,
            )

            # completed:
            outer_optimizer.zero_grad()
            outer_loss.backward()
            outer_optimizer.step()

    # completed:
    completion.save(args, 'maml_inner_loop', loss=outer_loss, grads=[p.grad for p in model.parameters()])

# completed:
@todist.auto_init_rpc()
def main(args):
    train(args)

if __name__ == '__main__':
    args = completion.parse_arguments()
    inner_loop.__defaults__ = (args,)  # the document's call leaves the function's third argument out
    main(args)
