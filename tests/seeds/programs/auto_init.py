# completed:
import argparse

import completion
import torch

import torchopt.distributed as todist

def parse_arguments():
    parser = argparse.ArgumentParser()
    # completed:
    completion.add_arguments(parser)
    args = completion.begin(parser.parse_args())

    return args

# completed:
initialized = []

@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def compute_loss(model, batch):
    assert initialized, 'worker_init_fn runs before any call'
    return completion.loss_of(model, batch)

def worker_init_fn():
    # set process title, seeding, etc.
    # completed:
    torch.manual_seed(todist.get_rank())
    initialized.append(todist.get_rank())

@todist.auto_init_rpc(worker_init_fn)
def main():
    # Your code here
    args = parse_arguments()
    # completed:
    todist.barrier()
    if todist.get_rank() == 0:
        model = completion.build_model()
        loss = compute_loss(model, completion.data(7))
        loss.backward()
        completion.save(args, 'auto_init', loss=loss, grads=[p.grad for p in model.parameters()])

if __name__ == '__main__':
    main()
