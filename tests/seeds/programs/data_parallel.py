# completed:
import completion
import torch

import torchopt.distributed as todist

def loss_fn(model, batch):
    # completed:
    return completion.loss_of(model, batch)

@todist.rank_zero_only
def train(args):

    for epoch in range(args.epochs):
        # completed:
        torch.manual_seed(epoch)
        model = completion.build_model()
        dataloader = [completion.data(size, seed=size) for size in (7, 5, 1)]

        for batch in dataloader:
            # Partition the data on the batch (first) dimension and distribute them to the remote workers
            # Aggregate the results from the remote workers and return the mean loss
            loss = todist.remote_sync_call(
                loss_fn,
                args=(model, batch),
                partitioner=todist.batch_partitioner,
                reducer=todist.mean_reducer,
            )

            # completed: the gradients of the three batches add up
            loss.backward()

    # completed:
    completion.save(args, 'data_parallel', loss=loss, grads=[p.grad for p in model.parameters()])

# completed:
@todist.auto_init_rpc()
def main(args):
    train(args)

if __name__ == '__main__':
    main(completion.parse_arguments())
