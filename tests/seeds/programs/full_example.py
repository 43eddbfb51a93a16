# completed:
import argparse

import completion
import setproctitle

import torch
import torch.nn as nn
import torchopt.distributed as todist

def parse_arguments():
    parser = argparse.ArgumentParser(description='TorchOpt Distributed Training')
    # completed:
    completion.add_arguments(parser)

    args = parser.parse_args()
    return args

# completed:
args = completion.begin(parse_arguments())

def worker_init_fn():
    # set process title, seeding, etc.
    setproctitle.setproctitle(f'Worker{todist.get_rank()}')
    torch.manual_seed(args.seed + todist.get_rank())

@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def compute_loss(model, batch):
    device = torch.device(f'cuda:{todist.get_local_rank()}')
    model = model.to(device)
    batch = batch.to(device)

    # Compute local loss of the given batch
    # completed:
    loss = completion.loss_of(model, batch)
    return loss.cpu()

def build_model():
    return nn.Sequential(
        # completed:
        nn.Linear(4, 6),
        nn.ReLU(),
        nn.Linear(6, 1),
    )

@todist.rank_zero_only
def train(args):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_loader = [completion.data(size, seed=size) for size in (7, 5, 1)]

    # completed:
    gradients = []

    for epoch in range(args.epochs):
        for batch in train_loader:
            with todist.autograd.context() as context_id:
                # Forward pass
                cloned_model = todist.module_clone(model, by='clone')
                loss = compute_loss(cloned_model, batch)

                # Backward pass
                optimizer.zero_grad()
                todist.autograd.backward(context_id, loss)

                # Update parameters
                optimizer.step()

                # completed:
                gradients += [p.grad.clone() for p in model.parameters()]

    # completed:
    completion.save(args, 'full_example', loss=loss, grads=gradients)

@todist.auto_init_rpc(worker_init_fn)
def main():
    args = parse_arguments()
    train(args)

if __name__ == '__main__':
    main()
