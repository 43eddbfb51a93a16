# completed:
import completion
import torchopt

import torchopt.distributed as todist

# completed:
inner_loss_fn = completion.loss_of

@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def distributed_data_parallelism(model, batch, args):
    # Compute local loss of the given batch
    # completed:
    loss = inner_loss_fn(model, batch)
    return loss

@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def inner_loop(model, batch, args):  # distributed MAML inner loop
    # batch: shape = (B, *)
    inner_model = torchopt.module_clone(model, by='reference', detach_buffers=True)

    # Inner optimization
    # completed:
    task_batch = batch
    optimizer = torchopt.MetaSGD(inner_model, lr=args.lr)
    for _ in range(args.inner_steps):
        optimizer.step(inner_loss_fn(inner_model, task_batch))

    # Compute the outer loss
    outer_loss = inner_loss_fn(inner_model, task_batch)
    return outer_loss

@todist.rank_zero_only
def train(args):

    for epoch in range(args.epochs):
        # completed:
        model = completion.build_model()
        dataloader = [completion.data(tasks, 6, seed=tasks) for tasks in (5, 2)]

        for batch in dataloader:
            # batch: shape = (T, B, *)
            outer_loss = inner_loop(model, batch, args)

            # completed: one loss of each kind
            loss = outer_loss + distributed_data_parallelism(model, batch.flatten(0, 1)[:11], args)
            loss.backward()

    # completed:
    grads = [p.grad for p in model.parameters()]
    completion.save(args, 'parallelize_wrappers', loss=outer_loss, grads=grads)

# completed:
@todist.auto_init_rpc()
def main(args):
    train(args)

if __name__ == '__main__':
    main(completion.parse_arguments())
