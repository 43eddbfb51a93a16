# completed:
import sys

import completion
import torch

import torchopt.distributed as todist

@todist.rank_non_zero_only
def greet():
    print(f'Greetings from worker(rank={todist.get_rank()})!')
    # completed:
    greeted.append(todist.get_rank())

@todist.rank_zero_only
def save_checkpoint(model):
    # completed:
    checkpoints.append([p.detach().clone() for p in model.parameters()])

@todist.rank_zero_only
def log_results(writer, results):
    # completed:
    writer.write(f'{results.item()}\n')
    logged.append(results.item())

# completed:
greeted, checkpoints, logged = [], [], []

@todist.auto_init_rpc()
def main():
    greet()

    # completed:
    writer = sys.stderr
    model = completion.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        # completed: every rank trains its own model, on the data of all, spread over all
        optimizer.zero_grad()
        results = todist.remote_sync_call(
            completion.loss_of, args=(model, completion.data(5, seed=epoch)), reducer=todist.mean_reducer
        )
        results.backward()
        optimizer.step()

        if epoch % args.log_interval == 0:
            log_results(writer, results)

        if epoch % args.save_interval == 0:
            save_checkpoint(model)

    # completed:
    counts = [len(greeted), len(logged), len(checkpoints)]
    grads = [p.grad for p in model.parameters()]
    completion.save(args, 'rank_zero_only', counts=counts, loss=results, grads=grads)

if __name__ == '__main__':
    args = completion.parse_arguments()
    main()
